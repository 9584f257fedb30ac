// The view of one message. It owns its node and redraws it from the message.

import { announce, announceBlocks } from './announce.js';
import { copyFrom } from './clipboard.js';
import { element, icon, iconButton } from './element.js';
import { describe } from './facts.js';
import { growing, isSend } from './field.js';
import { LiveMarkdown } from './live.js';
import { mediumView } from './media.js';
import { Pace } from './pace.js';
import { receiptView } from './receipt.js';

export function messageView(message, actions) {
  return message.role === 'user' ? new QuestionView(message, actions) : new AnswerView(message, actions);
}

class QuestionView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.bubble = element('div', { class: 'bubble' }, message.content);
    const media = (message.media ?? []).map((medium) => mediumView(medium, actions.url(medium)));
    this.media = media.length > 0 ? element('div', { class: 'media' }, ...media) : null;
    this.bubble.hidden = message.content === '' && media.length > 0;
    this.versions = new Versions(message, actions.show);
    this.tools = element(
      'div',
      { class: 'tools' },
      this.versions.node,
      iconButton('edit', 'Edit message', () => this.edit()),
      copyButton('Copy message', message),
      iconButton('delete', 'Delete message', () => actions.remove(message)),
    );
    this.node = element('article', { class: 'message question' }, heading('You said:'), this.media, this.bubble, this.tools);
  }

  offer(versions) {
    this.versions.draw(versions);
  }

  edit() {
    const field = element('textarea', { 'aria-label': 'Edit message', rows: '1' });
    field.value = this.message.content;
    const form = element(
      'form',
      { class: 'editor' },
      field,
      element('button', { type: 'button', class: 'secondary', onclick: () => this.#close(form) }, 'Cancel'),
      element('button', { class: 'primary' }, 'Send'),
    );
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      if (field.value.trim() || this.media) this.actions.edit(this.message, field.value);
    });
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.#close(form);
      else if (isSend(event)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.bubble.replaceWith(form);
    this.tools.hidden = true;
    growing(field);
    field.focus();
  }

  #close(form) {
    form.replaceWith(this.bubble);
    this.tools.hidden = false;
    this.tools.querySelector(':scope > button').focus();
  }
}

class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.thought = element('p', {});
    this.summary = element('summary', {}, 'Thinking');
    this.thinking = element('details', { class: 'thinking', hidden: true }, this.summary, this.thought);
    this.body = element('div', { class: 'prose' });
    this.problem = element('div', { class: 'problem', role: 'alert', hidden: true });
    this.facts = element('span', { class: 'facts' });
    this.copy = copyButton('Copy answer', message);
    this.speak = speakButton(actions.speaker, () => this.body.innerText);
    this.speaker = actions.speaker;
    this.versions = new Versions(message, actions.show);
    this.about = iconButton('receipt', 'About this answer', () => this.#toggleReceipt(), { 'aria-expanded': 'false' });
    this.tools = element(
      'div',
      { class: 'tools' },
      this.versions.node,
      this.copy,
      this.speak,
      iconButton('retry', 'Retry', () => actions.retry(message)),
      this.about,
      iconButton('branch', 'New conversation from here', () => actions.branch(message)),
      iconButton('delete', 'Delete answer', () => actions.remove(message)),
    );
    this.foot = element('footer', {}, this.facts, this.tools);
    this.node = element(
      'article',
      { class: 'message answer' },
      heading('Answer:'),
      this.thinking,
      this.body,
      this.problem,
      this.foot,
    );
    this.markdown = new LiveMarkdown(this.body);
    this.pace = new Pace(() => this.#draw());
    this.retry = () => actions.retry(message);
    if (message.state === 'streaming') this.grow();
    else this.settle();
  }

  // More text has arrived.
  grow() {
    this.pace.request();
    this.#state();
  }

  // Nothing more will arrive.
  settle() {
    this.pace.flush();
    this.#state();
  }

  // What can be done with this answer may have become more.
  offer(versions) {
    if (versions) this.versions.draw(versions);
    const { state, content } = this.message;
    this.speak.hidden = content === '' || state === 'streaming' || !this.speaker.isOffered;
  }

  // The receipt, in words.
  #toggleReceipt() {
    const shown = this.foot.querySelector('.receipt');
    if (shown) shown.remove();
    else this.foot.append(receiptView(this.message));
    this.about.setAttribute('aria-expanded', String(!shown));
  }

  #draw() {
    const isStreaming = this.message.state === 'streaming';
    this.thought.textContent = this.message.thinking ?? '';
    const finished = this.markdown.update(this.message.content, !isStreaming);
    if (this.node.isConnected) announceBlocks(finished);
  }

  #state() {
    const { state, error, content, thinking, isLost, receipt, facts = {} } = this.message;
    const isThinking = state === 'streaming' && content === '';
    this.node.dataset.state = state;
    this.node.classList.toggle('waiting', state === 'streaming' && content === '' && !thinking);
    this.thinking.hidden = !thinking;
    this.thinking.classList.toggle('going', isThinking);
    this.facts.textContent = state === 'streaming' ? (isLost ? 'Connection lost. The answer goes on; reconnecting…' : '') : describe(this.message);
    this.problem.hidden = state !== 'failed';
    this.copy.hidden = content === '';
    this.about.hidden = !receipt;
    this.summary.textContent = isThinking ? 'Thinking' : `Thought${facts.thinkingMs ? ` for ${(facts.thinkingMs / 1000).toFixed(1)} s` : ''}`;
    this.offer();
    if (state === 'failed') this.problem.replaceChildren(...problem(error, this.retry));
    if (state === 'stopped' && this.node.isConnected) announce('Stopped.');
  }
}

function problem(error, retry) {
  const wait = error.retryAfter ? ` Retry in ${error.retryAfter} s.` : '';
  return [
    icon('warning'),
    element('p', {}, error.text + wait),
    element('button', { type: 'button', class: 'secondary', onclick: retry }, 'Try again'),
  ];
}

// Which version of a message is shown, and the way to the others.
class Versions {
  constructor(message, show) {
    this.message = message;
    this.count = element('span', {});
    this.earlier = iconButton('left', 'Version before', () => this.#step(show, -1));
    this.later = iconButton('right', 'Version after', () => this.#step(show, 1));
    this.node = element('span', { class: 'versions', hidden: true }, this.earlier, this.count, this.later);
  }

  draw(versions) {
    this.all = versions;
    const at = versions.indexOf(this.message);
    this.node.hidden = versions.length < 2;
    this.count.textContent = `${at + 1} of ${versions.length}`;
    this.earlier.disabled = at === 0;
    this.later.disabled = at === versions.length - 1;
  }

  #step(show, by) {
    show(this.all[this.all.indexOf(this.message) + by]);
  }
}

function heading(text) {
  return element('h2', { class: 'visually-hidden' }, text);
}

function copyButton(label, message) {
  const button = iconButton('copy', label, () => copyFrom(button, message.content));
  return button;
}

// `text()` is what is to be read.
function speakButton(speaker, text) {
  const button = iconButton('speaker', 'Read aloud', () => speaker.toggle(text(), show), { 'aria-pressed': 'false' });
  const show = (isSpeaking) => {
    button.replaceChildren(icon(isSpeaking ? 'stop' : 'speaker'));
    button.setAttribute('aria-label', isSpeaking ? 'Stop reading' : 'Read aloud');
    button.setAttribute('aria-pressed', String(isSpeaking));
  };
  return button;
}
