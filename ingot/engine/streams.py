"""The reader's end of a request: batches of events, the last of which ends in the one terminal event."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Protocol

from ingot.engine.request import CallArguments, Ended, Event, Failed, TextDelta, ThinkingDelta
from ingot.errors import Cancelled, ClientLeft, IngotError

Batch = list[Event]

WAITING: Final = 16 << 20  # bytes, roughly, that may wait for one reader; no answer's text is so long
INFO_BYTES: Final = 160  # what a token with its logprob takes
EVENT_BYTES: Final = 64
JOINED: Final = 1024  # events that wait before they are joined


def is_last(batch: Batch) -> bool:
    return isinstance(batch[-1], Ended | Failed)


class EventSink(Protocol):
    """Where the engine puts a request's events. Called from the engine thread only."""

    def post(self, batch: Batch) -> None: ...


class Stream:
    """For a coroutine. `close` cancels the request if it has not ended; always call it in the end. `cancel` is told
    why.

    A reader that is late gets all that waits as one batch, in which neighbouring pieces of a text may be one. One that
    is too far behind gets what waits, and a failure that says so in place of the rest.
    """

    def __init__(self, cancel: Callable[[IngotError], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: Batch = []
        self._size = 0
        self._join_at = JOINED
        self._arrived = asyncio.Event()
        self._cancel = cancel
        self._complete = False  # the last event has arrived
        self._ended = False  # and was read
        self._heard: Callable[[Ended | Failed], None] | None = None

    def __len__(self) -> int:
        """How many events wait."""
        return len(self._waiting)

    def post(self, batch: Batch) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, batch)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._cancel(_left())

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while not self._ended:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._waiting = self._waiting, []
            self._size, self._join_at = 0, JOINED
            self._ended = is_last(batch)
            yield batch

    def close(self, heard: Callable[[Ended | Failed], None] | None = None, cause: IngotError | None = None) -> None:
        """`heard` gets the last event, where it was not read, once there is one. `cause` says why the rest is not read,
        where it is not that the client left."""
        if self._ended:
            return
        self._ended, self._heard = True, heard
        self._cancel(cause or _left())
        if self._complete:
            self._hear(self._waiting[-1])

    def _take(self, batch: Batch) -> None:
        if self._complete:
            return
        if self._ended:
            self._complete = is_last(batch)
            self._hear(batch[-1])
            return
        self._waiting += batch
        self._size += sum(map(size_of, batch))
        self._complete = is_last(batch)
        if self._size > WAITING and not self._complete:
            self._complete = True
            behind = Cancelled(f"The request was cancelled: its reader is {WAITING >> 20} MiB behind.")
            self._waiting.append(Failed(behind))
            self._cancel(behind)
        if len(self._waiting) > self._join_at:
            self._waiting = merge_deltas(self._waiting)
            self._join_at = max(JOINED, 2 * len(self._waiting))
        self._arrived.set()

    def _hear(self, event: Event) -> None:
        if self._heard is not None and isinstance(event, Ended | Failed):
            self._heard(event)


def _left() -> ClientLeft:
    return ClientLeft("The client left")


def size_of(event: Event) -> int:
    match event:
        case TextDelta(text=text, tokens=tokens):
            return len(text) + INFO_BYTES * sum(1 + len(token.top) for token in tokens)
        case ThinkingDelta(text=text) | CallArguments(fragment=text):
            return len(text)
    return EVENT_BYTES


def merge_deltas(events: Sequence[Event]) -> Batch:
    """The same events with each sequence's together, and neighbouring pieces of a text as one. The last stays last."""
    own: dict[int | None, Batch] = {}
    for event in events:
        own.setdefault(getattr(event, "index", None), []).append(event)
    last = own.pop(None, [])
    runs = (list(run) for sequence in own.values() for _, run in groupby(sequence, key=kind_of))
    return [event for run in runs for event in as_one(run)] + last


def kind_of(event: Event) -> tuple[type[Event], int | None]:
    return type(event), getattr(event, "call", None)


def as_one(run: Batch) -> Iterable[Event]:
    """A run of events of one kind and one sequence."""
    match run[0]:
        case TextDelta(index):
            told = [event for event in run if isinstance(event, TextDelta)]
            tokens = tuple(token for event in told for token in event.tokens)
            return [TextDelta(index, "".join(event.text for event in told), tokens)]
        case ThinkingDelta(index):
            return [ThinkingDelta(index, "".join(event.text for event in run if isinstance(event, ThinkingDelta)))]
        case CallArguments(index, call):
            fragments = (event.fragment for event in run if isinstance(event, CallArguments))
            return [CallArguments(index, call, "".join(fragments))]
    return run


class BlockingStream:
    """For a thread without an event loop: benchmarks and tests."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()

    def post(self, batch: Batch) -> None:
        self._batches.put(batch)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self._batches.get()
            yield batch
            if is_last(batch):
                return
