// A line of numbers, newest at the right; its height is that of the largest.

import { svgElement } from './element.js';

export const SAMPLES = 60;

export function plot(values) {
  const top = Math.max(1, ...values);
  const first = SAMPLES - values.length;
  const points = values.map((value, at) => `${first + at},${(39 - (37 * value) / top).toFixed(1)}`);
  const line = svgElement('polyline', { points: points.join(' '), 'vector-effect': 'non-scaling-stroke' });
  const area = svgElement('polygon', { points: `${first},40 ${points.join(' ')} ${SAMPLES - 1},40` });
  const frame = { viewBox: `0 0 ${SAMPLES - 1} 40`, preserveAspectRatio: 'none', 'aria-hidden': 'true' };
  return svgElement('svg', frame, area, line);
}

// The newest values, with their plot drawn into a node.
export class History {
  constructor(node) {
    this.node = node;
    this.values = [];
  }

  add(value) {
    this.values = [...this.values, value].slice(-SAMPLES);
    this.node.replaceChildren(plot(this.values));
  }
}
