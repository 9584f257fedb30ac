// A live look at the engine: its health and what it is working on, asked for each second while the panel is open.

import { element, find } from './element.js';
import { speed } from './facts.js';
import { notify } from './notice.js';
import { History } from './plot.js';
import { RequestRows } from './requestrows.js';
import { t } from './translate.js';

const EVERY_MS = 1000;

export class EngineView {
  constructor(api, models) {
    this.api = api;
    this.models = models;
    this.rows = new RequestRows(find('engine-requests'), (id) => this.#cancel(id));
    this.speeds = new History(find('engine-plot'));
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
      element('strong', {}, isReady ? t('Ready') : t('Not ready')),
      element('span', { class: 'detail' }, detail),
    );
  }

  #drawRequests({ value, reason }) {
    const requests = value ?? [];
    const total = requests.reduce((sum, request) => sum + (request.tokens_per_second || 0), 0);
    find('engine-speed').textContent = speed(total);
    this.speeds.add(total);
    this.rows.show(requests);
    const note = find('engine-note');
    note.hidden = requests.length > 0;
    note.textContent = reason ? reason.message : t('Nothing is running.');
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

function healthDetail({ detail, running, queued }) {
  const parts = typeof detail === 'string' && detail ? [detail] : [];
  if (Number.isFinite(running)) parts.push(t('{n} running', { n: running }));
  if (Number.isFinite(queued)) parts.push(t('{n} waiting', { n: queued }));
  return parts.join(' · ');
}
