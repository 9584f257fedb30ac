"""The models of a server: loaded when somebody asks for them, unloaded when nobody does, or to make room.

For the event loop alone. A request holds a lease on its model from when it is known which one it means until it
has ended, and a model with leases is never unloaded. Models are moved one at a time; which one, and who is let in
meanwhile, is decided anew whenever something has changed, from what is so at that moment: see `decide_swap`. So a
request that leaves takes its wish along, however far that was.

- Requests that name a model which is being loaded wait for that one load.
- A load that fails fails the requests that wait for it, and is tried again by one that comes later.

Light to import: a server is ready before it has loaded a model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, cast

from ingot.config import ModelEntry
from ingot.engine.model_swap import LeaseWaiter, ModelSlot, ModelSwap, decide_swap
from ingot.engine.status import ModelStatus
from ingot.errors import DeadlineExceeded, IngotError, Unavailable

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine


log = logging.getLogger("ingot.fleet")

RETRY_LOAD_S: Final = 5.0
"""For so long after a load that failed, requests are told why, and nothing is tried."""
SEE_LOG: Final = "the server's log says why"

OnModelLoaded = Callable[[ModelEntry, "ModelEngine"], Awaitable[None]]
"""Makes whatever a model needs besides its engine, which was just loaded. What it raises fails the load."""
OnModelUnloading = Callable[["ModelEngine"], Awaitable[None]]
"""Lets go of whatever was made for an engine that is about to be closed."""


class LoadsModels(Protocol):
    """Finds, loads and unloads models. Each call may take long, and raises IngotError in words."""

    async def measure(self, entry: ModelEntry) -> int:
        """The bytes that a model is to have, by its files, which are fetched where they are not here."""

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> ModelEngine:
        """`told` is called with the share that is done, from any thread."""

    async def unload(self, engine: ModelEngine) -> None:
        """Returns when its memory is back."""


class Fleet:
    def __init__(
        self,
        entries: Iterable[ModelEntry],
        opens: LoadsModels,
        memory: int,
        *,
        min_residency_s: float = 0.0,
        swap_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` are the bytes that all loaded models may have together."""
        self._clock = clock
        self._seats = {entry.name: ModelSlot(entry, clock) for entry in entries}
        self._opens, self._memory = opens, memory
        self._min_residency_s, self._swap_wait_s = min_residency_s, swap_wait_s
        self._under_way: ModelSwap | None = None
        self._again: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self.arriving: OnModelLoaded = _no_setup
        self.leaving: OnModelUnloading = _no_teardown

    @classmethod
    def of_one(cls, entry: ModelEntry, engine: ModelEngine) -> Fleet:
        """A fleet whose one model is loaded already, and stays."""
        fleet = cls([replace(entry, resident=True, preload=False)], cast("LoadsModels", None), 0)  # which loads nothing
        seat = fleet._seats[entry.name]
        seat.engine = engine
        seat.set_state("loaded")
        return fleet

    @property
    def resident(self) -> ModelEntry | None:
        """The model of a fleet that has one, which stays."""
        return next((entry for entry in self.entries if entry.resident), None)

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(seat.entry for seat in self._seats.values())

    @property
    def loaded(self) -> Sequence[tuple[ModelEntry, ModelEngine]]:
        return [(seat.entry, seat.engine) for seat in self._seats.values() if seat.engine is not None]

    @property
    def engines(self) -> Sequence[ModelEngine]:
        """Those that are loaded."""
        return [engine for _, engine in self.loaded]

    def standings(self) -> list[ModelStatus]:
        return [seat.standing() for seat in self._seats.values()]

    def is_loaded(self, name: str) -> bool:
        """Whether a request may use it now, without waiting."""
        return self._seats[name].is_open

    @asynccontextmanager
    async def lease(
        self, name: str, unload_after_s: float | None = None, within_s: float = inf
    ) -> AsyncIterator[ModelEngine]:
        """The engine of a model, which stays for as long as the block lasts; waits until it is loaded. `unload_after_s`
        says how long it is to stay after the last request, from now on; None: as before. `within_s` is the time that
        the request may take.

        Raises Unavailable with what went wrong, or cannot be; and DeadlineExceeded where time is up before the model
        is there.
        """
        seat = self._seats[name]
        began = await self._taken(seat, within_s)
        try:
            assert seat.engine is not None
            yield seat.engine
        finally:
            if unload_after_s is not None and not seat.entry.pin:
                seat.unload_after_s = unload_after_s
            self._end_lease(seat, began)

    def extend(self, name: str) -> Callable[[], None]:
        """A further lease, for work that outlasts the one that whoever calls has; ends with what is returned."""
        seat = self._seats[name]
        assert seat.leases, "nobody has a lease"
        began = seat.begin_lease()
        return lambda: self._end_lease(seat, began)

    async def preload(self) -> None:
        """Load what is to be there from the start, as far as memory holds it. What fails is logged."""
        for seat in [each for each in self._seats.values() if each.entry.preload]:
            try:
                if await self._opens.measure(seat.entry) <= self._free:
                    async with self.lease(seat.entry.name):
                        pass
                else:
                    log.warning(
                        "%s is loaded when it is asked for: memory holds what is loaded already", seat.entry.name
                    )
            except IngotError as error:
                log.error("%s could not be loaded: %s", seat.entry.name, error.message)

    async def unload(self, name: str) -> None:
        """Let a model finish what it has, and unload it. It takes on nobody meanwhile."""
        seat = self._seats[name]
        if not seat.claim:
            return
        gone = asyncio.get_running_loop().create_future()
        seat.unload_waiters.append(gone)
        self._apply_decision()
        try:
            await gone
        finally:
            if gone in seat.unload_waiters:
                seat.unload_waiters.remove(gone)
                self._apply_decision()

    async def swap(self, name: str) -> None:
        """Load a model in place of all others that are not pinned."""
        others = [seat for seat in self._seats.values() if seat.entry.name != name and not seat.entry.pin]
        await asyncio.gather(*(self.unload(seat.entry.name) for seat in others))
        async with self.lease(name):
            pass

    def close(self) -> None:
        """Begin nothing more."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        for timer in [self._again, *(seat.expiry for seat in self._seats.values())]:
            if timer is not None:
                timer.cancel()

    # Leases

    async def _taken(self, seat: ModelSlot, within_s: float) -> float:
        """When the lease began."""
        if seat.is_open:
            return seat.begin_lease()
        if seat.failure is not None and (left := seat.since + RETRY_LOAD_S - self._clock()) > 0:
            raise Unavailable(f"{seat.entry.name} could not be loaded: {seat.failure}", retry_after=left)
        now = self._clock()
        waiter = LeaseWaiter(asyncio.get_running_loop().create_future(), now, now + within_s)
        seat.queue.append(waiter)
        self._apply_decision()
        try:
            async with asyncio.timeout(None if within_s == inf else within_s):
                return await waiter.lease
        except TimeoutError:
            self._withdraw(seat, waiter)
            raise DeadlineExceeded(
                f"{seat.entry.name} could not be used within the {within_s:g} s that the request may take"
            ) from None
        except BaseException:
            self._withdraw(seat, waiter)
            raise

    def _withdraw(self, seat: ModelSlot, waiter: LeaseWaiter) -> None:
        """Whoever waited does not any more, or not for what it was given in the same moment."""
        if waiter in seat.queue:
            seat.queue.remove(waiter)
            self._apply_decision()
        elif not waiter.lease.cancelled() and waiter.lease.exception() is None:
            self._end_lease(seat, waiter.lease.result())

    def _end_lease(self, seat: ModelSlot, began: float) -> None:
        seat.leases.remove(began)
        seat.used = self._clock()
        self._rest(seat)
        self._apply_decision()

    # Deciding

    def _apply_decision(self) -> None:
        """Something has changed, or it is time: do what is to be done now."""
        if self._is_over:
            return
        now, seats = self._clock(), self._seats.values()
        limits = {"min_residency_s": self._min_residency_s, "swap_wait_s": self._swap_wait_s}
        made = decide_swap(seats, self._memory, self._under_way, now=now, **limits)
        for seat in made.refused:
            self._fail(seat, self._too_large(seat))
        if made.move is not None and self._under_way is None:
            self._under_way = made.move
            for seat in made.move.seats:
                seat.is_moving = True
            self._begin(self._carry_out(made.move))
        for seat in seats:
            seat.is_closed = seat in made.closed
            seat.others_closed = made.closed_for.get(seat, seat.others_closed if seat.queue else -inf)
            if seat.is_open:
                seat.grant()
            if seat.queue and not seat.claim and seat.needs is None and not seat.is_being_measured:
                seat.is_being_measured = True
                self._begin(self._find(seat))
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if made.again_at < inf:
            self._again = asyncio.get_running_loop().call_later(made.again_at - now, self._apply_decision)

    def _too_large(self, seat: ModelSlot) -> str:
        pinned = [each.entry.name for each in self._seats.values() if each.claim and each.entry.pin]
        beside = f" beside {', '.join(pinned)}, which is pinned" if pinned else ""
        return (
            f"it takes {_gb(seat.needs or 0)}, and the memory budget is {_gb(self._memory)}{beside}. Raise --memory, "
            "or give it less context"
        )

    @property
    def _free(self) -> int:
        return self._memory - sum(seat.claim for seat in self._seats.values())

    def _rest(self, seat: ModelSlot) -> None:
        """A request has ended, or a load: where nobody is left, the time begins after which it goes."""
        seat.stop_expiry()
        if seat.engine is not None and not seat.leases and seat.unload_after_s < inf:
            seat.expiry = asyncio.get_running_loop().call_later(seat.unload_after_s, self._expire, seat)

    def _expire(self, seat: ModelSlot) -> None:
        seat.expired = True
        self._apply_decision()

    # Moving

    async def _find(self, seat: ModelSlot) -> None:
        """How much memory a model needs. Its files may have to be fetched for that."""
        seat.set_state("loading")
        try:
            seat.needs = await self._opens.measure(seat.entry)
            seat.set_state("unloaded")
        except IngotError as error:
            self._fail(seat, error.message)
        except Exception:
            log.exception("%s could not be found", seat.entry.name)
            self._fail(seat, SEE_LOG)
        finally:
            seat.is_being_measured = False
            self._apply_decision()

    async def _carry_out(self, move: ModelSwap) -> None:
        coming = move.coming
        try:
            if coming is not None:
                coming.set_state("loading")
            for seat in move.going:
                if move.is_wanted:
                    await self._unload(seat)
            if coming is not None and move.is_wanted:
                await self._load(coming)
        except Exception as error:
            if not isinstance(error, IngotError):
                log.exception("%s could not be moved", ", ".join(seat.entry.name for seat in move.seats))
            if coming is not None:
                self._fail(coming, error.message if isinstance(error, IngotError) else SEE_LOG)
        finally:
            if coming is not None and coming.state == "loading":
                coming.set_state("unloaded")
            for seat in move.seats:
                seat.is_moving = False
            self._under_way = None
            self._apply_decision()

    async def _load(self, seat: ModelSlot) -> None:
        assert seat.needs is not None
        seat.claim, seat.needs = seat.needs, None
        engine = await self._opens.load(seat.entry, seat.claim, lambda share: _set_progress(seat, share))
        try:
            await self.arriving(seat.entry, engine)
        except Exception:
            await self._opens.unload(engine)
            raise
        seat.engine = engine
        seat.unload_after_s = inf if seat.entry.idle_s is None else seat.entry.idle_s
        seat.set_state("loaded")
        seat.grant()  # whoever waited for this load has it, though the model may be to go again by now
        self._rest(seat)

    async def _unload(self, seat: ModelSlot) -> None:
        engine, seat.engine = seat.engine, None
        assert engine is not None
        if seat.expired:
            log.info("%s is unloaded: nobody asked for it for %g s", seat.entry.name, seat.unload_after_s)
        seat.stop_expiry()
        seat.set_state("unloading")
        try:
            await self.leaving(engine)
            await self._opens.unload(engine)
        finally:
            seat.claim = 0
            seat.set_state("unloaded")
            seat.notify_unloaded()

    def _fail(self, seat: ModelSlot, words: str) -> None:
        seat.claim, seat.needs = 0, None
        seat.set_state("failed", words)
        seat.refuse(Unavailable(f"{seat.entry.name} could not be loaded: {words}", retry_after=RETRY_LOAD_S))
        seat.notify_unloaded()

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _no_setup(entry: ModelEntry, engine: ModelEngine) -> None:
    """Its engine is all that it needs."""


async def _no_teardown(engine: ModelEngine) -> None:
    """There is nobody who made anything for it."""


def _set_progress(seat: ModelSlot, share: float) -> None:
    seat.progress = share


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
