// The client of the server's API. Every failure is an ApiError whose message can be shown.

import { readEvents } from './sse.js';
import { t } from './translate.js';

const KEY = 'ingot.key';
const LAST = new Set(['response.completed', 'response.incomplete', 'response.failed']);
const LOST = 'connection_lost';

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null, param = null } = {}) {
    super(message);
    Object.assign(this, { name: 'ApiError', status, code, retryAfter, param });
  }

  // The answer may go on without this page having heard of it.
  get isLost() {
    return this.status === 0 || this.code === LOST;
  }

  // The server stores no responses, or not now.
  get isAboutStoring() {
    return ['store', 'background'].includes(this.param) || (this.status === 503 && this.message.includes('store: false'));
  }
}

// `askForKey(wasRefused)` resolves to whether the user gave a key; it is called when the server wants one.
export class Api {
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.mayStore = true; // until the server says that it stores no responses
    this.isRated = false; // whether the key has so many requests a minute
  }

  // The key lives as long as the tab and is never written to disk by the page.
  get key() {
    return sessionStorage.getItem(KEY) ?? '';
  }

  set key(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  }

  async models() {
    const body = await (await this.#request('v1/models')).json();
    return body.data ?? [];
  }

  // Yields the events of one answer; returns after the last, throws a `lost` ApiError if the stream ends before it. In
  // the background it goes on without this page, where the server stores responses.
  async *respond(body, { background, signal }) {
    const kept = background ? { background: true, store: true } : { store: false };
    yield* this.#events(
      await this.#request('v1/responses', {
        method: 'POST',
        headers: { 'Content-Type': 'application/json' },
        body: JSON.stringify({ ...body, ...kept, stream: true }),
        signal,
      }),
      signal,
    );
  }

  // Yields the events of an answer in the background, from behind the one of this number.
  async *resume(id, after, signal) {
    const query = after === null ? '' : `&starting_after=${after}`;
    yield* this.#events(await this.#request(`${responsePath(id)}?stream=true${query}`, { signal }), signal);
  }

  // A response as a whole.
  async response(id, signal) {
    return (await this.#request(responsePath(id), { signal })).json();
  }

  // Ends a response that is under way, and deletes what the server stores of it. One that is not there is no error.
  async discard(id) {
    try {
      await this.#request(responsePath(id), { method: 'DELETE', keepalive: true }, { ask: false });
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }

  // Yields the chunks of a chat completion.
  async *chat(body, signal) {
    const response = await this.#request('v1/chat/completions', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const { data } of readEvents(response.body)) {
      if (data === '[DONE]') return;
      const chunk = decode(data);
      if (chunk.error) throw errorFrom(chunk.error, { status: response.status });
      yield chunk;
    }
  }

  // The text of a short answer that nobody waits for.
  async complete(body, signal) {
    const response = await this.#request(
      'v1/responses',
      { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ ...body, store: false }), signal },
      { ask: false },
    );
    const { output = [] } = await response.json();
    return output.flatMap(({ type, content }) => (type === 'message' ? content.map(({ text }) => text) : [])).join('');
  }

  // The transcript of a recording.
  async transcribe(audio, model) {
    const form = new FormData();
    form.append('file', audio, `speech.${audio.type.split(/[/;]/)[1] ?? 'webm'}`);
    form.append('model', model);
    const body = await (await this.#request('v1/audio/transcriptions', { method: 'POST', body: form })).json();
    return body.text;
  }

  // Yields the bytes of a text's speech as they arrive: 16-bit samples at 24 kHz.
  async *speech(input, model, signal) {
    const response = await this.#request('v1/audio/speech', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify({ model, input, response_format: 'pcm' }),
      signal,
    });
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  }

  async requests(signal) {
    const body = await (await this.#request('v1/requests', { signal }, { ask: false })).json();
    return body.data ?? [];
  }

  async mcpServers() {
    const body = await (await this.#request('v1/mcp', {}, { ask: false })).json();
    return body.data ?? [];
  }

  // The state of the engine. Asks for a key where one is needed.
  async live(signal) {
    return (await this.#request('v1/live', { signal })).json();
  }

  async cacheTree(signal) {
    const body = await (await this.#request('v1/cache/tree', { signal }, { ask: false })).json();
    return body.data ?? [];
  }

  // Fetches a model by its short name or hub id; resolves when it is loaded.
  async addModel(model) {
    await this.#request('v1/models', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify({ model }) });
  }

  // Models that the server has memory for.
  async recommended() {
    const body = await (await this.#request('v1/models/recommended', {}, { ask: false })).json();
    return body.data ?? [];
  }

  // `what` is "load" or "unload"; resolves when that is done.
  async changeModel(id, what) {
    const name = id.split('/').map(encodeURIComponent).join('/');
    await this.#request(`v1/models/${name}/${what}`, { method: 'POST' });
  }

  async cancel(id) {
    await this.#request(`v1/requests/${encodeURIComponent(id)}`, { method: 'DELETE' });
  }

  // The readiness probe answers with an error status when the engine is not ready: here that is an answer too.
  async health(signal) {
    const response = await reach('health/ready', { headers: this.#credentials, signal });
    const body = await response.json().catch(() => ({}));
    return { ...body, ready: response.ok };
  }

  async *#events(response, signal) {
    try {
      for await (const { event, data } of readEvents(response.body)) {
        const fields = decode(data);
        if (event === 'error' || fields.type === 'error' || (fields.error && !fields.type)) {
          throw errorFrom(fields.error ?? fields, { status: fields.error?.status ?? response.status });
        }
        yield fields;
        if (LAST.has(fields.type)) return;
      }
    } catch (error) {
      if (error instanceof ApiError || signal?.aborted) throw error;
    }
    throw new ApiError(t('The connection closed before the answer was complete.'), { code: LOST });
  }

  get #credentials() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  async #request(path, init = {}, { ask = true } = {}) {
    for (let wasRefused = false; ; wasRefused = true) {
      const headers = { ...init.headers, ...this.#credentials };
      const response = await reach(path, { ...init, headers });
      this.isRated ||= response.headers.has('x-ratelimit-limit-requests');
      if (response.ok) return response;
      const error = await refusal(response);
      if (error.status !== 401 || !ask || !(await this.askForKey(wasRefused || Boolean(this.key)))) throw error;
    }
  }
}

function responsePath(id) {
  return `v1/responses/${encodeURIComponent(id)}`;
}

async function reach(path, init) {
  try {
    return await fetch(path, { ...init, cache: 'no-store', redirect: 'error' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError(t('The server cannot be reached. Is it still running?'));
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => '');
  const retryAfter = Number(response.headers.get('Retry-After')) || null;
  const facts = { status: response.status, retryAfter };
  try {
    return errorFrom(JSON.parse(text).error, facts);
  } catch {
    return new ApiError(t('The server answered {status}.', { status: `${response.status} ${response.statusText}`.trim() }), facts);
  }
}

function errorFrom(error, facts) {
  const message = typeof error === 'string' ? error : error.message;
  return new ApiError(String(message ?? t('The server reported an error without saying which.')), {
    ...facts,
    code: error.code ?? error.type ?? null,
    param: error.param ?? null,
  });
}

function decode(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError(t('The server sent something that is not JSON.'));
  }
}
