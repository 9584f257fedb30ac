"""Telling routers what could be taken over here, as it changes.

What is kept is counted anew when it has changed, between two steps, and what differs from what was told last is told:
so that whoever listens is right by construction, and nothing in the cache has to know of it. How often it is counted is
bounded by the share of the engine's time that this takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ingot.cache.block_listing import Block, Census
from ingot.cache.matches import Needs
from ingot.cache.prefix_index import PrefixIndex
from ingot.engine.kv_events_events import AllBlocksCleared, BlockEvent, differences

PAUSE_S = 0.1
"""Between two counts, at least."""
SHARE = 0.01
"""Of the engine's time, that counting may take."""


class Teller(Protocol):
    def tell(self, events: list[BlockEvent]) -> bool:
        """False where they cannot be taken now: they are to be told later."""
        ...

    def close(self) -> None: ...


class News:
    def __init__(self, teller: Teller, clock: Callable[[], float] = time.monotonic) -> None:
        self._teller, self._clock = teller, clock
        self._census: Census | None = None
        self._index: PrefixIndex | None = None
        self._told: dict[int, Block] = {}
        self._changes, self._next = -1, 0.0

    def of(self, index: PrefixIndex, needs: Needs) -> None:
        """What is kept is there from now on; what was told of another index is gone."""
        self._index, self._census, self._changes = index, Census(needs), -1

    def look(self, *, now: bool = False) -> None:
        """Tell what changed, unless that was done just before; `now` tells it all the same."""
        began = self._clock()
        if self._index is None or self._census is None or self._index.changes == self._changes:
            return
        if not now and began < self._next:
            return
        changes, found = self._index.changes, self._census.take(self._index)
        events = differences(self._told, found)
        if not events or self._teller.tell(events):
            self._told, self._changes = found, changes
        took = self._clock() - began
        self._next = began + max(PAUSE_S, took / SHARE)

    def close(self) -> None:
        """Nothing is kept any more, and nothing told."""
        if self._told:
            self._teller.tell([AllBlocksCleared()])
        self._told = {}
        self._teller.close()
