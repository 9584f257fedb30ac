// Markdown inside a line: emphasis, code, links and line breaks, as a flat list of events.
//
// An event is {text}, {code}, {math, display}, {line: true}, {open: tag, href?} or {close: tag}; opens and closes are properly
// nested. Nothing here recurses, and every scan is either consumed, bounded or remembered, so that a hundred
// kilobytes of "*" or "[" cost a hundred kilobytes of work.

import { readTarget, safeUrl, trimAddress } from './links.js';

const SPECIAL = /[\\`*_~[\]!<&\n]|\$\$|https?:\/\//gi;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2048})>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"`|\\^{}*]{1,2048}/iy;
const LINE_BREAK = /<br\s{0,3}\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp));/iy;
const NAMED = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0' };

export function parseInline(text) {
  return new InlineParser(text).parse();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = [];
    this.runs = [];
    this.brackets = [];
    this.closers = closingTicks(text);
    this.unclosed = new Set(); // ends of math that do not come any more
  }

  parse() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(this.text);
      const next = found ? found.index : this.text.length;
      if (next > this.at) this.push(this.text.slice(this.at, next));
      this.at = next;
      if (found) this.special(found[0]);
    }
    this.matchRuns(0);
    return events(this.parts);
  }

  special(mark) {
    if (mark === '$$') this.math('$$', true);
    else if (mark.length > 1) this.bareLink();
    else if (mark === '\n') this.lineBreak(1);
    else if (mark === '\\') this.escape();
    else if (mark === '`') this.code();
    else if (mark === '[') this.openBracket(1);
    else if (mark === '!') this.text[this.at + 1] === '[' ? this.openBracket(2) : this.literal(1);
    else if (mark === ']') this.closeBracket();
    else if (mark === '<') this.angle();
    else if (mark === '&') this.entity();
    else this.run(mark);
  }

  push(text) {
    this.parts.push({ text });
  }

  literal(length) {
    this.push(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  lineBreak(length) {
    this.parts.push({ line: true });
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === '\n') return this.lineBreak(2);
    if (next === '(' || next === '[') return this.math(next === '(' ? '\\)' : '\\]', next === '[');
    if (next === undefined || !PUNCTUATION.test(next)) return this.literal(1);
    this.push(next);
    this.at += 2;
  }

  code() {
    const length = runLength(this.text, this.at);
    const end = this.closers.get(this.at);
    if (end === undefined) return this.literal(length);
    let code = this.text.slice(this.at + length, end).replaceAll('\n', ' ');
    if (code.length > 2 && code.startsWith(' ') && code.endsWith(' ') && code.trim()) code = code.slice(1, -1);
    this.parts.push({ code });
    this.at = end + length;
  }

  math(close, display) {
    const end = this.unclosed.has(close) ? -1 : this.text.indexOf(close, this.at + 2);
    if (end < 0) this.unclosed.add(close);
    const math = this.text.slice(this.at + 2, Math.max(end, this.at + 2)).trim();
    if (!math) {
      this.push(this.text.slice(this.at + (close === '$$' ? 0 : 1), this.at + 2));
      this.at += 2;
      return;
    }
    this.parts.push({ math, display, source: this.text.slice(this.at, end + 2) });
    this.at = end + 2;
  }

  entity() {
    const match = matchAt(ENTITY, this.text, this.at);
    if (!match) return this.literal(1);
    const point = match[1] ? Number(match[1]) : Number.parseInt(match[2] ?? '', 16);
    const char = match[3] ? NAMED[match[3].toLowerCase()] : character(point);
    this.push(char);
    this.at += match[0].length;
  }

  angle() {
    const line = matchAt(LINE_BREAK, this.text, this.at);
    if (line) return this.lineBreak(line[0].length);
    const match = matchAt(AUTOLINK, this.text, this.at);
    const href = match && safeUrl(match[1]);
    if (!href) return this.literal(1);
    this.link(href, match[1]);
    this.at += match[0].length;
  }

  bareLink() {
    const before = this.text[this.at - 1];
    const match = before === undefined || !/\w/.test(before) ? matchAt(BARE_LINK, this.text, this.at) : null;
    const address = match && trimAddress(match[0]);
    const href = address && safeUrl(address);
    if (!href) return this.literal(match ? match[0].length : 4);
    this.link(href, address);
    this.at += address.length;
  }

  link(href, label) {
    this.parts.push({ open: 'a', href }, { text: label }, { close: 'a' });
  }

  openBracket(length) {
    const part = { text: this.text.slice(this.at, this.at + length) };
    this.brackets.push({ part, image: length === 2, firstRun: this.runs.length });
    this.parts.push(part);
    this.at += length;
  }

  closeBracket() {
    const opener = this.brackets.pop();
    const target = opener && readTarget(this.text, this.at + 1);
    const href = target && safeUrl(target.address);
    if (!href) return this.literal(1);
    this.matchRuns(opener.firstRun);
    Object.assign(opener.part, { text: '', open: opener.image ? 'img' : 'a', href });
    this.parts.push({ close: opener.image ? 'img' : 'a' });
    if (!opener.image) this.brackets.length = 0; // a link holds no link
    this.at = target.end;
  }

  run(char) {
    const length = runLength(this.text, this.at);
    if (char === '~' && length !== 2) return this.literal(length);
    const before = this.text[this.at - 1] ?? ' ';
    const after = this.text[this.at + length] ?? ' ';
    const run = { char, length, left: length, opens: [], closes: [], ...flanks(char, before, after) };
    this.parts.push({ run });
    this.runs.push(run);
    this.at += length;
  }

  // Pairs the runs from `first` on and forgets them. `floors` remembers, for each kind of closer, below which
  // height of the stack no opener is left for it, so that a text of closers is not searched again and again.
  matchRuns(first) {
    const stack = [];
    const floors = new Map();
    for (let at = first; at < this.runs.length; at += 1) {
      const run = this.runs[at];
      if (run.canClose) closeRun(run, stack, floors);
      if (run.canOpen && run.left > 0) stack.push(run);
    }
    this.runs.length = first;
  }
}

