"""The reader's end of work that is told piece by piece, and comes to one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar, Generic, TypeVar, cast

from ingot.errors import IngotError

Piece = TypeVar("Piece")
Last = TypeVar("Last")


class PieceStream(Generic[Piece, Last]):
    """For a coroutine. `close` cancels the request if it has not ended; always call it in the end."""

    piece: ClassVar[type]  # what all events but the last are

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Last | IngotError] = asyncio.Queue()
        self._cancel, self._ended = cancel, False

    def post(self, events: Sequence[Piece | Last | IngotError]) -> None:
        """From the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, events)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._cancel()

    async def __aiter__(self) -> AsyncIterator[Piece | Last]:
        """Raises the error that the work ends in."""
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
