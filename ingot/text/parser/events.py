"""What comes out of a parsed answer: plain, frozen events, ids of calls, and what emits the events of calls.

A call is announced once, its arguments come as fragments, and it ends once. `CallEventEmitter` sees to that; it belongs
to one answer's parser. Ids are in the style that the model's template will see again.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from ingot.text.parser.reader import TextReader
from ingot.text.tool_formats.format import IdStyle


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """Announces a call, once. Calls come one after another, numbered from 0. `in_thinking`: it was written there."""

    index: int
    id: str
    name: str
    in_thinking: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments. The pieces of a complete call make up one JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """Exactly one for each call that began.

    Not `complete`: the answer ended, or went on as something else, within the arguments. They are then the
    beginning of a JSON object, as far as it was certain; nothing was made up to close it.
    """

    index: int
    complete: bool = True


ParsedEvent = ReasoningDelta | ContentDelta | ToolCallBegan | ToolCallArguments | ToolCallEnded


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as the parser needs it: its name, the JSON schema of its arguments, and whether every call of it keeps to
    that because a grammar sees to it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class PastCall:
    """A past call, to be written again."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


def merge_events(events: Iterable[ParsedEvent]) -> list[ParsedEvent]:
    """The same events with neighbouring pieces of one text or one call joined.

    This is the normal form: however an answer was cut into pieces, its merged events are the same.
    """
    merged: list[ParsedEvent] = []
    for _, group in groupby(events, _merge_key):
        run = list(group)
        match first := run[0]:
            case ReasoningDelta() | ContentDelta() if len(run) > 1:
                merged.append(
                    replace(first, text="".join(event.text for event in run if isinstance(event, type(first))))
                )
            case ToolCallArguments() if len(run) > 1:
                pieces = (event.fragment for event in run if isinstance(event, ToolCallArguments))
                merged.append(replace(first, fragment="".join(pieces)))
            case _:
                merged.append(first)
    return merged


def _merge_key(event: ParsedEvent) -> object:
    if isinstance(event, ToolCallArguments):
        return event.index
    return type(event) if isinstance(event, ReasoningDelta | ContentDelta) else event


_ALPHABET = string.ascii_letters + string.digits


CallIdMaker = Callable[[str, int], str]
"""Makes the id of a call from its function's name and its number in the answer."""


def random_text(size: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(size))


def call_id_maker(style: IdStyle, *, past_calls: int = 0, random: Callable[[int], str] = random_text) -> CallIdMaker:
    """Ids in a style. Kimi numbers the calls of a whole conversation, so it asks how many there were before."""
    if style == "kimi":
        return lambda name, index: f"functions.{name}:{past_calls + index}"
    if style == "mistral":
        return lambda name, index: random(9)
    return lambda name, index: "call_" + random(24)


LONGEST_HELD_ARGUMENTS = 8192  # most characters of arguments that are held back for a call that has to be whole


class FormMismatch(Exception):
    """What comes next does not fit the form."""


@dataclass(slots=True)
class CallDraft:
    """A call that is being read. `only_known`: it must name one of the tools; `whole`: all of it must be read.

    `strict`: a grammar constrains it to its schema. `goes_on`: it was broken not by the answer's end but by something
    that is to be read by itself.
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


class CallEventEmitter:
    """`certain` is called when a call turns out to be one, before its first event.

    After `require_whole_calls`, a call is one only when it is complete, and any other has no events.
    """

    def __init__(
        self, reader: TextReader, ids: CallIdMaker, emit: Callable[[ParsedEvent], None], certain: Callable[[], None]
    ) -> None:
        self._reader, self._ids = reader, ids
        self._emit, self._certain = emit, certain
        self.call_count = 0
        self._used_ids: set[str] = set()
        self._whole = False
        self._pending: list[ParsedEvent] = []  # of a call that is not whole yet
        self._length = 0  # of the arguments of the last call,
        self._wait_for_whole = False  # which is held back because it has to be whole

    def require_whole_calls(self, certain: Callable[[], None]) -> None:
        """From here on, in thinking whose text has ended."""
        self._whole, self._certain = True, certain

    def begin(self, draft: CallDraft) -> None:
        index = self.call_count
        if draft.id is None or draft.id in self._used_ids:
            draft.id = self._ids(draft.name, index)
        self._used_ids.add(draft.id)
        self.call_count += 1
        draft.began = True
        read = self._reader.recorded()
        if self._whole or draft.whole:
            self._reader.start_copy(read)
        self._wait_for_whole = draft.whole
        self._length = 0
        self._queue(ToolCallBegan(index, draft.id, draft.name, in_thinking=self._whole))

    def fragment(self, text: str) -> None:
        if text:
            self._length += len(text)
            self._wait_for_whole = self._wait_for_whole and self._length <= LONGEST_HELD_ARGUMENTS
            self._queue(ToolCallArguments(self.call_count - 1, text))

    def end(self, draft: CallDraft) -> None:
        """The arguments are complete. What the form wants behind them is recorded, to be text if it is not that."""
        draft.ended = True
        self._queue(ToolCallEnded(self.call_count - 1))
        self._reader.record()

    def settle(self) -> None:
        """All of a call was read."""
        self._wait_for_whole = False
        self._release()

    def cut_off(self, draft: CallDraft) -> None:
        """The form was violated. In a call that was announced this can be because the answer ended: what is left is
        then half a marker or half a value, and no text."""
        if not draft.began:
            return
        broken_off = self._reader.cut or (self._reader.ended and draft.ended)
        if self._pending and (self._whole or not broken_off):
            # The call had no events yet: all that was read of it is text.
            self._pending.clear()
            self.call_count -= 1
            self._reader.record(self._reader.end_copy())
            return
        self._wait_for_whole = False
        if not draft.ended:
            draft.ended = True
            self._queue(ToolCallEnded(self.call_count - 1, complete=False))
        self._release()
        if self._reader.ended and not draft.goes_on:
            self._reader.drop_remaining()

    def _queue(self, event: ParsedEvent) -> None:
        self._pending.append(event)
        if not self._wait_for_whole and not (self._whole and not isinstance(event, ToolCallEnded)):
            self._release()

    def _release(self) -> None:
        if self._pending and isinstance(self._pending[0], ToolCallBegan):
            self._certain()
        for each in self._pending:
            self._emit(each)
        self._pending.clear()
        self._reader.end_copy()
