// What the engine holds, in bars and lists: memory, kept prompts, guesses.

import { element } from './element.js';
import { count } from './facts.js';

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB'];

export function bytes(number) {
  const power = number >= 1 ? Math.min(UNITS.length - 1, Math.floor(Math.log10(number) / 3)) : 0;
  const value = number / 1000 ** power;
  return `${power > 0 && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[power]}`;
}

export function drawMemory(node, memory) {
  const { budget_bytes: budget, weight_bytes: weights, state_bytes: states, held_bytes: held, owners } = memory;
  const all = Math.max(budget, weights + states, 1);
  const kept = owners.map(({ owner, kept_bytes: own }) => ledger(`Kept for ${owner || 'everybody'}`, own, all));
  node.replaceChildren(
    ledger('Weights', weights, all),
    ledger('States that exist', states, all),
    ledger('States that are held', held, all),
    ledger('In use by MLX', memory.active_bytes, all),
    ...kept,
    element('p', { class: 'hint' }, `Of ${bytes(budget)}; running requests have reserved ${percent(memory.used)} of the states.`),
  );
}

export function drawGuesses(node, { draft_tokens: guessed, accepted_tokens: right, accepted_per_position: places, drafts }) {
  if (guessed === 0) {
    node.replaceChildren(element('p', { class: 'hint' }, 'Nothing was guessed.'));
    return;
  }
  const told = `${count(right)} of ${count(guessed)} tokens right, ${((drafts + right) / drafts).toFixed(2)} tokens a pass`;
  const rows = places.slice(0, 16).map((times, place) => ledger(`Token ${place + 1}`, times, drafts, percent(times / drafts)));
  node.replaceChildren(element('p', {}, told), ...rows);
}

// Branches come with the place of what they go on from, which stands before them.
export function drawTree(list, branches) {
  const nodes = branches.map((branch) => ({ item: element('li', {}, element('p', {}, branchText(branch))), below: null }));
  branches.forEach(({ parent }, at) => {
    if (parent === null) return;
    nodes[parent].below ??= nodes[parent].item.appendChild(element('ul'));
    nodes[parent].below.append(nodes[at].item);
  });
  const roots = nodes.filter((_, at) => branches[at].parent === null).map(({ item }) => item);
  list.replaceChildren(...(roots.length > 0 ? roots : [element('li', { class: 'hint' }, 'Nothing is kept.')]));
}

function branchText({ salt, begin, end, uses, bytes: held, pinned, on_disk: filed, more }) {
  const parts = [`${count(end - begin)} tokens`, `used ${count(uses)}×`, held > 0 ? bytes(held) : 'not in memory'];
  if (filed) parts.push('on disk');
  if (pinned) parts.push('pinned');
  if (more > 0) parts.push(`${count(more)} more behind it`);
  if (salt) parts.push(`salt ${salt}`);
  return parts.join(' · ');
}

function ledger(name, value, all, told = bytes(value)) {
  const bar = element('progress', { max: '1', 'aria-label': name });
  bar.value = all > 0 ? Math.min(1, value / all) : 0;
  return element('div', { class: 'ledger' }, element('span', {}, name), bar, element('span', { class: 'figure' }, told));
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}
