"""The reader's end of a request: batches of events, the last of which ends in the one terminal event."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from ingot.engine.request import Ended, Event, Failed

Batch = list[Event]


def is_last(batch: Batch) -> bool:
    return isinstance(batch[-1], Ended | Failed)


class Reader(Protocol):
    """Where the engine puts a request's events. Called from the engine thread only."""

    def post(self, batch: Batch) -> None: ...


class Stream:
    """For a coroutine. `close` cancels the request if it has not ended; always call it in the end."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[Batch] = asyncio.Queue()
        self._cancel = cancel
        self._ended = False

    def post(self, batch: Batch) -> None:
        try:
            self._loop.call_soon_threadsafe(self._batches.put_nowait, batch)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._cancel()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        while not self._ended:
            batch = await self._batches.get()
            self._ended = is_last(batch)
            yield batch

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._cancel()


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
