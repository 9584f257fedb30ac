// Figures as text.

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB'];

// The facts about an answer, for the line under it.
export function describe({ state, facts = {} }) {
  const parts = [];
  if (state === 'stopped') parts.push('stopped');
  if (facts.finish === 'length') parts.push('cut off at the token limit');
  if (facts.completionTokens) parts.push(tokens(facts.completionTokens, facts.isGuess));
  if (facts.tokensPerSecond) parts.push(`${speed(facts.tokensPerSecond)} tokens/s`);
  if (facts.firstTokenMs !== undefined) parts.push(`first token ${(facts.firstTokenMs / 1000).toFixed(2)} s`);
  if (facts.promptTokens) parts.push(`prompt ${tokens(facts.promptTokens)}${facts.cachedTokens ? `, ${count(facts.cachedTokens)} from the cache` : ''}`);
  if (facts.proposedTokens) parts.push(draftTokens(facts));
  return parts.join(' · ');
}

export function count(number) {
  return number.toLocaleString('en-US');
}

export function bytes(number) {
  const power = number >= 1 ? Math.min(UNITS.length - 1, Math.floor(Math.log10(number) / 3)) : 0;
  const value = number / 1000 ** power;
  return `${power > 0 && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[power]}`;
}

export function speed(perSecond) {
  return perSecond < 100 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

function draftTokens({ proposedTokens, acceptedTokens, tokensPerPass }) {
  return `${count(acceptedTokens)} of ${count(proposedTokens)} draft tokens accepted, ${tokensPerPass.toFixed(1)} tokens per pass`;
}

function tokens(number, isEstimate) {
  return `${isEstimate ? 'about ' : ''}${count(number)} ${number === 1 ? 'token' : 'tokens'}`;
}
