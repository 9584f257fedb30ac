// Titles that the model gives conversations, in the background, once its first answer is there.

import { shortened } from './store.js';
import { thread } from './thread.js';

const KEY = 'ingot.titles';
const MOST_TOKENS = 24;
const MOST_CHARS = 2000; // of each message
const REQUEST = 'Write a title of at most six words for this conversation. Answer with the title alone.';

export class Titles {
  constructor(api, models) {
    Object.assign(this, { api, models });
  }

  get isOn() {
    return localStorage.getItem(KEY) !== 'off';
  }

  set isOn(value) {
    if (value) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, 'off');
  }

  // `name(title)` is called where the model has one, and the user has given none meanwhile.
  async suggest(conversation, name) {
    const shown = thread(conversation);
    // Where requests are counted, they are the user's.
    if (!this.isOn || this.api.isRated || conversation.named || shown.length !== 2) return;
    const told = shown.map(({ role, content }) => `${role}: ${content.slice(0, MOST_CHARS)}`).join('\n\n');
    const input = [{ role: 'user', content: `${told}\n\n${REQUEST}` }];
    const body = { model: this.models.chosen, input, max_output_tokens: MOST_TOKENS, temperature: 0, enable_thinking: false };
    try {
      const title = titleIn(await this.api.complete({ ...body, metadata: { purpose: 'title' } }));
      if (title && !conversation.named) name(title);
    } catch {
      // The title stays what the question says.
    }
  }
}

function titleIn(text) {
  if (/[<{]/.test(text)) return ''; // a call or a document instead of a title
  const line = text.trim().split('\n', 1)[0].replace(/^(title:|[#*"'“\s])+|["'”*.\s]+$/gi, '');
  return shortened(line);
}
