// What highlight.js knows of each language. A new language is one entry here.
//
// comments: what starts one that runs to the line's end; spans: [opener, closer] of what may run over lines;
// strings: quote characters; key: what follows a name that is a key; types: capitalised names are types.

const set = (text) => new Set(text.trim().split(/\s+/));
const C_SPANS = [['/*', '*/']];
const C_CONSTANTS = set('true false null nullptr NULL None nil undefined NaN Infinity this self super');

export const LANGUAGES = {
  python: {
    comments: ['#'],
    spans: [['"""', '"""'], ["'''", "'''"]],
    word: '@?[A-Za-z_]\\w*',
    types: true,
    keywords: set(`
      and as assert async await break case class continue def del elif else except finally for from
      global if import in is lambda match nonlocal not or pass raise return try type while with yield
    `),
    constants: set('True False None self cls NotImplemented Ellipsis'),
  },
  javascript: {
    comments: ['//'],
    spans: [...C_SPANS, ['`', '`']],
    types: true,
    keywords: set(`
      abstract any as async await boolean break case catch class const continue debugger declare default
      delete do else enum export extends finally for from function get if implements import in
      instanceof interface keyof let namespace new never number object of private protected public
      readonly return satisfies set static string switch symbol throw try type typeof unknown var void
      while with yield
    `),
    constants: C_CONSTANTS,
  },
  json: { comments: ['//'], strings: '"', key: /^\s*:/, constants: set('true false null') },
  shell: {
    comments: ['#'],
    word: '\\$[\\w@#?*!$-]+|\\$\\{[^}]*\\}|[A-Za-z_./~-][\\w./:@%+=~-]*',
    keywords: set(`
      if then else elif fi for in do done while until case esac function return exit export local
      readonly set unset source alias cd echo printf test sudo eval exec trap shift
    `),
  },
  c: {
    comments: ['//'],
    spans: C_SPANS,
    word: '#?[A-Za-z_]\\w*',
    types: true,
    keywords: set(`
      #include #define #ifdef #ifndef #endif #if #else #elif #pragma #undef alignas alignof asm auto
      bool break case catch char class co_await co_return co_yield concept const constexpr continue
      decltype default delete do double else enum explicit export extern final float for friend goto if
      inline int long mutable namespace new noexcept operator override private protected public register
      requires restrict return short signed sizeof static static_assert static_cast struct switch
      template thread_local throw try typedef typename union unsigned using virtual void volatile while
      size_t uint8_t uint16_t uint32_t uint64_t int8_t int16_t int32_t int64_t
    `),
    constants: C_CONSTANTS,
  },
  java: {
    comments: ['//'],
    spans: [['"""', '"""'], ...C_SPANS],
    word: '@?[A-Za-z_]\\w*',
    types: true,
    keywords: set(`
      abstract as assert async await base bool boolean break byte case catch char class companion const
      continue data decimal default delegate do double dynamic else enum event explicit extends final
      finally fixed float for foreach fun get goto if implements implicit import in init inner
      instanceof int interface internal is lateinit lock long namespace native new object open operator
      out override package params private protected public readonly record ref return sbyte sealed set
      short sizeof static string struct suspend switch synchronized throw throws transient try typeof
      uint ulong using val var virtual void volatile when where while yield
    `),
    constants: C_CONSTANTS,
  },
  go: {
    comments: ['//'],
    spans: [...C_SPANS, ['`', '`']],
    types: true,
    keywords: set(`
      any bool break byte case chan complex64 complex128 const continue default defer else error
      fallthrough float32 float64 for func go goto if import int int8 int16 int32 int64 interface map
      package range return rune select string struct switch type uint uint8 uint16 uint32 uint64 uintptr
      var
    `),
    constants: set('true false nil iota'),
  },
  rust: {
    comments: ['//'],
    spans: C_SPANS,
    strings: '"',
    word: "'[a-z_]+(?!')|[A-Za-z_]\\w*!?",
    types: true,
    keywords: set(`
      as async await bool break char const continue crate dyn else enum extern f32 f64 fn for i8 i16 i32
      i64 i128 if impl in isize let loop match mod move mut pub ref return static str struct super trait
      type u8 u16 u32 u64 u128 union unsafe use usize where while
    `),
    constants: set('true false self Self None Some Ok Err'),
  },
  swift: {
    comments: ['//'],
    spans: [['"""', '"""'], ...C_SPANS],
    strings: '"',
    word: '@?[A-Za-z_]\\w*',
    types: true,
    keywords: set(`
      actor any as associatedtype async await break case catch class continue default defer deinit do
      else enum extension fallthrough fileprivate for func get guard if import in init inout internal is
      lazy let mutating nonisolated open operator override private protocol public repeat rethrows
      return set some static struct subscript switch throw throws try typealias var weak where while
    `),
    constants: set('true false nil self Self super'),
  },
  ruby: {
    comments: ['#'],
    word: '[@$:]{0,2}[A-Za-z_]\\w*[?!]?',
    types: true,
    keywords: set(`
      alias and begin break case class def defined? do else elsif end ensure for if in module next not
      or redo rescue retry return self super then undef unless until when while yield require
      require_relative attr_reader attr_accessor local function repeat
    `),
    constants: set('true false nil'),
  },
  lua: {
    comments: ['--'],
    spans: [['[[', ']]']],
    keywords: set(`
      and break do else elseif end for function goto if in local not or repeat return then until while
    `),
    constants: set('true false nil'),
  },
  php: {
    comments: ['//', '#'],
    spans: C_SPANS,
    word: '\\$?[A-Za-z_]\\w*',
    types: true,
    keywords: set(`
      abstract and array as break case catch class clone const continue declare default do echo else
      elseif enum extends final finally fn for foreach function global if implements include instanceof
      insteadof interface match namespace new or print private protected public readonly require
      require_once return static switch throw trait try use var while xor yield
    `),
    constants: set('true false null'),
  },
  sql: {
    comments: ['--'],
    spans: C_SPANS,
    ignoreCase: true,
    keywords: set(`
      add all alter and as asc begin between by case check column commit constraint create cross
      database default delete desc distinct drop else end exists explain foreign from full group having
      if in index inner insert intersect into is join key left like limit not null offset on or order
      outer over partition primary references returning right rollback select set table then transaction
      union unique update using values view when where with int integer text varchar boolean real
      numeric timestamp date serial bigint
    `),
    constants: set('true false'),
  },
  css: {
    spans: C_SPANS,
    word: '[@.#]?-{0,2}[A-Za-z][\\w-]*',
    key: /^\s*:(?!:)/,
    keywords: set('@media @import @keyframes @supports @layer @container @property @font-face'),
    constants: set('auto none inherit initial unset'),
  },
  yaml: {
    comments: ['#'],
    word: '[A-Za-z_][\\w.-]*',
    key: /^\s*:(?:\s|$)/,
    constants: set('true false null yes no on off'),
  },
  toml: {
    comments: ['#', ';'],
    spans: [['"""', '"""']],
    word: '[A-Za-z_][\\w.-]*',
    key: /^\s*=/,
    constants: set('true false'),
  },
  make: { comments: ['#'], word: '\\$[({][^)}]*[)}]|[A-Za-z_.][\\w.-]*', key: /^\s*[:?+]?=|^\s*:/ },
  dockerfile: {
    comments: ['#'],
    keywords: set(`
      FROM RUN CMD LABEL EXPOSE ENV ADD COPY ENTRYPOINT VOLUME USER WORKDIR ARG ONBUILD STOPSIGNAL
      HEALTHCHECK SHELL AS
    `),
  },
  diff: { tokenize: colourDiff },
  html: { tokenize: colourMarkup },
};

