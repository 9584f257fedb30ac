"""What a response that goes on alone tells, for whoever reads along, also from the middle."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from msgspec import Struct

from ingot.http.edge import ClientGone

HELD: Final = 65_536  # batches


class Feed:
    """Batches of events, the latest of which are held. Who falls further behind misses the rest, and finds the response
    in the store."""

    def __init__(self) -> None:
        self._batches: deque[list[Struct]] = deque(maxlen=HELD)
        self._told = 0  # batches in all
        self._more = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        """Batches that are held."""
        return len(self._batches)

    @property
    def whole(self) -> bool:
        """Whether the first batch is still held."""
        return self._told == len(self._batches)

    def put(self, told: list[Struct]) -> None:
        self._batches.append(told)
        self._told += 1
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def reader(self) -> FeedReader:
        """From the first event on, for a feed that is `whole`."""
        return FeedReader(self)

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class FeedReader:
    def __init__(self, feed: Feed) -> None:
        self._feed, self._next = feed, 0

    def __len__(self) -> int:
        """Batches that wait to be read."""
        return self._feed._told - self._next

    async def batches(self) -> AsyncGenerator[list[Struct], None]:
        feed = self._feed
        while True:
            while len(self):
                behind = len(self)
                if behind > len(feed._batches):
                    raise ClientGone
                self._next += 1
                yield feed._batches[-behind]
            if feed._ended:
                return
            await feed._more.wait()
