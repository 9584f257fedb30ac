"""Threads for work that would hold up the event loop, so many for each kind of it, shared fairly by tenants."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from ingot.errors import Overloaded
from ingot.media import worker
from ingot.text import cancellation

T = TypeVar("T")
RETRY_S: Final = 1.0


class Lane:
    """Belongs to one event loop. Each tenant has at most `each` of the threads at a time, and takes turns with others
    for the next free one; beyond `waiting` of its own that wait, more are refused with Overloaded.

    Work whose caller is cancelled is told so (`stopping`) and keeps its thread until it stops.
    """

    def __init__(self, name: str, *, threads: int, each: int, waiting: int) -> None:
        self.name, self._threads, self._each, self._waiting = name, threads, each, waiting
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"ingot-{name}")
        self._running: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        await self._turn(tenant)
        left = threading.Event()

        def wanted() -> bool:
            return not left.is_set()

        def watched() -> T:
            cancellation.current.set(wanted)
            with worker.working_for(worker.Client(tenant, wanted)):
                return work()

        loop = asyncio.get_running_loop()
        made = self._executor.submit(contextvars.copy_context().run, watched)
        made.add_done_callback(lambda _: self._ended(loop, tenant))
        try:
            return await asyncio.wrap_future(made)
        except asyncio.CancelledError:
            left.set()
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        """Waits for a thread, which is the caller's from then on."""
        queue = self._queues.get(tenant)
        if not queue and self._has_room(tenant):
            self._running[tenant] += 1
            return
        if queue is None:
            queue = self._queues[tenant] = deque()
        if len(queue) >= self._waiting:
            raise Overloaded(
                f"{len(queue)} requests wait to be read already. Try again in a moment.", retry_after=RETRY_S
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the very moment in which its caller left
                self._leave(tenant)
            elif turn in queue:
                queue.remove(turn)
            raise

    def _has_room(self, tenant: str) -> bool:
        return self._running.total() < self._threads and self._running[tenant] < self._each

    def _ended(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        with suppress(RuntimeError):  # the loop is gone, and with it all who waited
            loop.call_soon_threadsafe(self._leave, tenant)

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        while (following := self._next()) is not None:
            turn = self._queues[following].popleft()
            if not turn.cancelled():
                self._running[following] += 1
                turn.set_result(None)
                self._queues.move_to_end(following)
        self._queues = OrderedDict((tenant, queue) for tenant, queue in self._queues.items() if queue)

    def _next(self) -> str | None:
        """Whose turn it is: of those who may have a thread, the one who has waited longest for a turn."""
        return next((tenant for tenant, queue in self._queues.items() if queue and self._has_room(tenant)), None)
