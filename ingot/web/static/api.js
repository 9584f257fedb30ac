// The client of the server's API. Every failure is an ApiError whose message can be shown.

import { readEvents } from './sse.js';

const KEY = 'ingot.key';

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: 'ApiError', status, code, retryAfter });
  }
}

// `askForKey(wasRefused)` resolves to whether the user gave a key; it is called when the server wants one.
export class Api {
  constructor(askForKey) {
    this.askForKey = askForKey;
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

  // Yields the chunks of one streamed answer; returns after the last, throws if the stream ends before it.
  async *chat(body, signal) {
    const response = await this.#request('v1/chat/completions', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    try {
      for await (const { event, data } of readEvents(response.body)) {
        if (data === '[DONE]') return;
        const chunk = decode(data);
        if (chunk.error || event === 'error') throw errorFrom(chunk.error ?? chunk, { status: response.status });
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ApiError || signal.aborted) throw error;
    }
    throw new ApiError('The connection closed before the answer was complete.');
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

  // The state of the engine. Asks for a key where one is needed.
  async live(signal) {
    return (await this.#request('v1/live', { signal })).json();
  }

  async cacheTree(signal) {
    const body = await (await this.#request('v1/cache/tree', { signal }, { ask: false })).json();
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

  get #credentials() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  async #request(path, init = {}, { ask = true } = {}) {
    for (let wasRefused = false; ; wasRefused = true) {
      const headers = { ...init.headers, ...this.#credentials };
      const response = await reach(path, { ...init, headers });
      if (response.ok) return response;
      const error = await refusal(response);
      if (error.status !== 401 || !ask || !(await this.askForKey(wasRefused || Boolean(this.key)))) throw error;
    }
  }
}

async function reach(path, init) {
  try {
    return await fetch(path, { ...init, cache: 'no-store', redirect: 'error' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError('The server cannot be reached. Is it still running?');
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => '');
  const retryAfter = Number(response.headers.get('Retry-After')) || null;
  const facts = { status: response.status, retryAfter };
  try {
    return errorFrom(JSON.parse(text).error, facts);
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}`.trim(), facts);
  }
}

function errorFrom(error, facts) {
  const message = typeof error === 'string' ? error : error.message;
  return new ApiError(String(message ?? 'The server reported an error without saying which.'), {
    ...facts,
    code: error.code ?? error.type ?? null,
  });
}

function decode(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError('The server sent something that is not JSON.');
  }
}
