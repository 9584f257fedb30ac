// The versions of a conversation. Its messages are a tree: each has a `parent` (null for the first), and `next` is the
// child that is shown, of a message and of the conversation itself. What is on screen is the way along `next`.

export function thread(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const shown = [];
  for (let message = byId.get(conversation.next); message; message = byId.get(message.next)) {
    shown.push(message);
    byId.delete(message.id); // a damaged conversation may run in a circle
  }
  return shown;
}

// All messages in the place of this one, the oldest first.
export function versions(conversation, message) {
  return conversation.messages.filter(({ parent }) => parent === message.parent);
}

// Adds a message behind another, or as the first, and shows it.
export function append(conversation, message, after = thread(conversation).at(-1) ?? null) {
  message.parent = after?.id ?? null;
  message.next = null;
  (after ?? conversation).next = message.id;
  conversation.messages.push(message);
}

export function parentOf(conversation, message) {
  return conversation.messages.find(({ id }) => id === message.parent) ?? null;
}

export function show(conversation, message) {
  (parentOf(conversation, message) ?? conversation).next = message.id;
}

// Takes a message out; what followed it follows what was before it. Returns what puts everything back.
export function remove(conversation, message) {
  const before = conversation.messages.map((each) => [each, each.parent, each.next]);
  const { next } = conversation;
  const holder = parentOf(conversation, message) ?? conversation;
  conversation.messages = conversation.messages.filter((each) => each !== message);
  for (const child of conversation.messages) if (child.parent === message.id) child.parent = message.parent;
  const others = conversation.messages.filter(({ parent }) => parent === message.parent);
  if (holder.next === message.id) holder.next = message.next ?? others.at(-1)?.id ?? null;
  return () => {
    for (const [each, parent, shown] of before) Object.assign(each, { parent, next: shown });
    const later = conversation.messages.filter((each) => !before.some(([known]) => known === each));
    Object.assign(conversation, { messages: [...before.map(([each]) => each), ...later], next });
  };
}

// A list of messages, each following the one before, as conversations once were.
export function chain(conversation) {
  let before = null;
  for (const message of conversation.messages) {
    Object.assign(message, { parent: before?.id ?? null, next: null });
    (before ?? conversation).next = message.id;
    before = message;
  }
  conversation.next ??= null;
  return conversation;
}
