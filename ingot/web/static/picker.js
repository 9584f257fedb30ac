// The name of the model that answers, and the list to choose another from, to load and to unload.

import { element, find, icon } from './element.js';
import { count } from './facts.js';
import { AddModel } from './addmodel.js';
import { MOVES, describeModel, labelMove } from './modelrows.js';
import { notify } from './notice.js';
import { Rows } from './requestrows.js';
import { t } from './translate.js';

export class Picker {
  constructor(state, models) {
    Object.assign(this, { state, models });
    this.menu = find('model-menu');
    this.rows = new Rows(this.menu.querySelector('ul'), (id) => new Choice(id, () => this.#choose(id), models));
    this.more = new AddModel(models);
    this.menu.append(this.more.node);
    this.menu.addEventListener('toggle', ({ newState }) => newState === 'open' && this.#opened());
    this.menu.addEventListener('keydown', (event) => this.#move(event));
    state.watch(() => this.draw());
  }

  draw() {
    const { list, context } = this.models;
    const drawn = JSON.stringify([nameOf(this.models), this.#isList, context]);
    if (drawn !== this.drawn) {
      const facts = context && element('span', { class: 'context' }, t('{n}-token context', { n: count(context) }));
      find('model').replaceChildren(this.#isList ? this.#button() : this.#label(), ...(facts ? [facts] : []));
      this.drawn = drawn;
    }
    this.rows.show(list, { chosen: this.models.chosen, mayChange: this.state.mayChange });
    this.more.draw();
  }

  // A model that is always loaded, alone, has nothing to choose and nothing to change.
  get #isList() {
    return this.models.list.length > 1 || this.models.list.some(({ kind }) => kind);
  }

  #label() {
    return element('span', { id: 'model-name' }, nameOf(this.models));
  }

  #button() {
    return element(
      'button',
      { id: 'model-name', type: 'button', popovertarget: 'model-menu', 'aria-haspopup': 'dialog', title: t('Choose a model') },
      element('span', {}, nameOf(this.models)),
      icon('open'),
    );
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
    this.models.askRights().then(() => this.more.open());
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

// A model of the list. What is about to be clicked stays where it is while the rest changes.
class Choice {
  constructor(id, choose, models) {
    this.id = id;
    this.facts = element('span', { class: 'hint' });
    const attributes = { type: 'button', class: 'choice', 'data-model': id, onclick: choose };
    this.button = element('button', attributes, element('span', { class: 'name' }, id), this.facts);
    const run = () => models.move(id, this.move).catch((error) => notify(error.message));
    this.mover = element('button', { type: 'button', class: 'link', onclick: run, hidden: true });
    this.bar = element('progress', { max: 1, 'aria-label': t('Loading {model}', { model: id }), hidden: true });
    this.node = element('li', {}, this.button, this.mover, this.bar);
  }

  update(card, { chosen, mayChange }) {
    if (this.id === chosen) this.button.setAttribute('aria-current', 'true');
    else this.button.removeAttribute('aria-current');
    this.facts.textContent = describeModel(card);
    this.move = card.kind && mayChange ? MOVES[card.state] : null;
    this.mover.hidden = !this.move;
    if (this.move) labelMove(this.mover, this.move, this.id);
    this.bar.hidden = card.state !== 'loading';
    if (typeof card.progress === 'number') this.bar.value = card.progress;
    else this.bar.removeAttribute('value');
  }
}

export function nameOf({ error, list, chosen }) {
  if (error) return error.status === 401 ? t('Key needed') : t('Not connected');
  return list.length > 0 ? chosen : t('Connecting…');
}
