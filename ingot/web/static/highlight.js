// Light colouring of source code, a line at a time: a growing block only ever colours its last line again.
//
// A highlighter is a function (line, state) -> { tokens, state }: tokens are [kind, text] pairs that join to the
// line, state is what the next line needs to know (null, or what closes an open comment or string).

import { LANGUAGES, ALIASES } from './languages.js';

const MAX_LINE = 4000;

const built = new Map();

export function highlighterFor(language) {
  const lower = language.toLowerCase();
  const name = Object.hasOwn(ALIASES, lower) ? ALIASES[lower] : lower;
  if (!Object.hasOwn(LANGUAGES, name)) return null;
  if (!built.has(name)) built.set(name, build(LANGUAGES[name]));
  return built.get(name);
}

function build(language) {
  const colour = language.tokenize ?? words(language);
  return (line, state) => (line.length > MAX_LINE ? { tokens: [['', line]], state } : colour(line, state));
}

// The tokenizer for languages made of words, strings, numbers and comments, which is nearly all of them.
function words(language) {
  const pattern = tokenPattern(language);
  const closers = new Map(language.spans ?? []);
  return (line, state) => {
    const tokens = [];
    let at = 0;
    while (at < line.length) {
      if (state) {
        const end = spanEnd(line, at, state);
        push(tokens, state === '*/' || state === '-->' ? 'comment' : 'string', line.slice(at, end.at));
        at = end.at;
        state = end.closed ? null : state;
        continue;
      }
      pattern.lastIndex = at;
      const match = pattern.exec(line);
      const { text, kind, opens } = classify(match, line, language, closers);
      push(tokens, kind, text);
      at += text.length;
      state = opens;
    }
    return { tokens, state };
  };
}

function tokenPattern({ comments = [], spans = [], strings = '"\'', word = '[A-Za-z_$][\\w$]*' }) {
  const comment = comments.map((mark) => `${escape(mark)}.*`).join('|') || '(?!)';
  const span = spans.map(([open]) => escape(open)).join('|') || '(?!)';
  const quoted = (quote) => `${quote}(?:[^${quote}\\\\]|\\\\.)*(?:${quote}|\\\\?$)`;
  const string = [...strings].map(quoted).join('|') || '(?!)';
  const number = '(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)\\w*';
  return new RegExp(
    `(?<span>${span})|(?<comment>${comment})|(?<string>${string})|(?<number>${number})|(?<word>${word})|\\s+|.`,
    'uy',
  );
}

function classify(match, line, language, closers) {
  const text = match[0];
  const { span, comment, string, number, word } = match.groups;
  if (span !== undefined) {
    const closer = closers.get(text);
    return { text, kind: closer === '*/' || closer === '-->' ? 'comment' : 'string', opens: closer };
  }
  let kind = '';
  if (comment !== undefined) kind = 'comment';
  else if (string !== undefined) kind = isKey(line, match, language) ? 'name' : 'string';
  else if (number !== undefined) kind = 'number';
  else if (word !== undefined) kind = wordKind(line, match, language);
  return { text, kind, opens: null };
}

function wordKind(line, match, language) {
  const name = language.ignoreCase ? match[0].toLowerCase() : match[0];
  if (language.keywords?.has(name)) return 'keyword';
  if (language.constants?.has(name)) return 'number';
  if (/^[@$%]./.test(name) || isKey(line, match, language)) return 'name';
  const next = line[match.index + match[0].length];
  if (next === '(') return 'call';
  return language.types && /^[A-Z]\w*[a-z]/.test(name) ? 'type' : '';
}

function isKey(line, match, language) {
  return Boolean(language.key) && language.key.test(line.slice(match.index + match[0].length));
}

function spanEnd(line, at, closer) {
  for (let found = line.indexOf(closer, at); found >= 0; found = line.indexOf(closer, found + 1)) {
    if (line[found - 1] !== '\\' || closer === '*/') return { at: found + closer.length, closed: true };
  }
  return { at: line.length, closed: false };
}

function push(tokens, kind, text) {
  const last = tokens.at(-1);
  if (last && last[0] === kind) last[1] += text;
  else if (text) tokens.push([kind, text]);
}

function escape(text) {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, '\\$&');
}
