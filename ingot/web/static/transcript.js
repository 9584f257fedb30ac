// The conversation on screen: one view for each message, in order.

import { element, find } from './element.js';
import { Follower } from './follow.js';
import { messageView } from './message.js';
import { thread, versions } from './thread.js';
import { t } from './translate.js';

export class Transcript {
  // `actions` are what a message offers: edit(message, text), retry, remove, branch and show(message), url(medium), and
  // the `speaker`. `welcome()` is what an empty conversation shows.
  constructor(state, actions, welcome) {
    Object.assign(this, { state, actions, welcome });
    this.list = find('messages');
    this.views = new Map();
    this.follower = new Follower(find('transcript'), this.list, find('jump'));
    state.watch(() => this.draw());
  }

  // Brings the screen in line with the conversation, touching only the messages that came or went.
  draw() {
    const { current } = this.state;
    const isOther = current.id !== this.conversation?.id;
    this.conversation = current;
    const shown = thread(current);
    const wanted = new Set(shown);
    for (const [id, view] of this.views) if (!wanted.has(view.message)) this.#drop(id, view);
    for (const [at, message] of shown.entries()) {
      if (!this.views.has(message.id)) this.#place(shown, message, at);
      this.views.get(message.id).offer(versions(current, message));
    }
    this.#preface(current.system, shown.length === 0);
    if (isOther) this.follower.jump();
  }

  view(message) {
    return this.views.get(message.id);
  }

  jump() {
    this.follower.jump();
  }

  editLast() {
    const last = thread(this.conversation).findLast((message) => message.role === 'user');
    if (last) this.view(last).edit();
  }

  #drop(id, view) {
    view.node.remove();
    this.views.delete(id);
  }

  #place(shown, message, at) {
    const view = messageView(message, this.actions);
    const after = shown.slice(at + 1).find(({ id }) => this.views.has(id));
    this.views.set(message.id, view);
    this.list.insertBefore(view.node, after ? this.view(after).node : null);
  }

  #preface(system, isEmpty) {
    this.list.querySelector('.preface')?.remove();
    const note = system.trim() && element('p', { class: 'system' }, element('strong', {}, t('System')), system.trim());
    const parts = [...(isEmpty ? [this.welcome()] : []), ...(note ? [note] : [])];
    if (parts.length > 0) this.list.prepend(element('div', { class: 'preface' }, ...parts));
  }
}
