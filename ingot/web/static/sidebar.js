// The list of conversations, and what can be done with one.

import { element, find, icon } from './element.js';
import { exportJson, exportMarkdown } from './export.js';
import { t } from './translate.js';

const AROUND = 24; // characters that are shown on both sides of what was found
const DAY = 24 * 60 * 60 * 1000;

export class Sidebar {
  constructor(state, chat, close) {
    Object.assign(this, { state, chat, close });
    this.list = find('conversations');
    this.menu = find('conversation-menu');
    find('new-chat').addEventListener('click', () => this.#go(() => chat.start()));
    this.search = find('search');
    this.search.addEventListener('input', () => this.draw());
    this.search.addEventListener('keydown', (event) => this.#endSearch(event));
    this.#wireMenu();
    state.watch(() => this.draw());
  }

  draw() {
    if (this.list.querySelector('form')) return; // a title is being edited
    const wanted = this.search.value.trim().toLowerCase();
    const shown = this.chat.store.list().map((each) => this.#factsOf(each, wanted)).filter(({ hit }) => hit !== null);
    const drawn = JSON.stringify([shown, wanted]);
    if (drawn === this.drawn) return; // what is about to be clicked stays where it is
    this.drawn = drawn;
    const focused = document.activeElement?.dataset?.conversation;
    const rows = [];
    for (const [at, facts] of shown.entries()) {
      if (facts.age !== shown[at - 1]?.age) rows.push(element('li', { class: 'age' }, facts.age));
      rows.push(this.#row(facts));
    }
    if (wanted && rows.length === 0) rows.push(element('li', { class: 'age' }, t('Nothing found')));
    this.list.replaceChildren(...rows);
    if (focused) this.list.querySelector(`[data-conversation="${CSS.escape(focused)}"]`)?.focus();
  }

  #factsOf(conversation, wanted) {
    const { id, title, updated } = conversation;
    const hit = wanted ? foundIn(conversation, wanted) : '';
    return { id, title, hit, age: ageOf(updated), isCurrent: conversation === this.chat.current, isBusy: this.state.answers.has(id) };
  }

  #row({ id, title, hit, isCurrent, isBusy }) {
    const conversation = () => this.chat.store.conversations.get(id); // another tab may have written it anew
    const open = element(
      'button',
      {
        type: 'button',
        class: 'title',
        title,
        'aria-current': isCurrent ? 'true' : null,
        'data-conversation': id,
        onclick: () => this.#go(() => this.chat.open(conversation())),
      },
      title,
      hit ? element('span', { class: 'hit' }, hit) : null,
    );
    const more = element(
      'button',
      {
        type: 'button',
        class: 'quiet more',
        'aria-label': t('More for {title}', { title }),
        'aria-haspopup': 'menu',
        onclick: () => this.#openMenu(conversation(), more),
      },
      icon('more'),
    );
    const dot = isBusy ? element('span', { class: 'busy', role: 'img', 'aria-label': t('being answered') }) : null;
    return element('li', { class: isCurrent ? 'current' : '' }, open, dot, more);
  }

  #endSearch(event) {
    if (event.key !== 'Escape' || !this.search.value) return;
    event.preventDefault();
    this.search.value = '';
    this.draw();
  }

  #go(action) {
    action();
    this.close();
    find('prompt').focus();
  }

  #openMenu(conversation, button) {
    this.subject = conversation;
    this.opener = button;
    this.menu.showPopover();
    const spot = button.getBoundingClientRect();
    const top = Math.min(spot.bottom + 4, innerHeight - this.menu.offsetHeight - 8);
    const left = Math.min(spot.left, innerWidth - this.menu.offsetWidth - 8);
    Object.assign(this.menu.style, { top: `${top}px`, left: `${left}px` });
    this.menu.querySelector('button').focus();
  }

  #wireMenu() {
    const actions = {
      rename: () => this.#rename(this.subject),
      markdown: () => exportMarkdown(this.subject),
      json: () => exportJson(this.subject),
      delete: () => this.chat.discard(this.subject),
    };
    this.menu.addEventListener('click', ({ target }) => {
      const action = target.closest('button')?.dataset.action;
      if (!action) return;
      this.menu.hidePopover();
      actions[action]();
    });
    this.menu.addEventListener('keydown', (event) => this.#moveInMenu(event));
  }

  #moveInMenu(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') {
      event.stopPropagation();
      this.menu.hidePopover();
      this.opener.focus();
    }
    if (!step) return;
    event.preventDefault();
    const items = [...this.menu.querySelectorAll('button')];
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  }

  #rename(conversation) {
    const button = this.list.querySelector(`[data-conversation="${CSS.escape(conversation.id)}"]`);
    const field = element('input', { type: 'text', 'aria-label': t('Title'), maxlength: '120', required: true });
    field.value = conversation.title;
    const form = element('form', { class: 'rename' }, field);
    let isDone = false; // taking the form away makes the field lose the focus, which ends the editing once more
    const finish = (isKept) => {
      if (isDone) return;
      isDone = true;
      const title = field.value.trim();
      form.replaceWith(button); // first, so that the list is free to redraw
      if (isKept && title) this.chat.rename(conversation, title);
      this.list.querySelector(`[data-conversation="${CSS.escape(conversation.id)}"]`)?.focus();
    };
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      finish(true);
    });
    field.addEventListener('blur', () => finish(true));
    field.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      event.stopPropagation();
      finish(false);
    });
    button.replaceWith(form);
    field.select();
  }
}

// Where a conversation says what is searched for: the words around it, '' for its title, or null.
function foundIn({ title, messages }, wanted) {
  if (title.toLowerCase().includes(wanted)) return '';
  for (const { content } of messages) {
    const at = content.toLowerCase().indexOf(wanted);
    if (at >= 0) return `${at > AROUND ? '…' : ''}${content.slice(Math.max(0, at - AROUND), at + wanted.length + AROUND)}`;
  }
  return null;
}

function ageOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return t('Today');
  if (time >= today - DAY) return t('Yesterday');
  return time >= today - 7 * DAY ? t('This week') : t('Earlier');
}
