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
from typing import TYPE_CHECKING, Final, cast

from ingot.config import ModelEntry
from ingot.engine.model_swap import LeaseWaiter, ModelSlot, ModelSwap, decide_swap
from ingot.engine.status import ModelStatus
from ingot.errors import DeadlineExceeded, IngotError, Unavailable
from ingot.quantities import format_bytes

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine
    from ingot.engine.loading.model_loader import ModelLoader
    from ingot.engine.loading.recommend import Recommendation


log = logging.getLogger("ingot.fleet")

RETRY_LOAD_S: Final = 5.0
"""For so long after a load that failed, requests are told why, and nothing is tried."""
SEE_LOG: Final = "the server's log says why"

OnModelLoaded = Callable[[ModelEntry, "ModelEngine"], Awaitable[None]]
"""Makes whatever a model needs besides its engine, which was just loaded. What it raises fails the load."""
OnModelUnloading = Callable[["ModelEngine"], Awaitable[None]]
"""Lets go of whatever was made for an engine that is about to be closed."""


class Fleet:
    def __init__(
        self,
        entries: Iterable[ModelEntry],
        loader: ModelLoader,
        memory: int,
        *,
        min_residency_s: float = 0.0,
        swap_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` are the bytes that all loaded models may have together."""
        self._clock = clock
        self._slots = {entry.name: ModelSlot(entry, clock) for entry in entries}
        self._loader, self._memory = loader, memory
        self._min_residency_s, self._swap_wait_s = min_residency_s, swap_wait_s
        self._current_swap: ModelSwap | None = None
        self._decide_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.arriving: OnModelLoaded = _no_setup
        self.leaving: OnModelUnloading = _no_teardown

    @classmethod
    def of_resident(cls, models: Iterable[tuple[ModelEntry, ModelEngine]]) -> Fleet:
        """A fleet whose models are loaded already, and stay."""
        engines = {entry.name: (replace(entry, resident=True, preload=False), engine) for entry, engine in models}
        fleet = cls([entry for entry, _ in engines.values()], cast("ModelLoader", None), 0)  # which loads nothing
        for name, (_, engine) in engines.items():
            slot = fleet._slots[name]
            slot.engine = engine
            slot.set_state("loaded")
        return fleet

    @property
    def is_resident(self) -> bool:
        """Whether its models are loaded already, and stay."""
        return any(slot.entry.resident for slot in self._slots.values())

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(slot.entry for slot in self._slots.values())

    @property
    def loaded(self) -> Sequence[tuple[ModelEntry, ModelEngine]]:
        return [(slot.entry, slot.engine) for slot in self._slots.values() if slot.engine is not None]

    @property
    def engines(self) -> Sequence[ModelEngine]:
        """Those that are loaded."""
        return [engine for _, engine in self.loaded]

    def statuses(self) -> list[ModelStatus]:
        return [self._status(slot) for slot in self._slots.values()]

    def _status(self, slot: ModelSlot) -> ModelStatus:
        status = slot.status()
        return status if slot.engine is not None else replace(status, stated=self._loader.stated(slot.entry))

    def recommended(self) -> list[Recommendation]:
        """Models that there is memory for. Not for the event loop."""
        return self._loader.recommended()

    async def add(self, entry: ModelEntry) -> None:
        """Another model, which is fetched if need be and loaded. It stays unless that fails. Raises Unavailable."""
        self._slots[entry.name] = slot = ModelSlot(entry, self._clock)
        try:
            async with self.lease(entry.name):
                pass
        except BaseException:
            if slot.engine is None and not slot.is_moving and not slot.is_being_measured:
                del self._slots[entry.name]
            raise

    def is_loaded(self, name: str) -> bool:
        """Whether a request may use it now, without waiting."""
        return self._slots[name].is_open

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
        slot = self._slots[name]
        began = await self._begin_lease(slot, within_s)
        try:
            assert slot.engine is not None
            yield slot.engine
        finally:
            if unload_after_s is not None and not (slot.entry.pin or slot.entry.resident):
                slot.unload_after_s = unload_after_s
            self._end_lease(slot, began)

    def extend(self, name: str) -> Callable[[], None]:
        """A further lease, for work that outlasts the one that whoever calls has; ends with what is returned."""
        slot = self._slots[name]
        assert slot.leases, "nobody has a lease"
        began = slot.begin_lease()
        return lambda: self._end_lease(slot, began)

    async def preload(self) -> None:
        """Load what is to be there from the start, as far as memory holds it. What fails is logged."""
        for slot in [each for each in self._slots.values() if each.entry.preload]:
            try:
                if await self._loader.measure(slot.entry) <= self._free:
                    async with self.lease(slot.entry.name):
                        pass
                else:
                    log.warning(
                        "%s is loaded when it is asked for: memory holds what is loaded already", slot.entry.name
                    )
            except IngotError as error:
                log.error("%s could not be loaded: %s", slot.entry.name, error.message)

    async def unload(self, name: str) -> None:
        """Let a model finish what it has, and unload it. It takes on nobody meanwhile."""
        slot = self._slots[name]
        if not slot.claim:
            return
        gone = asyncio.get_running_loop().create_future()
        slot.unload_waiters.append(gone)
        self._apply_decision()
        try:
            await gone
        finally:
            if gone in slot.unload_waiters:
                slot.unload_waiters.remove(gone)
                self._apply_decision()

    async def swap(self, name: str) -> None:
        """Load a model in place of all others that are not pinned."""
        others = [slot for slot in self._slots.values() if slot.entry.name != name and not slot.entry.pin]
        await asyncio.gather(*(self.unload(slot.entry.name) for slot in others))
        async with self.lease(name):
            pass

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for timer in [self._decide_timer, *(slot.expiry for slot in self._slots.values())]:
            if timer is not None:
                timer.cancel()

    # Leases

    async def _begin_lease(self, slot: ModelSlot, within_s: float) -> float:
        """When the lease began."""
        if slot.is_open:
            return slot.begin_lease()
        if slot.failure is not None and (left := slot.since + RETRY_LOAD_S - self._clock()) > 0:
            raise Unavailable(f"{slot.entry.name} could not be loaded: {slot.failure}", retry_after=left)
        now = self._clock()
        waiter = LeaseWaiter(asyncio.get_running_loop().create_future(), now, now + within_s)
        slot.queue.append(waiter)
        self._apply_decision()
        try:
            async with asyncio.timeout(None if within_s == inf else within_s):
                return await waiter.lease
        except TimeoutError:
            self._withdraw(slot, waiter)
            raise DeadlineExceeded(
                f"{slot.entry.name} could not be used within the {within_s:g} s that the request may take"
            ) from None
        except BaseException:
            self._withdraw(slot, waiter)
            raise

    def _withdraw(self, slot: ModelSlot, waiter: LeaseWaiter) -> None:
        """Whoever waited does not any more, or not for what it was given in the same moment."""
        if waiter in slot.queue:
            slot.queue.remove(waiter)
            self._apply_decision()
        elif not waiter.lease.cancelled() and waiter.lease.exception() is None:
            self._end_lease(slot, waiter.lease.result())

    def _end_lease(self, slot: ModelSlot, began: float) -> None:
        slot.leases.remove(began)
        slot.used = self._clock()
        self._rest(slot)
        self._apply_decision()

    # Deciding

    def _apply_decision(self) -> None:
        """Something has changed, or it is time: do what is to be done now."""
        if self._closed:
            return
        now, slots = self._clock(), self._slots.values()
        limits = {"min_residency_s": self._min_residency_s, "swap_wait_s": self._swap_wait_s}
        decision = decide_swap(slots, self._memory, self._current_swap, now=now, **limits)
        for slot in decision.refused:
            self._fail(slot, self._too_large(slot))
        if decision.swap is not None and self._current_swap is None:
            self._current_swap = decision.swap
            for slot in decision.swap.slots:
                slot.is_moving = True
            self._spawn(self._carry_out(decision.swap))
        for slot in slots:
            slot.is_closed = slot in decision.closed
            slot.others_closed = decision.closed_for.get(slot, slot.others_closed if slot.queue else -inf)
            if slot.is_open:
                slot.grant()
            if slot.queue and not slot.claim and slot.needs is None and not slot.is_being_measured:
                slot.is_being_measured = True
                self._spawn(self._find(slot))
        if self._decide_timer is not None:
            self._decide_timer.cancel()
            self._decide_timer = None
        if decision.again_at < inf:
            self._decide_timer = asyncio.get_running_loop().call_later(decision.again_at - now, self._apply_decision)

    def _too_large(self, slot: ModelSlot) -> str:
        pinned = [each.entry.name for each in self._slots.values() if each.claim and each.entry.pin]
        kept = f" alongside {', '.join(pinned)}, which is pinned" if pinned else ""
        return (
            f"it takes {format_bytes(slot.needs or 0)}, and the memory budget is {format_bytes(self._memory)}{kept}. "
            "Raise --memory, or give it less context"
        )

    @property
    def _free(self) -> int:
        return self._memory - sum(slot.claim for slot in self._slots.values())

    def _rest(self, slot: ModelSlot) -> None:
        """A request has ended, or a load: where nobody is left, the time begins after which it goes."""
        slot.stop_expiry()
        if slot.engine is not None and not slot.leases and slot.unload_after_s < inf:
            slot.expiry = asyncio.get_running_loop().call_later(slot.unload_after_s, self._expire, slot)

    def _expire(self, slot: ModelSlot) -> None:
        slot.expired = True
        self._apply_decision()

    # Moving

    async def _find(self, slot: ModelSlot) -> None:
        """How much memory a model needs. Its files may have to be fetched for that."""
        slot.set_state("loading")
        try:
            slot.needs = await self._loader.measure(slot.entry, lambda share: _set_progress(slot, share))
            slot.set_state("unloaded")
        except IngotError as error:
            self._fail(slot, error.message)
        except Exception:
            log.exception("%s could not be found", slot.entry.name)
            self._fail(slot, SEE_LOG)
        finally:
            slot.is_being_measured = False
            self._apply_decision()

    async def _carry_out(self, swap: ModelSwap) -> None:
        coming = swap.coming
        try:
            if coming is not None:
                coming.set_state("loading")
            for slot in swap.going:
                if swap.is_wanted:
                    await self._unload(slot)
            if coming is not None and swap.is_wanted:
                await self._load(coming)
        except Exception as error:
            if not isinstance(error, IngotError):
                log.exception("%s could not be moved", ", ".join(slot.entry.name for slot in swap.slots))
            if coming is not None:
                self._fail(coming, error.message if isinstance(error, IngotError) else SEE_LOG)
        finally:
            if coming is not None and coming.state == "loading":
                coming.set_state("unloaded")
            for slot in swap.slots:
                slot.is_moving = False
            self._current_swap = None
            self._apply_decision()

    async def _load(self, slot: ModelSlot) -> None:
        assert slot.needs is not None
        slot.claim, slot.needs = slot.needs, None
        engine = await self._loader.load(slot.entry, slot.claim, lambda share: _set_progress(slot, share))
        try:
            await self.arriving(slot.entry, engine)
        except Exception:
            await self._loader.unload(engine)
            raise
        slot.engine = engine
        slot.unload_after_s = inf if slot.entry.idle_s is None else slot.entry.idle_s
        slot.set_state("loaded")
        slot.grant()  # whoever waited for this load has it, though the model may be to go again by now
        self._rest(slot)

    async def _unload(self, slot: ModelSlot) -> None:
        engine, slot.engine = slot.engine, None
        assert engine is not None
        if slot.expired:
            log.info("%s is unloaded: nobody asked for it for %g s", slot.entry.name, slot.unload_after_s)
        slot.stop_expiry()
        slot.set_state("unloading")
        try:
            await self.leaving(engine)
            await self._loader.unload(engine)
        finally:
            slot.claim = 0
            slot.set_state("unloaded")
            slot.notify_unloaded()

    def _fail(self, slot: ModelSlot, reason: str) -> None:
        slot.claim, slot.needs = 0, None
        slot.set_state("failed", reason)
        slot.refuse(Unavailable(f"{slot.entry.name} could not be loaded: {reason}", retry_after=RETRY_LOAD_S))
        slot.notify_unloaded()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _no_setup(entry: ModelEntry, engine: ModelEngine) -> None:
    """Its engine is all that it needs."""


async def _no_teardown(engine: ModelEngine) -> None:
    """There is nobody who made anything for it."""


def _set_progress(slot: ModelSlot, share: float) -> None:
    slot.progress = share
