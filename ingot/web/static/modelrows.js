// The models of the server, a row each, with a button that loads or unloads one where there are several.

import { element } from './element.js';
import { count } from './facts.js';

const CHANGES = { unloaded: 'load', failed: 'load', loaded: 'unload' };
const WORDS = { load: 'Load', unload: 'Unload' };

export class ModelRows {
  // `change(id, what)` is called with "load" or "unload".
  constructor(list, change) {
    this.list = list;
    this.change = change;
    this.rows = new Map();
    this.isMoving = false; // whether one is on its way
  }

  // Rows are kept by id, so that a focused button stays where it is. `mayChange`: the key is the administrator's.
  show(models, mayChange) {
    this.isMoving = models.some(({ state }) => state === 'loading' || state === 'unloading');
    const ids = new Set(models.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const model of models) {
      if (!this.rows.has(model.id)) {
        const row = new ModelRow(model.id, this.change);
        this.rows.set(model.id, row);
        this.list.append(row.node);
      }
      this.rows.get(model.id).update(model, mayChange);
    }
  }
}

class ModelRow {
  constructor(id, change) {
    this.text = element('span', {});
    this.what = null;
    this.button = element('button', { type: 'button', class: 'link', onclick: () => change(id, this.what) });
    this.id = id;
    this.node = element('li', {}, element('code', {}, id), ' ', this.text, ' ', this.button);
  }

  update(model, mayChange) {
    this.text.textContent = modelText(model);
    // A server of one model, which stays, says nothing of kinds.
    this.what = model.kind && mayChange ? CHANGES[model.state] : undefined;
    this.button.hidden = !this.what;
    if (!this.what) return;
    this.button.textContent = WORDS[this.what];
    this.button.setAttribute('aria-label', `${WORDS[this.what]} ${this.id}`);
  }
}

function modelText({ state, kind, progress, failure, ...model }) {
  const said = typeof state === 'string' ? state : 'loaded';
  const share = typeof progress === 'number' ? ` ${Math.round(100 * progress)}%` : '';
  const context = model.context_length ?? model.max_model_len;
  const facts = [kind && kind !== 'chat' ? kind : null, `${said}${share}`, context ? `${count(context)} tokens` : null, failure];
  return facts.filter(Boolean).join(' · ');
}
