// What the server reports about an answer, in words: where the time went, what was cached and why not more, and what
// speculation won.

import { element } from './element.js';
import { count } from './facts.js';

const WHY = {
  complete: 'That was all of it.',
  new_turn: 'The rest is new.',
  unseen: 'No cached prompt begins like this one.',
  evicted: 'More of it was cached once, and made room for other prompts.',
  checkpoint: 'More is cached, but this model can only go on from the ends of messages.',
  salt: 'It is cached under another salt.',
  adapter: 'It is cached for another adapter.',
  off: 'The request turned the cache off.',
  scored: 'The whole prompt was computed to score it.',
  disabled: 'This server has no prompt cache.',
  template_rewrite: 'The chat template renders an earlier answer differently than it was generated.',
  several: 'There are several reasons.',
};

export function receiptView({ receipt, facts = {} }) {
  const lines = [...cacheLines(receipt, facts), ...timeLines(receipt.timing), ...speculationLines(receipt.speculation), ...otherLines(receipt)];
  return element('ul', { class: 'receipt' }, ...lines.map((line) => element('li', {}, line)));
}

function cacheLines({ cache }, { promptTokens }) {
  if (!cache) return [];
  const from = cache.tier === 'disk' ? 'the cache on disk' : 'the cache';
  const reused = cache.matched_tokens
    ? `${count(cache.matched_tokens)} of ${count(promptTokens ?? cache.matched_tokens)} prompt tokens came from ${from}.`
    : 'Nothing of the prompt came from the cache.';
  const codec = cache.codec && cache.codec !== 'raw' ? ` They were compressed as ${cache.codec}.` : '';
  return [`${reused}${codec} ${why(cache)}`.trim()];
}

function why({ reason, diverged }) {
  if (!diverged) return WHY[reason] ?? '';
  const place = diverged.message === null ? 'The prompt' : `Message ${diverged.message + 1} (${diverged.role})`;
  const differs = `differs from the cached one after ${count(diverged.character)} characters: “${diverged.ours.trim()}”, not “${diverged.theirs.trim()}”.`;
  return reason === 'template_rewrite' ? `${WHY[reason]} ${place} ${differs}` : `${place} ${differs}`;
}

function timeLines(timing) {
  if (!timing) return [];
  const { queue_s: queued, prefill_s: prefill, decode_s: decode } = timing;
  return [`${seconds(queued)} in the queue, ${seconds(prefill)} to read the prompt, ${seconds(decode)} to write the answer.`];
}

function speculationLines(speculation) {
  if (!speculation || speculation.passes === 0) return [];
  const { proposed, accepted, tokens_per_pass: each } = speculation;
  if (!proposed) return ['No draft tokens were proposed.'];
  const share = Math.round((100 * accepted) / proposed);
  return [`${count(accepted)} of ${count(proposed)} draft tokens were accepted (${share}%): ${each.toFixed(1)} tokens per pass, instead of one.`];
}

function otherLines({ specprefill, adapter, ignored = [], calls_in_thinking: calls }) {
  return [
    specprefill?.reason === undefined && specprefill ? 'Only the important part of the prompt was computed (specprefill).' : null,
    adapter ? `Written with the adapter ${adapter}.` : null,
    calls ? `${count(calls)} tool calls were found within the thinking.` : null,
    ignored.length > 0 ? `Without effect: ${ignored.join(', ')}.` : null,
  ].filter(Boolean);
}

function seconds(value) {
  return `${value.toFixed(2)} s`;
}
