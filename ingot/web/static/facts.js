// Figures as text.

import { language, t } from './translate.js';

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB'];

// The facts about an answer, for the line under it.
export function describe({ state, facts = {} }) {
  const parts = [];
  if (state === 'stopped') parts.push(t('stopped'));
  if (facts.finish === 'length') parts.push(t('cut off at the token limit'));
  if (facts.completionTokens) parts.push(tokens(facts.completionTokens, facts.isGuess));
  if (facts.tokensPerSecond) parts.push(t('{n} tokens/s', { n: speed(facts.tokensPerSecond) }));
  if (facts.firstTokenMs !== undefined) parts.push(t('first token {seconds} s', { seconds: decimal(facts.firstTokenMs / 1000, 2) }));
  if (facts.promptTokens) parts.push(promptTokens(facts));
  if (facts.proposedTokens) parts.push(draftTokens(facts));
  return parts.join(' · ');
}

// A number with so many digits after its point.
export function decimal(number, digits) {
  return number.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function count(number) {
  return number.toLocaleString(language);
}

export function bytes(number) {
  const power = number >= 1 ? Math.min(UNITS.length - 1, Math.floor(Math.log10(number) / 3)) : 0;
  const value = number / 1000 ** power;
  return `${power > 0 && value < 100 ? decimal(value, 1) : Math.round(value)} ${UNITS[power]}`;
}

export function speed(perSecond) {
  return perSecond < 100 ? decimal(perSecond, 1) : count(Math.round(perSecond));
}

function draftTokens({ proposedTokens, acceptedTokens, tokensPerPass }) {
  return t('{accepted} of {proposed} draft tokens accepted, {perPass} tokens per pass', {
    accepted: count(acceptedTokens),
    proposed: count(proposedTokens),
    perPass: decimal(tokensPerPass, 1),
  });
}

export function tokens(number, isEstimate = false) {
  const n = count(number);
  if (isEstimate) return t('about {n} tokens', { n });
  return number === 1 ? t('1 token') : t('{n} tokens', { n });
}

function promptTokens({ promptTokens: prompt, cachedTokens: cached }) {
  const words = { n: count(prompt), cached: count(cached ?? 0) };
  return cached ? t('prompt {n} tokens, {cached} from the cache', words) : t('prompt {n} tokens', words);
}
