// Where the administrator fetches a model that the server does not have yet, by name or from those that fit its memory.

import { element } from './element.js';
import { bytes } from './facts.js';
import { notify } from './notice.js';
import { t } from './translate.js';

const TASKS = { chat: t('chat'), code: t('code'), vision: t('vision'), embedding: t('embedding'), rerank: t('rerank'), audio: t('speech to text'), speech: t('text to speech') };

export class AddModel {
  constructor(models) {
    this.models = models;
    this.field = element('input', { type: 'text', 'aria-label': t('Short name or hub id'), placeholder: t('Short name or hub id'), spellcheck: 'false', autocomplete: 'off' });
    const form = element('form', { class: 'row', 'aria-label': t('Download a model') }, this.field, element('button', { class: 'secondary' }, t('Download')));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      const id = this.field.value.trim();
      if (id) this.#add(id);
      this.field.value = '';
    });
    this.list = element('ul', { class: 'recommended' });
    this.fitting = element('details', { hidden: true }, element('summary', {}, t('Models that fit this machine’s memory')), this.list);
    this.node = element('div', { class: 'more-models', hidden: true }, form, this.fitting);
  }

  draw() {
    this.node.hidden = !this.models.mayGrow;
  }

  // The list of models is open.
  async open() {
    this.draw();
    if (this.node.hidden || this.isFilled) return;
    this.isFilled = true;
    const found = await this.models.api.recommended().catch(() => []);
    this.fitting.hidden = found.length === 0;
    const tasks = (id) => found.filter((model) => model.id === id).map(({ task }) => TASKS[task] ?? task);
    const once = [...new Map(found.map((model) => [model.id, model])).values()];
    this.list.replaceChildren(...once.map((model) => this.#row(model, tasks(model.id).join(', '))));
  }

  #row({ id, download_bytes: size }, tasks) {
    const get = element('button', { type: 'button', class: 'link', 'aria-label': t('Download {model}', { model: id }), onclick: () => this.#add(id) }, t('Download'));
    return element('li', {}, element('span', {}, id, ' ', element('span', { class: 'hint' }, `${tasks} · ${bytes(size)}`)), get);
  }

  async #add(id) {
    try {
      await this.models.add(id);
    } catch (error) {
      notify(error.message);
    }
  }
}
