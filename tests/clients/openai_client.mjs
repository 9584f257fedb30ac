// Drives a running server with the official JavaScript client and prints what came of each task, as JSON.
// Usage: node openai_client.mjs BASE_URL KEY TASK

import OpenAI, { toFile } from "openai";

const [baseURL, apiKey, task] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];

// A second of silence, as a WAV file.
function sound() {
  const file = Buffer.alloc(44 + 32000);
  file.write("RIFF", 0);
  file.writeUInt32LE(36 + 32000, 4);
  file.write("WAVEfmt ", 8);
  for (const [at, value] of [[16, 16], [24, 16000], [28, 32000], [40, 32000]]) file.writeUInt32LE(value, at);
  for (const [at, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) file.writeUInt16LE(value, at);
  file.write("data", 36);
  return file;
}

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

  async transcription() {
    const file = () => toFile(sound(), "speech.wav", { type: "audio/wav" });
    const create = async (told) => client.audio.transcriptions.create({ file: await file(), model: "toy-ears", ...told });
    const events = [];
    for await (const event of await create({ stream: true })) events.push(event.type);
    const verbose = await create({ response_format: "verbose_json", timestamp_granularities: ["word"] });
    const told = { text: (await create({})).text, words: verbose.words.length, events };
    for (const response_format of ["text", "srt", "vtt"]) told[response_format] = await create({ response_format });
    return told;
  },

  async speech() {
    const told = { model: "toy-mouth", voice: "bf_emma", input: "Hello there.", response_format: "pcm" };
    const answer = await client.audio.speech.create(told);
    return { type: answer.headers.get("content-type"), bytes: (await answer.arrayBuffer()).byteLength };
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
