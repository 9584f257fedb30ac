// Conversations, kept in this browser's localStorage under one key each.
//
// A conversation is {id, title, named, system, created, updated, messages}; a message is {id, role, content}, for a
// question {media?} as media.js has it, and for an answer {state: 'streaming' | 'done' | 'stopped' | 'failed',
// thinking?, error?, facts?}. Only conversations that hold a message are written. Where there is no room for its media,
// a conversation is written without them. What cannot be read is left alone, never deleted.

const PREFIX = 'ingot.chat.';
const TITLE_LENGTH = 60;

export class Store {
  constructor(onFull) {
    this.onFull = onFull;
    this.conversations = new Map();
    for (const key of Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) this.#read(key);
  }

  // Another tab wrote or removed something; returns the id of what changed, or null.
  follow(event) {
    if (!event.key?.startsWith(PREFIX)) return null;
    const id = event.key.slice(PREFIX.length);
    this.conversations.delete(id);
    this.#read(event.key);
    return id;
  }

  list() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  create(system = '') {
    const now = Date.now();
    return { id: freshId(), title: '', named: false, system, created: now, updated: now, messages: [] };
  }

  // `touch` moves the conversation to the top of the list.
  save(conversation, { touch = true } = {}) {
    if (touch) conversation.updated = Date.now();
    if (!conversation.named) conversation.title = titleOf(conversation);
    if (conversation.messages.length === 0 && !this.conversations.has(conversation.id)) return;
    this.conversations.set(conversation.id, conversation);
    if (!this.#write(conversation) && !this.#write(withoutMedia(conversation))) this.onFull();
  }

  remove(conversation) {
    this.conversations.delete(conversation.id);
    localStorage.removeItem(PREFIX + conversation.id);
  }

  #write(conversation) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      return false;
    }
  }

  #read(key) {
    const conversation = parse(localStorage.getItem(key));
    if (!conversation || PREFIX + conversation.id !== key) return;
    for (const message of conversation.messages) if (message.state === 'streaming') message.state = 'stopped';
    this.conversations.set(conversation.id, conversation);
  }
}

export function userMessage(content, media = []) {
  return { id: freshId(), role: 'user', content, ...(media?.length > 0 && { media }) };
}

function withoutMedia(conversation) {
  const bare = ({ media, ...message }) => ({ ...message, ...(media && { media: media.map(nameOnly) }) });
  return { ...conversation, messages: conversation.messages.map(bare) };
}

function nameOnly({ kind, name }) {
  return { kind, name };
}

export function answerMessage() {
  return { id: freshId(), role: 'assistant', content: '', state: 'streaming' };
}

function titleOf({ messages }) {
  const question = messages.find((message) => message.role === 'user');
  const first = (question?.content.trim() || question?.media?.[0].name)?.split('\n', 1)[0] ?? '';
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : first || 'New chat';
}

function parse(text) {
  try {
    const value = JSON.parse(text);
    return isConversation(value) ? value : null;
  } catch {
    return null;
  }
}

function isConversation(value) {
  return (
    typeof value?.id === 'string' &&
    typeof value.title === 'string' &&
    typeof value.system === 'string' &&
    Number.isFinite(value.updated) &&
    Array.isArray(value.messages) &&
    value.messages.every(
      (message) =>
        typeof message?.id === 'string' &&
        typeof message.content === 'string' &&
        (message.role === 'user' || message.role === 'assistant'),
    )
  );
}

// crypto.randomUUID exists only on secure origins.
function freshId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
