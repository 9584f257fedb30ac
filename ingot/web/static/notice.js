// A short message at the foot of the page, with at most one thing to do about it.

import { element, find } from './element.js';

const SHOWN_MS = 8000;

let timer = 0;

export function notify(text, action = null) {
  const box = find('notice');
  const button = action && element('button', { type: 'button', class: 'link' }, action.label);
  button?.addEventListener('click', () => {
    hide();
    action.run();
  });
  box.replaceChildren(element('span', {}, text), ...(button ? [button] : []));
  box.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hide, SHOWN_MS);
}

function hide() {
  find('notice').hidden = true;
}
