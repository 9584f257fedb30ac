// The models of the server, a row each, with a button that loads or unloads one where there are several.

import { element } from './element.js';
import { count } from './facts.js';
import { Rows } from './requestrows.js';

const CHANGES = { unloaded: 'load', failed: 'load', loaded: 'unload' };
const WORDS = { load: 'Load', unload: 'Unload' };

export class ModelRows extends Rows {
  // `change(id, what)` is called with "load" or "unload".
  constructor(list, change) {
    super(list, (id) => new ModelRow(id, change));
    this.isMoving = false; // whether one is loading or unloading
  }

  // `mayChange`: the key is the administrator's.
  show(models, mayChange) {
    this.isMoving = models.some(({ state }) => state === 'loading' || state === 'unloading');
    super.show(models, mayChange);
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
  const name = typeof state === 'string' ? state : 'loaded';
  const share = typeof progress === 'number' ? ` ${Math.round(100 * progress)}%` : '';
  const context = model.context_length ?? model.max_model_len;
  const facts = [kind && kind !== 'chat' ? kind : null, `${name}${share}`, context ? `${count(context)} tokens` : null, failure];
  return facts.filter(Boolean).join(' · ');
}
