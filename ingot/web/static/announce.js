// Announces text to screen readers, block by block rather than token by token.

import { element, find } from './element.js';
import { t } from './translate.js';

const MAX_MESSAGES = 12;
const MAX_TEXT = 1500;

export function announce(text) {
  const region = find('announcer');
  const message = text.trim().slice(0, MAX_TEXT);
  if (!message) return;
  region.append(element('p', {}, message));
  while (region.childElementCount > MAX_MESSAGES) region.firstElementChild.remove();
}

export function announceBlocks(nodes) {
  for (const node of nodes) {
    if (node.matches('figure.code')) announce(t('Code block, {language}.', { language: node.querySelector('.language').textContent }));
    else announce(node.textContent);
  }
}
