// Files of messages: what kind they are, how they are shown, and how they are sent. Nothing is sent before the message.

import { element, icon } from './element.js';
import { bytes } from './facts.js';
import { t } from './translate.js';

const MOST_BYTES = 20 * 1024 * 1024;
const MOST_TEXT_BYTES = 1024 * 1024;
const WORDS = { image: t('images'), video: t('videos'), pdf: t('PDFs'), audio: t('audio'), text: t('text files') };

export const wordOf = (kind) => WORDS[kind] ?? t('such files');

// Resolves to {kind, name, blob}; throws an Error whose message can be shown.
export async function mediumOf(file) {
  if (file.size > MOST_BYTES) throw new Error(t('{name} is larger than {size}.', { name: file.name, size: bytes(MOST_BYTES) }));
  return { kind: await kindOf(file), name: file.name, blob: file };
}

async function kindOf(file) {
  const kind = ['image', 'video', 'audio'].find((each) => file.type.startsWith(`${each}/`) && file.type !== 'image/svg+xml');
  if (kind) return kind;
  if (file.type === 'application/pdf') return 'pdf';
  if (file.size > MOST_TEXT_BYTES) throw new Error(t('{name} is larger than {size}, the most of a text.', { name: file.name, size: bytes(MOST_TEXT_BYTES) }));
  if ((await textOf(file)) === null) throw new Error(t('{name} is no image, video, audio, PDF or text.', { name: file.name }));
  return 'text';
}

// What a file says, or null where it is not text.
async function textOf(blob) {
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await blob.arrayBuffer());
    return text.includes('\0') ? null : text;
  } catch {
    return null;
  }
}

// `url` resolves to an address for the file, or to null where it is not stored here.
export function mediumView({ kind, name, size }, url) {
  if (kind !== 'image' && kind !== 'video' && kind !== 'audio') return chip(name, size, kind === 'pdf' ? 'PDF' : t('Text'));
  const view =
    kind === 'image'
      ? element('img', { class: 'medium', alt: name })
      : element(kind, { class: 'medium', controls: true, 'aria-label': name });
  url.then((address) => {
    if (address) view.src = address;
    else view.replaceWith(element('span', { class: 'medium missing' }, t('{name} (not stored in this browser)', { name })));
  });
  return view;
}

function chip(name, size, word) {
  const facts = [word, size ? bytes(size) : null].filter(Boolean).join(' · ');
  return element('span', { class: 'medium file' }, icon('file'), element('span', {}, element('strong', {}, name), ` ${facts}`));
}

// A message's content as the server takes it. `read(medium)` resolves to its bytes.
export async function contentOf({ content, media = [] }, read) {
  if (media.length === 0) return content;
  const parts = await Promise.all(media.map(async (medium) => partOf(medium, await read(medium))));
  return content.trim() ? [...parts, { type: 'input_text', text: content }] : parts;
}

async function partOf({ kind, name }, blob) {
  if (!blob) throw new Error(t('{name} is not stored in this browser any more. Delete the message, or attach the file again.', { name }));
  if (kind === 'text') return { type: 'input_text', text: fenced(name, await textOf(blob)) };
  const url = await dataUrl(blob);
  if (kind === 'pdf') return { type: 'input_file', filename: name, file_data: url };
  if (kind === 'audio') return { type: 'input_audio', input_audio: { data: url.slice(url.indexOf(',') + 1) } };
  return { type: `input_${kind}`, [`${kind}_url`]: url };
}

// A file's text under its name, in a fence that is longer than any in it.
function fenced(name, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  const fence = '`'.repeat(longest + 1);
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(t('A file cannot be read.')));
    reader.readAsDataURL(blob);
  });
}
