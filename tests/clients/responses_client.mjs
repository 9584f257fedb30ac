// Drives a running server's responses with the official JavaScript client and prints what came of each task, as JSON.
// Usage: node responses_client.mjs BASE_URL KEY TASK

import OpenAI from "openai";

const [baseURL, apiKey, task] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = "default";
const weather = {
  type: "function",
  name: "weather",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  strict: false,
};

const tasks = {
  async whole() {
    const made = await client.responses.create({ model, input: "Hi" });
    const found = await client.responses.retrieve(made.id);
    return { text: made.output_text, stored: found.output_text, status: made.status };
  },

  async stream() {
    const kinds = [];
    let text = "";
    for await (const event of await client.responses.create({ model, input: "think", stream: true })) {
      if (kinds.at(-1) !== event.type) kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return { kinds, text };
  },

  async helper() {
    const final = await client.responses.stream({ model, input: "think" }).finalResponse();
    return { text: final.output_text };
  },

  async tools() {
    const first = await client.responses.create({ model, input: "What is the weather?", tools: [weather] });
    const call = first.output.find((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id: call.call_id, output: "18 degrees" };
    const next = { model, tools: [weather], input: [output], previous_response_id: first.id };
    const second = await client.responses.create(next);
    const cached = second.usage.input_tokens_details.cached_tokens / first.usage.input_tokens;
    return { city: JSON.parse(call.arguments).city, text: second.output_text, cached };
  },

  async items() {
    const made = await client.responses.create({ model, input: "Hi" });
    const items = [];
    for await (const item of client.responses.inputItems.list(made.id)) items.push(item.type);
    await client.responses.delete(made.id);
    return { items };
  },

  async cancel() {
    const made = await client.responses.create({ model, input: "long", background: true });
    return { before: made.status, after: (await client.responses.cancel(made.id)).status };
  },

  async refused() {
    await client.responses.create({ model, input: "Hi", truncation: "auto" });
  },
};

try {
  console.log(JSON.stringify(await tasks[task]()));
} catch (error) {
  const { status, code, param, message } = error;
  console.log(JSON.stringify({ error: { name: error.constructor.name, status, code, param, message } }));
}
