// The conversation's logic: what sending, editing, retrying and deleting do. Several conversations may be answered at
// once; each answer writes to its own, whichever is on screen. Answers go on in the server when the page is left, and
// are taken up again when it is opened; the server stores one only until the page has all of it.

import { announce } from './announce.js';
import { Answer } from './answer.js';
import { inputOf } from './input.js';
import { notify } from './notice.js';
import { answerMessage, branchOf, newConversation, userMessage } from './store.js';
import { append, parentOf, remove, show, thread } from './thread.js';
import { openCalls } from './tools.js';
import { t } from './translate.js';

const SAVE_EVERY_MS = 1000;
const CURRENT = 'ingot.current';

export class Chat {
  // `parts` are what adds `fields` to a request.
  constructor({ api, state, store, settings, models, parts, titles }) {
    Object.assign(this, { api, state, store, settings, models, parts, titles });
    // A reload stays where it was; a new tab starts afresh.
    state.current = store.conversations.get(sessionStorage.getItem(CURRENT)) ?? newConversation();
    for (const { messages } of store.list()) for (const message of messages) if (isGone(message)) message.state = 'stopped';
    store.follow((id) => this.#follow(id));
  }

  attach(transcript) {
    this.transcript = transcript;
    this.#takeUp();
  }

  get current() {
    return this.state.current;
  }

  get isAnswering() {
    return this.state.answers.has(this.current.id);
  }

  open(conversation) {
    sessionStorage.setItem(CURRENT, conversation.id);
    this.state.change({ current: conversation });
  }

  start() {
    this.open(newConversation());
  }

  setSystem(text) {
    this.current.system = text;
    this.#saved(this.current, { touch: false });
  }

  rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    this.#saved(conversation, { touch: false });
  }

  discard(conversation) {
    this.state.answers.get(conversation.id)?.stop();
    this.#forget(conversation.messages);
    this.store.remove(conversation);
    if (conversation === this.current) this.open(this.store.list()[0] ?? newConversation());
    this.state.change();
    notify(t('Conversation deleted.'), {
      label: t('Undo'),
      run: () => {
        this.store.save(conversation, { touch: false });
        this.open(conversation);
      },
    });
  }

  // Sends a message, or lets it wait for the end of the answer under way. Returns whether it took it.
  send(text, media = []) {
    if ((!text.trim() && media.length === 0) || !this.settings.isValid()) return false;
    const message = userMessage(text, media);
    if (this.isAnswering) {
      this.current.queue = [...(this.current.queue ?? []), message];
      announce(t('Queued. It is sent after this answer.'));
      this.#saved(this.current);
      return true;
    }
    append(this.current, message);
    this.#answer(this.current);
    return true;
  }

  // Takes a message back that waits to be sent.
  unqueue(message) {
    this.current.queue = this.current.queue.filter((each) => each !== message);
    this.#saved(this.current);
  }

  // Sends what waits, where no answer is under way.
  sendQueued(conversation = this.current) {
    const [message, ...others] = conversation.queue ?? [];
    if (!message || this.state.answers.has(conversation.id)) return;
    conversation.queue = others;
    append(conversation, message);
    this.#answer(conversation);
  }

  // Another version of a message of the user, with an answer of its own.
  edit(message, text) {
    if (!this.settings.isValid()) return;
    this.stop();
    append(this.current, userMessage(text, message.media), parentOf(this.current, message));
    this.#answer(this.current);
  }

  // Another version of an answer.
  retry(message) {
    if (!this.settings.isValid()) return;
    this.stop();
    this.#answer(this.current, parentOf(this.current, message));
  }

  // Shows another version of a message, with what followed that.
  show(message) {
    show(this.current, message);
    this.#saved(this.current, { touch: false });
  }

  // A conversation of its own that has everything up to this message.
  branch(message) {
    const conversation = branchOf(this.current, message);
    this.store.save(conversation);
    this.open(conversation);
    notify(t('This is a new conversation, with the messages up to there.'));
  }

  // The user's word on a call that the model wants to make. The answer goes on when there is one on each.
  decide(message, request, isAllowed) {
    const decision = { type: 'mcp_approval_response', approval_request_id: request.id, approve: isAllowed };
    message.items = [...message.items, decision];
    if (openCalls(message).length > 0) this.#saved(this.current);
    else this.#begin(this.current, Object.assign(message, { state: 'streaming', earlier: message.items }));
    this.transcript.view(message).settle();
  }

  stop() {
    this.state.answers.get(this.current.id)?.stop();
  }

  remove(message) {
    const conversation = this.current;
    const answer = this.state.answers.get(conversation.id);
    if (answer?.message === message) answer.stop();
    this.#forget([message]);
    const restore = remove(conversation, message);
    this.#saved(conversation);
    notify(t('Message deleted.'), {
      label: t('Undo'),
      run: () => {
        restore();
        this.#saved(conversation);
      },
    });
  }

