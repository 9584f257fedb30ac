// The requests that wait and run, a row each, with a button that ends one.

import { element, iconButton } from './element.js';
import { count, speed } from './facts.js';

const PHASES = { queued: 'Waiting', prefill: 'Reading', decode: 'Writing' };

export class RequestRows {
  constructor(list, cancel) {
    this.list = list;
    this.cancel = cancel;
    this.rows = new Map();
  }

  // Rows are kept by id, so that a focused button stays where it is.
  show(requests) {
    const ids = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const request of requests) {
      if (!this.rows.has(request.id)) {
        const row = new RequestRow(request.id, this.cancel);
        this.rows.set(request.id, row);
        this.list.append(row.node);
      }
      this.rows.get(request.id).update(request);
    }
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

function age({ age_s: told, queued_s: queued = 0, prompt_s: prompt = 0, answer_s: answer = 0 }) {
  return told ?? queued + prompt + answer;
}

function progress(request) {
  if (request.phase === 'decode') return { done: request.completion_tokens ?? 0, all: request.max_tokens ?? 0 };
  return { done: request.prefilled_tokens ?? 0, all: request.prompt_tokens ?? 0 };
}
