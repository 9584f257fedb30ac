"""The Markdown renderer and its neighbours, run in the browser that they are written for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selenium import webdriver

from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

# After which a script counts as hanging: far more than is needed, and far less than anything quadratic would take.
LIMIT_S = 10.0

HARNESS = """
const [markdown, { LiveMarkdown }, highlight, languages, sse] = await Promise.all(
  ['markdown', 'live', 'highlight', 'languages', 'sse'].map((name) => import(`/static/${name}.js`)),
);
window.rendered = (text) => {
  const box = document.createElement('div');
  box.append(markdown.renderMarkdown(text));
  return box;
};
window.grown = (pieces) => {
  const box = document.createElement('div');
  const live = new LiveMarkdown(box);
  let text = '';
  for (const piece of pieces) live.update((text += piece));
  live.update(text, true);
  return box;
};
window.depth = (node) => 1 + Math.max(0, ...[...node.children].map(window.depth));
window.coloured = (language, lines) => {
  const colour = highlight.highlighterFor(language);
  let state = null;
  return lines.map((line) => {
    const result = colour(line, state);
    state = result.state;
    return result.tokens;
  });
};
window.languageNames = [...Object.keys(languages.LANGUAGES), ...Object.keys(languages.ALIASES)];
window.eventsOf = (pieces) => {
  const parser = new sse.EventParser();
  return pieces.flatMap((piece) => [...parser.feed(piece)]);
};
"""


@pytest.fixture(scope="module")
def run(browser: webdriver.Chrome, scripted_server: ScriptedServer) -> Callable[..., Any]:
    """Runs a script on an empty page with the page's modules at hand. They keep nothing, so one page does for all."""
    browser.get(f"{scripted_server.url}/blank")
    browser.execute_async_script(f"(async () => {{ {HARNESS} }})().then(arguments[0])")
    browser.set_script_timeout(LIMIT_S)
    return browser.execute_script


