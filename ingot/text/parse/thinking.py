"""Reads a thinking part, and the calls of an answer that never leaves it.

Some models call a tool amid their thinking and end there. Others write down in thinking what they might call, close
it, and call or do not. Only the closing tag or the answer's end tells the two apart, so from the first marker on that
may begin a call the text is held. The closing tag makes all of it thinking. The end makes calls of what is a complete
call of a given tool and begins a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ingot.text.formats.table import CallForm
from ingot.text.parse.call_events import Mismatch, Teller
from ingot.text.parse.calls import CallReader
from ingot.text.parse.prose import Prose
from ingot.text.parse.reader import Steps, TextReader, markers

NAME_WITHIN = 512
"""Characters from a marker on, within which a call names its tool: a marker without is not waited for."""


@dataclass(frozen=True, slots=True)
class CallOpening:
    """What a marker begins: calls of these forms, which stand behind it, or with it (not `opened`)."""

    forms: tuple[CallForm, ...]
    opened: bool


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
    ) -> None:
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
            if reasoning.at_line_start and (yield from self._names_a_tool()):
                return (yield from self._undecided())
            reasoning.write(reader.advance(reader.at + 1))
        reasoning.finish()
        return False

    def _names_a_tool(self) -> Steps[bool]:
        ahead = yield from self._reader.ahead(NAME_WITHIN)
        return any(name in ahead for name in self._names)

    def _undecided(self) -> Steps[bool]:
        """The rest of a part in which a call may have begun. Whether it was closed, and so is all thinking."""
        reader = self._reader
        held: list[str] = []
        closed = (yield from reader.scan(markers(self._close), held.append)) is not None
        if closed:
            self._reasoning.write("".join(held))
            reader.advance(reader.at + len(self._close))
        else:
            reader.unread("".join(held))
            self._teller.only_whole(self._reasoning.restart)
            yield from self._with_calls()
        return closed

    def _with_calls(self) -> Steps[None]:
        reader, reasoning = self._reader, self._reasoning
        while (marker := (yield from reader.scan(markers(*self._openings), reasoning.write))) is not None:
            if reasoning.at_line_start:
                yield from self._section(marker)
            else:
                reasoning.write(reader.advance(reader.at + 1))
        reasoning.finish()

    def _section(self, marker: str) -> Steps[None]:
        reader, opening = self._reader, self._openings[marker]
        reader.record()
        reader.advance(reader.at + (len(marker) if opening.opened else 0))
        with suppress(Mismatch):
            yield from self._calls.section(opening.forms, opened=opening.opened, only_known=True)
        self._reasoning.write(reader.recorded())
