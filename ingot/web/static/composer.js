// Where the user writes, and the button that sends or stops.

import { Attachments } from './attachments.js';
import { Dictation } from './dictation.js';
import { find, icon } from './element.js';
import { count } from './facts.js';
import { growing, isSend } from './field.js';

export class Composer {
  constructor(api, chat, models, transcript) {
    Object.assign(this, { chat, models, transcript });
    this.field = find('prompt');
    this.fit = growing(this.field);
    this.button = find('send');
    this.attachments = new Attachments(models, this.field);
    this.attachments.addEventListener('change', () => this.draw());
    this.dictation = new Dictation(api, models, (text) => this.#write(text));
    find('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      if (chat.isAnswering) chat.stop();
      else this.#send();
    });
    this.field.addEventListener('keydown', (event) => this.#key(event));
    this.field.addEventListener('input', () => this.draw());
    chat.addEventListener('change', () => this.draw());
    this.draw();
  }

  focus() {
    this.field.focus();
  }

  draw() {
    const { isAnswering } = this.chat;
    const action = isAnswering ? 'stop' : 'send';
    this.button.disabled = !isAnswering && !this.field.value.trim() && this.attachments.list.length === 0;
    if (this.button.dataset.action !== action) {
      this.button.dataset.action = action;
      this.button.setAttribute('aria-label', isAnswering ? 'Stop' : 'Send');
      this.button.title = isAnswering ? 'Stop (Esc)' : 'Send (Enter)';
      this.button.replaceChildren(icon(action));
    }
    find('context-use').textContent = contextUse(this.chat.current, this.models.context);
  }

  #send() {
    if (!this.chat.send(this.field.value, this.attachments.list)) return;
    this.attachments.clear();
    this.field.value = '';
    this.fit();
    this.draw();
    this.focus();
  }

  // After the text in the field.
  #write(text) {
    const before = this.field.value.trimEnd();
    this.field.value = before ? `${before} ${text}` : text;
    this.fit();
    this.draw();
    this.focus();
  }

  #key(event) {
    if (isSend(event)) {
      event.preventDefault();
      if (!this.chat.isAnswering) this.#send();
    } else if (event.key === 'ArrowUp' && this.field.value === '') {
      event.preventDefault();
      this.transcript.editLast();
    }
  }
}

// How full the context was after the last answer.
function contextUse({ messages }, limit) {
  const facts = messages.findLast((message) => message.facts?.promptTokens)?.facts;
  if (!facts) return '';
  const used = count(facts.promptTokens + (facts.completionTokens ?? 0));
  return limit ? `${used} / ${count(limit)} tokens` : `${used} tokens`;
}
