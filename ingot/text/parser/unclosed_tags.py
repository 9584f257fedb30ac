"""Closing tags that a model forgot: whether a value that holds the markers of calls goes on after them.

Models forget the closing tag of a value or of a call, above all between parallel calls. The value then seems to go on
through the next call. But a value may also be a text about calls, with whole calls in it. Only what follows
distinguishes the two: a text is closed by the tags of its own call, with the calls within it balanced; if these never
come, a tag was forgotten at the first marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from ingot.text.parser.events import FormMismatch
from ingot.text.parser.reader import Markers, Steps, TextReader, make_markers
from ingot.text.parser.values import TextValue
from ingot.text.tool_formats.format import (
    Arguments,
    CallForm,
    CallId,
    Elements,
    Gap,
    JsonCall,
    Maybe,
    Name,
    Ordinal,
    Part,
    TagEnd,
    TextParameters,
    UpTo,
)

CALL_HEAD_WINDOW = 320
"""Characters within which a call has to begin, from its marker to its first argument, to be seen as one."""
MOST_UNCLOSED_VALUES = 4
"""Values of one answer that are read to the end to find their closing tags. Later ones end at the first marker."""

_ARGUMENTS = (Arguments, JsonCall, TextParameters, Elements)
_SPACE = " \t\r\n"
_GAP = r"[ \t\r\n]*"
_NAME = r"[^\s<>(){}\[\]\"'`,;=|]{1,256}"


class CallHeads:
    """How the calls of a family begin: from a marker to where the first argument or the end is to come.

    `ends` are the markers that end the message that calls stand in, in families that write messages."""

    def __init__(self, forms: tuple[CallForm, ...], ends: tuple[str, ...] = ()) -> None:
        self.ends = ends
        self._patterns: dict[str, list[re.Pattern[str]]] = {}
        for form in forms:
            if form.opening and isinstance(form.opening[0], str):
                self._add(form, (*form.opening, *form.call))
            if isinstance(form.call[0], str):
                self._add(form, form.call)
        self.literals = tuple(sorted(self._patterns))

    def _add(self, form: CallForm, parts: tuple[Part, ...]) -> None:
        assert isinstance(parts[0], str)
        last = next(index for index, part in enumerate(parts) if isinstance(part, _ARGUMENTS))
        closing = tuple(part for part in (*parts[last + 1 :], *form.closing) if isinstance(part, str))
        pattern = "".join(_part_pattern(part, closing) for part in parts[: last + 1])
        self._patterns.setdefault(parts[0], []).append(re.compile(pattern))

    def found(self, text: str) -> int:
        """The length of the head that the text begins with; 0 where there is none."""
        for literal, patterns in self._patterns.items():
            if text.startswith(literal):
                return next((found.end() for each in patterns if (found := each.match(text)) is not None), 0)
        return 0


@lru_cache(maxsize=64)
def call_heads(forms: tuple[CallForm, ...], ends: tuple[str, ...] = ()) -> CallHeads:
    """Of the forms that have markers of their own."""
    return CallHeads(tuple(form for form in forms if not form.bare), ends)


def _part_pattern(part: Part, closing: tuple[str, ...]) -> str:
    match part:
        case str():
            return re.escape(part)
        case Gap():
            return _GAP
        case Maybe():
            return f"(?:{re.escape(part.text)})?"
        case UpTo():
            return rf"[\s\S]{{0,{CALL_HEAD_WINDOW}}}?{re.escape(part.text)}"
        case Name():
            return _NAME
        case TagEnd():
            return f"(?:{re.escape(part.text)}|(?={re.escape(part.instead)}))" if part.instead else re.escape(part.text)
        case Ordinal():
            return f"(?:{re.escape(part.before)}[\\w\\-]*{re.escape(part.after)})?"
        case CallId():
            return f"(?:{re.escape(part.marker)}[\\w\\-]*)?"
        case Arguments():
            return f"(?={re.escape(part.notation.opens)})"
        case JsonCall():
            return rf'(?=\{{{_GAP}"(?:{part.name_key}|{part.arguments_key})"{_GAP}:)'
        case TextParameters():
            begins = (part.key_open, part.end, "{", *(part.object_tags or ())[:1], *closing)
        case Elements():
            begins = (part.mark, "{")
    return f"{_GAP}(?={'|'.join(map(re.escape, begins))})"


class ValueMarkers:
    """The markers of calls that the values of one form may hold: those that begin and end a call, and a parameter."""

    def __init__(
        self, heads: CallHeads, value_close: str, end: str, closing: tuple[str, ...], key_open: str = ""
    ) -> None:
        self.heads = heads
        self.value_close, self._end, self._closing, self._key_open = value_close, end, closing, key_open
        self.following = (*((key_open,) if key_open else ()), end, *closing, *heads.ends)
        self.all = self.also(value_close)

    def also(self, *others: str) -> Markers:
        return make_markers(*others, self.value_close, *self.following, *self.heads.literals)

    def head(self, reader: TextReader) -> Steps[int]:
        """The length of the head of a call that comes next; 0 where none does. Passes nothing."""
        for literal in self.heads.literals:
            if (yield from reader.sees(literal)):
                return self.heads.found((yield from reader.ahead(CALL_HEAD_WINDOW)))
        return 0

    def follows(self, reader: TextReader, close: str) -> Steps[bool]:
        """Whether behind the closing tag of a value, which comes next, its call goes on or ends."""
        return (yield from reader.next_in_turn(((close,), self.following)))

    def ends_form(self, reader: TextReader) -> Steps[bool]:
        """Whether the end of a call comes next, and that of its form."""
        for closing in self._closing:
            if (yield from reader.next_in_turn(((self._end,), (closing,)))):
                return True
        return False

    def ends_call(self, reader: TextReader, marker: str) -> Steps[bool]:
        """Whether the end of a call or of its form, which comes next, is confirmed by what stands behind it: another
        end, another call, or the end of the answer."""
        ahead = yield from reader.ahead(CALL_HEAD_WINDOW)
        behind = ahead[len(marker) :].lstrip(_SPACE)
        if not behind:
            return len(ahead) < CALL_HEAD_WINDOW
        ends = (*(self._closing if marker == self._end else ()), *self.heads.ends)
        return marker in self.heads.ends or any(map(behind.startswith, ends)) or self.heads.found(behind) > 0

    def closes(self, reader: TextReader, close: str, is_own: Callable[[str], bool]) -> Steps[bool]:
        """Passes a text up to `close`, its own closing tag, if that comes: where no call in the text is open, and with
        what may follow it. `is_own`: whether a parameter of the value's own tool begins."""
        frames: list[Literal["call", "value"]] = []
        markers = self.also(close)
        while (marker := (yield from reader.scan(markers, _discard))) is not None:
            size = len(marker)
            if marker in (close, self.value_close):
                if frames[-1:] == ["value"]:
                    frames.pop()
                elif not frames and marker == close and (yield from self.follows(reader, close)):
                    return True
            elif marker == self._key_open:
                if frames[-1:] == ["call"] or (not frames and is_own((yield from reader.ahead(CALL_HEAD_WINDOW)))):
                    frames.append("value")
            elif marker == self._end and "call" in frames:
                del frames[-1 - frames[::-1].index("call") :]
            elif marker == self._end or marker in (*self._closing, *self.heads.ends):
                frames.clear()
            elif head := (yield from self.head(reader)):
                frames.append("call")
                size = head
            reader.advance(reader.at + size)
        return False

    def closes_json(self, reader: TextReader, close: str, value: TextValue) -> Steps[bool]:
        """The same for JSON, of which `value` is what was read so far: where no string in it is open."""
        while (yield from reader.scan(make_markers(close), value.write)) is not None:
            if not value.in_json_string and (yield from self.follows(reader, close)):
                return True
            value.write(reader.advance(reader.at + len(close)))
        return False


class UnclosedValues:
    """One answer's."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self._left = MOST_UNCLOSED_VALUES

    def goes_on(self, closes: Steps[bool], value: TextValue, markers: Markers, tag: str = "") -> Steps[bool]:
        """Whether the value goes on up to a closing tag that `closes` finds. It is then written up to there, with the
        `tag` that was passed before. Raises Mismatch where the answer was cut before it could be found."""
        reader = self._reader
        if not self._left:
            return False
        reader.start_lookahead()
        if (yield from closes):
            value.write(tag + reader.keep_lookahead())
            return True
        if reader.cut:
            text = tag + reader.keep_lookahead()
            value.write(text[: markers.undecided(text)])
            raise FormMismatch
        reader.undo_lookahead()
        self._left -= 1
        return False


def _discard(text: str) -> None:
    """Text that is looked ahead at is written later, if it belongs to the value."""
