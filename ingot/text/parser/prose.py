"""Reads a thinking part, and the calls of an answer that never leaves it, or leaves it and says nothing.

Some models call a tool amid their thinking and end there, some after they have closed it. Others write down in thinking
what they might call, close it, and answer. Only what comes behind tells them apart, so from the first marker on that
may begin a call the text is held. An answer behind the closing tag makes all of it thinking. Where there is none, what
is a complete call of a given tool and begins a line is that call; within a line it is one if its markers are
unmistakable and nothing quotes it, in an answer that was not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ingot.text.parse.prose import Prose
from ingot.text.parser.calls import CallReader
from ingot.text.parser.events import Mismatch, Teller
from ingot.text.parser.reader import Steps, TextReader, markers
from ingot.text.tool_formats.format import CallForm, Name

NAME_WITHIN = 512
"""Characters from a marker on, within which a call names its tool: a marker without is not waited for."""


@dataclass(frozen=True, slots=True)
class CallOpening:
    """What a marker begins: calls of these forms, which stand behind it, or with it (not `opened`)."""

    forms: tuple[CallForm, ...]
    opened: bool

    @property
    def unmistakable(self) -> tuple[CallForm, ...]:
        """The forms that no example looks like: all but JSON between plain tags."""
        return tuple(form for form in self.forms if _is_unmistakable(form))


def _is_unmistakable(form: CallForm) -> bool:
    special = any(isinstance(part, str) and "|" in part for part in form.opening[:1])
    return special or any(isinstance(part, Name) for part in form.call)


class ThoughtReader:
    def __init__(
        self,
        close: str,
        openings: Mapping[str, CallOpening],
        names: frozenset[str],
        reader: TextReader,
        calls: CallReader,
        teller: Teller,
        reasoning: Prose,
        says_nothing: Callable[[], bool],
    ) -> None:
        """`says_nothing`: whether there is neither text nor a call outside of thinking so far."""
        self._says_nothing = says_nothing
        self._close = close
        self._openings = openings if names else {}
        self._names = names
        self._reader, self._calls, self._teller = reader, calls, teller
        self._reasoning = reasoning

    def read(self) -> Steps[bool]:
        """Up to the closing tag, which is passed, or to the answer's end. Whether the part was closed."""
        reader, reasoning = self._reader, self._reasoning
        wanted = markers(self._close, *self._openings)
        while (marker := (yield from reader.scan(wanted, reasoning.write))) is not None:
            if marker == self._close:
                reader.advance(reader.at + len(marker))
                return True
            if self._forms(marker) and (yield from self._names_a_tool()):
                return (yield from self._undecided())
            reasoning.write(reader.advance(reader.at + 1))
        reasoning.finish()
        return False

    def _names_a_tool(self) -> Steps[bool]:
        ahead = yield from self._reader.ahead(NAME_WITHIN)
        return any(name in ahead for name in self._names)

    def _forms(self, marker: str) -> tuple[CallForm, ...]:
        """Those of which a call may begin with the marker where it stands."""
        opening = self._openings[marker]
        if self._reasoning.at_line_start:
            return opening.forms
        return () if self._reasoning.quotes or self._reader.cut else opening.unmistakable

    def _undecided(self) -> Steps[bool]:
        """The rest of a part in which a call may have begun. Whether it was closed."""
        reader = self._reader
        held: list[str] = []
        closed = (yield from reader.scan(markers(self._close), held.append)) is not None
        if closed and (yield from self._answers()):
            self._reasoning.write("".join(held))
            reader.advance(reader.at + len(self._close))
            return True
        if closed:
            reader.drop_rest()
        reader.unread("".join(held))
        self._teller.only_whole(self._reasoning.restart)
        yield from self._with_calls()
        if not closed:
            self._reasoning.finish()
        return closed

    def _answers(self) -> Steps[bool]:
        """Whether there is an answer behind the closing tag, which comes next, or was before, or would have come."""
        reader = self._reader
        if not self._says_nothing():
            return True
        reader.look_ahead()
        reader.advance(reader.at + len(self._close))
        yield from reader.gap()
        ended = reader.at == len(reader.text) and not reader.cut
        reader.look_back()
        return not ended

    def _with_calls(self) -> Steps[None]:
        reader, reasoning = self._reader, self._reasoning
        while (marker := (yield from reader.scan(markers(*self._openings), reasoning.write))) is not None:
            if forms := self._forms(marker):
                yield from self._section(marker, forms)
            else:
                reasoning.write(reader.advance(reader.at + 1))

    def _section(self, marker: str, forms: tuple[CallForm, ...]) -> Steps[None]:
        reader, opened = self._reader, self._openings[marker].opened
        reader.record()
        reader.advance(reader.at + (len(marker) if opened else 0))
        with suppress(Mismatch):
            yield from self._calls.section(forms, opened=opened, only_known=True)
        self._reasoning.write(reader.recorded())
