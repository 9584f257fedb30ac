// What the server reports about an answer, in words: where the time went, what was cached and why not more, and what
// speculation won.

import { element } from './element.js';
import { count, decimal } from './facts.js';
import { t } from './translate.js';

const WHY = {
  complete: t('That was all of it.'),
  new_turn: t('The rest is new.'),
  unseen: t('No cached prompt begins like this one.'),
  evicted: t('More of it was cached once, and made room for other prompts.'),
  checkpoint: t('More is cached, but this model can only go on from the ends of messages.'),
  salt: t('It is cached under another salt.'),
  adapter: t('It is cached for another adapter.'),
  off: t('The request turned the cache off.'),
  scored: t('The whole prompt was computed to score it.'),
  disabled: t('This server has no prompt cache.'),
  template_rewrite: t('The chat template renders an earlier answer differently than it was generated.'),
  several: t('There are several reasons.'),
};

export function receiptView({ receipt, facts = {} }) {
  const lines = [...cacheLines(receipt, facts), ...timeLines(receipt.timing), ...speculationLines(receipt.speculation), ...otherLines(receipt)];
  return element('ul', { class: 'receipt' }, ...lines.map((line) => element('li', {}, line)));
}

function cacheLines({ cache }, { promptTokens }) {
  if (!cache) return [];
  const from = cache.tier === 'disk' ? t('the cache on disk') : t('the cache');
  const reused = cache.matched_tokens
    ? t('{n} of {all} prompt tokens came from {cache}.', { n: count(cache.matched_tokens), all: count(promptTokens ?? cache.matched_tokens), cache: from })
    : t('Nothing of the prompt came from the cache.');
  const codec = cache.codec && cache.codec !== 'raw' ? ` ${t('They were compressed as {codec}.', { codec: cache.codec })}` : '';
  return [`${reused}${codec} ${why(cache)}`.trim()];
}

function why({ reason, diverged }) {
  if (!diverged) return WHY[reason] ?? '';
  const place = diverged.message === null ? t('The prompt') : t('Message {n} ({role})', { n: diverged.message + 1, role: diverged.role });
  const differs = t('differs from the cached one after {n} characters: “{ours}”, not “{theirs}”.', { n: count(diverged.character), ours: diverged.ours.trim(), theirs: diverged.theirs.trim() });
  return reason === 'template_rewrite' ? `${WHY[reason]} ${place} ${differs}` : `${place} ${differs}`;
}

function timeLines(timing) {
  if (!timing) return [];
  const { queue_s: queued, prefill_s: prefill, decode_s: decode } = timing;
  return [t('{queued} in the queue, {prefill} to read the prompt, {decode} to write the answer.', { queued: seconds(queued), prefill: seconds(prefill), decode: seconds(decode) })];
}

function speculationLines(speculation) {
  if (!speculation || speculation.passes === 0) return [];
  const { proposed, accepted, tokens_per_pass: each } = speculation;
  if (!proposed) return [t('No draft tokens were proposed.')];
  const share = Math.round((100 * accepted) / proposed);
  return [t('{accepted} of {proposed} draft tokens were accepted ({share}%): {perPass} tokens per pass, instead of one.', { accepted: count(accepted), proposed: count(proposed), share, perPass: decimal(each, 1) })];
}

function otherLines({ specprefill, adapter, ignored = [], calls_in_thinking: calls }) {
  return [
    specprefill?.reason === undefined && specprefill ? t('Only the important part of the prompt was computed (specprefill).') : null,
    adapter ? t('Written with the adapter {adapter}.', { adapter }) : null,
    calls ? t('{n} tool calls were found within the thinking.', { n: count(calls) }) : null,
    ignored.length > 0 ? t('Without effect: {fields}.', { fields: ignored.join(', ') }) : null,
  ].filter(Boolean);
}

function seconds(value) {
  return `${decimal(value, 2)} s`;
}
