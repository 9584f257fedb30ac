"""Tells of the calls that are being read: each announced once, its arguments as they come, ended once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.text.call_ids import IdMaker
from ingot.text.parsed import ParsedEvent, ToolCallArguments, ToolCallBegan, ToolCallEnded
from ingot.text.reader import Reader


class Mismatch(Exception):
    """What comes next is not what the form says."""


@dataclass(slots=True)
class Draft:
    """A call that is being read. `only_known`: it must name a given tool to be one."""

    only_known: bool
    name: str = ""
    id: str | None = None
    early: str | None = None  # arguments that came before the name, or not as an object
    read: str = ""  # what was read of it when it began,
    at: int = 0  # and where that was
    began: bool = False
    ended: bool = False


class Teller:
    """`certain` is called when a call turns out to be one, before its first event.

    After `only_whole`, a call is one only when it is complete, and nothing is told of any other.
    """

    def __init__(
        self, reader: Reader, ids: IdMaker, emit: Callable[[ParsedEvent], None], certain: Callable[[], None]
    ) -> None:
        self._reader, self._ids = reader, ids
        self._emit, self._certain = emit, certain
        self._begun = 0
        self._used_ids: set[str] = set()
        self._whole = False
        self._held: list[ParsedEvent] = []  # of a call that is not whole yet

    def only_whole(self, certain: Callable[[], None]) -> None:
        """From here on, in a text that has ended."""
        self._whole, self._certain = True, certain

    def begin(self, draft: Draft) -> None:
        index = self._begun
        if draft.id is None or draft.id in self._used_ids:
            draft.id = self._ids(draft.name, index)
        self._used_ids.add(draft.id)
        self._begun += 1
        draft.began = True
        draft.read, draft.at = self._reader.recorded(), self._reader.at
        self._tell(ToolCallBegan(index, draft.id, draft.name))

    def fragment(self, text: str) -> None:
        if text:
            self._tell(ToolCallArguments(self._begun - 1, text))

    def end(self, draft: Draft) -> None:
        """The arguments are complete. What the form wants behind them is recorded, to be text if it is not that."""
        draft.ended = True
        self._tell(ToolCallEnded(self._begun - 1))
        self._reader.record()

    def cut_off(self, draft: Draft) -> None:
        """The form was not kept to. In a call that has begun this can be because the answer ended: what is left is
        then half a marker or half a value, and no text."""
        if not draft.began:
            return
        if self._whole:
            self._take_back(draft)
            return
        if not draft.ended:
            draft.ended = True
            self._tell(ToolCallEnded(self._begun - 1, complete=False))
        if self._reader.ended:
            self._reader.drop_rest()

    def _tell(self, event: ParsedEvent) -> None:
        self._held.append(event)
        if self._whole and not isinstance(event, ToolCallEnded):
            return
        if isinstance(self._held[0], ToolCallBegan):
            self._certain()
        for each in self._held:
            self._emit(each)
        self._held.clear()

    def _take_back(self, draft: Draft) -> None:
        """Nothing was told of the call: all that was read of it is text."""
        if draft.ended:
            return
        self._held.clear()
        self._begun -= 1
        self._reader.record(draft.read + self._reader.text[draft.at : self._reader.at])