  // Deletes what the server still stores of these messages.
  #forget(messages) {
    for (const { response } of messages) if (response) this.api.discard(response.id).catch(() => {});
  }

  // What an earlier visit of the page left under way goes on; what it left in the server is deleted there.
  #takeUp() {
    for (const conversation of this.store.list()) {
      for (const message of conversation.messages) {
        if (message.state === 'streaming') this.#resume(conversation, message);
        else if (message.response) this.#tidy(conversation, message);
      }
    }
  }

  // One tab at a time reads an answer, so that another one that is open shows what this one saves.
  #resume({ id }, { id: messageId }) {
    exclusively(`ingot.answer.${messageId}`, async () => {
      const conversation = this.store.conversations.get(id);
      const message = conversation?.messages.find((each) => each.id === messageId);
      if (message?.state !== 'streaming' || this.state.answers.has(id)) return;
      const answer = new Answer(this.api, conversation, message);
      await this.#run(answer, (grow) => answer.resume(grow));
      this.#goOn(conversation, message);
    });
  }

  async #answer(conversation, after = undefined) {
    const message = { ...answerMessage(), isJson: this.settings.format.isJson };
    append(conversation, message, after);
    await this.#begin(conversation, message);
  }

  async #begin(conversation, message) {
    const answer = new Answer(this.api, conversation, message);
    this.state.answers.get(conversation.id)?.stop();
    this.state.answers.set(conversation.id, answer);
    if (conversation === this.current) {
      sessionStorage.setItem(CURRENT, conversation.id);
      this.transcript.jump();
    }
    this.#saved(conversation);
    announce(t('Answering.'));
    await exclusively(`ingot.answer.${message.id}`, () => this.#run(answer, (grow) => this.#ask(answer, grow)));
    this.#goOn(conversation, message);
  }

  // What comes after an answer: a title, and the message that waits for its end.
  #goOn(conversation, message) {
    if (message.state !== 'done' || openCalls(message).length > 0) return;
    this.titles.suggest(conversation, (title) => this.#saved(Object.assign(conversation, { title, named: true }), { touch: false }));
    this.sendQueued(conversation);
  }

  async #ask(answer, grow) {
    const { conversation, message } = answer;
    try {
      const body = await this.#body(conversation, message);
      if ((this.models.card?.state ?? 'loaded') !== 'loaded') this.models.load(); // and follows how it is loaded
      await answer.run(body, grow);
    } catch (error) {
      Object.assign(message, { state: 'failed', error: { text: error.message, retryAfter: null } });
    }
  }

  // Reads an answer to its end.
  async #run(answer, read) {
    const { conversation, message } = answer;
    this.state.answers.set(conversation.id, answer);
    this.state.change();
    const saving = setInterval(() => this.#keep(answer), SAVE_EVERY_MS);
    let known = message.response;
    await read(() => {
      this.transcript.view(message)?.grow();
      if (message.response !== known) this.#keep(answer); // where it can be found again
      known = message.response;
    });
    clearInterval(saving);
    if (this.state.answers.get(conversation.id) === answer) this.state.answers.delete(conversation.id);
    const kept = this.#keep(answer, { touch: true });
    this.transcript.view(message)?.settle();
    this.state.change();
    await kept;
    this.#tidy(conversation, message);
    if (message.state === 'done' && (this.models.error || this.models.card?.state)) this.models.load();
  }

  // The page has all of an answer, or wants no more of it: the server ends it, and stores it no longer.
  async #tidy(conversation, message) {
    if (!message.response || message.state === 'streaming') return;
    if (message.response.isBackground) await this.api.discard(message.response.id).catch(() => {});
    delete message.response;
    await this.#keep({ conversation, message });
  }

  // A message that was deleted or replaced while its answer was under way is not written back.
  async #keep({ conversation, message }, { touch = false } = {}) {
    const isKept = this.store.conversations.get(conversation.id) === conversation;
    if (isKept && conversation.messages.includes(message)) await this.store.save(conversation, { touch });
  }

  async #body(conversation, answer) {
    const input = await inputOf(conversation, answer, (medium) => this.store.file(medium));
    const instructions = conversation.system.trim();
    const fields = Object.assign({}, ...this.parts.map((part) => part.fields));
    return { model: this.models.chosen, ...(instructions && { instructions }), input, ...this.settings.sampling(), ...fields };
  }

  // Another tab changed a conversation.
  #follow(id) {
    if (this.state.answers.has(id)) return;
    const changed = this.store.conversations.get(id);
    if (id === this.current.id && changed) this.state.current = changed;
    this.state.change();
  }

  #saved(conversation, how) {
    this.store.save(conversation, how);
    this.state.change();
  }
}

// Whether an answer ended with the visit of the page that began it.
function isGone({ state, response }) {
  return state === 'streaming' && !response?.isBackground;
}

// Where the browser has locks: only on secure origins.
function exclusively(name, work) {
  return navigator.locks ? navigator.locks.request(name, work) : work();
}
