// System prompt, sampling and the API key of the page. The rule for sampling: what is shown is sent, what is empty is not,
// and then the server's own default holds.

import { element, find } from './element.js';
import { t } from './translate.js';

const KEY = 'ingot.sampling';

// `neutral` is where the slider stands while the field is empty; without one there is no slider. `reach` is what
// the slider covers where that is less than what may be typed.
const CONTROLS = [
  {
    name: 'temperature',
    label: t('Temperature'),
    hint: t('Lower is steadier, higher is freer'),
    bounds: { min: 0, max: 2, step: 0.05 },
    neutral: 1,
    initial: 0.7,
  },
  {
    name: 'top_p',
    label: t('Top p'),
    hint: t('Keep the likeliest tokens up to this share'),
    bounds: { min: 0, max: 1, step: 0.01 },
    neutral: 1,
    initial: 0.95,
  },
  {
    name: 'top_k',
    label: t('Top k'),
    hint: t('Keep this many tokens; 0 keeps all'),
    bounds: { min: 0, max: 1_000_000, step: 1 },
  },
  {
    name: 'min_p',
    label: t('Min p'),
    hint: t('Drop tokens below this share of the likeliest'),
    bounds: { min: 0, max: 1, step: 0.01 },
    neutral: 0,
  },
  {
    name: 'presence_penalty',
    label: t('Presence penalty'),
    hint: t('Against anything said before'),
    bounds: { min: -2, max: 2, step: 0.1 },
    neutral: 0,
  },
  {
    name: 'frequency_penalty',
    label: t('Frequency penalty'),
    hint: t('Against what was said often'),
    bounds: { min: -2, max: 2, step: 0.1 },
    neutral: 0,
  },
  {
    name: 'repetition_penalty',
    label: t('Repetition penalty'),
    hint: t('1 is off'),
    bounds: { min: 0.01, max: 10, step: 0.05 },
    neutral: 1,
    reach: { min: 0.5, max: 2 },
  },
  {
    name: 'max_output_tokens',
    label: t('Max tokens'),
    hint: t('Longest answer; empty: until it ends'),
    bounds: { min: 1, max: 16_777_216, step: 1 },
  },
  {
    name: 'seed',
    label: t('Seed'),
    hint: t('Same seed, same text; empty: random'),
    bounds: { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
  },
];

export class Settings {
  constructor(api, state, models, format, { onSystem, onKey, reveal }) {
    Object.assign(this, { state, models, format, reveal });
    this.form = find('sampling');
    this.form.append(...CONTROLS.map((control) => this.#row(control)));
    this.form.addEventListener('submit', (event) => event.preventDefault());
    this.recommended = {};
    this.#fill(stored() ?? this.#initial());
    find('sampling-reset').addEventListener('click', () => this.#reset());
    find('system').addEventListener('input', ({ target }) => onSystem(target.value));
    const key = find('key');
    key.value = api.key;
    key.addEventListener('input', () => (api.key = key.value.trim()));
    key.addEventListener('change', onKey);
    state.watch(() => this.draw());
  }

  // The server sends by itself what a model's makers recommend, so the page's own first values give way to that.
  draw() {
    const field = find('system');
    const { system } = this.state.current;
    if (field.value !== system) field.value = system;
    const recommended = this.models.card?.default_sampling_params ?? {};
    if (JSON.stringify(recommended) === JSON.stringify(this.recommended)) return;
    this.recommended = recommended;
    for (const { name } of CONTROLS) this.#input(name).placeholder = recommended[name] ?? t('default');
    if (!stored()) this.#fill(this.#initial());
  }

  // Sets what a preset says, and nothing else.
  use(sampling) {
    this.#fill(sampling);
    this.#store();
  }

  // The sampling fields of a request: numbers, and only those that are set.
  sampling() {
    const set = CONTROLS.map(({ name }) => [name, this.#input(name).valueAsNumber]);
    return Object.fromEntries(set.filter(([, value]) => Number.isFinite(value)));
  }

  // Shows what is wrong instead of sending something else than what is shown.
  isValid() {
    if (this.form.checkValidity() && this.format.isValid()) return true;
    this.reveal();
    this.form.reportValidity();
    this.format.report();
    return false;
  }

  #reset() {
    this.#fill(this.#initial());
    localStorage.removeItem(KEY);
  }

  #row({ name, label, hint, bounds, neutral, reach }) {
    const isWhole = bounds.step === 1;
    const input = element('input', {
      ...bounds,
      id: `sampling-${name}`,
      type: 'number',
      step: isWhole ? 1 : 'any',
      inputmode: isWhole ? 'numeric' : 'decimal',
      placeholder: t('default'),
      'aria-describedby': `hint-${name}`,
    });
    input.addEventListener('input', () => this.#store());
    return element(
      'div',
      { class: 'control' },
      element('label', { for: input.id }, label),
      input,
      neutral === undefined ? null : this.#slider(input, label, { ...bounds, ...reach }, neutral),
      element('p', { id: `hint-${name}`, class: 'hint' }, hint),
    );
  }

  #slider(input, label, bounds, neutral) {
    const slider = element('input', { ...bounds, type: 'range', 'aria-label': t('{label}, slider', { label }) });
    const follow = () => {
      slider.value = input.value || neutral;
      slider.classList.toggle('unset', input.value === '');
    };
    input.addEventListener('input', follow);
    input.addEventListener('fill', follow);
    slider.addEventListener('input', () => {
      input.value = slider.value;
      follow();
      this.#store();
    });
    return slider;
  }

  #fill(values) {
    for (const { name } of CONTROLS) {
      const input = this.#input(name);
      input.value = values[name] ?? '';
      input.dispatchEvent(new Event('fill'));
    }
  }

  #initial() {
    if (Object.keys(this.recommended).length > 0) return {};
    return Object.fromEntries(CONTROLS.map((control) => [control.name, control.initial]));
  }

  #store() {
    localStorage.setItem(KEY, JSON.stringify(this.sampling()));
  }

  #input(name) {
    return find(`sampling-${name}`);
  }
}

function stored() {
  try {
    const values = JSON.parse(localStorage.getItem(KEY));
    if (typeof values !== 'object' || values === null) return null;
    const { max_tokens: most, ...others } = values; // its name in what an earlier version stored
    return most === undefined ? others : { max_output_tokens: most, ...others };
  } catch {
    return null;
  }
}
