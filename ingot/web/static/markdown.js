// Markdown as DOM nodes, built one by one: no markup of the text is ever parsed by the browser.

import { parseBlocks } from './blocks.js';
import { CodeBlock } from './code.js';
import { copyFrom } from './clipboard.js';
import { element, iconButton } from './element.js';
import { parseInline } from './inline.js';
import { mathView } from './math.js';
import { t } from './translate.js';

const MAX_INLINE_DEPTH = 12;
const MAX_HEADING = 6;

export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  for (const block of parseBlocks(text.split('\n'))) fragment.append(renderBlock(block));
  return fragment;
}

export function renderBlock(block) {
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
  math: ({ tex, source }) => element('p', {}, tex ? mathView(tex, source, true) : source),
  list: renderList,
  table: renderTable,
};

function renderList({ ordered, start, items, loose }) {
  const attributes = ordered && start !== 1 ? { start } : {};
  return element(ordered ? 'ol' : 'ul', attributes, ...items.map((item) => renderItem(item, loose)));
}

export function renderItem({ checked, blocks }, loose) {
  const children = blocks.map((block) =>
    block.type === 'paragraph' && !loose ? renderInline(block.text) : renderBlock(block),
  );
  if (checked === null) return element('li', {}, ...children);
  const label = checked ? t('Done') : t('Not done');
  const box = element('input', { type: 'checkbox', disabled: true, checked, 'aria-label': label });
  return element('li', { class: 'task' }, box, ...children);
}

function renderTable({ align, head, rows }) {
  const table = element(
    'table',
    {},
    element('thead', {}, renderRow(head, align, 'th')),
    element('tbody', {}, ...rows.map((row) => renderRow(row, align))),
  );
  const copy = iconButton('copy', t('Copy table'), () => copyFrom(copy, tabbed(table)));
  return element('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': t('Table') }, table, copy);
}

// A table as spreadsheets take it, with the source of formulas.
function tabbed(table) {
  const textOf = (cell) => {
    const plain = cell.cloneNode(true);
    for (const formula of plain.querySelectorAll('.math')) formula.replaceWith(formula.dataset.source);
    return plain.textContent.replaceAll(/\s+/g, ' ').trim();
  };
  return [...table.rows].map((row) => [...row.cells].map(textOf).join('\t')).join('\n');
}

export function renderRow(row, align, tag = 'td') {
  const cells = row.map((text, at) => element(tag, { class: `align-${align[at]}` }, renderInline(text)));
  return element('tr', {}, ...cells);
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
    else if (event.math) parent.append(mathView(event.math, event.source, event.display));
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
