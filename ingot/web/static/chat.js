// The conversation's logic: what sending, editing, retrying and deleting do. Several conversations may be
// answered at once; each answer writes to its own, whichever is on screen.

import { announce } from './announce.js';
import { Answer } from './answer.js';
import { withMedia } from './media.js';
import { notify } from './notice.js';
import { answerMessage, userMessage } from './store.js';

const SAVE_EVERY_MS = 1000;
const CURRENT = 'ingot.current';
const SYSTEM = 'ingot.system';

// Fires `change` when the list of conversations, the current one or an answer's start and end changed.
export class Chat extends EventTarget {
  constructor({ api, store, settings, models }) {
    super();
    Object.assign(this, { api, store, settings, models });
    this.answers = new Map();
    // A reload stays where it was; a new tab starts afresh.
    this.current = store.conversations.get(sessionStorage.getItem(CURRENT)) ?? this.#fresh();
  }

  attach(transcript) {
    this.transcript = transcript;
    transcript.show(this.current);
  }

  get isAnswering() {
    return this.answers.has(this.current.id);
  }

  get lastSucceeded() {
    return this.current.messages.at(-1)?.state === 'done';
  }

  open(conversation) {
    this.current = conversation;
    sessionStorage.setItem(CURRENT, conversation.id);
    this.transcript.show(conversation);
    this.#changed();
  }

  start() {
    this.open(this.#fresh());
  }

  setSystem(text) {
    this.current.system = text;
    localStorage.setItem(SYSTEM, text);
    this.store.save(this.current, { touch: false });
    this.transcript.refresh();
  }

  rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    this.store.save(conversation, { touch: false });
    this.#changed();
  }

  discard(conversation) {
    this.answers.get(conversation.id)?.stop();
    this.store.remove(conversation);
    if (conversation === this.current) this.open(this.store.list()[0] ?? this.#fresh());
    this.#changed();
    notify('Conversation deleted.', {
      label: 'Undo',
      run: () => {
        this.store.save(conversation, { touch: false });
        this.open(conversation);
      },
    });
  }

  send(text, media = []) {
    if (this.isAnswering || (!text.trim() && media.length === 0)) return false;
    if (!this.settings.isValid()) return false;
    this.current.messages.push(userMessage(text, media));
    this.#answer();
    return true;
  }

  // Replaces a message of the user and everything that came after it.
  edit(message, text) {
    if (!this.settings.isValid()) return;
    this.stop();
    this.#truncate(this.#index(message));
    this.current.messages.push(userMessage(text, message.media));
    this.#answer();
  }

  // Asks again for an answer; what followed it is gone, as it followed from it.
  retry(message) {
    if (!this.settings.isValid()) return;
    this.stop();
    this.#truncate(this.#index(message));
    this.#answer();
  }

  stop() {
    this.answers.get(this.current.id)?.stop();
  }

  remove(message) {
    const conversation = this.current;
    const at = this.#index(message);
    const answer = this.answers.get(conversation.id);
    if (answer?.message === message) answer.stop();
    conversation.messages.splice(at, 1);
    this.#saved(conversation);
    notify('Message deleted.', {
      label: 'Undo',
      run: () => {
        conversation.messages.splice(at, 0, message);
        this.#saved(conversation);
      },
    });
  }

  // The page is about to go away: keeps what has arrived, and hangs up before the browser makes it look like a
  // failure.
  leave() {
    for (const answer of this.answers.values()) {
      answer.stop();
      this.store.save(answer.conversation);
    }
  }

  // Another tab changed a conversation.
  follow(event) {
    const id = this.store.follow(event);
    if (id === null || this.answers.has(id)) return;
    const changed = this.store.conversations.get(id);
    if (id === this.current.id && changed) this.open(changed);
    else this.#changed();
  }

  async #answer() {
    const conversation = this.current;
    const body = this.#body(conversation);
    const message = answerMessage();
    conversation.messages.push(message);
    const answer = new Answer(this.api, conversation, message);
    this.answers.get(conversation.id)?.stop();
    this.answers.set(conversation.id, answer);
    this.#saved(conversation);
    sessionStorage.setItem(CURRENT, conversation.id);
    this.transcript.jump();
    announce('Answering.');
    const saving = setInterval(() => this.#keep(answer), SAVE_EVERY_MS);
    await answer.run(body, () => this.transcript.view(message)?.grow());
    clearInterval(saving);
    this.#keep(answer);
    if (this.answers.get(conversation.id) === answer) this.answers.delete(conversation.id);
    this.transcript.view(message)?.settle();
    this.#changed();
  }

  // A message that was deleted or replaced while its answer was under way is not written back.
  #keep({ conversation, message }) {
    const isKept = this.store.conversations.get(conversation.id) === conversation;
    if (isKept && conversation.messages.includes(message)) this.store.save(conversation);
  }

  #body({ system, messages }) {
    const history = messages
      .filter(({ role, content }) => role === 'user' || content !== '')
      .map(({ role, content, thinking, media }) => ({
        role,
        content: withMedia(content, media),
        ...(thinking && { reasoning_content: thinking }),
      }));
    const preface = system.trim() ? [{ role: 'system', content: system.trim() }] : [];
    return { model: this.models.chosen, messages: [...preface, ...history], ...this.settings.sampling() };
  }

  // A new conversation starts with the system prompt that was written last.
  #fresh() {
    return this.store.create(localStorage.getItem(SYSTEM) ?? '');
  }

  #truncate(at) {
    this.current.messages.length = at;
    this.transcript.refresh();
  }

  #index(message) {
    return this.current.messages.indexOf(message);
  }

  #saved(conversation) {
    this.store.save(conversation);
    if (conversation === this.current) this.transcript.refresh();
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event('change'));
  }
}
