// A live look at the engine: its health and what it is working on, asked for each second while the panel is open.

import { element, find, iconButton, svgElement } from './element.js';
import { count, speed } from './facts.js';
import { notify } from './notice.js';

const EVERY_MS = 1000;
const SAMPLES = 60;
const PHASES = { queued: 'Waiting', prefill: 'Reading', decode: 'Writing' };

export class EngineView {
  constructor(api, models) {
    this.api = api;
    this.models = models;
    this.rows = new Map();
    this.speeds = [];
    this.timer = 0;
    this.isOpen = false;
    document.addEventListener('visibilitychange', () => this.isOpen && !document.hidden && this.#poll());
  }

  open() {
    this.isOpen = true;
    this.#poll();
  }

  close() {
    this.isOpen = false;
    clearTimeout(this.timer);
  }

  async #poll() {
    clearTimeout(this.timer);
    const signal = AbortSignal.timeout(5 * EVERY_MS);
    const [health, requests] = await Promise.allSettled([this.api.health(signal), this.api.requests(signal)]);
    if (!this.isOpen) return;
    this.#drawHealth(health);
    this.#drawRequests(requests);
    if (!document.hidden) this.timer = setTimeout(() => this.#poll(), EVERY_MS);
  }

  #drawHealth({ value, reason }) {
    const isReady = value?.ready ?? false;
    const box = find('engine-health');
    box.dataset.state = isReady ? 'ready' : 'down';
    const detail = value ? healthDetail(value) : reason.message;
    box.replaceChildren(
      element('span', { class: 'lamp' }),
      element('strong', {}, isReady ? 'Ready' : 'Not ready'),
      element('span', { class: 'detail' }, detail),
    );
  }

  #drawRequests({ value, reason }) {
    const requests = value ?? [];
    const total = requests.reduce((sum, request) => sum + (request.tokens_per_second || 0), 0);
    this.speeds = [...this.speeds, total].slice(-SAMPLES);
    find('engine-speed').textContent = speed(total);
    find('engine-plot').replaceChildren(plot(this.speeds));
    this.#syncRows(requests);
    const note = find('engine-note');
    note.hidden = requests.length > 0;
    note.textContent = reason ? reason.message : 'Nothing is running.';
  }

  // Rows are kept by id, so that a focused button stays where it is.
  #syncRows(requests) {
    const list = find('engine-requests');
    const ids = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const request of requests) {
      if (!this.rows.has(request.id)) {
        const row = new RequestRow(request.id, (id) => this.#cancel(id));
        this.rows.set(request.id, row);
        list.append(row.node);
      }
      this.rows.get(request.id).update(request);
    }
  }

  async #cancel(id) {
    try {
      await this.api.cancel(id);
    } catch (error) {
      notify(error.message);
    }
    this.#poll();
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
    const { phase, age_s: age = 0, tokens_per_second: perSecond = 0, preemptions = 0 } = request;
    this.phase.textContent = PHASES[phase] ?? phase;
    this.phase.dataset.phase = phase;
    this.speed.textContent = phase === 'decode' ? `${speed(perSecond)} tok/s` : '';
    const { done, all } = progress(request);
    this.bar.value = all > 0 ? Math.min(1, done / all) : 0;
    const again = preemptions > 0 ? ` · preempted ${preemptions}×` : '';
    const unit = phase === 'decode' ? 'new tokens' : 'prompt tokens';
    this.detail.textContent = `${count(done)} of ${count(all)} ${unit} · ${age.toFixed(1)} s${again}`;
  }
}

function progress(request) {
  if (request.phase === 'decode') return { done: request.completion_tokens ?? 0, all: request.max_tokens ?? 0 };
  return { done: request.prefilled_tokens ?? 0, all: request.prompt_tokens ?? 0 };
}

function healthDetail({ detail, running, queued }) {
  const parts = typeof detail === 'string' && detail ? [detail] : [];
  if (Number.isFinite(running)) parts.push(`${running} running`);
  if (Number.isFinite(queued)) parts.push(`${queued} waiting`);
  return parts.join(' · ');
}

// The last minute, newest at the right; the height is that of the fastest second.
function plot(speeds) {
  const top = Math.max(1, ...speeds);
  const first = SAMPLES - speeds.length;
  const points = speeds.map((perSecond, at) => `${first + at},${(39 - (37 * perSecond) / top).toFixed(1)}`);
  const line = svgElement('polyline', { points: points.join(' '), 'vector-effect': 'non-scaling-stroke' });
  const area = svgElement('polygon', { points: `${first},40 ${points.join(' ')} ${SAMPLES - 1},40` });
  const frame = { viewBox: `0 0 ${SAMPLES - 1} 40`, preserveAspectRatio: 'none', 'aria-hidden': 'true' };
  return svgElement('svg', frame, area, line);
}
