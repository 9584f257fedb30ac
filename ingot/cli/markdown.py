"""Markdown on a terminal while it is generated: styled, and wrapped at words.

What is certain is shown at once. Only the characters that may begin a heading, a list, a table or a fence are held back
at the start of a line, and the markers of bold, italic and code until the next character. A word that outgrows its line
is taken back and written on the next one. Tables and code stay as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Final

BOLD, DIM, ITALIC, UNDERLINED, CYAN = "1", "2", "3", "4", "36"
PLAIN: Final = "\x1b[0m"
NARROWEST: Final = 20
TAB: Final = "    "
_UNDECIDED = re.compile(r" *(?:#{1,6}|[+>]|\d{1,9}[.)]?|[-*_`~][-*_`~ ]*)?")
_BLOCK = re.compile(r"( *)(?:(#{1,6}) |([-*+]) |(\d{1,9}[.)]) |(>)(?: |(?=[^ ])))")
_RULE = re.compile(r" *(?:-[- ]*-[- ]*-|\*[* ]*\*[* ]*\*|_[_ ]*_[_ ]*_)[-*_ ]*")
_FENCE = re.compile(r" *(`{3,}|~{3,})")


class MarkdownScreen:
    """`columns` is the terminal's width. Text is only wrapped, and has the style `base`, where it is not `rendered`."""

    def __init__(
        self, write: Callable[[str], object], columns: Callable[[], int], *, rendered: bool = True, base: str = ""
    ) -> None:
        self._write, self._columns, self._rendered, self._base = write, columns, rendered, base
        self._output: list[str] = []
        self._held = ""  # not shown yet: the start of a line, or a marker
        self._at_start = True
        self._verbatim = False  # for the rest of the line
        self._fence = ""  # that closes the code
        self._code = 0  # the length of the marker that closes inline code
        self._bold = self._italic = False
        self._heading = ""
        self._last = ""  # the last visible character of the line
        self._column, self._indent = 0, ""
        self._word: list[tuple[str, str]] = []  # its characters with their styles
        self._word_width = 0
        self._shown = ""  # the terminal's style

    def feed(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._end_line()
            elif self._at_start and self._rendered:
                self._begin_line(character)
            else:
                self._add(character)
        self._flush()

    def finish(self) -> None:
        """The text ended; the next one begins a line."""
        if self._held or self._column:
            self._end_line()
        self._style_as("")
        self._flush()

    def _flush(self) -> None:
        if self._output:
            self._write("".join(self._output))
            self._output.clear()

    # Lines

    def _begin_line(self, character: str) -> None:
        self._held += character
        if self._fence or _FENCE.match(self._held):
            if self._fence and not self._fence.startswith(self._held.strip()):
                self._replay(verbatim=True)
            return  # a fence is read to the end of its line
        if _UNDECIDED.fullmatch(self._held):
            return
        if (block := _BLOCK.match(self._held)) is not None:
            self._begin_block(block)
        else:
            self._replay(verbatim=self._held.lstrip().startswith("|"))

    def _begin_block(self, block: re.Match[str]) -> None:
        spaces, heading, bullet, number, _ = block.groups()
        rest, self._held, self._at_start = self._held[block.end() :], "", False
        if heading:
            self._heading = f"{BOLD};{UNDERLINED}" if len(heading) < 3 else BOLD
        else:
            mark = f"{spaces}{'•' if bullet else number or '│'} "
            self._put_unbroken(mark, DIM if not (bullet or number) else "")
            self._indent = mark if not (bullet or number) else " " * len(mark)
        for character in rest:
            self._add(character)

    def _replay(self, *, verbatim: bool) -> None:
        held, self._held, self._at_start, self._verbatim = self._held, "", False, verbatim
        for character in held:
            self._add(character)

    def _end_line(self) -> None:
        if self._at_start and self._held:
            if (fence := _FENCE.match(self._held)) and self._fence in ("", fence[1][: len(self._fence)]):
                self._fence = "" if self._fence else fence[1]
                self._put_unbroken(self._held, DIM)
                self._held = ""
            elif not self._fence and _RULE.fullmatch(self._held):
                self._put_unbroken("─" * min(40, self._width), DIM)
                self._held = ""
            else:
                self._replay(verbatim=bool(self._fence))
        self._resolve("\n")
        self._style_as("")
        self._output.append("\n")
        self._at_start, self._verbatim = True, False
        self._bold, self._italic, self._code, self._heading, self._last = False, False, 0, "", ""
        self._column, self._indent = 0, ""
        self._end_word()

    # Characters

    def _add(self, character: str) -> None:
        if self._verbatim or not self._rendered:
            self._put(character)
            return
        marker = self._held[:1]
        if marker and (character != marker or marker == "\\") and self._resolve(character):
            return
        if character in ("`" if self._code else "*_`\\"):
            self._held += character
        else:
            self._put(character)

    def _resolve(self, following: str) -> bool:
        """What a held marker means, now that the next character is known. True where that one is used up."""
        held, self._held = self._held, ""
        if not held:
            return False
        before, marker = self._last, held[0]
        opens = not following.isspace() and not before.isalnum()
        closes = bool(before) and not before.isspace()
        if marker == "\\":
            escaped = not following.isalnum() and not following.isspace()
            self._put(following if escaped else held)
            return escaped
        if marker == "`" and (len(held) == self._code or (not self._code and not following.isspace())):
            self._code = 0 if self._code else len(held)
        elif marker == "*" and len(held) <= 3 and (opens or closes) and not self._code:
            self._toggle(len(held), literal=held, opens=not following.isspace(), closes=closes, within=before.isalnum())
        elif held == "_" and (opens or (closes and not following.isalnum())) and not self._code:
            self._toggle(len(held), literal=held, opens=opens, closes=closes, within=False)
        else:
            self._put_all(held)
        return False

    def _toggle(self, count: int, *, literal: str, opens: bool, closes: bool, within: bool) -> None:
        """One marker is italic, two are bold. Within a word one of them opens nothing: it is a product."""
        bold, italic = count >= 2, count != 2
        active = (not bold or self._bold) and (not italic or self._italic)
        if (active and not closes) or (not active and (not opens or (within and italic))):
            self._put_all(literal)
            return
        self._bold ^= bold
        self._italic ^= italic

    def _put_all(self, text: str) -> None:
        for character in text:
            self._put(character)

    def _put(self, character: str) -> None:
        if character == "\t":
            self._put_all(TAB)
            return
        self._at_start = False
        width = character_width(character)
        if self._verbatim:
            self._put_unbroken(character, CYAN if self._fence else "")
            return
        if character == " " or width == 2:
            self._end_word()
        if character == " ":
            if self._column < self._width:
                self._emit(" ", 1)
            self._end_word()
        else:
            if self._column + width > self._width:
                self._wrap()
            self._emit(character, width)
            if width == 2:  # such scripts have no spaces: a line ends after any character
                self._end_word()
        self._last = character

    def _put_unbroken(self, text: str, style: str) -> None:
        self._style_as(style)
        self._output.append(text)
        self._column += sum(map(character_width, text))
        self._last = text[-1]
        self._end_word()

    def _emit(self, character: str, width: int) -> None:
        style = self._style
        self._style_as(style)
        self._output.append(character)
        self._word.append((style, character))
        self._column += width
        self._word_width += width

    def _wrap(self) -> None:
        """Take the word back and write it on a new line; one that is as long as a line goes on there."""
        if self._word_width >= self._width - len(self._indent):
            self._end_word()
        if self._word:
            self._output.append(f"\x1b[{self._word_width}D\x1b[K")
        self._style_as("")
        self._output.append("\n")
        self._style_as(DIM if self._indent.strip() else "")
        self._output.append(self._indent)
        for style, character in self._word:
            self._style_as(style)
            self._output.append(character)
        self._column = len(self._indent) + self._word_width

    def _end_word(self) -> None:
        self._word.clear()
        self._word_width = 0

    def _style_as(self, style: str) -> None:
        if style != self._shown:
            self._output.append(f"\x1b[0;{style}m" if style else PLAIN)
            self._shown = style

    @property
    def _style(self) -> str:
        styles = (self._base, self._heading, self._bold and BOLD, self._italic and ITALIC, self._code and CYAN)
        return ";".join(style for style in styles if style)

    @property
    def _width(self) -> int:
        return max(NARROWEST, self._columns() - 1)  # writing into the last column wraps on some terminals


def character_width(character: str) -> int:
    """The columns that a character takes."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
