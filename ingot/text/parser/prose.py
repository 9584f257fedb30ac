"""Content and thinking: the text of an answer that is no call.

`ProseWriter` emits text, without the white space that only separates markers, and tracks fenced code and JSON strings.

`ThinkingReader` reads a thinking part, and the calls of an answer that never leaves it, or has nothing after it. Some
models call a tool amid their thinking and end there, some right after it. Others write down in thinking what they might
call, close it, and answer. Only what follows distinguishes these, so text is held back from the first marker on that
may begin a call. An answer after the closing tag makes all of it thinking. Without one, a complete call of one of the
tools that begins a line is a call; within a line it is one if its markers are unmistakable and not quoted, in an answer
that was not cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ingot.text.parser.calls import CallReader
from ingot.text.parser.events import CallEventEmitter, FormMismatch
from ingot.text.parser.reader import Steps, TextReader, make_markers
from ingot.text.tool_formats.format import CallForm, Name

TOOL_NAME_WITHIN = 512
"""Characters from a marker on, within which a call names its tool: a marker without is not waited for."""


@dataclass(frozen=True, slots=True)
class CallOpening:
    """What a marker begins: calls of these forms, which stand behind it, or with it (not `opened`)."""

    forms: tuple[CallForm, ...]
    opened: bool

    @property
    def unmistakable(self) -> tuple[CallForm, ...]:
        """The forms that examples do not use: all but JSON between plain tags."""
        return tuple(form for form in self.forms if _is_unmistakable(form))


def _is_unmistakable(form: CallForm) -> bool:
    special = any(isinstance(part, str) and "|" in part for part in form.opening[:1])
    return special or any(isinstance(part, Name) for part in form.call)


@dataclass
class ThinkingReader:
    close: str
    openings: Mapping[str, CallOpening]
    names: frozenset[str]  # of the tools
    reader: TextReader
    calls: CallReader
    emitter: CallEventEmitter
    reasoning: ProseWriter
    is_silent: Callable[[], bool]  # whether there is neither text nor a call outside of thinking so far

    def read(self) -> Steps[bool]:
        """Up to the closing tag, which is passed, or to the answer's end. Whether the part was closed."""
        reader, reasoning = self.reader, self.reasoning
        wanted = make_markers(self.close, *self.openings)
        while (marker := (yield from reader.scan(wanted, reasoning.write))) is not None:
            if marker == self.close:
                reader.advance(reader.at + len(marker))
                return True
            if self._forms(marker):
                ahead = yield from reader.ahead(TOOL_NAME_WITHIN)
                if any(name in ahead for name in self.names):
                    return (yield from self._undecided())
            reasoning.write(reader.advance(reader.at + 1))
        reasoning.finish()
        return False

    def _forms(self, marker: str) -> tuple[CallForm, ...]:
        """Those of which a call may begin with the marker where it stands."""
        opening = self.openings[marker]
        if self.reasoning.at_line_start:
            return opening.forms
        return () if self.reasoning.quotes or self.reader.cut else opening.unmistakable

    def _undecided(self) -> Steps[bool]:
        """The remainder of a part in which a call may begin. Whether it was closed."""
        reader = self.reader
        pending: list[str] = []
        closed = (yield from reader.scan(make_markers(self.close), pending.append)) is not None
        if closed and (yield from self._answers()):
            self.reasoning.write("".join(pending))
            reader.advance(reader.at + len(self.close))
            return True
        if closed:
            reader.drop_remaining()
        reader.unread("".join(pending))
        self.emitter.require_whole_calls(self.reasoning.restart)
        yield from self._with_calls()
        if not closed:
            self.reasoning.finish()
        return closed

    def _answers(self) -> Steps[bool]:
        """Whether there is an answer behind the closing tag, which comes next, or was before, or would have come."""
        reader = self.reader
        if not self.is_silent():
            return True
        reader.start_lookahead()
        reader.advance(reader.at + len(self.close))
        yield from reader.gap()
        ended = reader.at == len(reader.text) and not reader.cut
        reader.undo_lookahead()
        return not ended

    def _with_calls(self) -> Steps[None]:
        reader, reasoning = self.reader, self.reasoning
        while (marker := (yield from reader.scan(make_markers(*self.openings), reasoning.write))) is not None:
            if forms := self._forms(marker):
                yield from self._section(marker, forms)
            else:
                reasoning.write(reader.advance(reader.at + 1))

    def _section(self, marker: str, forms: tuple[CallForm, ...]) -> Steps[None]:
        reader, opened = self.reader, self.openings[marker].opened
        reader.record()
        reader.advance(reader.at + (len(marker) if opened else 0))
        with suppress(FormMismatch):
            yield from self.calls.section(forms, opened=opened, only_known=True)
        self.reasoning.write(reader.recorded())


_SPACE = " \t\r\n"
_JSON_SIGNS = re.compile(r'\\.|\\\Z|["\n]', re.DOTALL)


