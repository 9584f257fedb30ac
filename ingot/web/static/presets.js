// Presets: a system prompt and sampling under a name, stored in this browser.

import { element, find } from './element.js';
import { notify } from './notice.js';
import { t } from './translate.js';

const KEY = 'ingot.presets';

export class Presets {
  // `use(preset)` takes {system, sampling}; `current()` returns what is set now.
  constructor({ use, current }) {
    this.presets = stored();
    this.select = find('preset');
    this.select.addEventListener('change', () => {
      const preset = this.#chosen;
      if (preset) use(preset);
      this.#draw(this.select.value);
    });
    find('preset-save').addEventListener('submit', (event) => {
      event.preventDefault();
      const field = find('preset-name');
      const name = field.value.trim();
      if (!name) return;
      this.presets = [...this.presets.filter((preset) => preset.name !== name), { name, ...current() }];
      this.presets.sort((a, b) => a.name.localeCompare(b.name));
      field.value = '';
      this.#changed(name);
      notify(t('Saved as “{name}”.', { name }));
    });
    find('preset-delete').addEventListener('click', () => {
      const gone = this.#chosen;
      this.presets = this.presets.filter((preset) => preset !== gone);
      this.#changed('');
      notify(t('“{name}” deleted.', { name: gone.name }), {
        label: t('Undo'),
        run: () => {
          this.presets = [...this.presets, gone];
          this.#changed(gone.name);
        },
      });
    });
    this.#draw('');
  }

  get #chosen() {
    return this.presets.find(({ name }) => name === this.select.value);
  }

  #changed(chosen) {
    localStorage.setItem(KEY, JSON.stringify(this.presets));
    this.#draw(chosen);
  }

  #draw(chosen) {
    const names = this.presets.map(({ name }) => element('option', { value: name, selected: name === chosen }, name));
    this.select.replaceChildren(element('option', { value: '' }, this.presets.length > 0 ? t('Choose a preset') : t('No presets yet')), ...names);
    find('preset-delete').hidden = !this.#chosen;
  }
}

function stored() {
  try {
    const presets = JSON.parse(localStorage.getItem(KEY)) ?? [];
    return presets.filter(({ name, system, sampling }) => name && typeof system === 'string' && typeof sampling === 'object');
  } catch {
    return [];
  }
}
