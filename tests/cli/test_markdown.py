"""Markdown on a terminal, however it is split."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest

from ingot.cli.markdown import MarkdownScreen, character_width

DOCUMENT = """\
# A *great* heading

Some **bold text** and *italic one* with `inline **code**` and a_snake_case name, 2 * 3 = 6 and 4*5*6.
- first item with a rather long text that has to wrap at words
  * nested **thing** here and more words to wrap around
10. ten is a number with a long line that wraps

> a quote that is long enough to need another line

| a | b |
|---|---|

```python
def f(x):
    return "**not bold**"  # a long line of code that stays

```
- - -
**Bold** start, ***both***, \\*escaped\\*, #no heading, 5 stars ***** and __init__.
東京は日本の首都であり世界最大級の都市圏を形成している。
averyveryveryveryverylongwordthatfitsonnolineatall and more"""
SHOWN = """\
A great heading

Some bold text and italic one with
inline **code** and a_snake_case name,
2 * 3 = 6 and 4*5*6.
• first item with a rather long text
  that has to wrap at words
  • nested thing here and more words to
    wrap around
10. ten is a number with a long line
    that wraps

│ a quote that is long enough to need
│ another line

| a | b |
|---|---|

```python
def f(x):
    return "**not bold**"  # a long line of code that stays

```
───────────────────────────────────────
Bold start, both, *escaped*, #no
heading, 5 stars ***** and __init__.
東京は日本の首都であり世界最大級の都市
圏を形成している。
averyveryveryveryverylongwordthatfitson
nolineatall and more
"""


@dataclass
class Terminal:
    """What a terminal of any width shows: its lines, and the style of each character."""

    rows: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    style: str = ""

    def write(self, text: str) -> None:
        for escape, final, character in re.findall(r"\x1b\[([\d;]*)([A-Za-z])|([^\x1b])", text):
            if character == "\n":
                self.rows.append([])
            elif character:
                self.rows[-1] += [(character, self.style), *[("", "")] * (character_width(character) - 1)]
            elif final == "m":
                self.style = escape.removeprefix("0").removeprefix(";")
            elif final == "D":
                del self.rows[-1][-int(escape) :]
            else:
                assert final == "K", escape

    @property
    def text(self) -> str:
        return "\n".join("".join(character for character, _ in row).rstrip() for row in self.rows)

    def styled(self, style: str) -> str:
        return "".join(character for row in self.rows for character, its in row if its == style)


def shown(document: str, pieces: list[int], **options: object) -> Terminal:
    terminal = Terminal()
    screen = MarkdownScreen(terminal.write, lambda: 40, **options)  # type: ignore[arg-type]
    begin = 0
    for size in pieces:
        screen.feed(document[begin : begin + size])
        begin += size
    screen.feed(document[begin:])
    screen.finish()
    return terminal


@pytest.mark.parametrize("seed", range(6))
def test_a_document_is_rendered_and_wrapped_however_it_is_split(seed: int) -> None:
    dice = random.Random(seed)
    pieces = [1] * len(DOCUMENT) if seed == 0 else [dice.randrange(1, 3 * seed) for _ in range(len(DOCUMENT) // seed)]
    terminal = shown(DOCUMENT, pieces)
    assert terminal.text == SHOWN
    assert terminal.styled("1").replace("\n", "") == "bold textthingBold"
    assert terminal.styled("3") == "italic one"
    assert terminal.styled("1;3") == "both" and terminal.styled("1;4;3") == "great"
    assert terminal.styled("36").startswith("inline **code**def f(x):    return")
    assert terminal.style == ""


def test_what_is_certain_is_shown_at_once() -> None:
    terminal = Terminal()
    screen = MarkdownScreen(terminal.write, lambda: 40)
    for piece, text in (
        ("On", "On"),
        ("ce *", "Once "),
        ("up", "Once up"),
        ("on*", "Once upon"),
        ("\n#", "Once upon\n"),
    ):
        screen.feed(piece)
        assert "\n".join("".join(character for character, _ in row) for row in terminal.rows) == text


def test_thinking_is_wrapped_and_not_rendered() -> None:
    terminal = shown("# Is *this* the way to do it, or is there any other?", [], rendered=False, base="2")
    assert terminal.text == "# Is *this* the way to do it, or is\nthere any other?\n"
    assert terminal.styled("2").startswith("# Is *this*")


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("", ""),
        ("*", "*\n"),
        ("**unclosed", "unclosed\n"),
        ("`", "`\n"),
        ("```", "```\n"),
        ("#", "#\n"),
        ("1.", "1.\n"),
        ("-", "-\n"),
        ("a\\", "a\\\n"),
        ("***", "─" * 39 + "\n"),
        ("_a", "a\n"),
        ("` `` ```", "` `` ```\n"),
        ("\n\n\n", "\n\n\n"),
    ],
)
def test_what_is_not_complete_at_the_end_is_shown(document: str, text: str) -> None:
    assert shown(document, [1] * len(document)).text == text
