// A conversation as the input of a request.

import { contentOf } from './media.js';
import { thread } from './thread.js';
import { pastItems } from './tools.js';

// What is said up to an answer, with the calls that it has made already. `read(medium)` resolves to a file's bytes.
export async function inputOf(conversation, answer, read) {
  const input = [];
  for (const message of thread(conversation)) {
    const { role, content, thinking, items } = message;
    if (message === answer) return [...input, ...(items ?? [])];
    if (role === 'user') input.push({ role, content: await contentOf(message, read) });
    else if (items) input.push(...pastItems(items));
    else if (content) {
      if (thinking) input.push({ type: 'reasoning', summary: [], content: [{ type: 'reasoning_text', text: thinking }] });
      input.push({ role, content });
    }
  }
  return input;
}
