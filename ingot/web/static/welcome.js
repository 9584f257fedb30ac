// What an empty conversation shows: who answers, and how to reach the same model without this page.

import { CodeBlock } from './code.js';
import { element, icon } from './element.js';
import { count } from './facts.js';

export function welcome(models) {
  const node = element('section', { class: 'welcome' }, icon('ingot'), element('h2', {}, title(models)));
  const facts = models.context ? `${count(models.context)} tokens of context. ` : '';
  if (models.error) node.append(element('p', { class: 'problem', role: 'alert' }, models.error.message));
  else node.append(element('p', {}, `${facts}Conversations are kept in this browser.`));
  if (models.list.length > 0) node.append(new CodeBlock('bash').update(curl(models.chosen)).node);
  return node;
}

function title({ list, chosen, error }) {
  if (error) return error.status === 401 ? 'This server asks for a key' : 'No connection';
  return list.length > 0 ? chosen : 'Connecting…';
}

function curl(model) {
  const address = new URL('v1/chat/completions', document.baseURI).href;
  const body = { model, messages: [{ role: 'user', content: 'Hello!' }] };
  return [
    `curl ${address} \\`,
    "  -H 'Content-Type: application/json' \\",
    `  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,
  ];
}