class _JsonStringTracker:
    """Follows a text that may be a JSON document, and knows whether what comes next is within a string of it."""

    def __init__(self) -> None:
        self.inside = False
        self._is_json: bool | None = None  # it begins with a bracket
        self._escape = ""  # half of one

    def write(self, text: str) -> None:
        if self._is_json is None and (begins := text.lstrip(_SPACE)[:1]):
            self._is_json = begins in "{["
        if not self._is_json:
            return
        text = self._escape + text
        self._escape = ""
        for sign in _JSON_SIGNS.findall(text):
            if sign == "\\":
                self._escape = sign
            else:
                self.inside = not self.inside if sign == '"' else self.inside and sign != "\n"


class ProseWriter:
    """Emits text as it comes, except for white space next to a marker: models are trained to write line breaks around
    tags and calls, and templates write them again.

    White space is held back until it is clear what it is. If text follows, it is emitted. If a marker follows
    (`restart`), it is dropped, unless more text comes later, which it then separates from the text before the marker.
    If the answer ends (`finish`), it is emitted if there was text since the last marker.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._fences = CodeFences()
        self._space: list[str] = []
        self._between = ""  # white space that stood before the last markers, with text before it
        self._silent = True  # nothing has gone out yet
        self._after_marker = False
        self.blank = True  # nothing but white space since the beginning or the last marker
        self.at_line_start = True  # nothing but white space since the last line break
        self._first = self._last = ""  # the line's first and last characters, white space aside
        self._spaced = True  # white space is what was written last
        self._json = _JsonStringTracker()

    @property
    def fenced(self) -> bool:
        """Whether the line stands within fenced code."""
        return self._fences.open

    @property
    def quotes(self) -> bool:
        """Whether what comes next is quoted: as code, in quotes, or in a quoted line."""
        return self.fenced or self._first == ">" or self._last in tuple("`'\"“‘«")

    @property
    def attached(self) -> bool:
        """Whether what comes next stands right behind a word or a sentence, as what is shown does not."""
        ends_sentence = self._last.isalnum() or self._last in tuple(".!?:;…。！？：；")
        return ends_sentence and not self._spaced and not self.quotes

    @property
    def in_json_string(self) -> bool:
        return self._json.inside

    @property
    def silent(self) -> bool:
        """Whether no text was emitted yet."""
        return self._silent

    def write(self, text: str) -> None:
        if not text:
            return
        self._follow_lines(text)
        self._json.write(text)
        body = text.rstrip(_SPACE)
        if body:
            self._emit(self._leading(body) + body.lstrip(_SPACE))
            self._space.clear()
            self.blank = self._silent = False
        self._space.append(text[len(body) :])

    def restart(self) -> None:
        if not self._silent and not self._between:
            self._between = "".join(self._space)
        self._space.clear()
        self._fences.end_line()
        self._first = self._last = ""
        self._json = _JsonStringTracker()
        self._after_marker = self.blank = self.at_line_start = True

    def finish(self) -> None:
        pending = "".join(self._space)
        if pending and not (self.blank and self._after_marker):
            self._emit(pending)
        self._space.clear()

    def _leading(self, body: str) -> str:
        """The white space that goes out before `body`."""
        space = "".join(self._space) + body[: len(body) - len(body.lstrip(_SPACE))]
        if not (self.blank and self._after_marker):
            return space
        leading = "" if self._silent else self._between or space
        self._between = ""
        return leading

    def _follow_lines(self, text: str) -> None:
        self._fences.write(text)
        line = text[text.rfind("\n") + 1 :]
        if "\n" in text:
            self._first = self._last = ""
        self._spaced = text[-1] in _SPACE
        if visible := line.strip(_SPACE):
            self._first, self._last = self._first or visible[0], visible[-1]
        self.at_line_start = not line.strip(_SPACE) and (self.at_line_start or "\n" in text)


_FENCE = "```"
_LINE_SPACE = " \t\r"


class CodeFences:
    """Follows text as it comes, and knows whether the line that is being written stands within a fence."""

    def __init__(self) -> None:
        self.open = False
        self._head = ""  # the line's first characters, white space aside: as many as may be a fence
        self._named = False  # something stands behind them
        self._quoted = False  # and backticks in it: then they set off code within a line

    def write(self, text: str) -> None:
        *lines, last = text.split("\n")
        for line in lines:
            self._go_on(line)
            self.end_line()
        self._go_on(last)

    def end_line(self) -> None:
        if self._head == _FENCE and not self._quoted:
            self.open = not self.open or self._named
        self._head, self._named, self._quoted = "", False, False

    def _go_on(self, piece: str) -> None:
        missing = len(_FENCE) - len(self._head)
        if missing:
            piece = piece if self._head else piece.lstrip(_LINE_SPACE)
            self._head, piece = self._head + piece[:missing], piece[missing:]
        behind = piece if self._named else piece.lstrip("`").strip(_LINE_SPACE)
        self._named = self._named or behind != ""
        self._quoted = self._quoted or "`" in behind
