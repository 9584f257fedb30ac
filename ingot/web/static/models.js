// Which models the server has, which one answers, and what that one takes.

import { t } from './translate.js';

const POLL_MS = 1000; // while a model is loaded or unloaded

export class Models {
  constructor(api, state) {
    Object.assign(this, { api, state });
    this.timer = 0;
  }

  // Those that chat.
  get list() {
    return this.#ofKind('chat');
  }

  get speechToText() {
    return this.#ofKind('audio')[0] ?? null;
  }

  get textToSpeech() {
    return this.#ofKind('speech')[0] ?? null;
  }

  get error() {
    return this.state.modelsError;
  }

  get card() {
    const { list } = this;
    return list.find(({ id }) => id === this.state.chosen) ?? list[0] ?? null;
  }

  // The id that requests name; "default" always means the served model.
  get chosen() {
    return this.card?.id ?? 'default';
  }

  // Tokens that fit, or null where the server does not say.
  get context() {
    return contextOf(this.card);
  }

  // Whether the chosen model takes files of this kind.
  takes(kind) {
    return this.#takes(this.card, kind);
  }

  // Other models that take them.
  takers(kind) {
    return this.list.filter((card) => card.id !== this.chosen && this.#takes(card, kind)).map(({ id }) => id);
  }

  // How far the model is loaded that answers wait for, or '' where nothing waits.
  get loading() {
    const { state, progress, id } = this.card ?? {};
    if (state !== 'loading') return '';
    const share = typeof progress === 'number' ? ` ${Math.round(100 * progress)}%` : '';
    return t('Loading {model}…', { model: id }) + share;
  }

  async load() {
    clearTimeout(this.timer);
    try {
      const models = await this.api.models();
      this.state.change({ models, modelsError: null });
    } catch (error) {
      this.state.change({ modelsError: error });
    }
    if (this.#isMoving()) this.timer = setTimeout(() => this.load(), POLL_MS);
  }

  choose(id) {
    this.state.change({ chosen: id });
  }

  // `what` is "load" or "unload".
  async move(id, what) {
    const done = this.api.changeModel(id, what);
    done.catch(() => {}); // reported below; a poll may come first
    await this.load();
    await done;
    await this.load();
  }

  // Fetches a model that is not there yet.
  async add(id) {
    const done = this.api.addModel(id);
    const isAdded = await Promise.race([done.then(() => true, () => true), pause()]);
    if (!isAdded) await this.load(); // and follows how far it is
    await done.finally(() => this.load());
  }

  // Whether models come and go while the server runs.
  get mayGrow() {
    return this.state.mayChange && this.list.some(({ kind }) => kind);
  }

  // Whether the key is the administrator's: the engine's figures are for that one.
  async askRights() {
    const live = await this.api.live().catch(() => ({}));
    this.state.change({ mayChange: Boolean(live.engines) });
  }

  #isMoving() {
    if (this.state.models.some(({ state }) => state === 'loading' || state === 'unloading')) return true;
    return this.state.answers.size > 0 && (this.card?.state ?? 'loaded') !== 'loaded';
  }

  #ofKind(wanted) {
    return this.state.models.filter(({ kind = 'chat' }) => kind === wanted);
  }

  // A video may be sent as its frames, a PDF is sent as images of its pages, and audio is transcribed by another model.
  #takes(card, kind) {
    const modalities = card?.input_modalities ?? [];
    if (kind === 'text') return true;
    if (kind === 'audio') return Boolean(this.speechToText);
    return modalities.includes(kind) || ((kind === 'video' || kind === 'pdf') && modalities.includes('image'));
  }
}

function pause() {
  return new Promise((resolve) => setTimeout(resolve, POLL_MS));
}

export function contextOf(card) {
  return card?.context_length ?? card?.max_model_len ?? null;
}
