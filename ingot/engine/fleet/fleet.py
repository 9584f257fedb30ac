"""The models of a server: loaded when somebody asks for them, unloaded when nobody does, or to make room.

For the event loop alone. A request holds a lease on its model from when it is known which one it means until it has
ended, and a model with leases is never unloaded. Models are moved one at a time, in the order in which somebody first
asked for them:

- Requests that name a model which is being loaded wait for that one load.
- A model that does not fit beside the others makes the idle one go that weighs most, or else the one that was there
  longest: that one takes on nobody else, finishes what it has, and goes. Requests that name it meanwhile wait for their
  turn. So nobody fails, and no model stays for less than `min_residency_s`.
- A load that fails fails the requests that wait for it, and is tried again by one that comes later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from ingot.config import ModelEntry
from ingot.engine.fleet.seat import Seat
from ingot.engine.fleet.standing import Standing
from ingot.errors import IngotError, Unavailable

if TYPE_CHECKING:
    from ingot.engine.side_engine import SideEngine

log = logging.getLogger("ingot.fleet")

RETRY_S: Final = 5.0
"""For so long after a load that failed, requests are told why, and nothing is tried."""

Arriving = Callable[[ModelEntry, "SideEngine"], Awaitable[None]]
"""Makes whatever a model needs besides its engine, which was just loaded. What it raises fails the load."""
Leaving = Callable[["SideEngine"], Awaitable[None]]
"""Lets go of whatever was made for an engine that is about to be closed."""


class Opens(Protocol):
    """Finds, loads and unloads models. Each call may take long, and raises IngotError in words."""

    async def measure(self, entry: ModelEntry) -> int:
        """The bytes that a model is to have, by its files, which are fetched where they are not here."""

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> SideEngine:
        """`told` is called with the share that is done, from any thread."""

    async def unload(self, engine: SideEngine) -> None:
        """Returns when its memory is back."""


class Fleet:
    def __init__(self, entries: Iterable[ModelEntry], opens: Opens, memory: int, min_residency_s: float = 0.0) -> None:
        """`memory` are the bytes that all loaded models may have together."""
        self._seats = {entry.name: Seat(entry) for entry in entries}
        self._opens, self._memory, self._min_residency_s = opens, memory, min_residency_s
        self._moving = asyncio.Lock()
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.arriving: Arriving = _nothing_to_make
        self.leaving: Leaving = _nothing_to_leave

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(seat.entry for seat in self._seats.values())

    @property
    def loaded(self) -> Sequence[tuple[ModelEntry, SideEngine]]:
        return [(seat.entry, seat.engine) for seat in self._seats.values() if seat.engine is not None]

    @property
    def engines(self) -> Sequence[SideEngine]:
        """Those that are loaded."""
        return [engine for _, engine in self.loaded]

    def standings(self) -> list[Standing]:
        return [seat.standing() for seat in self._seats.values()]

    def is_loaded(self, name: str) -> bool:
        return self._seats[name].takes

    @asynccontextmanager
    async def lease(self, name: str, kept_s: float | None = None) -> AsyncIterator[SideEngine]:
        """The engine of a model, which stays for as long as the block lasts; waits until it is loaded. `kept_s` says
        how long it is to stay after the last request, from now on; None: as before.

        Raises Unavailable with what went wrong, or cannot be.
        """
        seat = self._seats[name]
        engine = await self._taken(seat)
        try:
            yield engine
        finally:
            del engine
            if kept_s is not None and not seat.entry.pin:
                seat.kept_s = kept_s
            self._end_lease(seat)

    def extend(self, name: str) -> Callable[[], None]:
        """A further lease, for work that outlasts the one that whoever calls has; ends with what is returned."""
        seat = self._seats[name]
        assert seat.leases, "nobody has a lease"
        seat.leases += 1
        return lambda: self._end_lease(seat)

    async def preload(self) -> None:
        """Load what is to be there from the start, as far as memory holds it. What fails is logged."""
        for seat in [each for each in self._seats.values() if each.entry.preload]:
            try:
                if await self._fits(seat):
                    async with self.lease(seat.entry.name):
                        pass
                else:
                    log.warning(
                        "%s is loaded when it is asked for: memory holds what is loaded already", seat.entry.name
                    )
            except IngotError as error:
                log.error("%s could not be loaded: %s", seat.entry.name, error.message)

    async def unload(self, name: str) -> None:
        """Let a model finish what it has, and unload it."""
        seat = self._seats[name]
        async with self._moving:
            await self._drain(seat)

    async def swap(self, name: str) -> None:
        """Load a model in place of all others that are not pinned."""
        async with self._moving:
            for seat in self._seats.values():
                if seat.entry.name != name and not seat.entry.pin:
                    await self._drain(seat)
        async with self.lease(name):
            pass

    def close(self) -> None:
        """Begin nothing more."""
        for task in self._tasks:
            task.cancel()
        for seat in self._seats.values():
            seat.stop_expiry()

    # Coming

    async def _taken(self, seat: Seat) -> SideEngine:
        """The engine, once whoever loads it has counted this lease."""
        if seat.takes:
            seat.leases += 1
        else:
            self._bring_soon(seat)
            place = asyncio.get_running_loop().create_future()
            seat.queue.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place in seat.queue:
                    seat.queue.remove(place)
                elif not place.cancelled() and place.exception() is None:  # granted, and nobody takes it
                    self._end_lease(seat)
                raise
        seat.stop_expiry()
        assert seat.engine is not None
        return seat.engine

    def _end_lease(self, seat: Seat) -> None:
        seat.leases -= 1
        seat.used = time.monotonic()
        self._rest(seat)

    def _bring_soon(self, seat: Seat) -> None:
        """Unless it is on its way. Raises Unavailable where that failed just now."""
        if seat.coming is None:
            if seat.failure is not None and (left := seat.resides_for(RETRY_S)):
                raise Unavailable(f"{seat.entry.name} could not be loaded: {seat.failure}", retry_after=left)
            seat.coming = self._begin(self._bring(seat))

    async def _bring(self, seat: Seat) -> None:
        if seat.engine is None:
            seat.become("loading")
        try:
            claim = await self._opens.measure(seat.entry)
            async with self._moving:
                if not seat.takes:  # else it was to make room, and nobody needed that in the end
                    await self._load(seat, claim)
            seat.grant()
        except IngotError as error:
            self._fail(seat, error.message)
        except Exception:
            log.exception("%s could not be loaded", seat.entry.name)
            self._fail(seat, "the server's log says why")
        finally:
            seat.coming = None
            self._rest(seat)

    async def _load(self, seat: Seat, claim: int) -> None:
        seat.become("loading")
        await self._make_room(seat, claim)
        seat.claim = claim
        engine = await self._opens.load(seat.entry, claim, lambda share: _told(seat, share))
        try:
            await self.arriving(seat.entry, engine)
        except Exception:
            await self._opens.unload(engine)
            raise
        seat.engine = engine
        seat.kept_s = inf if seat.entry.idle_s is None else seat.entry.idle_s
        seat.become("loaded")

    def _fail(self, seat: Seat, words: str) -> None:
        seat.claim = 0
        seat.become("failed", words)
        seat.refuse(Unavailable(f"{seat.entry.name} could not be loaded: {words}", retry_after=RETRY_S))

    # Making room

    @property
    def _free(self) -> int:
        return self._memory - sum(seat.claim for seat in self._seats.values() if seat.engine is not None)

    async def _fits(self, seat: Seat) -> bool:
        return await self._opens.measure(seat.entry) <= self._free

    async def _make_room(self, coming: Seat, claim: int) -> None:
        try:
            while self._free < claim:
                going = self._next_to_go(coming, claim)
                if left := going.resides_for(self._min_residency_s):
                    await self._changed(within_s=left)
                else:
                    await self._drain(going)
        finally:
            for seat in self._seats.values():
                seat.draining = False

    def _next_to_go(self, coming: Seat, claim: int) -> Seat:
        """Raises Unavailable where nobody may go whose room would do."""
        there = [seat for seat in self._seats.values() if seat.engine is not None and not seat.entry.pin]
        if self._free + sum(seat.claim for seat in there) < claim:
            pinned = [each.entry.name for each in self._seats.values() if each.engine is not None and each.entry.pin]
            beside = f" beside {', '.join(pinned)}, which is pinned" if pinned else ""
            raise Unavailable(
                f"it takes {_gb(claim)}, and the memory budget is {_gb(self._memory)}{beside}. Raise --memory, or give "
                "it less context"
            )
        idle = [seat for seat in there if seat.idle]
        return max(idle, key=Seat.weight) if idle else min(there, key=lambda seat: seat.since)

    async def _drain(self, seat: Seat) -> None:
        """Unload a model once nobody uses it; meanwhile it takes on nobody. For whoever moves models."""
        if seat.engine is None:
            return
        seat.draining = True
        try:
            while seat.leases:
                await self._changed()
            await self._close(seat)
        finally:
            seat.draining = False

    async def _close(self, seat: Seat) -> None:
        engine, seat.engine = seat.engine, None
        assert engine is not None
        seat.stop_expiry()
        seat.become("unloading")
        try:
            await self.leaving(engine)
            await self._opens.unload(engine)
        finally:
            seat.claim = 0
            seat.become("unloaded")
            self._stir()

    # Idle ones

    def _rest(self, seat: Seat) -> None:
        """A request has ended, or a load: where nobody is left, the time begins after which it goes."""
        self._stir()
        seat.stop_expiry()
        if seat.takes and not seat.leases and seat.kept_s < inf:
            loop = asyncio.get_running_loop()
            seat.expiry = loop.call_later(seat.kept_s, lambda: self._begin(self._retire(seat)))

    async def _retire(self, seat: Seat) -> None:
        async with self._moving:
            if seat.takes and seat.idle:
                log.info("%s is unloaded: nobody asked for it for %g s", seat.entry.name, seat.kept_s)
                await self._close(seat)

    # Time

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has heard of it

    def _stir(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _changed(self, within_s: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._change.wait()


async def _nothing_to_make(entry: ModelEntry, engine: SideEngine) -> None:
    """Its engine is all that it needs."""


async def _nothing_to_leave(engine: SideEngine) -> None:
    """There is nobody who made anything for it."""


def _told(seat: Seat, share: float) -> None:
    seat.progress = share


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
