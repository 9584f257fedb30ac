// The part of the engine page that measures this server, and that compares two models or settings on the same prompts.

import { chart } from './chart.js';
import { element, find } from './element.js';
import { count, decimal, speed, tokens } from './facts.js';
import { measured, timed } from './measure.js';
import { notify } from './notice.js';
import { t } from './translate.js';

const HEAD = [t('streams'), t('done'), t('failed'), t('prompt'), t('output'), t('tokens/s'), t('tokens/s each'), 'TTFT p50', 'p90', 'p99 ms', 'ITL p50', 'p90', 'p99 ms'];

// A form whose button starts some work, and then stops it.
class Run {
  constructor(id, words, work) {
    this.form = find(id);
    this.button = this.form.querySelector('button');
    this.words = words;
    this.abort = null;
    this.form.addEventListener('submit', (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.#start(work);
    });
  }

  async #start(work) {
    this.abort = new AbortController();
    this.button.textContent = t('Stop');
    try {
      await work(this.abort.signal);
    } catch (error) {
      if (!this.abort.signal.aborted) notify(error.message);
    }
    this.abort = null;
    this.button.textContent = this.words;
  }
}

export class Workbench {
  constructor(api) {
    this.api = api;
    this.known = '';
    new Run('measure', t('Measure'), (signal) => this.#measure(signal));
    new Run('compare', t('Compare'), (signal) => this.#compare(signal));
  }

  // The models that can be chosen.
  show(models) {
    const ids = models.filter(({ kind = 'chat' }) => kind === 'chat').map(({ id }) => id);
    if (this.known === ids.join()) return;
    const isFirst = !this.known;
    this.known = ids.join();
    for (const select of document.querySelectorAll('select.model')) {
      const { value } = select;
      select.replaceChildren(...ids.map((id) => element('option', { value: id }, id)));
      if (ids.includes(value)) select.value = value;
    }
    if (isFirst && ids.length > 1) find('compare-b').value = ids[1];
  }

  async #measure(signal) {
    const levels = find('measure-streams').value.split(',').map(Number).filter((streams) => streams > 0);
    const plan = { model: find('measure-model').value, prompt: find('measure-prompt').valueAsNumber, output: find('measure-output').valueAsNumber, levels };
    const [out, figures] = [find('measure-result'), []];
    out.replaceChildren(element('p', { class: 'hint', role: 'status' }, t('Measuring…')));
    try {
      for await (const level of measured(this.api, plan, signal)) {
        figures.push(level);
        out.replaceChildren(tableOf(figures), plotsOf(figures));
      }
    } finally {
      if (figures.length === 0) out.replaceChildren();
    }
  }

  async #compare(signal) {
    const sides = ['a', 'b'].map((side) => ({ ...fieldsOf(find(`compare-${side}-fields`)), model: find(`compare-${side}`).value }));
    const prompts = find('compare-prompts').value.split('\n').map((line) => line.trim()).filter(Boolean);
    const out = find('compare-result');
    const head = sides.map(({ model }, at) => element('th', { scope: 'col' }, `${'AB'[at]}: ${model}`));
    const body = element('tbody');
    out.replaceChildren(scrolling(t('Comparison'), element('table', {}, element('thead', {}, element('tr', {}, element('th', { scope: 'col' }, t('Prompt')), ...head)), body)));
    const all = [[], []];
    for (const prompt of prompts) {
      const cells = sides.map(() => element('td'));
      body.append(element('tr', {}, element('th', { scope: 'row' }, prompt), ...cells));
      for (const [at, side] of sides.entries()) {
        const request = { max_tokens: 256, ...side, messages: [{ role: 'user', content: prompt }] };
        const sample = await timed(this.api, request, signal, ({ text, thinking }) => (cells[at].textContent = text || thinking));
        cells[at].append(element('p', { class: 'hint' }, factsOf([sample])));
        all[at].push(sample);
      }
    }
    body.append(element('tr', {}, element('th', { scope: 'row' }, t('All')), ...all.map((samples) => element('td', {}, factsOf(samples)))));
  }
}

function factsOf(samples) {
  const output = samples.reduce((total, sample) => total + sample.output, 0);
  const seconds = samples.reduce((total, { started, ended }) => total + (ended - started) / 1000, 0);
  const first = samples.reduce((total, { started, ended, arrivals }) => total + ((arrivals[0] ?? ended) - started) / 1000, 0) / Math.max(1, samples.length);
  return [tokens(output), t('{n} tokens/s', { n: speed(output / seconds) }), t('first token {seconds} s', { seconds: decimal(first, 2) })].join(' · ');
}

// The fields of requests that a side adds.
function fieldsOf(field) {
  if (!field.value.trim()) return {};
  try {
    const fields = JSON.parse(field.value);
    if (fields?.constructor === Object) return fields;
  } catch {
    // Said below.
  }
  throw new Error(t('Fields of requests are a JSON object, such as {"temperature": 0}.'));
}

function tableOf(figures) {
  const milliseconds = (values) => (values ?? []).map((value) => decimal(value, 1));
  const rows = figures.map((each) => [
    ...[each.streams, each.done, each.failed, Math.round(each.prompt), Math.round(each.output)].map(count),
    ...[each.perSecond, each.each].map((value) => decimal(value, 1)),
    ...milliseconds(each.ttft),
    ...milliseconds(each.itl),
  ]);
  const head = element('tr', {}, ...HEAD.map((name) => element('th', { scope: 'col' }, name)));
  const body = rows.map((cells) => element('tr', {}, ...cells.map((cell) => element('td', {}, cell))));
  return scrolling(t('Measurements'), element('table', { class: 'figures' }, element('thead', {}, head), element('tbody', {}, ...body)));
}

function scrolling(label, table) {
  return element('div', { class: 'scrolling', tabindex: '0', role: 'region', 'aria-label': label }, table);
}

function plotsOf(figures) {
  const streams = figures.map((each) => each.streams);
  const quantiles = (name) => ['p50', 'p90', 'p99'].map((label, at) => ({ label, values: figures.map((each) => each[name]?.[at] ?? 0) }));
  return element(
    'div',
    { class: 'charts' },
    chart(t('Throughput, tokens/s'), streams, [{ label: '', values: figures.map((each) => each.perSecond) }]),
    chart(t('Time to first token, ms'), streams, quantiles('ttft')),
    chart(t('Time between tokens, ms'), streams, quantiles('itl')),
  );
}
