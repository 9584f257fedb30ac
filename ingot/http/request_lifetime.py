"""Requests in progress, and how they end early: the client disconnects, the deadline passes, the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from starlette.types import Receive

from ingot.errors import DeadlineExceeded, IngotError
from ingot.http.edge import ClientGone, Reply

# The engine ends a request at its deadline; this much later the edge does, for instance where nobody reads.
DEADLINE_GRACE_S: Final = 5.0
DRAIN_POLL_S: Final = 0.05  # while a stopping server waits for its requests


class RequestLifetime:
    """One request's work, which can be ended from outside."""

    def __init__(self, receive: Receive, limit_s: float, answer: Reply | None = None) -> None:
        self._receive = receive
        if answer is not None:
            answer.ended_by = self._ended_by
        self._limit_s = limit_s
        self._scope = anyio.CancelScope()
        self._cause: IngotError | ClientGone | None = None

    def abandon(self, cause: IngotError | ClientGone) -> None:
        if self._cause is None:
            self._cause = cause
            self._scope.cancel()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`; raises the cause where it was abandoned before its end."""
        self._scope.deadline = anyio.current_time() + self._limit_s + DEADLINE_GRACE_S
        with self._scope:
            async with background_task(self._watch()):
                await work()
        if self._scope.cancelled_caught:
            raise self._cause or _deadline_error()

    def _ended_by(self) -> IngotError | None:
        """Why the server ended it; None where it did not."""
        if isinstance(self._cause, ClientGone):
            return None
        return self._cause or (_deadline_error() if self._scope.cancel_called else None)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.abandon(ClientGone())


def _deadline_error() -> DeadlineExceeded:
    return DeadlineExceeded("The request took longer than allowed.")


class LiveRequests:
    """The requests in progress."""

    def __init__(self) -> None:
        self._requests: set[RequestLifetime] = set()
        self.draining = False  # no more are accepted
        self.refusal: IngotError | None = None  # why, unless the server is stopping

    def __len__(self) -> int:
        return len(self._requests)

    async def run(self, request: RequestLifetime, work: Callable[[], Awaitable[None]]) -> None:
        self._requests.add(request)
        try:
            await request.run(work)
        finally:
            self._requests.discard(request)

    async def drain(self, within_s: float, hurried: Callable[[], bool]) -> None:
        """Accept no more, and wait until all have ended, time is up, or `hurried` is true."""
        self.draining = True
        with anyio.move_on_after(within_s):
            while self._requests and not hurried():
                await anyio.sleep(DRAIN_POLL_S)

    def abandon_all(self, cause: IngotError) -> None:
        for request in list(self._requests):
            request.abandon(cause)


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` concurrently with the block, and cancels it at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
