// Where the user writes, the button that sends or stops, and the messages that wait for the end of an answer.

import { Attachments } from './attachments.js';
import { Dictation } from './dictation.js';
import { Drafts } from './drafts.js';
import { element, find, icon, iconButton } from './element.js';
import { count } from './facts.js';
import { growing, isSend } from './field.js';
import { thread } from './thread.js';
import { t } from './translate.js';

export class Composer {
  constructor({ api, state, store, chat, models, transcript }) {
    Object.assign(this, { state, store, chat, models, transcript });
    this.field = find('prompt');
    this.fit = growing(this.field);
    this.button = find('send');
    this.drafts = new Drafts();
    this.attachments = new Attachments(models, this.field, () => this.#drawButton());
    this.dictation = new Dictation(api, models, (text) => this.#write(text));
    find('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      if (chat.isAnswering) chat.stop();
      else this.#send();
    });
    this.field.addEventListener('keydown', (event) => this.#key(event));
    this.field.addEventListener('input', () => {
      this.drafts.set(chat.current, this.field.value);
      this.#drawButton();
    });
    state.watch(() => this.draw());
  }

  focus() {
    this.field.focus();
  }

  draw() {
    const { current } = this.chat;
    if (this.shown !== current.id) this.#restore(current);
    this.#drawButton();
    this.#drawQueue(current.queue ?? []);
    this.dictation.draw();
    this.attachments.draw();
    find('prompt-hint').dataset.answering = String(this.chat.isAnswering);
    find('context-use').textContent = contextUse(current, this.models.context);
  }

  #restore(conversation) {
    this.shown = conversation.id;
    this.field.value = this.drafts.get(conversation);
    this.fit();
  }

  #drawButton() {
    const { isAnswering } = this.chat;
    const action = isAnswering ? 'stop' : 'send';
    this.button.disabled = !isAnswering && !this.field.value.trim() && this.attachments.list.length === 0;
    if (this.button.dataset.action === action) return;
    this.button.dataset.action = action;
    this.button.setAttribute('aria-label', isAnswering ? t('Stop') : t('Send'));
    this.button.title = isAnswering ? t('Stop (Esc)') : t('Send (Enter)');
    this.button.replaceChildren(icon(action));
  }

  #drawQueue(queue) {
    const box = find('queue');
    box.hidden = queue.length === 0;
    const note = this.chat.isAnswering ? t('Sent after this answer') : t('Waiting to be sent');
    const rows = queue.map((message) => {
      const text = message.content || message.media.map(({ name }) => name).join(', ');
      const drop = iconButton('close', t('Take back'), () => this.#takeBack(message));
      return element('li', {}, element('span', { class: 'text' }, text), drop);
    });
    const send = element('button', { type: 'button', class: 'link', onclick: () => this.chat.sendQueued() }, t('Send now'));
    box.replaceChildren(element('li', { class: 'note' }, note, this.chat.isAnswering ? '' : send), ...rows);
  }

  #takeBack(message) {
    this.chat.unqueue(message);
    this.#write(message.content);
  }

  async #send() {
    const text = this.field.value;
    const { list } = this.attachments;
    if (this.isSending || (!text.trim() && list.length === 0)) return;
    this.isSending = true;
    const media = await Promise.all(list.map((medium) => this.store.keepFile(medium)));
    this.isSending = false;
    this.drafts.set(this.chat.current, '');
    if (!this.chat.send(text, media)) {
      this.drafts.set(this.chat.current, text);
      return;
    }
    this.attachments.clear();
    this.field.value = '';
    this.fit();
    this.#drawButton();
    this.focus();
  }

  // After the text in the field.
  #write(text) {
    const before = this.field.value.trimEnd();
    this.field.value = before ? `${before} ${text}` : text;
    this.fit();
    this.#drawButton();
    this.focus();
  }

  #key(event) {
    if (isSend(event)) {
      event.preventDefault();
      this.#send();
    } else if (event.key === 'ArrowUp' && this.field.value === '') {
      event.preventDefault();
      this.transcript.editLast();
    }
  }
}

// How full the context was after the last answer.
function contextUse(conversation, limit) {
  const facts = thread(conversation).findLast((message) => message.facts?.promptTokens)?.facts;
  if (!facts) return '';
  const used = count(facts.promptTokens + (facts.completionTokens ?? 0));
  return limit ? t('{used} of {limit} tokens', { used, limit: count(limit) }) : t('{n} tokens', { n: used });
}
