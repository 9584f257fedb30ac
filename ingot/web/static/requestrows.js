// The requests that wait and run, a row each, with a button that ends one.

import { element, iconButton } from './element.js';
import { count, decimal, speed } from './facts.js';
import { t } from './translate.js';

const PHASES = { queued: t('Waiting'), prefill: t('Prefill'), decode: t('Decode') };

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
    this.bar = element('progress', { max: '1', 'aria-label': t('Progress') });
    this.detail = element('span', { class: 'detail' });
    const name = element('code', { title: id }, id);
    const stop = iconButton('close', t('Cancel {id}', { id }), () => cancel(id));
    const head = element('div', { class: 'head' }, this.phase, name, this.speed, stop);
    this.node = element('li', {}, head, this.bar, this.detail);
  }

  update(request) {
    const { phase, tokens_per_second: perSecond = 0, preemptions = 0 } = request;
    this.phase.textContent = PHASES[phase] ?? phase;
    this.phase.dataset.phase = phase;
    this.speed.textContent = phase === 'decode' ? t('{n} tokens/s', { n: speed(perSecond) }) : '';
    const { done, all } = progress(request);
    this.bar.value = all > 0 ? Math.min(1, done / all) : 0;
    const again = preemptions > 0 ? ` · ${t('preempted {n}×', { n: preemptions })}` : '';
    const unit = phase === 'decode' ? t('new tokens') : t('prompt tokens');
    this.detail.textContent = `${t('{n} of {all}', { n: count(done), all: count(all) })} ${unit} · ${decimal(age(request), 1)} s${again}`;
  }
}

function age({ age_s: seconds, queued_s: queued = 0, prompt_s: prompt = 0, answer_s: answer = 0 }) {
  return seconds ?? queued + prompt + answer;
}

function progress(request) {
  if (request.phase === 'decode') return { done: request.completion_tokens ?? 0, all: request.max_tokens ?? 0 };
  return { done: request.prefilled_tokens ?? 0, all: request.prompt_tokens ?? 0 };
}
