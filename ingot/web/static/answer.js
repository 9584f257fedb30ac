// One answer while it is generated: reads the events of a response into a message and collects the facts about it. A
// lost connection is taken up again where it broke off, as the server goes on without it.

import { callItems } from './tools.js';
import { t } from './translate.js';

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;

export class Answer {
  constructor(api, conversation, message) {
    Object.assign(this, { api, conversation, message });
    this.abort = new AbortController();
  }

  stop() {
    this.abort.abort();
  }

  // Resolves when the answer has ended in any way; `message.state` says which. `onText` is called as text arrives.
  async run(body, onText) {
    const { message, abort } = this;
    this.watch = new Stopwatch();
    await this.#read(async () => {
      const { signal } = abort;
      try {
        await this.#follow(this.api.respond(body, { background: this.api.mayStore, signal }), onText);
      } catch (error) {
        if (!error.isAboutStoring || message.response) throw error;
        this.api.mayStore = false;
        await this.#follow(this.api.respond(body, { background: false, signal }), onText);
      }
    }, onText);
    message.facts = { ...message.facts, ...this.watch.facts(message.facts?.completionTokens) };
  }

  // Goes on with one that an earlier visit of the page began.
  async resume(onText) {
    this.watch = null;
    await this.#read(() => this.#catchUp(onText), onText);
  }

  async #read(begin, onText) {
    const { message } = this;
    try {
      await begin();
    } catch (error) {
      await this.#recover(error, onText).catch((last) => this.#fail(last));
    } finally {
      delete message.isLost;
    }
  }

  // Tries again for as long as the server can only not be reached.
  async #recover(error, onText) {
    const { message, abort } = this;
    for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      const mayReturn = error.isLost || error.status === 503;
      if (abort.signal.aborted || !mayReturn || !message.response?.isBackground) throw error;
      message.isLost = true;
      onText();
      await rest(pause, abort.signal);
      const { after } = message.response;
      try {
        await this.#catchUp(onText);
        return;
      } catch (next) {
        if (message.response.after !== after) pause = FIRST_PAUSE_MS;
        error = next;
      }
    }
  }

  async #catchUp(onText) {
    const { message, abort } = this;
    const { id, after } = message.response;
    try {
      await this.#follow(this.api.resume(id, after, abort.signal), onText);
    } catch (error) {
      if (error.status === 404) error.message = t('The server does not have this answer any more.');
      if (error.status !== 400) throw error;
      this.#settle(await this.api.response(id, abort.signal)); // its events are gone, the response is not
      onText();
    }
  }

  async #follow(events, onText) {
    for await (const event of events) this.#take(event, onText);
  }

  #take({ type, delta, item, response, sequence_number: number }, onText) {
    const { message } = this;
    delete message.isLost;
    if (type === 'response.created' && !message.response) {
      message.response = { id: response.id, isBackground: response.background, after: number };
    }
    if (message.response && number !== undefined) message.response.after = number;
    const isThought = type === 'response.reasoning_text.delta' || type === 'response.reasoning_summary_text.delta';
    if (type === 'response.output_text.delta') message.content += delta;
    else if (isThought) message.thinking = (message.thinking ?? '') + delta;
    else if (item) this.#takeItem(item);
    else if (response && response.status !== 'in_progress' && response.status !== 'queued') this.#settle(response);
    else return;
    if (delta) this.watch?.tick(isThought);
    onText();
  }

  // A call that was begun or that has ended.
  #takeItem(item) {
    const { message } = this;
    const items = [...(message.items ?? message.earlier ?? []).filter(({ id }) => id !== item.id), item];
    message.items = callItems(items) ?? message.items;
  }

  // The response has ended; all of it is here.
  #settle(response) {
    const { message } = this;
    const output = [...(message.earlier ?? []), ...response.output];
    const part = (wanted, inner) =>
      output.flatMap((item) => (item.type === wanted ? (item.content ?? item.summary ?? []) : [])).map(({ text }) => text).join(inner);
    message.content = part('message', '') || message.content;
    message.thinking = part('reasoning', '') || message.thinking;
    message.receipt = response.ingot;
    const logprobs = output.flatMap(({ type, content }) => (type === 'message' ? content.flatMap((each) => each.logprobs ?? []) : []));
    if (logprobs.length > 0) message.logprobs = logprobs.map(({ token, logprob, top_logprobs: others }) => ({ token, logprob, top_logprobs: others.map((other) => ({ token: other.token, logprob: other.logprob })) }));
    const items = callItems(output);
    if (items) message.items = items.map(withoutLogprobs);
    message.facts = { ...message.facts, model: response.model, ...usageFacts(response), ...speculationFacts(response.ingot?.speculation) };
    if (!this.watch) Object.assign(message.facts, timingFacts(response.ingot?.timing, message.facts.completionTokens));
    if (response.status === 'completed') message.state = 'done';
    else if (response.status === 'incomplete') Object.assign(message, { state: 'done', facts: { ...message.facts, finish: 'length' } });
    else if (response.status === 'cancelled') message.state = 'stopped';
    else this.#fail(response.error ?? { message: t('The server ended the answer without saying why.') });
  }

  #fail(error) {
    const { message } = this;
    if (this.abort.signal.aborted) {
      message.state = 'stopped';
      return;
    }
    message.state = 'failed';
    message.error = { text: error.message, retryAfter: error.retryAfter ?? null };
    if (error instanceof TypeError) console.error(error);
  }
}

function withoutLogprobs({ content, ...item }) {
  return content ? { ...item, content: content.map(({ logprobs, ...part }) => part) } : item;
}

function rest(pause, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener('online', done);
      resolve();
    };
    const timer = setTimeout(done, pause);
    addEventListener('online', done);
    signal.addEventListener('abort', done);
  });
}

function usageFacts({ usage }) {
  if (!usage) return {};
  return {
    promptTokens: usage.input_tokens,
    completionTokens: usage.output_tokens,
    cachedTokens: usage.input_tokens_details?.cached_tokens ?? 0,
  };
}

function speculationFacts(speculation) {
  if (!speculation) return {};
  const { proposed, accepted, tokens_per_pass: tokensPerPass } = speculation;
  return { proposedTokens: proposed, acceptedTokens: accepted, tokensPerPass };
}

// Of an answer that this page did not see from its beginning: as the server measured them.
function timingFacts(timing, tokens) {
  if (!timing) return {};
  const { queue_s: queued, prefill_s: prefill, decode_s: decode } = timing;
  return {
    firstTokenMs: Math.round(1000 * (queued + prefill)),
    tokensPerSecond: tokens > 1 && decode > 0 ? (tokens - 1) / decode : null,
  };
}

// Speed is measured here, as the user feels it: from the first piece of text to the last.
class Stopwatch {
  constructor() {
    this.start = performance.now();
    this.pieces = 0;
  }

  tick(isThought) {
    this.last = performance.now();
    this.first ??= this.last;
    if (isThought) this.thought = this.last;
    this.pieces += 1;
  }

  // Without the server's count, one piece of text counts as one token, and the count is marked as an estimate.
  facts(counted) {
    if (this.pieces === 0) return {};
    const tokens = counted ?? this.pieces;
    const seconds = (this.last - this.first) / 1000;
    return {
      completionTokens: tokens,
      isGuess: counted === undefined,
      firstTokenMs: Math.round(this.first - this.start),
      thinkingMs: this.thought === undefined ? null : Math.round(this.thought - this.first),
      tokensPerSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    };
  }
}
