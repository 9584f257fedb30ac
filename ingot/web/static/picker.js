// The name of the model that answers, and the list to choose another from, to load and to unload.

import { element, find, icon } from './element.js';
import { count } from './facts.js';
import { MOVES, describeModel } from './modelrows.js';
import { notify } from './notice.js';

const WORDS = { load: 'Load', unload: 'Unload' };

export class Picker {
  constructor(state, models) {
    Object.assign(this, { state, models });
    this.menu = find('model-menu');
    this.menu.addEventListener('toggle', ({ newState }) => newState === 'open' && this.#opened());
    this.menu.addEventListener('keydown', (event) => this.#move(event));
    state.watch(() => this.draw());
  }

  draw() {
    const { list, context } = this.models;
    const drawn = JSON.stringify([list, this.models.chosen, nameOf(this.models), this.state.mayChange]);
    if (drawn === this.drawn) return; // so that nothing goes away that is about to be clicked
    this.drawn = drawn;
    const facts = context && element('span', { class: 'context' }, `${count(context)}-token context`);
    find('model').replaceChildren(list.length > 1 ? this.#button() : this.#label(), ...(facts ? [facts] : []));
    this.#drawMenu();
  }

  #label() {
    return element('span', { id: 'model-name' }, nameOf(this.models));
  }

  #button() {
    return element(
      'button',
      { id: 'model-name', type: 'button', popovertarget: 'model-menu', 'aria-haspopup': 'dialog', title: 'Choose a model' },
      element('span', {}, nameOf(this.models)),
      icon('open'),
    );
  }

  #drawMenu() {
    const focused = document.activeElement?.dataset?.focus;
    this.menu.querySelector('ul').replaceChildren(...this.models.list.map((card) => this.#row(card)));
    if (focused) this.menu.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }

  #row(card) {
    const { id } = card;
    const choose = element(
      'button',
      {
        type: 'button',
        class: 'choice',
        'data-model': id,
        'data-focus': `choose ${id}`,
        'aria-current': id === this.models.chosen ? 'true' : null,
        onclick: () => this.#choose(id),
      },
      element('span', { class: 'name' }, id),
      element('span', { class: 'hint' }, describeModel(card)),
    );
    const move = card.kind && this.state.mayChange ? MOVES[card.state] : null;
    const moved = move && this.#mover(id, move);
    const bar = card.state === 'loading' && element('progress', { max: 1, value: card.progress ?? null, 'aria-label': `Loading ${id}` });
    return element('li', {}, choose, moved || null, bar || null);
  }

  #mover(id, what) {
    const label = `${WORDS[what]} ${id}`;
    const run = () => this.models.move(id, what).catch((error) => notify(error.message));
    const attributes = { type: 'button', class: 'link', 'aria-label': label, 'data-focus': `move ${id}`, onclick: run };
    return element('button', attributes, WORDS[what]);
  }

  #choose(id) {
    this.models.choose(id);
    this.menu.hidePopover();
    find('prompt').focus();
  }

  #opened() {
    const spot = find('model-name').getBoundingClientRect();
    const left = Math.max(8, Math.min(spot.left, innerWidth - this.menu.offsetWidth - 8));
    Object.assign(this.menu.style, { top: `${spot.bottom + 4}px`, left: `${left}px` });
    this.menu.querySelector('[aria-current]')?.focus();
    this.models.askRights();
    this.models.load();
  }

  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...this.menu.querySelectorAll('.choice')];
    items.at((items.indexOf(document.activeElement) + step) % items.length)?.focus();
  }
}

export function nameOf({ error, list, chosen }) {
  if (error) return error.status === 401 ? 'Key needed' : 'Not connected';
  return list.length > 0 ? chosen : 'Connecting…';
}
