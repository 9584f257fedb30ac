// Reads an answer aloud, as its sound comes from the server. One at a time.

import { notify } from './notice.js';

const RATE = 24000; // of the samples that the server sends: 16 bits, the lower byte first
const MOST = 4000; // letters of one request

export class Speaker {
  constructor(api, models) {
    Object.assign(this, { api, models });
    this.playing = null;
  }

  get isOffered() {
    return Boolean(this.models.speaking);
  }

  // `changed(isSpeaking)` is called when this text begins to be read and when that is over.
  async toggle(text, changed) {
    const isSame = this.playing?.changed === changed;
    this.stop();
    if (isSame) return;
    const playing = new Playing(changed);
    this.playing = playing;
    changed(true);
    try {
      for (const piece of pieces(text)) {
        const samples = this.api.speech(piece, this.models.speaking.id, playing.ended.signal);
        for await (const bytes of samples) playing.add(bytes);
      }
      await playing.heard();
    } catch (error) {
      if (!playing.ended.signal.aborted) notify(error.message);
    }
    if (this.playing === playing) this.stop();
  }

  stop() {
    this.playing?.close();
    this.playing = null;
  }
}

// Sound that is played while more of it comes.
class Playing {
  constructor(changed) {
    this.changed = changed;
    this.ended = new AbortController();
    this.context = new AudioContext({ sampleRate: RATE });
    this.until = 0; // on the context's clock
    this.last = Promise.resolve();
    this.rest = new Uint8Array(0); // half of a sample
  }

  add(bytes) {
    const joined = new Uint8Array(this.rest.length + bytes.length);
    joined.set(this.rest);
    joined.set(bytes, this.rest.length);
    const count = joined.length >> 1;
    this.rest = joined.slice(count * 2);
    if (count === 0) return;
    const view = new DataView(joined.buffer);
    const sound = this.context.createBuffer(1, count, RATE);
    sound.getChannelData(0).set(Float32Array.from({ length: count }, (_, at) => view.getInt16(at * 2, true) / 32768));
    const source = this.context.createBufferSource();
    source.buffer = sound;
    source.connect(this.context.destination);
    this.last = new Promise((resolve) => source.addEventListener('ended', resolve));
    this.until = Math.max(this.until, this.context.currentTime);
    source.start(this.until);
    this.until += sound.duration;
  }

  // Resolves when all that came was played, or when it is over.
  heard() {
    const over = new Promise((resolve) => this.ended.signal.addEventListener('abort', resolve));
    return Promise.race([this.last, over]);
  }

  close() {
    this.ended.abort();
    this.context.close();
    this.changed(false);
  }
}

// Parts of a text that are short enough for a request, which end where a line, a sentence or a word does.
export function pieces(text) {
  const found = [];
  let left = text.trim();
  while (left.length > MOST) {
    const head = left.slice(0, MOST);
    const end = ['\n', '. ', ' '].map((sign) => head.lastIndexOf(sign) + 1).find((at) => at > 0) ?? MOST;
    found.push(left.slice(0, end).trim());
    left = left.slice(end).trim();
  }
  return [...found, left].filter(Boolean);
}
