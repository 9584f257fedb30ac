// A block of code: its language, a copy button, and lines that can keep arriving.

import { copyFrom } from './clipboard.js';
import { element, iconButton } from './element.js';
import { highlighterFor } from './highlight.js';
import { t } from './translate.js';

// Beyond this many coloured lines the colour costs more than it helps; the rest is shown plain.
const MAX_COLOURED = 3000;

export class CodeBlock {
  constructor(language) {
    this.language = language;
    this.highlight = highlighterFor(language);
    this.lines = [];
    this.settled = 0;
    this.state = null;
    this.tail = null;
    this.code = element('code');
    this.node = this.#frame();
  }

  // Shows `lines`, which begin with those shown before; while the block is open, the last one may still change.
  update(lines, isClosed = true) {
    this.lines = lines;
    this.tail?.remove();
    this.tail = null;
    const final = isClosed ? lines.length : lines.length - 1;
    const fresh = document.createDocumentFragment();
    for (; this.settled < final; this.settled += 1) {
      const { nodes, state } = this.#line(lines[this.settled]);
      this.state = state;
      fresh.append(this.settled > 0 ? '\n' : '', ...nodes);
    }
    if (!isClosed && lines.length > 0) {
      this.tail = element('span', {}, this.settled > 0 ? '\n' : '', ...this.#line(lines.at(-1)).nodes);
      fresh.append(this.tail);
    }
    this.code.append(fresh);
    return this;
  }

  #line(line) {
    const text = line.endsWith('\r') ? line.slice(0, -1) : line;
    if (!this.highlight || this.settled >= MAX_COLOURED) return { nodes: [text], state: null };
    const { tokens, state } = this.highlight(text, this.state);
    const nodes = tokens.map(([kind, part]) => (kind ? element('span', { class: `tok-${kind}` }, part) : part));
    return { nodes, state };
  }

  #frame() {
    const copy = iconButton('copy', t('Copy code'), () => copyFrom(copy, this.lines.join('\n')));
    const wrap = iconButton('wrap', t('Wrap lines'), () => wrap.setAttribute('aria-pressed', String(node.classList.toggle('wrapped'))), {
      'aria-pressed': 'false',
    });
    const name = this.language || t('text');
    const node = element(
      'figure',
      { class: 'code' },
      element('figcaption', {}, element('span', { class: 'language' }, name), wrap, copy),
      element('pre', { tabindex: '0', role: 'region', 'aria-label': t('Code, {language}', { language: name }) }, this.code),
    );
    return node;
  }
}
