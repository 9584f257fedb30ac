// Tools of MCP servers: which of them the model is offered, the calls that it makes, and the user's word on each.

import { element, find, icon } from './element.js';
import { t } from './translate.js';

const KEY = 'ingot.tools';
const CALLS = new Set(['mcp_call', 'mcp_approval_request']);
const CHOICES = { '': t('Off'), always: t('Ask before each call'), never: t('Allow every call') };

// The choice for each server, among the settings.
export class ToolChoice {
  constructor(api, state, models) {
    Object.assign(this, { api, state, models, servers: [], choices: stored() });
    this.list = find('tools');
  }

  async load() {
    this.servers = await this.api.mcpServers().catch(() => []);
    find('tools-section').hidden = this.servers.length === 0;
    this.list.replaceChildren(...this.servers.map((server) => this.#row(server)));
  }

  // The fields of a request; none where the model's chat template has no tools.
  get fields() {
    const chosen = this.servers.filter(({ server_label: label }) => this.choices[label]);
    if (chosen.length === 0 || !this.models.card?.tool_format) return {};
    return { tools: chosen.map(({ server_label: label }) => ({ type: 'mcp', server_label: label, require_approval: this.choices[label] })) };
  }

  #row({ server_label: label, tools }) {
    const id = `tools-${label}`;
    const options = Object.entries(CHOICES).map(([value, words]) => element('option', { value }, words));
    const select = element('select', { id, 'aria-describedby': `${id}-hint` }, ...options);
    select.value = this.choices[label] ?? '';
    select.addEventListener('change', () => {
      this.choices[label] = select.value;
      localStorage.setItem(KEY, JSON.stringify(this.choices));
    });
    const names = tools.map(({ name }) => name).join(', ');
    return element('li', {}, element('label', { for: id }, label), select, element('p', { id: `${id}-hint`, class: 'hint' }, names));
  }
}

// The items of an answer that are about tools, of which it has any at all only where there was a call.
export function callItems(output) {
  const items = output.filter(({ type }) => type !== 'mcp_list_tools');
  return items.some(({ type }) => CALLS.has(type)) ? items : null;
}

// The same of an earlier answer: a call that was allowed and not made is not made any more.
export function pastItems(items) {
  return items.filter(({ approve, approval_request_id: id }) => approve !== true || made(items, id));
}

// Calls that wait for the user's word.
export function openCalls({ items = [], state }) {
  if (state !== 'done') return [];
  const decided = new Set(items.map(({ approval_request_id: id }) => id));
  return items.filter(({ type, id }) => type === 'mcp_approval_request' && !decided.has(id));
}

// `decide(request, isAllowed)` is called with the user's word.
export function callViews(message, decide) {
  const { items = [] } = message;
  const open = new Set(openCalls(message));
  const shown = items.filter(({ type, id }) => type === 'mcp_call' || (type === 'mcp_approval_request' && !made(items, id)));
  return shown.map((item) => callView(item, items, open.has(item) ? decide : null));
}

function made(items, request) {
  return items.some(({ type, approval_request_id: id }) => type === 'mcp_call' && id === request);
}

function callView(item, items, decide) {
  const { server_label: server, name, type, output, error } = item;
  const isAsked = type === 'mcp_approval_request';
  const refused = isAsked && items.some(({ approval_request_id: id, approve }) => id === item.id && approve === false);
  const word = refused ? t('refused') : isAsked ? (decide ? t('wants to be called') : t('not called')) : stateOf(item);
  const head = element('summary', {}, icon('tool'), element('code', {}, `${server}: ${name}`), ' ', element('span', { class: 'hint' }, word));
  const view = element('details', { class: 'call', open: Boolean(decide) }, head, labelled(t('Arguments'), pretty(item.arguments)));
  const result = error?.content ?? output;
  if (result) view.append(labelled(error ? t('Error') : t('Result'), pretty(result)));
  if (!decide) return view;
  const button = (words, style, isAllowed) => element('button', { type: 'button', class: style, onclick: () => decide(item, isAllowed) }, words);
  return element('div', { class: 'asked' }, view, element('div', { class: 'buttons' }, button(t('Refuse'), 'secondary', false), button(t('Allow'), 'primary', true)));
}

function stateOf({ status, error }) {
  if (error || status === 'failed') return t('failed');
  return status === 'completed' ? t('called') : t('is being called');
}

function labelled(words, text) {
  return element('div', {}, element('p', { class: 'hint' }, words), element('pre', { tabindex: '0', role: 'region', 'aria-label': words }, text));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}
