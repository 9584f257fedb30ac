// The engine page: polled each second while it is visible, drawn from counters.

import { Api } from './api.js';
import { find } from './element.js';
import { count, speed } from './facts.js';
import { KeyDialog } from './keydialog.js';
import { drawMemory, drawSpeculation, drawTree } from './ledgers.js';
import { merged } from './merged.js';
import { ModelRows } from './modelrows.js';
import { notify } from './notice.js';
import { History } from './plot.js';
import { RequestRows } from './requestrows.js';
import { Timeline } from './timeline.js';
import { Workbench } from './workbench.js';
import { t, translatePage } from './translate.js';

const EVERY_MS = 1000;
const SLOWLY = 5; // polls between two of what changes rarely

class Overview {
  constructor(api) {
    this.api = api;
    this.rows = new RequestRows(find('engine-requests'), (id) => this.#cancel(id));
    this.models = new ModelRows(find('models'), (id, what) => this.#changeModel(id, what));
    this.workbench = new Workbench(api);
    this.isWhole = false; // whether the key shows the whole engine
    this.timeline = new Timeline(find('timeline'), document.querySelector('.legend'));
    this.plots = Object.fromEntries(['answer', 'computed', 'waiting'].map((name) => [name, new History(find(`${name}-plot`))]));
    this.before = null;
    this.turn = 0;
    this.timer = 0;
    document.addEventListener('visibilitychange', () => !document.hidden && this.poll());
  }

  async poll() {
    clearTimeout(this.timer);
    const signal = () => AbortSignal.timeout(5 * EVERY_MS);
    try {
      this.#draw(await this.api.live(signal()));
      if (this.turn % SLOWLY === 0) {
        drawTree(find('tree'), await this.api.cacheTree(signal()));
      }
      if (this.turn % SLOWLY === 0 || this.models.isMoving) {
        const models = await this.api.models();
        this.models.show(models, this.isWhole);
        this.workbench.show(models);
      }
      this.turn += 1;
    } catch (error) {
      this.#drawHealth(false, error.message);
    }
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), EVERY_MS);
  }

  #draw(live) {
    this.#drawHealth(live.ready, live.detail);
    this.timeline.show(live);
    this.rows.show(live.requests);
    const note = find('engine-note');
    note.hidden = live.requests.length > 0;
    note.textContent = t('Nothing is running.');
    this.isWhole = Boolean(live.engines);
    find('only-own').hidden = this.isWhole;
    for (const section of document.querySelectorAll('.whole')) section.hidden = !this.isWhole;
    if (live.engines?.length > 0) this.#drawEngine(merged(live.engines));
  }

  #drawHealth(isReady, detail) {
    find('health').dataset.state = isReady ? 'ready' : 'down';
    find('health-detail').textContent = isReady ? t('Ready') : detail;
  }

  #drawEngine({ title, running, waiting, totals, memory, speculation }) {
    find('health-detail').title = title;
    const now = performance.now() / 1000;
    const { generated = 0, computed = 0 } = this.#rates(totals, now);
    find('answer-speed').textContent = speed(generated);
    find('computed-speed').textContent = speed(computed);
    find('waiting').textContent = count(waiting);
    find('running').textContent = count(running);
    this.plots.answer.add(generated);
    this.plots.computed.add(computed);
    this.plots.waiting.add(waiting);
    const share = totals.prompt_tokens > 0 ? totals.cached_tokens / totals.prompt_tokens : 0;
    find('cached-share').textContent = `${Math.round(100 * share)}%`;
    find('cached-detail').textContent = t('{used} of {limit} tokens', { used: count(totals.cached_tokens), limit: count(totals.prompt_tokens) });
    drawMemory(find('memory'), memory);
    drawSpeculation(find('speculation'), speculation);
  }

  // Tokens a second since the last poll; a restarted server counts from zero again.
  #rates(totals, now) {
    const { before } = this;
    this.before = { totals, now };
    if (!before || totals.steps < before.totals.steps) return {};
    const rate = (name) => (totals[name] - before.totals[name]) / Math.max(0.001, now - before.now);
    return { generated: rate('generated_tokens'), computed: rate('computed_tokens') };
  }

  async #cancel(id) {
    try {
      await this.api.cancel(id);
    } catch (error) {
      notify(error.message);
    }
    this.poll();
  }

  // Loading takes a while, during which the page is still updated.
  async #changeModel(id, what) {
    try {
      const changed = this.api.changeModel(id, what);
      this.#pollModels();
      await changed;
    } catch (error) {
      notify(error.message);
    }
    this.#pollModels();
  }

  #pollModels() {
    this.turn = 0;
    this.poll();
  }
}

translatePage();
const dialog = new KeyDialog();
const api = new Api(async (wasRefused) => {
  const key = await dialog.ask(wasRefused);
  if (key) api.key = key;
  return Boolean(key);
});
new Overview(api).poll();
