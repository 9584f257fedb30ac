// The form of answers: text, JSON or JSON of a schema; and whether they come with the probability of each token.

import { element, find } from './element.js';
import { decimal } from './facts.js';
import { t } from './translate.js';

const KEY = 'ingot.format';
const ALTERNATIVES = 5;

export class AnswerFormat {
  constructor() {
    this.kind = find('format');
    this.schema = find('schema');
    this.logprobs = find('logprobs');
    const { kind = 'text', schema = '', logprobs = false } = stored();
    this.kind.value = kind;
    this.schema.value = schema;
    this.logprobs.checked = logprobs;
    for (const field of [this.kind, this.schema, this.logprobs]) field.addEventListener('input', () => this.#changed());
    this.#changed();
  }

  // The fields of a request.
  get fields() {
    const told = this.logprobs.checked ? { include: ['message.output_text.logprobs'], top_logprobs: ALTERNATIVES } : {};
    if (this.kind.value === 'json_object') return { ...told, text: { format: { type: 'json_object' } } };
    if (this.kind.value !== 'json_schema') return told;
    return { ...told, text: { format: { type: 'json_schema', name: 'answer', strict: true, schema: JSON.parse(this.schema.value) } } };
  }

  // Whether answers are JSON.
  get isJson() {
    return this.kind.value !== 'text';
  }

  isValid() {
    return this.schema.checkValidity();
  }

  report() {
    this.schema.reportValidity();
  }

  #changed() {
    const isSchema = this.kind.value === 'json_schema';
    find('schema-row').hidden = !isSchema;
    this.schema.setCustomValidity(isSchema && !isObject(this.schema.value) ? t('This is no JSON schema.') : '');
    const values = { kind: this.kind.value, schema: this.schema.value, logprobs: this.logprobs.checked };
    localStorage.setItem(KEY, JSON.stringify(values));
  }
}

// The tokens of an answer, the likelier the paler; what else could have been there is told of the one that is pointed at.
export function tokensView(logprobs) {
  const about = element('p', { class: 'hint', role: 'status' }, t('Point at a token to see what else could have been there.'));
  const pieces = logprobs.map(({ token, logprob, top_logprobs: others = [] }) => {
    const doubt = Math.min(4, Math.floor((1 - Math.exp(logprob)) * 5));
    const tell = () => (about.textContent = [{ token, logprob }, ...others.filter((other) => other.token !== token)].map(share).join('   '));
    return element('span', { class: `doubt-${doubt}`, onpointerover: tell, onfocus: tell, tabindex: '0' }, token);
  });
  return element('div', { class: 'tokens' }, element('p', { class: 'pieces' }, ...pieces), about);
}

function share({ token, logprob }) {
  return `${JSON.stringify(token)} ${decimal(100 * Math.exp(logprob), 1)}%`;
}

function isObject(text) {
  try {
    return JSON.parse(text)?.constructor === Object;
  } catch {
    return false;
  }
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}
