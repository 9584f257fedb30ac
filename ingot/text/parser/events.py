"""Tells of the calls that are being read: each announced once, its arguments as they come, ended once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.text.parse.call_ids import IdMaker
from ingot.text.parse.events import ParsedEvent, ToolCallArguments, ToolCallBegan, ToolCallEnded
from ingot.text.parser.reader import TextReader

LONGEST_DOUBT = 8192
"""Characters of arguments that are held of a call that has to be whole."""


class Mismatch(Exception):
    """What comes next is not what the form says."""


@dataclass(slots=True)
class Draft:
    """A call that is being read. `only_known`: it must name a given tool to be one; `whole`: all of it must be read.

    `strict`: a grammar holds it to its schema. `goes_on`: what broke it is not the answer's end, though that may have
    come, but something that is to be read by itself.
    """

    only_known: bool
    whole: bool = False
    name: str = ""
    id: str | None = None
    early: str | None = None  # arguments that came before the name, or not as an object
    began: bool = False
    ended: bool = False
    strict: bool = False
    goes_on: bool = False


class Teller:
    """`certain` is called when a call turns out to be one, before its first event.

    After `only_whole`, a call is one only when it is complete, and nothing is told of any other.
    """

    def __init__(
        self, reader: TextReader, ids: IdMaker, emit: Callable[[ParsedEvent], None], certain: Callable[[], None]
    ) -> None:
        self._reader, self._ids = reader, ids
        self._emit, self._certain = emit, certain
        self.begun = 0
        self._used_ids: set[str] = set()
        self._whole = False
        self._held: list[ParsedEvent] = []  # of a call that is not whole yet
        self._length = 0  # of the arguments of the last call,
        self._doubted = False  # which is held because it has to be whole

    def only_whole(self, certain: Callable[[], None]) -> None:
        """From here on, in thinking whose text has ended."""
        self._whole, self._certain = True, certain

    def begin(self, draft: Draft) -> None:
        index = self.begun
        if draft.id is None or draft.id in self._used_ids:
            draft.id = self._ids(draft.name, index)
        self._used_ids.add(draft.id)
        self.begun += 1
        draft.began = True
        read = self._reader.recorded()
        if self._whole or draft.whole:
            self._reader.keep(read)
        self._doubted = draft.whole
        self._length = 0
        self._tell(ToolCallBegan(index, draft.id, draft.name, in_thinking=self._whole))

    def fragment(self, text: str) -> None:
        if text:
            self._length += len(text)
            self._doubted = self._doubted and self._length <= LONGEST_DOUBT
            self._tell(ToolCallArguments(self.begun - 1, text))

    def end(self, draft: Draft) -> None:
        """The arguments are complete. What the form wants behind them is recorded, to be text if it is not that."""
        draft.ended = True
        self._tell(ToolCallEnded(self.begun - 1))
        self._reader.record()

    def settle(self) -> None:
        """All of a call was read."""
        self._doubted = False
        self._release()

    def cut_off(self, draft: Draft) -> None:
        """The form was not kept to. In a call that has begun this can be because the answer ended: what is left is
        then half a marker or half a value, and no text."""
        if not draft.began:
            return
        broken_off = self._reader.cut or (self._reader.ended and draft.ended)
        if self._held and (self._whole or not broken_off):
            self._take_back()
            return
        self._doubted = False
        if not draft.ended:
            draft.ended = True
            self._tell(ToolCallEnded(self.begun - 1, complete=False))
        self._release()
        if self._reader.ended and not draft.goes_on:
            self._reader.drop_rest()

    def _tell(self, event: ParsedEvent) -> None:
        self._held.append(event)
        if not self._doubted and not (self._whole and not isinstance(event, ToolCallEnded)):
            self._release()

    def _release(self) -> None:
        if self._held and isinstance(self._held[0], ToolCallBegan):
            self._certain()
        for each in self._held:
            self._emit(each)
        self._held.clear()
        self._reader.kept()

    def _take_back(self) -> None:
        """Nothing was told of the call: all that was read of it is text."""
        self._held.clear()
        self.begun -= 1
        self._reader.record(self._reader.kept())
