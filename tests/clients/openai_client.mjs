// Drives a running server with the official JavaScript client and prints what came of each task, as JSON.
// Usage: node openai_client.mjs BASE_URL KEY TASK

import OpenAI from "openai";

const [baseURL, apiKey, task] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];

const tasks = {
  async chat() {
    const answer = await client.chat.completions.create({ model: "default", messages, temperature: 0.5 });
    return { text: answer.choices[0].message.content, id: answer.id, header: answer._request_id };
  },

  async stream() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const stream = await client.chat.completions.create({ model: "default", messages, ...options });
    let text = "", usage = null, finishes = [];
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      if (chunk.choices[0]?.finish_reason) finishes.push(chunk.choices[0].finish_reason);
      usage = chunk.usage ?? usage;
    }
    return { text, finishes, tokens: usage.completion_tokens };
  },

  async helper() {
    const completion = await client.chat.completions.stream({ model: "default", messages }).finalChatCompletion();
    return { text: completion.choices[0].message.content };
  },

  async completion() {
    const answer = await client.completions.create({ model: "default", prompt: "a", echo: true, logprobs: 1 });
    return { text: answer.choices[0].text, tokens: answer.choices[0].logprobs.tokens };
  },

  async models() {
    const listed = [];
    for await (const model of client.models.list()) listed.push(model.id);
    return { listed, retrieved: (await client.models.retrieve("org/toy")).id };
  },

  async broken() {
    let text = "";
    const stream = await client.chat.completions.create({ model: "default", messages, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    return { text };
  },

  async refused() {
    await client.chat.completions.create({ model: "default", messages, temperature: 3 });
  },

  async left() {
    const stream = await client.chat.completions.create({ model: "default", messages, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    return {};
  },
};

try {
  console.log(JSON.stringify(await tasks[task]()));
} catch (error) {
  const { name, status, code, param, message } = error;
  console.log(JSON.stringify({ error: { name: error.constructor.name ?? name, status, code, param, message } }));
}
