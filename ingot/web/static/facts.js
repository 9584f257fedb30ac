// Figures as text.

// The facts about an answer, for the line under it.
export function describe({ state, facts = {} }) {
  const parts = [];
  if (state === 'stopped') parts.push('stopped');
  if (facts.finish === 'length') parts.push('cut off at the token limit');
  if (facts.completionTokens) parts.push(tokens(facts.completionTokens, facts.isGuess));
  if (facts.tokensPerSecond) parts.push(`${speed(facts.tokensPerSecond)} tok/s`);
  if (facts.firstTokenMs !== undefined) parts.push(`first after ${(facts.firstTokenMs / 1000).toFixed(2)} s`);
  if (facts.promptTokens) parts.push(`prompt ${count(facts.promptTokens)}`);
  if (facts.cachedTokens) parts.push(`${count(facts.cachedTokens)} cached`);
  if (facts.proposedTokens) parts.push(draftTokens(facts));
  return parts.join(' · ');
}

export function count(number) {
  return number.toLocaleString('en-US');
}

export function speed(perSecond) {
  return perSecond < 100 ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

function draftTokens({ proposedTokens, acceptedTokens, tokensPerPass }) {
  return `${count(acceptedTokens)} of ${count(proposedTokens)} draft tokens accepted, ${tokensPerPass.toFixed(1)} tokens a pass`;
}

function tokens(number, isEstimate) {
  return `${isEstimate ? 'about ' : ''}${count(number)} ${number === 1 ? 'token' : 'tokens'}`;
}
