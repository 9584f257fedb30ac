// Figures, in words.

// What is known about an answer, for the line under it.
export function describe({ state, facts = {} }) {
  const parts = [];
  if (state === 'stopped') parts.push('stopped');
  if (facts.finish === 'length') parts.push('cut off at the token limit');
  if (facts.completionTokens) parts.push(`${facts.isGuess ? '~' : ''}${count(facts.completionTokens)} tokens`);
  if (facts.tokensPerSecond) parts.push(`${facts.tokensPerSecond.toFixed(1)} tok/s`);
  if (facts.firstTokenMs !== undefined) parts.push(`first after ${(facts.firstTokenMs / 1000).toFixed(2)} s`);
  if (facts.promptTokens) parts.push(`prompt ${count(facts.promptTokens)}`);
  if (facts.cachedTokens) parts.push(`${count(facts.cachedTokens)} cached`);
  return parts.join(' · ');
}

export function count(number) {
  return number.toLocaleString('en-US');
}
