"""The reader's end of a request: streams of events, the last of which is terminal.

`EventStream` is for coroutines that read an answer, `BlockingStream` for threads without an event loop, `PieceStream`
for work that comes in pieces (transcripts, speech). The engine thread posts. The reader closes the stream in the end,
which cancels a request that has not ended.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import ClassVar, Final, Generic, Protocol, TypeVar, cast

from ingot.engine.request import CallArguments, Ended, Event, Failed, TextDelta, ThinkingDelta
from ingot.errors import Cancelled, ClientLeft, IngotError

EventBatch = list[Event]

MOST_WAITING_BYTES: Final = 16 << 20  # roughly, that may wait for one reader; no answer's text is so long
TOKEN_INFO_BYTES: Final = 160  # of a token with its logprob
EVENT_BYTES: Final = 64
MERGED_AFTER: Final = 1024  # waiting events, after which neighbouring deltas are merged


def ends_stream(batch: EventBatch) -> bool:
    return isinstance(batch[-1], Ended | Failed)


class EventSink(Protocol):
    """Where the engine puts a request's events. Called from the engine thread only."""

    def post(self, batch: EventBatch) -> None: ...


class EventStream:
    """For a coroutine. Always call `close` in the end: it cancels the request if it has not ended. `cancel` gets the
    reason.

    A late reader gets all waiting events as one batch, in which neighbouring deltas may be merged. One that is too far
    behind gets what waits, and then a failure in place of the rest.
    """

    def __init__(self, cancel: Callable[[IngotError], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: EventBatch = []
        self._size = 0
        self._merge_at = MERGED_AFTER
        self._arrived = asyncio.Event()
        self._cancel = cancel
        self._complete = False  # the last event has arrived
        self._ended = False  # and was read
        self._on_end: Callable[[Ended | Failed], None] | None = None

    def __len__(self) -> int:
        """Events that wait."""
        return len(self._waiting)

    def post(self, batch: EventBatch) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, batch)
        except RuntimeError:  # the loop is closed: there is no reader any more
            self._cancel(_client_left())

    async def __aiter__(self) -> AsyncIterator[EventBatch]:
        while not self._ended:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._waiting = self._waiting, []
            self._size, self._merge_at = 0, MERGED_AFTER
            self._ended = ends_stream(batch)
            yield batch

    def close(self, on_end: Callable[[Ended | Failed], None] | None = None, cause: IngotError | None = None) -> None:
        """`on_end` gets the last event, once it arrives, where it was not read. `cause` is why the reader stops, where
        the client has not left."""
        if self._ended:
            return
        self._ended, self._on_end = True, on_end
        self._cancel(cause or _client_left())
        if self._complete:
            self._report_end(self._waiting[-1])

    def _take(self, batch: EventBatch) -> None:
        if self._complete:
            return
        if self._ended:
            self._complete = ends_stream(batch)
            self._report_end(batch[-1])
            return
        self._waiting += batch
        self._size += sum(map(event_bytes, batch))
        self._complete = ends_stream(batch)
        if self._size > MOST_WAITING_BYTES and not self._complete:
            self._complete = True
            behind = Cancelled(f"The request was cancelled: its reader is {MOST_WAITING_BYTES >> 20} MiB behind.")
            self._waiting.append(Failed(behind))
            self._cancel(behind)
        if len(self._waiting) > self._merge_at:
            self._waiting = merge_deltas(self._waiting)
            self._merge_at = max(MERGED_AFTER, 2 * len(self._waiting))
        self._arrived.set()

    def _report_end(self, event: Event) -> None:
        if self._on_end is not None and isinstance(event, Ended | Failed):
            self._on_end(event)


def _client_left() -> ClientLeft:
    return ClientLeft("The client left")


def event_bytes(event: Event) -> int:
    match event:
        case TextDelta(text=text, tokens=tokens):
            return len(text) + TOKEN_INFO_BYTES * sum(1 + len(token.top) for token in tokens)
        case ThinkingDelta(text=text) | CallArguments(fragment=text):
            return len(text)
    return EVENT_BYTES


def merge_deltas(events: Sequence[Event]) -> EventBatch:
    """The same events grouped by sequence, with neighbouring deltas merged. The last stays last."""
    own: dict[int | None, EventBatch] = {}
    for event in events:
        own.setdefault(getattr(event, "index", None), []).append(event)
    last = own.pop(None, [])
    runs = (list(run) for sequence in own.values() for _, run in groupby(sequence, key=event_kind))
    return [event for run in runs for event in merge_run(run)] + last


def event_kind(event: Event) -> tuple[type[Event], int | None]:
    return type(event), getattr(event, "call", None)


def merge_run(run: EventBatch) -> Iterable[Event]:
    """Merge events of one kind and one sequence."""
    match run[0]:
        case TextDelta(index):
            texts = [event for event in run if isinstance(event, TextDelta)]
            tokens = tuple(token for event in texts for token in event.tokens)
            return [TextDelta(index, "".join(event.text for event in texts), tokens)]
        case ThinkingDelta(index):
            return [ThinkingDelta(index, "".join(event.text for event in run if isinstance(event, ThinkingDelta)))]
        case CallArguments(index, call):
            fragments = (event.fragment for event in run if isinstance(event, CallArguments))
            return [CallArguments(index, call, "".join(fragments))]
    return run


class BlockingStream:
    """For a thread without an event loop: benchmarks and tests."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[EventBatch] = queue.SimpleQueue()

    def post(self, batch: EventBatch) -> None:
        self._batches.put(batch)

    def __iter__(self) -> Iterator[EventBatch]:
        while True:
            batch = self._batches.get()
            yield batch
            if ends_stream(batch):
                return


Piece = TypeVar("Piece")
Last = TypeVar("Last")


class PieceStream(Generic[Piece, Last]):
    """For a coroutine. Always call `close` in the end: it cancels the request if it has not ended."""

    piece: ClassVar[type]  # the type of all events but the last

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Last | IngotError] = asyncio.Queue()
        self._cancel, self._ended = cancel, False

    def post(self, events: Sequence[Piece | Last | IngotError]) -> None:
        """From the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, events)
        except RuntimeError:  # the loop is closed: there is no reader any more
            self._cancel()

    async def __aiter__(self) -> AsyncIterator[Piece | Last]:
        """Raises the error that the work ended with."""
        while not self._ended:
            event = await self._events.get()
            self._ended = not isinstance(event, self.piece)
            if isinstance(event, IngotError):
                raise event
            yield cast("Piece | Last", event)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._cancel()

    def _take(self, events: Sequence[Piece | Last | IngotError]) -> None:
        for event in events:
            self._events.put_nowait(event)
