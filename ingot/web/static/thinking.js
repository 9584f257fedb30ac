// Whether and how much the model is to think, where its chat template can be told so.

import { find } from './element.js';

const KEY = 'ingot.thinking';
const FIELDS = {
  off: { enable_thinking: false },
  on: { enable_thinking: true },
  low: { reasoning: { effort: 'low' } },
  medium: { reasoning: { effort: 'medium' } },
  high: { reasoning: { effort: 'high' } },
};

export class ThinkingChoice {
  constructor(state, models) {
    this.models = models;
    this.select = find('thinking');
    this.select.value = localStorage.getItem(KEY) ?? '';
    this.select.addEventListener('change', () => localStorage.setItem(KEY, this.select.value));
    state.watch(() => (this.select.hidden = !this.#isOffered));
  }

  // The fields of a request; none where the model decides.
  get fields() {
    return (this.#isOffered && FIELDS[this.select.value]) || {};
  }

  get #isOffered() {
    return Boolean(this.models.card?.thinking_format);
  }
}