export const ALIASES = {
  py: 'python', python3: 'python', pycon: 'python', js: 'javascript', jsx: 'javascript', mjs: 'javascript',
  ts: 'javascript', tsx: 'javascript', typescript: 'javascript', jsonc: 'json', json5: 'json', jsonl: 'json',
  sh: 'shell', bash: 'shell', zsh: 'shell', console: 'shell', shellscript: 'shell', fish: 'shell',
  h: 'c', cpp: 'c', 'c++': 'c', cc: 'c', hpp: 'c', cuda: 'c', metal: 'c', objc: 'c',
  kotlin: 'java', kt: 'java', csharp: 'java', cs: 'java', 'c#': 'java', scala: 'java', golang: 'go', rs: 'rust',
  rb: 'ruby', postgresql: 'sql', postgres: 'sql', mysql: 'sql', sqlite: 'sql', scss: 'css', less: 'css',
  yml: 'yaml', ini: 'toml', conf: 'toml', makefile: 'make', docker: 'dockerfile', patch: 'diff',
  xml: 'html', svg: 'html', vue: 'html', svelte: 'html', htm: 'html',
};

function colourDiff(line) {
  const kind = { '+': 'added', '-': 'removed', '@': 'keyword' }[line[0]] ?? '';
  return { tokens: line ? [[kind, line]] : [], state: null };
}

const MARKUP = new RegExp(
  [
    '(?<comment><!--)',
    '(?<tag></?[A-Za-z][\\w:-]*|/?>)',
    '(?<string>"[^"]*"?|\'[^\']*\'?)',
    '(?<name>[A-Za-z_:@][\\w:.-]*)(?==)',
    '[A-Za-z_:@][\\w:.-]*',
    '[^<>"\'A-Za-z_:@/]+',
    '.',
  ].join('|'),
  'uy',
);

function colourMarkup(line, state) {
  const tokens = [];
  for (let at = 0; at < line.length; ) {
    if (state === '-->') {
      const found = line.indexOf('-->', at);
      const end = found < 0 ? line.length : found + 3;
      tokens.push(['comment', line.slice(at, end)]);
      at = end;
      state = found < 0 ? state : null;
      continue;
    }
    MARKUP.lastIndex = at;
    const { 0: text, groups } = MARKUP.exec(line);
    if (groups.comment) state = '-->';
    else if (groups.tag) state = text.endsWith('>') ? null : 'tag';
    tokens.push([markupKind(groups, state), text]);
    at += text.length;
  }
  return { tokens, state };
}

function markupKind(groups, state) {
  if (groups.comment) return 'comment';
  if (groups.tag) return 'keyword';
  if (state !== 'tag') return '';
  if (groups.string) return 'string';
  return groups.name ? 'name' : '';
}
