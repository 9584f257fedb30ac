"""Thread pools for work that would block the event loop, one for each kind of work, shared fairly by tenants."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

from ingot.errors import Overloaded
from ingot.media import worker
from ingot.observe.logs import current_request_id
from ingot.shares import Shares
from ingot.text import cancellation

T = TypeVar("T")
LANE_RETRY_S: Final = 1.0


class FairTurns:
    """A fair semaphore of one event loop: `at_once` may run, at most `each` of one tenant, and tenants take turns.
    Where `waiting` of a tenant wait already, more raise Overloaded."""

    def __init__(self, name: str, *, at_once: int, each: int, waiting: int) -> None:
        self._each, self._waiting = each, waiting
        self._running = Shares(name, at_once)
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        await self.take(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    async def take(self, tenant: str) -> None:
        """Waits for a turn, which the caller has until it calls `leave`."""
        queue = self._queues.get(tenant)
        if not queue and self._has_room(tenant):
            self._running.add(tenant, 1)
            return
        if queue is None:
            queue = self._queues[tenant] = deque()
        if len(queue) >= self._waiting:
            raise Overloaded(
                f"{len(queue)} requests of this key are waiting already. Try again in a moment.",
                retry_after=LANE_RETRY_S,
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came just when its caller left
                self.leave(tenant)
            elif turn in queue:
                queue.remove(turn)
            raise

    def leave(self, tenant: str) -> None:
        self._running.add(tenant, -1)
        while (following := self._next()) is not None:
            turn = self._queues[following].popleft()
            if not turn.cancelled():
                self._running.add(following, 1)
                turn.set_result(None)
                self._queues.move_to_end(following)
        self._queues = OrderedDict((tenant, queue) for tenant, queue in self._queues.items() if queue)

    def _has_room(self, tenant: str) -> bool:
        return self._running.total < self._running.capacity and self._running.held[tenant] < self._each

    def _next(self) -> str | None:
        """Whose turn it is: of the tenants that may run, the one with fewest running; then the one that waited
        longest."""
        waiting = (tenant for tenant, queue in self._queues.items() if queue and self._has_room(tenant))
        return min(waiting, key=lambda tenant: self._running.held[tenant], default=None)


class ThreadLane:
    """Threads that tenants use by turns.

    Work whose caller is cancelled can see that (`cancellation.still_wanted`) and keeps its thread until it stops.
    """

    def __init__(self, name: str, *, threads: int, each: int, waiting: int) -> None:
        self._turns = FairTurns(name, at_once=threads, each=each, waiting=waiting)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"ingot-{name}")

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        await self._turns.take(tenant)
        left = threading.Event()

        def wanted() -> bool:
            return not left.is_set()

        def watched() -> T:
            cancellation.still_wanted.set(wanted)
            with worker.working_for(worker.MediaClient(tenant, wanted, current_request_id.get())):
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

    def _ended(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(self._turns.leave, tenant)
