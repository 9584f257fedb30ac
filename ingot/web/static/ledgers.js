// The state of the engine, as bars and lists: memory, cached prefixes, speculation.

import { element } from './element.js';
import { bytes, count, decimal } from './facts.js';
import { t } from './translate.js';

export function drawMemory(node, memory) {
  const { budget_bytes: budget, weight_bytes: weights, state_bytes: allocated, held_bytes: used, owners } = memory;
  const all = Math.max(budget, weights + allocated, 1);
  const cached = owners.map(({ owner, kept_bytes: own }) => ledger(owner ? t('Prompt cache, {owner}', { owner }) : t('Prompt cache, all keys'), own, all));
  node.replaceChildren(
    ledger(t('Weights'), weights, all),
    ledger(t('KV cache, allocated'), allocated, all),
    ledger(t('KV cache, in use'), used, all),
    ledger(t('In use by MLX'), memory.active_bytes, all),
    ...cached,
    ...(memory.experts ?? []).map((own) => element('p', {}, expertsText(own))),
    element('p', { class: 'hint' }, t('Of {budget}; running requests have reserved {share} of the KV cache.', { budget: bytes(budget), share: percent(memory.used) })),
  );
}

function expertsText({ model, share, hits, predicted, misses, read_bytes: read, waited_s: waited }) {
  const found = percent((hits + predicted) / Math.max(1, hits + predicted + misses));
  const numbers = { model, share: percent(share), found, read: bytes(read), waited: Math.round(waited) };
  return t('Experts of {model}: {share} fit in memory, {found} were there in time; {read} read, {waited} s waited', numbers);
}

export function drawSpeculation(node, { draft_tokens: proposed, accepted_tokens: accepted, accepted_per_position: positions, drafts }) {
  if (proposed === 0) {
    node.replaceChildren(element('p', { class: 'hint' }, t('No draft tokens were proposed.')));
    return;
  }
  const perPass = decimal((drafts + accepted) / drafts, 2);
  const summary = t('{accepted} of {proposed} draft tokens accepted, {perPass} tokens per pass', { accepted: count(accepted), proposed: count(proposed), perPass });
  const rows = positions.slice(0, 16).map((times, at) => ledger(t('Token {n}', { n: at + 1 }), times, drafts, percent(times / drafts)));
  node.replaceChildren(element('p', {}, summary), ...rows);
}

// A branch has the index of its parent, which comes before it.
export function drawTree(list, branches) {
  const nodes = branches.map((branch) => ({ item: element('li', {}, element('p', {}, branchText(branch))), below: null }));
  branches.forEach(({ parent }, at) => {
    if (parent === null) return;
    nodes[parent].below ??= nodes[parent].item.appendChild(element('ul'));
    nodes[parent].below.append(nodes[at].item);
  });
  const roots = nodes.filter((_, at) => branches[at].parent === null).map(({ item }) => item);
  list.replaceChildren(...(roots.length > 0 ? roots : [element('li', { class: 'hint' }, t('Nothing is cached.'))]));
}

function branchText({ salt, begin, end, uses, bytes: size, pinned, on_disk: isOnDisk, more }) {
  const parts = [t('{n} tokens', { n: count(end - begin) }), t('used {n}×', { n: count(uses) }), size > 0 ? bytes(size) : t('not in memory')];
  if (isOnDisk) parts.push(t('on disk'));
  if (pinned) parts.push(t('pinned'));
  if (more > 0) parts.push(t('{n} more after it', { n: count(more) }));
  if (salt) parts.push(t('salt {salt}', { salt }));
  return parts.join(' · ');
}

function ledger(name, value, all, figure = bytes(value)) {
  const bar = element('progress', { max: '1', 'aria-label': name });
  bar.value = all > 0 ? Math.min(1, value / all) : 0;
  return element('div', { class: 'ledger' }, element('span', {}, name), bar, element('span', { class: 'figure' }, figure));
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}
