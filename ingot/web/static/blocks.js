// Markdown's block structure: lines of text in, a tree of plain objects out.
//
// The text is a model's and may be hostile, so every reader walks its lines once, and containers nest at most
// MAX_DEPTH deep; what lies deeper is read as a paragraph. The whole parse is therefore linear in the text.
//
// Every block carries `line` (its first line) and `end` (one past its last). `settled` is the line that made it
// what it is: the block before it can no longer change once that line is complete.

const MAX_DEPTH = 12;
const TAB_WIDTH = 4;

const FENCE = /^[ \t]*(`{3,}|~{3,})(.*)$/;
const HEADING = /^[ \t]*(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^[ \t]*>[ ]?/;
const MARKER = /^([ \t]*)([-+*]|(\d{1,9})([.)]))([ \t]+|$)/;
const UNDERLINE = /^[ \t]*(={2,}|-{3,})[ \t]*$/;
const DELIMITER_ROW = /^[ \t\r|:-]+$/;
const DELIMITER_CELL = /^:?-+:?$/;
const MATH = /^[ \t]*(?:(\$\$)|\\\[)/;
const TASK = /^\[([ xX])\][ \t]+/;

export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block =
      readFence(lines, at) ??
      readMath(lines, at) ??
      readHeading(lines, at) ??
      readRule(lines, at) ??
      readQuote(lines, at, depth) ??
      readList(lines, at, depth) ??
      readTable(lines, at) ??
      readParagraph(lines, at, depth);
    block.line = at;
    block.settled ??= at;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function readFence(lines, at) {
  const open = fence(lines[at]);
  if (!open) return null;
  const indent = indentOf(lines[at]);
  const code = [];
  let end = at + 1;
  while (end < lines.length && !closes(open, lines[end])) {
    code.push(dedent(lines[end], indent));
    end += 1;
  }
  const closed = end < lines.length;
  return { type: 'code', language: open.language, code, closed, end: closed ? end + 1 : end };
}

function fence(line) {
  const match = FENCE.exec(line);
  if (!match || (match[1][0] === '`' && match[2].includes('`'))) return null;
  return { mark: match[1], language: match[2].trim().split(/[\s,{]/, 1)[0] };
}

function closes(open, line) {
  const text = line.trim();
  return text.length >= open.mark.length && isRunOf(text, open.mark[0]);
}

// Displayed math, up to its end or a blank line. What never ends is shown as it was written.
function readMath(lines, at) {
  const close = mathClose(lines[at]);
  if (!close) return null;
  const tex = [];
  let rest = lines[at].trim().slice(2);
  for (let end = at + 1; ; end += 1) {
    const isLast = rest.trimEnd().endsWith(close);
    tex.push(isLast ? rest.trimEnd().slice(0, -2) : rest);
    const source = () => lines.slice(at, end).join('\n');
    if (isLast) return { type: 'math', tex: tex.join('\n').trim(), source: source(), end };
    if (end === lines.length || isBlank(lines[end])) return { type: 'math', tex: null, source: source(), end };
    rest = lines[end];
  }
}

// What ends the displayed math that this line begins; null where it begins none, or text follows on the same line.
function mathClose(line) {
  const open = MATH.exec(line);
  if (!open) return null;
  const close = open[1] ?? '\\]';
  const inside = line.trim().slice(2);
  const at = inside.indexOf(close);
  return at < 0 || (at === inside.length - 2 && at > 0) ? close : null;
}

function readHeading(lines, at) {
  const match = HEADING.exec(lines[at]);
  if (!match) return null;
  let text = lines[at].slice(match[0].length).trim();
  let last = text.length;
  while (last > 0 && text[last - 1] === '#') last -= 1;
  if (last === 0 || text[last - 1] === ' ') text = text.slice(0, last).trimEnd();
  return { type: 'heading', level: match[1].length, text, end: at + 1 };
}

function readRule(lines, at) {
  return isRule(lines[at]) ? { type: 'rule', end: at + 1 } : null;
}

function isRule(line) {
  const text = line.trimStart();
  if (text[0] !== '-' && text[0] !== '*' && text[0] !== '_') return false;
  const marks = text.replace(/[ \t\r]/g, '');
  return marks.length >= 3 && isRunOf(marks, marks[0]);
}

function readQuote(lines, at, depth) {
  if (depth >= MAX_DEPTH || !QUOTE.test(lines[at])) return null;
  const inner = [];
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) {
    inner.push(lines[end].replace(QUOTE, ''));
    end += 1;
  }
  return { type: 'quote', blocks: parseBlocks(inner, depth + 1), end };
}

function readList(lines, at, depth) {
  const first = marker(lines[at]);
  if (depth >= MAX_DEPTH || !first) return null;
  const list = { type: 'list', ordered: first.number !== null, start: first.number, items: [], loose: false };
  let end = at;
  for (let next = first; next && next.kind === first.kind && !isRule(lines[end]); ) {
    const item = readItem(lines, end, next, depth);
    const followed = item.end < lines.length ? marker(lines[item.end]) : null;
    list.loose ||= item.hasGap || (item.endsInBlank && followed?.kind === first.kind);
    list.items.push(item);
    end = item.end;
    next = followed;
  }
  return { ...list, end };
}

function readItem(lines, at, mark, depth) {
  const content = [lines[at].slice(mark.width)];
  let hasGap = false;
  let blanks = 0;
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    if (isBlank(lines[end])) {
      blanks += 1;
    } else if (isInside(lines[end], mark) || (blanks === 0 && isPlain(lines[end], depth))) {
      hasGap ||= blanks > 0;
      for (; blanks > 0; blanks -= 1) content.push('');
      content.push(dedent(lines[end], mark.column));
    } else break;
  }
  const source = content.join('\n');
  const task = TASK.exec(content[0]);
  if (task) content[0] = content[0].slice(task[0].length);
  const checked = task ? task[1] !== ' ' : null;
  return { source, checked, blocks: parseBlocks(content, depth + 1), hasGap, endsInBlank: blanks > 0, end };
}

// Whether a line can only go on with the paragraph above it.
function isPlain(line, depth) {
  return marker(line) === null && !startsBlock(line, depth);
}

// Models often indent a nested list by two columns below "1. ", which strictly would need three.
function isInside(line, mark) {
  const indent = indentOf(line);
  return indent >= mark.column || (indent >= mark.indent + 2 && marker(line) !== null);
}

function marker(line) {
  const match = MARKER.exec(line);
  if (!match) return null;
  const indent = indentOf(line);
  const space = match[5].length >= 1 && match[5].length <= TAB_WIDTH ? match[5].length : 1;
  const width = match[1].length + match[2].length;
  return {
    kind: match[4] ?? match[2],
    number: match[3] === undefined ? null : Number(match[3]),
    indent,
    column: indent + match[2].length + space,
    width: width + space,
    isEmpty: line.length <= width + match[5].length,
  };
}

function readTable(lines, at) {
  const align = tableAlignment(lines, at);
  if (!align) return null;
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes('|') && !isBlank(lines[end])) {
    rows.push(cells(lines[end]).slice(0, align.length));
    end += 1;
  }
  return { type: 'table', align, head: cells(lines[at]), rows, end, settled: at + 1 };
}

function tableAlignment(lines, at) {
  const line = lines[at + 1];
  if (line === undefined || !lines[at].includes('|') || !DELIMITER_ROW.test(line)) return null;
  const marks = cells(line);
  if (marks.length !== cells(lines[at]).length) return null;
  if (!marks.every((mark) => DELIMITER_CELL.test(mark))) return null;
  return marks.map((mark) => {
    if (mark.endsWith(':')) return mark.startsWith(':') ? 'center' : 'end';
    return 'start';
  });
}

function cells(line) {
  let text = line.trim();
  if (text.startsWith('|')) text = text.slice(1);
  if (text.endsWith('|') && !text.endsWith('\\|')) text = text.slice(0, -1);
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll('\\|', '|'));
}

function readParagraph(lines, at, depth) {
  const text = [lines[at].trim()];
  let end = at + 1;
  for (; end < lines.length && !isBlank(lines[end]); end += 1) {
    const underline = UNDERLINE.exec(lines[end]);
    if (underline) {
      return { type: 'heading', level: underline[1][0] === '=' ? 1 : 2, text: text.join('\n'), end: end + 1 };
    }
    if (startsBlock(lines[end], depth) || tableAlignment(lines, end)) break;
    text.push(lines[end].trim());
  }
  return { type: 'paragraph', text: text.join('\n'), end };
}

// Whether a line ends the paragraph above it. "1986. A good year" inside a sentence does not.
function startsBlock(line, depth) {
  if (fence(line) || HEADING.test(line) || isRule(line) || mathClose(line)) return true;
  if (depth >= MAX_DEPTH) return false;
  if (QUOTE.test(line)) return true;
  const mark = marker(line);
  return mark !== null && !mark.isEmpty && (mark.number === null || mark.number === 1);
}

function isBlank(line) {
  return line.trim() === '';
}

function isRunOf(text, char) {
  for (let at = 0; at < text.length; at += 1) if (text[at] !== char) return false;
  return true;
}

function indentOf(line) {
  let column = 0;
  for (let at = 0; at < line.length; at += 1) {
    if (line[at] === ' ') column += 1;
    else if (line[at] === '\t') column += TAB_WIDTH - (column % TAB_WIDTH);
    else break;
  }
  return column;
}

function dedent(line, columns) {
  let column = 0;
  let at = 0;
  while (column < columns && (line[at] === ' ' || line[at] === '\t')) {
    column += line[at] === '\t' ? TAB_WIDTH - (column % TAB_WIDTH) : 1;
    at += 1;
  }
  return at === 0 ? line : ' '.repeat(Math.max(0, column - columns)) + line.slice(at);
}
