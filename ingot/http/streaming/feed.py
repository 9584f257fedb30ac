"""What a response that goes on alone tells, for a client that reads along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct

from ingot.http.edge import ClientGone

BEHIND: Final = 65_536  # batches that may wait


class Feed:
    """Batches of events. Who leaves or falls too far behind misses the rest, and finds the response in the store."""

    def __init__(self) -> None:
        self._batches: asyncio.Queue[list[Struct] | None] = asyncio.Queue()
        self._left = False

    def __len__(self) -> int:
        return self._batches.qsize()

    def put(self, told: list[Struct]) -> None:
        if len(self) >= BEHIND:
            self._leave()
        if not self._left:
            self._batches.put_nowait(told)

    def end(self) -> None:
        self._batches.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[list[Struct]]:
        while (told := await self._batches.get()) is not None:
            yield told
        if self._left:
            raise ClientGone

    async def aclose(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self._left, self._batches = True, asyncio.Queue()
        self.end()
