// Says to a screen reader what happens, block by block rather than token by token.

import { element, find } from './element.js';

const KEPT = 12;
const MAX_TEXT = 1500;

export function announce(text) {
  const region = find('announcer');
  const said = text.trim().slice(0, MAX_TEXT);
  if (!said) return;
  region.append(element('p', {}, said));
  while (region.childElementCount > KEPT) region.firstElementChild.remove();
}

export function announceBlocks(nodes) {
  for (const node of nodes) {
    if (node.matches('figure.code')) announce(`Code block, ${node.querySelector('.language').textContent}.`);
    else announce(node.textContent);
  }
}
