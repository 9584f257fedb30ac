// The conversation on screen: one view for each message, in order.

import { element, find } from './element.js';
import { Follower } from './follow.js';
import { messageView } from './message.js';

export class Transcript {
  // `actions` are what a message offers: edit(message, text), retry(message), remove(message), and the `speaker`.
  constructor(actions, welcome) {
    this.actions = actions;
    this.welcome = welcome;
    this.list = find('messages');
    this.views = new Map();
    this.follower = new Follower(find('transcript'), this.list, find('jump'));
  }

  show(conversation) {
    this.conversation = conversation;
    this.views.clear();
    this.list.replaceChildren();
    this.refresh();
    this.follower.jump();
  }

  // Brings the screen in line with the conversation's messages, touching only those that came or went.
  refresh() {
    const { messages, system } = this.conversation;
    const wanted = new Set(messages.map((message) => message.id));
    for (const [id, view] of this.views) if (!wanted.has(id)) this.#drop(id, view);
    for (const [at, message] of messages.entries()) if (!this.views.has(message.id)) this.#place(message, at);
    this.#preface(system, messages.length === 0);
  }

  // Another server, or the same with another model, may offer more.
  offer() {
    for (const view of this.views.values()) view.offer?.();
  }

  view(message) {
    return this.views.get(message.id);
  }

  jump() {
    this.follower.jump();
  }

  editLast() {
    const last = this.conversation.messages.findLast((message) => message.role === 'user');
    if (last) this.view(last).edit();
  }

  #drop(id, view) {
    view.node.remove();
    this.views.delete(id);
  }

  #place(message, at) {
    const view = messageView(message, this.actions);
    const after = this.conversation.messages.slice(at + 1).find(({ id }) => this.views.has(id));
    this.views.set(message.id, view);
    this.list.insertBefore(view.node, after ? this.view(after).node : null);
  }

  #preface(system, isEmpty) {
    this.list.querySelector('.preface')?.remove();
    const note = system.trim() && element('p', { class: 'system' }, element('strong', {}, 'System'), system.trim());
    const parts = [...(isEmpty ? [this.welcome()] : []), ...(note ? [note] : [])];
    if (parts.length > 0) this.list.prepend(element('div', { class: 'preface' }, ...parts));
  }
}
