// The requests that wait and run, a row each, with a button that ends one.

import { element, iconButton } from './element.js';
import { count, speed } from './facts.js';

const PHASES = { queued: 'Waiting', prefill: 'Reading', decode: 'Writing' };

// Rows are kept by id, so that a focused button stays where it is. `create(id)` makes a row with a `node` and `update`.
export class Rows {
  constructor(list, create) {
    this.list = list;
    this.create = create;
    this.rows = new Map();
  }

  show(items, ...details) {
    const ids = new Set(items.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const item of items) {
      if (!this.rows.has(item.id)) {
        const row = this.create(item.id);
        this.rows.set(item.id, row);
        this.list.append(row.node);
      }
      this.rows.get(item.id).update(item, ...details);
    }
  }
}

export class RequestRows extends Rows {
  constructor(list, cancel) {
    super(list, (id) => new RequestRow(id, cancel));
  }
}

class RequestRow {
  constructor(id, cancel) {
    this.phase = element('span', { class: 'phase' });
    this.speed = element('span', { class: 'speed' });
    this.bar = element('progress', { max: '1', 'aria-label': 'Progress' });
    this.detail = element('span', { class: 'detail' });
    const name = element('code', { title: id }, id);
    const stop = iconButton('close', `Cancel ${id}`, () => cancel(id));
    const head = element('div', { class: 'head' }, this.phase, name, this.speed, stop);
    this.node = element('li', {}, head, this.bar, this.detail);
  }

  update(request) {
    const { phase, tokens_per_second: perSecond = 0, preemptions = 0 } = request;
    this.phase.textContent = PHASES[phase] ?? phase;
    this.phase.dataset.phase = phase;
    this.speed.textContent = phase === 'decode' ? `${speed(perSecond)} tok/s` : '';
    const { done, all } = progress(request);
    this.bar.value = all > 0 ? Math.min(1, done / all) : 0;
    const again = preemptions > 0 ? ` · preempted ${preemptions}×` : '';
    const unit = phase === 'decode' ? 'new tokens' : 'prompt tokens';
    this.detail.textContent = `${count(done)} of ${count(all)} ${unit} · ${age(request).toFixed(1)} s${again}`;
  }
}

function age({ age_s: seconds, queued_s: queued = 0, prompt_s: prompt = 0, answer_s: answer = 0 }) {
  return seconds ?? queued + prompt + answer;
}

function progress(request) {
  if (request.phase === 'decode') return { done: request.completion_tokens ?? 0, all: request.max_tokens ?? 0 };
  return { done: request.prefilled_tokens ?? 0, all: request.prompt_tokens ?? 0 };
}
