// Markdown that is still being written: blocks that can no longer change are left alone, and of the last one only
// the end is drawn again, so that the cost of a token does not grow with the answer.

import { parseBlocks } from './blocks.js';
import { CodeBlock } from './code.js';
import { renderBlock, renderItem, renderRow } from './markdown.js';

export class LiveMarkdown {
  constructor(container) {
    this.container = container;
    this.sealed = 0; // characters of the text whose nodes are final
    this.live = []; // {block, source, node, view} of what may still change
  }

  // Shows `text`, which begins with every text shown before. Returns the nodes of blocks that became final.
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
      else if (shown.source !== source || shown.block.type !== block.type) redraw(shown, block, source);
    });
    for (const gone of this.live.splice(blocks.length)) gone.node.remove();
  }

  #add(block, source) {
    const { node, view } = draw(block);
    this.container.append(node);
    return { block, source, node, view };
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

function draw(block) {
  if (block.type !== 'code') return { node: renderBlock(block), view: null };
  const view = new CodeBlock(block.language).update(block.code, block.closed);
  return { node: view.node, view };
}

function redraw(shown, block, source) {
  const isSameType = shown.block.type === block.type;
  if (!isSameType || !GROW[block.type]?.(shown, block, source)) {
    const fresh = draw(block);
    shown.node.replaceWith(fresh.node);
    Object.assign(shown, fresh);
  }
  Object.assign(shown, { block, source });
}

// How a node takes over the longer version of its block; false where it has to be drawn anew.
const GROW = {
  code({ view, block: before, source: old }, block, source) {
    if (block.language !== before.language || !source.startsWith(old)) return false;
    view.update(block.code, block.closed);
    return true;
  },

  list({ node, block: before }, block) {
    if (['ordered', 'start', 'loose'].some((name) => before[name] !== block[name])) return false;
    const isSame = (at) => before.items[at]?.source === block.items[at].source;
    replaceChanged(node, block.items, isSame, (item) => renderItem(item, block.loose));
    return true;
  },

  table({ node, block: before }, block) {
    if (!isSameRow(before.align, block.align) || !isSameRow(before.head, block.head)) return false;
    const isSame = (at) => at < before.rows.length && isSameRow(before.rows[at], block.rows[at]);
    replaceChanged(node.querySelector('tbody'), block.rows, isSame, (row) => renderRow(row, block.align));
    return true;
  },
};

function replaceChanged(parent, parts, isSame, render) {
  while (parent.childElementCount > parts.length) parent.lastElementChild.remove();
  const shown = [...parent.children];
  parts.forEach((part, at) => {
    if (at >= shown.length) parent.append(render(part));
    else if (!isSame(at)) shown[at].replaceWith(render(part));
  });
}

function isSameRow(before, after) {
  return before.length === after.length && before.every((cell, at) => cell === after[at]);
}
