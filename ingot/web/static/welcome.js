// What an empty conversation shows: who answers, and how to reach the same model without this page.

import { CodeBlock } from './code.js';
import { element, icon } from './element.js';
import { count } from './facts.js';
import { nameOf } from './picker.js';
import { wordOf } from './media.js';
import { t } from './translate.js';

export function welcome(models) {
  const node = element('section', { class: 'welcome' }, icon('ingot'), element('h2', {}, titleOf(models)));
  const context = models.context ? `${t('{n} tokens of context.', { n: count(models.context) })} ` : '';
  const seen = ['image', 'video', 'audio'].filter((kind) => models.takes(kind)).map(wordOf);
  const facts = context + (seen.length > 0 ? `${t('Takes {kinds} and text.', { kinds: seen.join(', ') })} ` : '');
  if (models.error) node.append(element('p', { class: 'problem', role: 'alert' }, models.error.message));
  else node.append(element('p', {}, `${facts}${t('Conversations are kept in this browser.')}`));
  if (models.list.length > 0) node.append(new CodeBlock('bash').update(curl(models.chosen)).node);
  return node;
}

function titleOf(models) {
  if (models.error) return models.error.status === 401 ? t('This server asks for a key') : t('No connection');
  return nameOf(models);
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
