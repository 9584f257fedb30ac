// One answer while it is generated: reads the stream into a message and collects the facts about it.

export class Answer {
  constructor(api, conversation, message) {
    this.api = api;
    this.conversation = conversation;
    this.message = message;
    this.abort = new AbortController();
  }

  stop() {
    this.abort.abort();
  }

  // Resolves when the answer has ended in any way; `message.state` says which. `onText` is called as text arrives.
  async run(body, onText) {
    const { message } = this;
    const watch = new Stopwatch();
    try {
      for await (const chunk of this.api.chat(body, this.abort.signal)) {
        this.#take(chunk, watch, onText);
      }
      message.state = 'done';
    } catch (error) {
      this.#fail(error);
    }
    message.facts = { ...message.facts, ...watch.facts(message.facts?.completionTokens) };
  }

  #take(chunk, watch, onText) {
    const { message } = this;
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content;
    const thought = choice?.delta?.reasoning_content;
    if (text || thought) {
      watch.tick();
      if (text) message.content += text;
      if (thought) message.thinking = (message.thinking ?? '') + thought;
      onText();
    }
    if (chunk.model) message.facts = { ...message.facts, model: chunk.model };
    if (choice?.finish_reason) message.facts = { ...message.facts, finish: choice.finish_reason };
    if (chunk.usage) message.facts = { ...message.facts, ...usageFacts(chunk.usage) };
    if (chunk.ingot?.speculation) message.facts = { ...message.facts, ...speculationFacts(chunk.ingot.speculation) };
  }

  #fail(error) {
    const { message } = this;
    if (this.abort.signal.aborted) {
      message.state = 'stopped';
      return;
    }
    message.state = 'failed';
    message.error = { text: error.message, retryAfter: error.retryAfter ?? null };
    if (error.name !== 'ApiError') console.error(error);
  }
}

function usageFacts(usage) {
  return {
    promptTokens: usage.prompt_tokens,
    completionTokens: usage.completion_tokens,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
  };
}

function speculationFacts({ proposed, accepted, tokens_per_pass: tokensPerPass }) {
  return { proposedTokens: proposed, acceptedTokens: accepted, tokensPerPass };
}

// Speed is measured here, as the user feels it: from the first piece of text to the last.
class Stopwatch {
  constructor() {
    this.start = performance.now();
    this.pieces = 0;
  }

  tick() {
    this.last = performance.now();
    this.first ??= this.last;
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
      tokensPerSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    };
  }
}
