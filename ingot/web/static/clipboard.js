// Copying, with the button saying how it went.

import { icon } from './element.js';
import { t } from './translate.js';

const SHOWN_MS = 1500;

export async function copyFrom(button, text) {
  const done = await copy(text);
  const before = button.getAttribute('aria-label');
  button.replaceChildren(icon(done ? 'check' : 'close'));
  button.setAttribute('aria-label', done ? t('Copied') : t('Could not copy'));
  setTimeout(() => {
    button.replaceChildren(icon('copy'));
    button.setAttribute('aria-label', before);
  }, SHOWN_MS);
}

async function copy(text) {
  // The clipboard API exists only on secure origins; a page served over plain HTTP in a local network is none.
  if (!navigator.clipboard) return copyBySelection(text);
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = document.createElement('textarea');
  field.className = 'visually-hidden';
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand('copy');
  field.remove();
  focused?.focus();
  return done;
}
