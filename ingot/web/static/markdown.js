// Markdown as DOM nodes, built one by one: no markup of the text is ever parsed by the browser.
//
// renderMarkdown(text) gives a fragment. LiveMarkdown shows a text that grows: blocks that can no longer change
// are left alone, only what follows them is drawn again.

import { parseBlocks } from './blocks.js';
import { CodeBlock } from './code.js';
import { element } from './element.js';
import { parseInline } from './inline.js';

const MAX_INLINE_DEPTH = 12;
const MAX_HEADING = 6;

export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  for (const block of parseBlocks(text.split('\n'))) fragment.append(renderBlock(block));
  return fragment;
}

export class LiveMarkdown {
  constructor(container) {
    this.container = container;
    this.sealed = 0; // characters of the text whose nodes are final
    this.live = []; // {block, source, node, view} of what may still change
  }

  // Shows `text`, which begins with every text shown before. Returns the blocks' nodes that became final.
  update(text, isComplete = false) {
    const lines = text.slice(this.sealed).split('\n');
    const blocks = parseBlocks(lines);
    this.#draw(blocks, lines);
    return this.#seal(isComplete ? blocks.length : settledBlocks(blocks, lines.length - 1), blocks, lines);
  }

  #draw(blocks, lines) {
    blocks.forEach((block, at) => {
      const source = lines.slice(block.line, block.end).join('\n');
      const shown = this.live[at];
      if (!shown) this.live.push(this.#add(block, source));
      else if (shown.source !== source || shown.block.type !== block.type) this.#redraw(shown, block, source);
    });
    for (const gone of this.live.splice(blocks.length)) gone.node.remove();
  }

  #add(block, source) {
    const { node, view } = liveBlock(block);
    this.container.append(node);
    return { block, source, node, view };
  }

  #redraw(shown, block, source) {
    const canGrow = shown.view && block.type === 'code' && block.language === shown.block.language;
    if (canGrow && source.startsWith(shown.source)) {
      shown.view.update(block.code, block.closed);
    } else {
      const { node, view } = liveBlock(block);
      shown.node.replaceWith(node);
      Object.assign(shown, { node, view });
    }
    Object.assign(shown, { block, source });
  }

  #seal(count, blocks, lines) {
    const final = this.live.splice(0, count);
    for (const { view, block } of final) view?.update(block.code);
    const end = count < blocks.length ? blocks[count].line : lines.length;
    if (count > 0) for (let at = 0; at < end; at += 1) this.sealed += lines[at].length + 1;
    return final.map(({ node }) => node);
  }
}

// How many blocks can no longer change, given that the lines before `lastLine` are complete.
function settledBlocks(blocks, lastLine) {
  let count = 0;
  while (count + 1 < blocks.length && blocks[count + 1].settled < lastLine) count += 1;
  return count;
}

function liveBlock(block) {
  if (block.type !== 'code') return { node: renderBlock(block), view: null };
  const view = new CodeBlock(block.language).update(block.code, block.closed);
  return { node: view.node, view };
}

function renderBlock(block) {
  return RENDER[block.type](block);
}

const RENDER = {
  paragraph: ({ text }) => element('p', {}, renderInline(text)),
  heading: ({ level, text }) => {
    // The page's own headings come first; an answer's start below them.
    const shown = Math.min(level + 2, MAX_HEADING);
    return element(`h${shown}`, { class: `level-${level}` }, renderInline(text));
  },
  rule: () => element('hr'),
  quote: ({ blocks }) => element('blockquote', {}, ...blocks.map(renderBlock)),
  code: ({ language, code }) => new CodeBlock(language).update(code).node,
  list: renderList,
  table: renderTable,
};

function renderList({ ordered, start, items, loose }) {
  const attributes = ordered && start !== 1 ? { start } : {};
  return element(ordered ? 'ol' : 'ul', attributes, ...items.map((item) => renderItem(item, loose)));
}

function renderItem({ checked, blocks }, loose) {
  const children = blocks.map((block) =>
    block.type === 'paragraph' && !loose ? renderInline(block.text) : renderBlock(block),
  );
  if (checked === null) return element('li', {}, ...children);
  const label = checked ? 'Done' : 'Not done';
  const box = element('input', { type: 'checkbox', disabled: true, checked, 'aria-label': label });
  return element('li', { class: 'task' }, box, ...children);
}

function renderTable({ align, head, rows }) {
  const cell = (tag) => (text, at) => element(tag, { class: `align-${align[at]}` }, renderInline(text));
  const body = rows.map((row) => element('tr', {}, ...row.map(cell('td'))));
  const table = element(
    'table',
    {},
    element('thead', {}, element('tr', {}, ...head.map(cell('th')))),
    element('tbody', {}, ...body),
  );
  return element('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' }, table);
}

// Elements beyond the depth limit, and links within links, are left out; their text stays.
function renderInline(text) {
  const root = document.createDocumentFragment();
  const path = [root];
  let links = 0;
  for (const event of parseInline(text)) {
    const parent = path.at(-1);
    if (event.open) {
      const isLink = event.href !== undefined;
      const skip = path.length > MAX_INLINE_DEPTH || (isLink && links > 0);
      const node = skip ? parent : inlineElement(event);
      if (!skip) parent.append(node);
      links += isLink ? 1 : 0;
      path.push(node);
    } else if (event.close) {
      links -= event.close === 'a' || event.close === 'img' ? 1 : 0;
      if (parent.href && !parent.hasChildNodes()) parent.append(parent.href);
      path.pop();
    } else if (event.text !== undefined) parent.append(event.text);
    else parent.append(event.line ? element('br') : element('code', {}, event.code));
  }
  return root;
}

function inlineElement({ open, href }) {
  if (href === undefined) return element(open);
  const attributes = { href, title: href, target: '_blank', rel: 'noopener noreferrer' };
  // An image is not fetched: the answer of a model must not make the browser call anyone.
  return element('a', open === 'img' ? { ...attributes, class: 'image' } : attributes);
}
