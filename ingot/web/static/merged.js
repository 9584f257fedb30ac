// The figures of all loaded models, added up.

import { t } from './translate.js';

const sum = (engines, figure) => engines.reduce((total, engine) => total + figure(engine), 0);

export function merged(engines) {
  const names = [...new Set(engines.flatMap(({ totals }) => Object.keys(totals)))];
  return {
    title: engines.map(({ model, device, formats }) => t('{model} on {device}, {formats}', { model, device, formats })).join('\n'),
    running: sum(engines, ({ running }) => running),
    waiting: sum(engines, ({ waiting }) => waiting),
    totals: Object.fromEntries(names.map((name) => [name, sum(engines, ({ totals }) => totals[name])])),
    memory: memoryOf(engines),
    speculation: speculationOf(engines.map(({ speculation }) => speculation)),
  };
}

// The budget and what MLX has in use are the process's, and the same for all.
function memoryOf(engines) {
  const most = (name) => Math.max(0, ...engines.map(({ memory }) => memory[name]));
  const total = (name) => sum(engines, ({ memory }) => memory[name]);
  const named = engines.length > 1 ? (owner, model) => `${owner || 'everybody'}, ${model}` : (owner) => owner;
  return {
    budget_bytes: most('budget_bytes'),
    weight_bytes: total('weight_bytes'),
    state_bytes: total('state_bytes'),
    held_bytes: total('held_bytes'),
    active_bytes: most('active_bytes'),
    used: most('used'),
    experts: engines.filter(({ memory }) => memory.experts).map(({ model, memory }) => ({ model, ...memory.experts })),
    owners: engines.flatMap(({ model, memory }) => memory.owners.map((own) => ({ ...own, owner: named(own.owner, model) }))),
  };
}

function speculationOf(counts) {
  const longest = Math.max(0, ...counts.map(({ accepted_per_position: positions }) => positions.length));
  const at = (position) => sum(counts, ({ accepted_per_position: positions }) => positions[position] ?? 0);
  return {
    drafts: sum(counts, ({ drafts }) => drafts),
    draft_tokens: sum(counts, ({ draft_tokens: tokens }) => tokens),
    accepted_tokens: sum(counts, ({ accepted_tokens: tokens }) => tokens),
    accepted_per_position: Array.from({ length: longest }, (_, position) => at(position)),
  };
}
