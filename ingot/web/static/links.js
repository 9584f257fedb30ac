// Addresses in Markdown: which may become a link, and where one ends. Every scan is bounded.

const MAX_URL = 2048;
const MAX_TITLE = 512;

// The address itself if it may become a link: http, https and mailto only; null for everything else.
export function safeUrl(address) {
  if (address.length > MAX_URL || !/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

// "(address "title")" from `at` on: where it points and where it ends, or null.
export function readTarget(text, at) {
  if (text[at] !== '(') return null;
  const start = skipSpace(text, at + 1);
  const angled = text[start] === '<';
  const stop = angled ? angledEnd(text, start) : addressEnd(text, start);
  if (stop === null) return null;
  const address = angled ? text.slice(start + 1, stop - 1) : text.slice(start, stop);
  const end = skipSpace(text, titleEnd(text, skipSpace(text, stop)));
  return text[end] === ')' ? { address, end: end + 1 } : null;
}

function angledEnd(text, start) {
  for (let at = start + 1; at < text.length && at - start < MAX_URL; at += 1) {
    if (text[at] === '>') return at + 1;
    if (text[at] === '<' || text[at] === '\n') return null;
  }
  return null;
}

function addressEnd(text, start) {
  let depth = 0;
  for (let at = start; at < text.length && at - start <= MAX_URL; at += 1) {
    const char = text[at];
    if (char === ' ' || char === '\n' || char === '\t' || char === '<' || char === '>') return at;
    if (char === ')' && depth === 0) return at;
    depth += char === '(' ? 1 : char === ')' ? -1 : 0;
  }
  return null;
}

function titleEnd(text, start) {
  const close = { '"': '"', "'": "'", '(': ')' }[text[start]];
  if (!close) return start;
  for (let at = start + 1; at < text.length && at - start < MAX_TITLE; at += 1) {
    if (text[at] === close && text[at - 1] !== '\\') return at + 1;
  }
  return start;
}

function skipSpace(text, at) {
  while (text[at] === ' ' || text[at] === '\n' || text[at] === '\t') at += 1;
  return at;
}

// Of an address in running text, the punctuation at its end and a bracket it did not open are the sentence's.
export function trimAddress(address) {
  const surplus = { ')': 0, ']': 0 };
  for (const char of address) {
    if (char in surplus) surplus[char] += 1;
    else if (char === '(') surplus[')'] -= 1;
    else if (char === '[') surplus[']'] -= 1;
  }
  let end = address.length;
  for (; end > 0; end -= 1) {
    const last = address[end - 1];
    if (surplus[last] > 0) surplus[last] -= 1;
    else if (!/[.,;:!?'_~]/.test(last)) break;
  }
  return address.slice(0, end);
}
