// Reads an answer aloud while its audio arrives from the server. One at a time.

import { notify } from './notice.js';

const RATE = 24000; // of the samples that the server sends: 16 bits, the lower byte first
const MOST = 4000; // characters of one request

export class Speaker {
  constructor(api, models) {
    Object.assign(this, { api, models });
    this.playing = null;
  }

  get isOffered() {
    return Boolean(this.models.textToSpeech);
  }

  // `changed(isSpeaking)` is called when reading this text begins and ends.
  async toggle(text, changed) {
    const isSame = this.playing?.changed === changed;
    this.stop();
    if (isSame) return;
    const playing = new Playing(changed);
    this.playing = playing;
    changed(true);
    try {
      for (const piece of pieces(text)) {
        const samples = this.api.speech(piece, this.models.textToSpeech.id, playing.ended.signal);
        for await (const bytes of samples) playing.add(bytes);
      }
      await playing.played();
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

// Audio that is played while more of it arrives.
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
    const audio = this.context.createBuffer(1, count, RATE);
    audio.getChannelData(0).set(Float32Array.from({ length: count }, (_, at) => view.getInt16(at * 2, true) / 32768));
    const source = this.context.createBufferSource();
    source.buffer = audio;
    source.connect(this.context.destination);
    this.last = new Promise((resolve) => source.addEventListener('ended', resolve));
    this.until = Math.max(this.until, this.context.currentTime);
    source.start(this.until);
    this.until += audio.duration;
  }

  // Resolves when everything was played, or when it was stopped.
  played() {
    const over = new Promise((resolve) => this.ended.signal.addEventListener('abort', resolve));
    return Promise.race([this.last, over]);
  }

  close() {
    this.ended.abort();
    this.context.close();
    this.changed(false);
  }
}

// Parts of a text that are short enough for one request and end with a line, a sentence or a word.
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