CASES = [
    ("plain", "Hello", "<p>Hello</p>"),
    ("two paragraphs", "a\n\nb", "<p>a</p><p>b</p>"),
    ("line break", "a\nb", "<p>a<br>b</p>"),
    ("windows lines", "a\r\n\r\n- b\r\n", "<p>a</p><ul><li>b</li></ul>"),
    ("emphasis", "*a* _b_ **c** __d__ ***e***", "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
     "<em><strong>e</strong></em></p>"),
    ("nested emphasis", "**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("no emphasis in words", "snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
    ("emphasis inside a word", "un*frigging*believable", "<p>un<em>frigging</em>believable</p>"),
    ("emphasis by CJK marks", "**「強調」**です", "<p><strong>「強調」</strong>です</p>"),
    ("unclosed emphasis", "**a *b", "<p>**a *b</p>"),
    ("strike", "~~gone~~ ~kept~", "<p><del>gone</del> ~kept~</p>"),
    ("inline code", "`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
    ("unclosed code", "`a", "<p>`a</p>"),
    ("escapes", r"\*a\* \_b\_ \\", r"<p>*a* _b_ \</p>"),
    ("entities", "&lt;b&gt; &amp; &#65; &#x41; &unknown;", "<p>&lt;b&gt; &amp; A A &amp;unknown;</p>"),
    ("markup is text", "<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>"),
    ("the break tag", "a<br>b<br/>c", "<p>a<br>b<br>c</p>"),
    ("headings", "# a\n### b ###\n###### c", '<h3 class="level-1">a</h3><h5 class="level-3">b</h5>'
     '<h6 class="level-6">c</h6>'),
    ("underlined headings", "a\n===\nb\n---", '<h3 class="level-1">a</h3><h4 class="level-2">b</h4>'),
    ("no heading", "#hashtag", "<p>#hashtag</p>"),
    ("rules", "---\n***\n_ _ _", "<hr><hr><hr>"),
    ("quote", "> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    ("list", "- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("list after text", "x\n- a\n* b", "<p>x</p><ul><li>a</li></ul><ul><li>b</li></ul>"),
    ("ordered", "3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("a year is no list", "It was\n1986. A good year", "<p>It was<br>1986. A good year</p>"),
    ("nested", "- a\n  - b\n    1. c\n- d", "<ul><li>a<ul><li>b<ol><li>c</li></ol></li></ul></li><li>d</li></ul>"),
    ("nested by two", "1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("tabs", "- a\n\t- b", "<ul><li>a<ul><li>b</li></ul></li></ul>"),
    ("loose", "- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("item of two paragraphs", "- a\n\n  b", "<ul><li><p>a</p><p>b</p></li></ul>"),
    ("item going on", "- a\nb", "<ul><li>a<br>b</li></ul>"),
    ("tasks", "- [x] a\n- [ ] b", '<ul><li class="task"><input type="checkbox" disabled="" checked="" '
     'aria-label="Done">a</li><li class="task"><input type="checkbox" disabled="" aria-label="Not done">b</li></ul>'),
]  # fmt: skip


def test_markdown_becomes_the_expected_nodes(run: Callable[..., Any]) -> None:
    sources = [source for _, source, _ in CASES]
    got = run("return arguments[0].map((text) => rendered(text).innerHTML)", sources)
    wanted = {name: html for name, _, html in CASES}
    assert dict(zip(wanted, got, strict=True)) == wanted


LINKS = [
    ("[a](https://b.example/c)", [("a", "https://b.example/c")]),
    ("[a *b*](http://c.example)", [("a b", "http://c.example/")]),
    ("[a](<https://b.example/c d>)", [("a", "https://b.example/c%20d")]),
    ("[wiki](https://w.example/A_(b))", [("wiki", "https://w.example/A_(b)")]),
    ('[a](https://b.example "title")', [("a", "https://b.example/")]),
    ("[a](mailto:x@y.example)", [("a", "mailto:x@y.example")]),
    ("<https://a.example>", [("https://a.example", "https://a.example/")]),
    ("See https://a.example/b_c, or (https://d.example).", [
        ("https://a.example/b_c", "https://a.example/b_c"), ("https://d.example", "https://d.example/")]),
    ("![cat](https://a.example/cat.png)", [("cat", "https://a.example/cat.png")]),
    ("![](https://a.example/cat.png)", [("https://a.example/cat.png", "https://a.example/cat.png")]),
    ("[![badge](https://a.example/b.svg)](https://c.example)", [("badge", "https://c.example/")]),
    ("[a](javascript:alert(1))", []),
    ("[a](relative/path)", []),
    ("[a](#fragment)", []),
    ("[a](//b.example)", []),
    ("[a](https://)", []),
    ("[a] (https://)", []),
]  # fmt: skip


def test_links_go_where_they_say_and_only_to_the_web_or_mail(run: Callable[..., Any]) -> None:
    script = """
        return arguments[0].map((text) =>
          [...rendered(text).querySelectorAll('a')].map((a) => [a.textContent, a.href, a.title, a.rel, a.target]));
    """
    for (source, wanted), links in zip(LINKS, run(script, [source for source, _ in LINKS]), strict=True):
        shape = [(text, href, href, "noopener noreferrer", "_blank") for text, href in wanted]
        assert [tuple(link) for link in links] == shape, source


def test_a_link_that_is_refused_stays_readable(run: Callable[..., Any]) -> None:
    source = "[click](javascript:alert(1))"
    assert run("return rendered(arguments[0]).textContent", source) == source


def test_tables_keep_their_cells_and_alignment(run: Callable[..., Any]) -> None:
    source = "| a | b |\n|:--|--:|\n| 1 | `x\\|y` |\n| only |\n| 1 | 2 | 3 |\n\nafter"
    script = """
        const box = rendered(arguments[0]);
        const cells = (row) => [...row.cells].map((cell) => [cell.tagName, cell.className, cell.textContent]);
        return [...box.querySelectorAll('tr')].map(cells);
    """
    rows = run(script, source)
    assert rows[0] == [["TH", "align-start", "a"], ["TH", "align-end", "b"]]
    assert rows[1] == [["TD", "align-start", "1"], ["TD", "align-end", "x|y"]]
    assert [len(row) for row in rows] == [2, 2, 1, 2]


def test_fences_hold_code_as_it_is(run: Callable[..., Any]) -> None:
    source = "````md\n```\n\tinner *text*\n```\n````\n- x\n\n  ~~~py\n  y = 1\n  ~~~\n\n```\nopen"
    script = """
        return [...rendered(arguments[0]).querySelectorAll('figure')].map((figure) =>
          [figure.querySelector('.language').textContent, figure.querySelector('code').textContent]);
    """
    assert run(script, source) == [["md", "```\n\tinner *text*\n```"], ["py", "y = 1"], ["text", "open"]]


PATHOLOGICAL = {
    "math": "\\(\\[$$ " * 14_000,
    "math lines": "$$\n\\[x\n" * 14_000,
    "stars": "*" * 100_000,
    "spaced stars": "*a " * 33_000,
    "star and word": "a**b" + "c* " * 33_000,
    "marks in turn": "*_" * 50_000,
    "strong in pairs": "**a*" * 25_000,
    "nested strong": "*" * 50_000 + "a" + "*" * 50_000,
    "underscores": "_a" * 50_000,
    "openers without closers": "_a " * 16_000 + "b* " * 16_000,
    "tildes": "~~a" * 33_000,
    "open brackets": "[" * 100_000,
    "bracket pairs": "[" * 50_000 + "]" * 50_000,
    "image openers": "![" * 50_000,
    "half links": "[a](" * 25_000,
    "angled half links": "[a](<b" * 16_000,
    "half links with parentheses": "[a](b(" * 16_000,
    "links": "[a](https://b.example)" * 4_500,
    "quotes": ">" * 100_000,
    "spaced quotes": "> " * 50_000,
    "quote lines": ">\n" * 50_000,
    "deeper quotes": "\n".join(">" * depth + " x" for depth in range(440)),
    "ordered in ordered": "1. " * 33_000,
    "bullets": "- a\n" * 25_000,
    "empty bullets": "-\n" * 50_000,
    "deeper lists": "\n".join("  " * depth + "- x" for depth in range(310)),
    "quote and bullet": "> - " * 25_000,
    "ticks of all lengths": " ".join("`" * length for length in range(1, 440)),
    "tick pairs": "`a" * 50_000,
    "fences": "```\n" * 25_000,
    "unclosed fence": "```python\n" + "'" * 100_000,
    "code that opens comments": "```c\n" + "/* " * 33_000,
    "long code lines": "```js\n" + ("f(" * 1_900 + "\n") * 26,
    "headings": "# " + "#" * 100_000,
    "heading spaces": "# a" + " " * 100_000 + "b",
    "spaces": " " * 100_000 + "x",
    "bullet spaces": "- " + " " * 100_000 + "x",
    "blank lines": "\n" * 100_000,
    "rule with an end": "- " * 50_000 + "x",
    "pipes": "|" * 50_000 + "\n" + "|-" * 25_000,
    "wide table": "|" + "a|" * 300 + "\n|" + "-|" * 300 + "\n" + "|b\n" * 25_000,
    "addresses": "https://" * 12_500,
    "address with brackets": ("https://a.example/" + ")" * 2_000 + " ") * 49,
    "angles": "<" * 100_000,
    "half autolinks": "<https://a" * 10_000,
    "ampersands": "&" * 100_000,
    "backslashes": "\\" * 100_000,
    "backslash lines": "\\\n" * 50_000,
    "entities": "&#0;" * 25_000,
    "zero width": "\u200b" * 100_000,
    "lone surrogates are not sent": "\U0001f600" * 25_000,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_pathological_text_is_rendered_in_linear_time_and_bounded_depth(run: Callable[..., Any], name: str) -> None:
    script = """
        const box = rendered(arguments[0]);
        return { depth: depth(box), nodes: box.querySelectorAll('*').length };
    """
    got = run(script, PATHOLOGICAL[name])
    assert got["depth"] < 64
    assert got["nodes"] <= 1.5 * len(PATHOLOGICAL[name]) + 16


FRAGMENTS = [
    *("word", " ", "  ", "\n", "\n\n", "\t", "*", "**", "_", "`", "```", "~~", "~~~", "[", "](", ")", "<", ">", "> "),
    *("$$", "$$\n", "\\(", "\\)", "\\[", "\\]"),
    *("- ", "* ", "1. ", "2) ", "  - ", "    ", "# ", "## ", "---", "===", "| a | b |", "\n|---|---|\n", "| 1 | 2 |"),
    *("\n```python\n", "\n```\n", "x = 'y'\n", "/* ", "[l](https://a.example)", "![i](https://a.example/i.png)"),
    *("#", "|", "|-", "-", "=", "1", ".", "+", "word\n#", "word\n| a |\n|-"),
    *("[x](javascript:y)", "https://a.example/b.", "&lt;", "&", "\\", "<br>", "- [ ] ", "- [x] ", "\r\n", "é", "漢字"),
]
documents = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=40)


@given(pieces=documents, seed=st.integers(0, 2**16))
def test_a_growing_text_ends_as_the_same_nodes_as_the_whole_one(
    run: Callable[..., Any], pieces: list[str], seed: int
) -> None:
    text = "".join(pieces)
    cuts = sorted(random.Random(seed).sample(range(len(text) + 1), k=min(len(text), 12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    script = """
        const [text, parts] = arguments;
        const whole = rendered(text).innerHTML;
        return [grown(parts).innerHTML === whole, grown([...text]).innerHTML === whole, whole];
    """
    by_parts, by_characters, whole = run(script, text, parts)
    assert by_parts, whole
    assert by_characters, whole
    addresses = re.findall(r'(?:href|src|style|on\w+)="([^"]*)"', whole)
    assert all(address.startswith(("https://a.example", "#icon-")) for address in addresses)


def test_a_block_that_the_next_characters_take_back_is_not_kept(run: Callable[..., Any]) -> None:
    texts = ["word\n#tag", "word\n| a |\n|-x", "word\n```a`b", "- a\n\n-b", "word\n> a\n>b", "word\n---x", "a\n1.b"]
    script = "return arguments[0].map((text) => [grown([...text]).innerHTML, rendered(text).innerHTML])"
    for text, (by_characters, whole) in zip(texts, run(script, texts), strict=True):
        assert by_characters == whole, text


def test_colouring_changes_no_text_in_any_language(run: Callable[..., Any]) -> None:
    lines = [
        'def f(x: int) -> "Foo": return """open # not a comment',
        "still inside' \\",
        'closed""" /* begins',
        "ends */ let y = 0x1F + 1e-9; // `template ${x}",
        "<!-- a <b href='c' d>text</b> --> <e f=\"g\"/>",
        "key: value = [1, 2.5, true] # note $VAR ${VAR} --flag 'it''s' $",
        "+ added", "- removed", "@@ -1 +1 @@", "", "\t  ", "漢字 😀 \u0000",
    ]  # fmt: skip
    script = """
        const joined = (line) => line.map(([, text]) => text).join('');
        return languageNames.map((name) => [name, coloured(name, arguments[0]).map(joined)]);
    """
    for name, joined in run(script, lines):
        assert joined == lines, name


def test_an_unknown_language_is_left_plain(run: Callable[..., Any]) -> None:
    for name in ("brainfuck", "constructor", "__proto__", "toString"):
        html = run("return rendered(arguments[0]).querySelector('code').innerHTML", f"```{name}\nif x\n```")
        assert html == "if x"


@given(
    texts=st.lists(st.text(st.sampled_from("ab :\t\u00e9"), max_size=6), min_size=1, max_size=6),
    end=st.sampled_from(["\n", "\r\n"]),
    seed=st.integers(0, 2**16),
)
def test_server_sent_events_are_the_same_however_they_are_cut(
    run: Callable[..., Any], texts: list[str], end: str, seed: int
) -> None:
    stream = "".join(
        f": alive{end}{end}event: e{end}data: {json.dumps(text)}{end}data: second{end}{end}" for text in texts
    )
    cuts = sorted(random.Random(seed).sample(range(len(stream) + 1), k=min(len(stream), 10)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    wanted = [{"event": "e", "data": f"{json.dumps(text)}\nsecond"} for text in texts]
    assert run("return eventsOf(arguments[0])", parts) == wanted
