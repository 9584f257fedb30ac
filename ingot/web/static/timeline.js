// Requests over the last two minutes, a bar each: queue, prompt and answer.

import { t } from './translate.js';

const WINDOW_S = 120;
const ROW_PX = 14;
const GAP_PX = 3;
const LEAST_ROWS = 4;
const MOST_ROWS = 40;
const ENDINGS = { ended: 'answer', cancelled: 'cancelled' }; // any other outcome is an error's code

// Seconds ago at which each request began and ended, and its parts in order.
export function bars({ requests = [], past = [] }) {
  const running = requests.map((request) => bar(request, 0, 'answer'));
  const ended = past.map((request) => bar(request, request.ended_ago_s, ENDINGS[request.outcome] ?? 'failed'));
  return [...ended, ...running].filter(({ end }) => end < WINDOW_S).sort((one, other) => other.begin - one.begin);
}

function bar({ queued_s: queued, prompt_s: prompt, answer_s: answer, prompt_tokens: all, cached_tokens: cached }, end, ending) {
  const share = all > 0 ? Math.min(1, cached / all) : 0;
  const parts = [
    { phase: 'queued', seconds: queued },
    { phase: 'cached', seconds: prompt * share },
    { phase: 'prompt', seconds: prompt * (1 - share) },
    { phase: ending, seconds: answer },
  ];
  return { begin: end + queued + prompt + answer, end, ending, parts };
}

// A row for each bar, so that none covers another: the first that is free when it begins.
export function rowsOf(sorted) {
  const ends = [];
  return sorted.map(({ begin, end }) => {
    const free = ends.findIndex((end) => end >= begin);
    const row = free < 0 ? ends.length : free;
    ends[row] = end;
    return row;
  });
}

export class Timeline {
  // `legend` has an entry for each phase, whose mark is in its colour.
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.legend = legend;
    this.live = {};
    addEventListener('resize', () => this.draw());
    new MutationObserver(() => this.draw()).observe(document.documentElement, { attributeFilter: ['data-theme'] });
  }

  show(live) {
    this.live = live;
    this.draw();
  }

  draw() {
    const sorted = bars(this.live);
    const rows = rowsOf(sorted);
    const count = Math.min(MOST_ROWS, Math.max(LEAST_ROWS, ...rows.map((row) => row + 1)));
    const { context, width } = this.#sized(count * (ROW_PX + GAP_PX));
    const colours = this.#colours();
    const x = (ago) => width * (1 - Math.min(ago, WINDOW_S) / WINDOW_S);
    sorted.forEach(({ begin, end, ending, parts }, at) => {
      if (rows[at] >= count) return;
      const y = rows[at] * (ROW_PX + GAP_PX);
      let ago = begin;
      for (const { phase, seconds } of parts) {
        context.fillStyle = colours[phase];
        context.fillRect(x(ago), y, x(ago - seconds) - x(ago), ROW_PX);
        ago -= seconds;
      }
      context.fillStyle = colours[ending];
      context.fillRect(x(end) - 1, y, 1, ROW_PX); // so that an instant request is visible
    });
    this.canvas.setAttribute('aria-label', t('{n} requests in the last two minutes', { n: sorted.length }));
    this.canvas.dataset.bars = sorted.length;
  }

  #colours() {
    const entries = [...this.legend.querySelectorAll('[data-phase]')];
    return Object.fromEntries(entries.map((entry) => [entry.dataset.phase, getComputedStyle(entry, '::before').backgroundColor]));
  }

  #sized(height) {
    const { canvas } = this;
    canvas.style.height = `${height}px`;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext('2d');
    context.scale(ratio, ratio);
    return { context, width };
  }
}
