// A conversation as a file to keep: JSON with all its versions, or Markdown to read, as it is shown.

import { thread } from './thread.js';
import { t } from './translate.js';

export function exportJson(conversation) {
  download(conversation, 'json', 'application/json', `${JSON.stringify(conversation, null, 2)}\n`);
}

export function exportMarkdown(conversation) {
  download(conversation, 'md', 'text/markdown', asMarkdown(conversation));
}

export function asMarkdown(conversation) {
  const { title, system } = conversation;
  const parts = [`# ${title}`];
  if (system.trim()) parts.push(`**${t('System')}**\n\n${system.trim()}`);
  for (const { role, content, media = [] } of thread(conversation)) {
    const text = [...media.map(({ name }) => `[${name}]`), content.trim()].filter(Boolean).join('\n\n');
    parts.push(`**${role === 'user' ? t('You') : t('Assistant')}**\n\n${text}`);
  }
  return `${parts.join('\n\n')}\n`;
}

function download({ title }, extension, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement('a');
  link.href = url;
  link.download = `${fileName(title)}.${extension}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the download may not have begun yet
}

function fileName(title) {
  const name = title.normalize('NFKD').replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-+|-+$/g, '');
  return name.slice(0, 60).toLowerCase() || 'conversation';
}
