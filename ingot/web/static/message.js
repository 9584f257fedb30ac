// The view of one message. It owns its node and redraws it from the message.

import { announce, announceBlocks } from './announce.js';
import { copyFrom } from './clipboard.js';
import { element, icon, iconButton } from './element.js';
import { decimal, describe } from './facts.js';
import { tokensView } from './format.js';
import { growing, isSend } from './field.js';
import { LiveMarkdown } from './live.js';
import { mediumView } from './media.js';
import { Pace } from './pace.js';
import { receiptView } from './receipt.js';
import { callViews } from './tools.js';
import { t } from './translate.js';

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
      iconButton('edit', t('Edit message'), () => this.edit()),
      copyButton(t('Copy message'), message),
      iconButton('delete', t('Delete message'), () => actions.remove(message)),
    );
    this.node = element('article', { class: 'message question' }, heading(t('You said:')), this.media, this.bubble, this.tools);
  }

  offer(versions) {
    this.versions.draw(versions);
  }

  edit() {
    const field = element('textarea', { 'aria-label': t('Edit message'), rows: '1' });
    field.value = this.message.content;
    const form = element(
      'form',
      { class: 'editor' },
      field,
      element('button', { type: 'button', class: 'secondary', onclick: () => this.#close(form) }, t('Cancel')),
      element('button', { class: 'primary' }, t('Send')),
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
    this.summary = element('summary', {}, t('Thinking'));
    this.thinking = element('details', { class: 'thinking', hidden: true }, this.summary, this.thought);
    this.calls = element('div', { class: 'calls', hidden: true });
    this.decide = (request, isAllowed) => actions.decide(message, request, isAllowed);
    this.loading = actions.loading;
    this.body = element('div', { class: 'prose' });
    this.problem = element('div', { class: 'problem', role: 'alert', hidden: true });
    this.facts = element('span', { class: 'facts' });
    this.copy = copyButton(t('Copy answer'), message);
    this.speak = speakButton(actions.speaker, () => this.body.innerText);
    this.speaker = actions.speaker;
    this.versions = new Versions(message, actions.show);
    this.about = iconButton('receipt', t('About this answer'), () => this.#toggleReceipt(), { 'aria-expanded': 'false' });
    this.tools = element(
      'div',
      { class: 'tools' },
      this.versions.node,
      this.copy,
      this.speak,
      iconButton('retry', t('Retry'), () => actions.retry(message)),
      this.about,
      iconButton('branch', t('New conversation from here'), () => actions.branch(message)),
      iconButton('delete', t('Delete answer'), () => actions.remove(message)),
    );
    this.foot = element('footer', {}, this.facts, this.tools);
    this.node = element(
      'article',
      { class: 'message answer' },
      heading(t('Answer:')),
      this.thinking,
      this.calls,
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
    if (state === 'streaming' && !content && !this.message.isLost) this.facts.textContent = this.loading();
    this.speak.hidden = content === '' || state === 'streaming' || !this.speaker.isOffered;
  }

  // The receipt, in words.
  #toggleReceipt() {
    const shown = this.foot.querySelector('.receipt');
    if (shown) shown.remove();
    else this.foot.append(receiptView(this.message));
    if (!shown && this.message.logprobs) this.foot.querySelector('.receipt').append(element('li', {}, tokensView(this.message.logprobs)));
    this.about.setAttribute('aria-expanded', String(!shown));
  }

  #drawCalls() {
    const { items, state } = this.message;
    const drawn = `${state} ${JSON.stringify(items)}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.calls.hidden = !items;
    this.calls.replaceChildren(...callViews(this.message, this.decide));
  }

  #draw() {
    const isStreaming = this.message.state === 'streaming';
    this.thought.textContent = this.message.thinking ?? '';
    const { content, isJson } = this.message;
    const finished = this.markdown.update(isJson && content ? `\`\`\`json\n${content}${isStreaming ? '' : '\n```'}` : content, !isStreaming);
    if (this.node.isConnected) announceBlocks(finished);
  }

  #state() {
    const { state, error, content, thinking, isLost, receipt, facts = {} } = this.message;
    const isThinking = state === 'streaming' && content === '';
    this.node.dataset.state = state;
    this.node.classList.toggle('waiting', state === 'streaming' && content === '' && !thinking);
    this.thinking.hidden = !thinking;
    this.thinking.classList.toggle('going', isThinking);
    this.facts.textContent = state === 'streaming' ? (isLost ? t('Connection lost. The answer goes on; reconnecting…') : '') : describe(this.message);
    this.problem.hidden = state !== 'failed';
    this.copy.hidden = content === '';
    this.about.hidden = !receipt;
    this.#drawCalls();
    this.summary.textContent = isThinking ? t('Thinking') : facts.thinkingMs ? t('Thought for {seconds} s', { seconds: decimal(facts.thinkingMs / 1000, 1) }) : t('Thought');
    this.offer();
    if (state === 'failed') this.problem.replaceChildren(...problem(error, this.retry));
    if (state === 'stopped' && this.node.isConnected) announce(t('Stopped.'));
  }
}

function problem(error, retry) {
  const wait = error.retryAfter ? ` ${t('Retry in {seconds} s.', { seconds: error.retryAfter })}` : '';
  return [
    icon('warning'),
    element('p', {}, error.text + wait),
    element('button', { type: 'button', class: 'secondary', onclick: retry }, t('Try again')),
  ];
}

// Which version of a message is shown, and the way to the others.
class Versions {
  constructor(message, show) {
    this.message = message;
    this.count = element('span', {});
    this.earlier = iconButton('left', t('Version before'), () => this.#step(show, -1));
    this.later = iconButton('right', t('Version after'), () => this.#step(show, 1));
    this.node = element('span', { class: 'versions', hidden: true }, this.earlier, this.count, this.later);
  }

  draw(versions) {
    this.all = versions;
    const at = versions.indexOf(this.message);
    this.node.hidden = versions.length < 2;
    this.count.textContent = t('{n} of {all}', { n: at + 1, all: versions.length });
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
  const button = iconButton('speaker', t('Read aloud'), () => speaker.toggle(text(), show), { 'aria-pressed': 'false' });
  const show = (isSpeaking) => {
    button.replaceChildren(icon(isSpeaking ? 'stop' : 'speaker'));
    button.setAttribute('aria-label', isSpeaking ? t('Stop reading') : t('Read aloud'));
    button.setAttribute('aria-pressed', String(isSpeaking));
  };
  return button;
}
