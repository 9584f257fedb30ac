// Drives a running server with Anthropic's official JavaScript client and prints what came of each task, as JSON.
// Usage: node anthropic_client.mjs BASE_URL KEY TASK

import Anthropic from "@anthropic-ai/sdk";

const [baseURL, apiKey, task] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });
const model = "claude-opus-5";
const tools = [
  {
    name: "weather",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const question = { role: "user", content: "What is the weather?" };
const hello = { model, max_tokens: 100, messages: [{ role: "user", content: "Hi" }] };

const tasks = {
  async whole() {
    const made = await client.messages.create(hello);
    return { text: made.content[0].text, stop: made.stop_reason, same: made.id === made._request_id };
  },

  async stream() {
    const kinds = [];
    for await (const event of await client.messages.create({ ...hello, stream: true })) {
      if (kinds.at(-1) !== event.type) kinds.push(event.type);
    }
    return { kinds };
  },

  async helper() {
    const stream = client.messages.stream({ model, max_tokens: 400, messages: [question], tools });
    const final = await stream.finalMessage();
    return { types: final.content.map((block) => block.type), input: final.content.at(-1).input };
  },

  async tools() {
    const first = await client.messages.create({ model, max_tokens: 400, messages: [question], tools });
    const call = first.content.at(-1);
    const result = { type: "tool_result", tool_use_id: call.id, content: "18 degrees" };
    const messages = [question, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    const second = await client.messages.create({ model, max_tokens: 400, messages, tools });
    const counted = await client.messages.countTokens({ model, messages, tools });
    const read = second.usage.cache_read_input_tokens;
    return {
      city: call.input.city,
      text: second.content[0].text,
      cached: read / first.usage.input_tokens,
      exact: counted.input_tokens === second.usage.input_tokens + read,
    };
  },

  async broken() {
    for await (const event of await client.messages.create({ ...hello, stream: true })) event;
  },

  async refused() {
    await client.messages.create({ ...hello, max_tokens: -1 });
  },
};

try {
  console.log(JSON.stringify(await tasks[task]()));
} catch (error) {
  const { status, message, type } = error;
  console.log(JSON.stringify({ error: { name: error.constructor.name, status, message, type } }));
}
