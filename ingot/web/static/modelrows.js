// The models of the server, a row each, with a button that loads or unloads one where there are several.

import { element } from './element.js';
import { bytes, count } from './facts.js';
import { contextOf } from './models.js';
import { Rows } from './requestrows.js';
import { t } from './translate.js';

export const MOVES = { unloaded: 'load', failed: 'load', loaded: 'unload' };
const SEEN = { image: t('images'), video: t('video') };
const STATES = { loaded: t('loaded'), unloaded: t('unloaded'), loading: t('loading'), unloading: t('unloading'), failed: t('failed') };
const KINDS = { embedding: t('embedding'), rerank: t('rerank'), audio: t('speech to text'), speech: t('text to speech') };

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
    this.text.textContent = describeModel(model);
    // A server of one model, which stays, says nothing of kinds.
    this.what = model.kind && mayChange ? MOVES[model.state] : undefined;
    this.button.hidden = !this.what;
    if (!this.what) return;
    labelMove(this.button, this.what, this.id);
  }
}

// Says on a button what it does to a model.
export function labelMove(button, what, id) {
  button.textContent = what === 'load' ? t('Load') : t('Unload');
  button.setAttribute('aria-label', what === 'load' ? t('Load {model}', { model: id }) : t('Unload {model}', { model: id }));
}

// What is known of a model, in a line.
export function describeModel({ state, kind, progress, failure, memory_bytes: memory, input_modalities: modalities = [], ...card }) {
  const name = STATES[state ?? 'loaded'] ?? state;
  const share = typeof progress === 'number' ? ` ${Math.round(100 * progress)}%` : '';
  const context = contextOf(card);
  const seen = modalities.map((each) => SEEN[each]).filter(Boolean).join(', ');
  const facts = [kind && kind !== 'chat' ? (KINDS[kind] ?? kind) : null, `${name}${share}`, context && t('{n} tokens', { n: count(context) }), seen, memory ? bytes(memory) : null, failure];
  return facts.filter(Boolean).join(' · ');
}
