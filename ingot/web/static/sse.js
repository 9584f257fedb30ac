// Server-sent events out of a byte stream: yields each event's {event, data} as the stream delivers it.

export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    await reader.cancel().catch(() => {}); // an aborted stream refuses; there is nothing left to cancel
  }
}

export class EventParser {
  constructor() {
    this.rest = '';
    this.event = 'message';
    this.data = [];
  }

  *feed(text) {
    const lines = (this.rest + text).split('\n');
    this.rest = lines.pop();
    for (const line of lines) {
      const event = this.#line(line.endsWith('\r') ? line.slice(0, -1) : line);
      if (event) yield event;
    }
  }

  #line(line) {
    if (line === '') return this.#dispatch();
    const colon = line.indexOf(':');
    if (colon === 0) return null; // a comment: the server keeping the connection alive
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (name === 'data') this.data.push(value);
    else if (name === 'event') this.event = value;
    return null;
  }

  #dispatch() {
    const event = this.data.length > 0 ? { event: this.event, data: this.data.join('\n') } : null;
    this.event = 'message';
    this.data = [];
    return event;
  }
}
