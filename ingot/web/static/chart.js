// Lines over numbers of streams, with their values.

import { element, svgElement } from './element.js';
import { decimal } from './facts.js';

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [260, 150, 8, 14, 18];

// `series` is [{label, values}], with a value for each number of `streams`.
export function chart(title, streams, series) {
  const most = Math.max(1e-9, ...series.flatMap(({ values }) => values));
  const x = (at) => LEFT + ((WIDTH - 60) * at) / Math.max(1, streams.length - 1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  const svg = svgElement('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', 'aria-label': title });
  for (const [at, { label, values }] of series.entries()) {
    const points = values.map((value, place) => `${x(place)},${y(value)}`).join(' ');
    const end = { x: x(values.length - 1) + 6, y: y(values.at(-1)) + 4 };
    svg.append(svgElement('polyline', { points, class: `line-${at}` }));
    svg.append(...values.map((value, place) => svgElement('circle', { cx: x(place), cy: y(value), r: 2.5, class: `line-${at}` })));
    svg.append(svgElement('text', end, `${label} ${decimal(values.at(-1), values.at(-1) < 10 ? 1 : 0)}`.trim()));
  }
  svg.append(...streams.map((number, place) => svgElement('text', { x: x(place), y: HEIGHT - 4, 'text-anchor': 'middle' }, String(number))));
  return element('figure', {}, element('figcaption', {}, title), svg);
}
