// Conversations, kept in this browser's IndexedDB, and followed in its other tabs.
//
// A conversation is {id, title, named, system, created, updated, next, messages, queue?}; a message is {id, parent,
// next, role, content} (see thread.js), for a question {media?: [{kind, name, type, size, file}]}, where `file` is the
// key of its bytes, and for an answer {state: 'streaming' | 'done' | 'stopped' | 'failed', thinking?, error?, facts?,
// receipt?, response?: {id, after}}, where `response` is what the server still stores of it. Only conversations that
// hold a message are written. What cannot be read is left alone, never deleted.

import { openDatabase } from './database.js';
import { chain, thread } from './thread.js';
import { t } from './translate.js';

const OLD_PREFIX = 'ingot.chat.'; // of the keys in localStorage that conversations once had
const TITLE_LENGTH = 60;

export async function openStore(onFull) {
  const store = new Store(await openDatabase(), onFull);
  await store.load();
  return store;
}

class Store {
  constructor(database, onFull) {
    Object.assign(this, { database, onFull });
    this.conversations = new Map();
    this.blobs = new Map(); // files that were used, by key
    this.urls = new Map();
    this.channel = new BroadcastChannel('ingot.conversations');
  }

  async load() {
    const found = await this.database.all('conversations');
    for (const conversation of found) this.#take(conversation);
    await this.#migrate();
    this.#sweep([...found, ...this.conversations.values()]);
  }

  // `changed(id)` is called when another tab wrote or removed a conversation, which has been read by then.
  follow(changed) {
    this.channel.onmessage = async ({ data: id }) => {
      const found = await this.database.get('conversations', id);
      if (found) this.#take(found);
      else this.conversations.delete(id);
      changed(id);
    };
  }

  list() {
    return [...this.conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  // `touch` moves the conversation to the top of the list. Resolves when it is written.
  async save(conversation, { touch = true } = {}) {
    if (touch) conversation.updated = Date.now();
    if (!conversation.named) conversation.title = titleOf(conversation);
    if (conversation.messages.length === 0 && !this.conversations.has(conversation.id)) return;
    this.conversations.set(conversation.id, conversation);
    await this.#written(this.database.put('conversations', structuredClone(conversation)), conversation);
  }

  async remove(conversation) {
    this.conversations.delete(conversation.id);
    await this.#written(this.database.remove('conversations', conversation.id), conversation);
  }

  // Stores a file; returns what a message holds of it.
  async keepFile({ kind, name, blob }) {
    const file = freshId();
    this.blobs.set(file, blob);
    await this.database.put('files', { id: file, blob }).catch(() => this.onFull());
    return { kind, name, type: blob.type, size: blob.size, file };
  }

  // The bytes of a message's file, or null where they are not stored here.
  async file({ file }) {
    if (!this.blobs.has(file)) this.blobs.set(file, (await this.database.get('files', file))?.blob ?? null);
    return this.blobs.get(file);
  }

  // An address for what a message shows.
  async url(medium) {
    const blob = await this.file(medium);
    if (blob && !this.urls.has(medium.file)) this.urls.set(medium.file, URL.createObjectURL(blob));
    return this.urls.get(medium.file) ?? null;
  }

  async #written(writing, { id }) {
    try {
      await writing;
      this.channel.postMessage(id);
    } catch {
      this.onFull();
    }
  }

  #take(conversation) {
    if (isConversation(conversation)) this.conversations.set(conversation.id, conversation);
  }

  async #migrate() {
    for (const key of Object.keys(localStorage).filter((name) => name.startsWith(OLD_PREFIX))) {
      const old = parse(localStorage.getItem(key));
      if (!isConversation(old) || OLD_PREFIX + old.id !== key) continue;
      for (const message of old.messages) {
        if (!message.media) continue;
        const kept = message.media.map(({ kind, name, url }) => (url ? this.keepFile({ kind, name, blob: blobOf(url) }) : { kind, name }));
        message.media = await Promise.all(kept);
      }
      this.conversations.set(old.id, chain(old));
      try {
        await this.database.put('conversations', old);
        localStorage.removeItem(key);
      } catch {
        this.onFull();
      }
    }
  }

  // Removes files that no message holds any more, be it one that cannot be read.
  async #sweep(conversations) {
    const messages = conversations.flatMap((each) => [each.messages, each.queue].flat());
    const held = new Set(messages.flatMap((message) => message?.media ?? []).map(({ file }) => file));
    for (const key of await this.database.keys('files')) {
      if (!held.has(key)) this.database.remove('files', key).catch(() => {});
    }
  }
}

export function newConversation() {
  const now = Date.now();
  return { id: freshId(), title: '', named: false, system: '', created: now, updated: now, next: null, messages: [] };
}

export function userMessage(content, media = []) {
  return { id: freshId(), role: 'user', content, ...(media?.length > 0 && { media }) };
}

export function answerMessage() {
  return { id: freshId(), role: 'assistant', content: '', state: 'streaming' };
}

// The messages so far as a conversation of its own.
export function branchOf(conversation, message) {
  const shown = thread(conversation);
  const upTo = shown.slice(0, shown.indexOf(message) + 1).map((each) => ({ ...structuredClone(each), id: freshId() }));
  const title = conversation.title && t('{title} (branch)', { title: conversation.title });
  const { system } = conversation;
  return chain({ ...newConversation(), title, named: Boolean(title), system, messages: upTo });
}

function titleOf(conversation) {
  const question = thread(conversation).find((message) => message.role === 'user');
  const first = (question?.content.trim() || question?.media?.[0].name)?.split('\n', 1)[0] ?? '';
  return shortened(first) || t('New chat');
}

export function shortened(title) {
  return title.length > TITLE_LENGTH ? `${title.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : title;
}

function parse(text) {
  try {
    return JSON.parse(text);
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

// The bytes of a data URL; the page's policy lets nothing fetch it.
function blobOf(url) {
  const [head, data] = url.split(',', 2);
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.slice('data:'.length).split(';', 1)[0] });
}

// crypto.randomUUID exists only on secure origins.
function freshId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}
