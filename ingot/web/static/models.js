// Which models the server has, and which one answers.

import { element, find } from './element.js';
import { count } from './facts.js';

export class Models {
  constructor(api) {
    this.api = api;
    this.list = [];
    this.speechToText = null;
    this.textToSpeech = null;
    this.error = null;
    this.chosen = 'default'; // the name that always means the served model
  }

  get card() {
    return this.list.find(({ id }) => id === this.chosen) ?? null;
  }

  // Tokens that fit, or null where the server does not say.
  get context() {
    return this.card?.context_length ?? this.card?.max_model_len ?? null;
  }

  // Whether the chosen model takes media of this kind; a video may be sent as its frames.
  takes(kind) {
    const modalities = this.card?.input_modalities ?? [];
    return modalities.includes(kind) || (kind === 'video' && modalities.includes('image'));
  }

  async load() {
    try {
      const all = await this.api.models();
      const of = (wanted) => all.filter(({ kind = 'chat' }) => kind === wanted);
      this.list = of('chat');
      this.speechToText = of('audio')[0] ?? null;
      this.textToSpeech = of('speech')[0] ?? null;
      this.error = null;
      if (!this.card) this.chosen = this.list[0]?.id ?? 'default';
    } catch (error) {
      this.error = error;
    }
    this.draw();
  }

  draw() {
    const name = this.list.length > 1 ? this.#choice() : element('span', { id: 'model-name' }, this.#name());
    const context = this.context && element('span', { class: 'context' }, `${count(this.context)}-token context`);
    find('model').replaceChildren(name, ...(context ? [context] : []));
  }

  #name() {
    if (this.error) return this.error.status === 401 ? 'Key needed' : 'Not connected';
    return this.list.length > 0 ? this.chosen : 'Connecting…';
  }

  #choice() {
    const options = this.list.map(({ id }) => element('option', { value: id, selected: id === this.chosen }, id));
    const choose = (event) => {
      this.chosen = event.target.value;
      this.draw();
    };
    return element('select', { id: 'model-name', 'aria-label': 'Model', onchange: choose }, ...options);
  }
}