function closeRun(closer, stack, floors) {
  const kind = `${closer.char}${closer.canOpen}${closer.length % 3}`;
  while (closer.left > 0) {
    const floor = floors.get(kind) ?? 0;
    let at = stack.length - 1;
    while (at >= floor && !pairs(stack[at], closer)) at -= 1;
    if (at < floor) {
      floors.set(kind, stack.length);
      return;
    }
    pair(stack[at], closer);
    stack.length = stack[at].left > 0 ? at + 1 : at;
    for (const [key, height] of floors) if (height > stack.length) floors.set(key, stack.length);
  }
}

function pairs(opener, closer) {
  if (opener.char !== closer.char) return false;
  if (!opener.canClose && !closer.canOpen) return true;
  const bothThirds = opener.length % 3 === 0 && closer.length % 3 === 0;
  return bothThirds || (opener.length + closer.length) % 3 !== 0;
}

function pair(opener, closer) {
  const width = opener.left >= 2 && closer.left >= 2 ? 2 : 1;
  const tag = closer.char === '~' ? 'del' : width === 2 ? 'strong' : 'em';
  opener.left -= width;
  closer.left -= width;
  opener.opens.push(tag);
  closer.closes.push(tag);
}

// Only ASCII punctuation counts: with CommonMark's wider rule, emphasis next to CJK punctuation fails.
function flanks(char, before, after) {
  const leftSolid = !/\s/.test(before);
  const rightSolid = !/\s/.test(after);
  const beforeMark = PUNCTUATION.test(before);
  const afterMark = PUNCTUATION.test(after);
  const left = rightSolid && (!afterMark || !leftSolid || beforeMark);
  const right = leftSolid && (!beforeMark || !rightSolid || afterMark);
  if (char !== '_') return { canOpen: left, canClose: right };
  return { canOpen: left && (!right || beforeMark), canClose: right && (!left || afterMark) };
}

function events(parts) {
  const list = [];
  const say = (text) => {
    const last = list.at(-1);
    if (last && last.text !== undefined) last.text += text;
    else if (text) list.push({ text });
  };
  for (const part of parts) {
    if (part.run) {
      for (const tag of part.run.closes) list.push({ close: tag });
      say(part.run.char.repeat(part.run.left));
      for (const tag of part.run.opens.reverse()) list.push({ open: tag });
    } else if (part.text !== undefined && !part.open) say(part.text);
    else list.push(part.open ? { open: part.open, href: part.href } : part);
  }
  return list;
}

// For each run of backticks that a later run of the same length closes: where that one starts.
function closingTicks(text) {
  const closers = new Map();
  const next = new Map();
  const runs = text.includes('`') ? [...text.matchAll(/`+/g)] : [];
  for (const { index, 0: ticks } of runs.reverse()) {
    if (next.has(ticks.length)) closers.set(index, next.get(ticks.length));
    next.set(ticks.length, index);
  }
  return closers;
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function character(point) {
  const isValid = point > 0 && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff);
  return isValid ? String.fromCodePoint(point) : '\ufffd';
}
