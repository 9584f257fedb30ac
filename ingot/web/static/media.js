// Images and videos of messages: {kind: 'image' | 'video', name, url}, made from files, and their views.
// The url is a data URL: nothing is fetched, and nothing is sent before the message is.

import { element } from './element.js';

const KINDS = ['image', 'video'];
const MOST_BYTES = 20 * 1024 * 1024;

export function kindOf(file) {
  return KINDS.find((kind) => file.type.startsWith(`${kind}/`)) ?? null;
}

// Resolves to the medium; throws an Error whose message can be shown.
export async function mediumOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than ${MOST_BYTES / 1024 / 1024} MB.`);
  return { kind: kindOf(file), name: file.name, url: await dataUrl(file) };
}

export function mediumView({ kind, name, url }) {
  if (!url) return element('span', { class: 'medium missing' }, `${name} (not stored in this browser)`);
  if (kind === 'video') return element('video', { class: 'medium', src: url, controls: true, 'aria-label': name });
  return element('img', { class: 'medium', src: url, alt: name });
}

// A message's content as the server takes it.
export function withMedia(content, media) {
  const present = (media ?? []).filter(({ url }) => url);
  if (present.length === 0) return content;
  const parts = present.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } }));
  return content.trim() ? [...parts, { type: 'text', text: content }] : parts;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
