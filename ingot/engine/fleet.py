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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, cast

from ingot.config import ModelEntry
from ingot.engine.status import ModelState, ModelStatus
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


@dataclass(frozen=True, slots=True)
class ModelSwap:
    """Unload `going`, one after the other, and then load `coming`; each only if it is still wanted by then."""

    going: tuple[ModelSlot, ...]
    coming: ModelSlot | None = None

    @property
    def seats(self) -> tuple[ModelSlot, ...]:
        return self.going if self.coming is None else (*self.going, self.coming)

    @property
    def balance(self) -> int:
        """The bytes that are free afterwards and are not yet."""
        return sum(seat.claim for seat in self.going) - (0 if self.coming is None else self.coming.needs or 0)

    @property
    def is_wanted(self) -> bool:
        if self.coming is not None:
            return bool(self.coming.queue)
        return all(seat.unload_waiters or (seat.expired and not seat.queue) for seat in self.going)


@dataclass(slots=True)
class SwapDecision:
    move: ModelSwap | None = None  # the next one
    closed: set[ModelSlot] = field(default_factory=set)  # loaded models that take on nobody for now
    closed_for: dict[ModelSlot, float] = field(default_factory=dict)  # wanted models, and since when others are closed
    refused: list[ModelSlot] = field(default_factory=list)  # models whose requests can never be served
    again_at: float = inf  # when to decide again, though nothing else happens


def decide_swap(
    seats: Collection[ModelSlot],
    memory: int,
    under_way: ModelSwap | None = None,
    *,
    now: float,
    min_residency_s: float,
    swap_wait_s: float,
) -> SwapDecision:
    """Which model to move next, once what is `under_way` is done, and which loaded ones take on nobody for now.

    A model is wanted while a request waits for it, and no longer: once the last one that waits has left, by itself or
    at its deadline, nothing is unloaded for it any more, and whoever stood back for it is let in.

    - A wanted model that fits into free memory is loaded at once, whoever else waits for room.
    - One that does not fit needs others to go: idle ones, of which those go first that were unused for long and free
      much; where they do not suffice, models in use, of which those go first that were loaded first. Pinned ones stay,
      and each stays for `min_residency_s` at least. None is unloaded until nobody uses any of those that have to go.
      Running requests are never cut.
    - For `swap_wait_s`, or half of the time that the waiting request may take if that is less, models that have to go
      take on everybody as before. If there is a moment in which nobody uses them, they go.
    - Then they are closed: who asks for them waits as well, and free memory is kept for the wanted model. They go when
      the last running request has ended.
    - Where that takes longer than another `swap_wait_s`, an answer is long, and it would help nobody to let all others
      wait for it. So they are opened again, and free memory is anybody's, until the last request has ended that began
      before they were closed, or no more than `swap_wait_s` is left until the deadline of one that waits. Then they
      are closed until they go. So a wait for room is bounded: by what is said above and two requests' longest time.

    Where several models wait for room, the one is first whose `swap_wait_s` is over first. Once it is over, those
    behind it get the room that it leaves.
    """
    made, times = SwapDecision(closed={seat for seat in seats if seat.unload_waiters}), list[float]()
    for seat in seats:
        if seat.engine is not None and not seat.leases and ModelSwap((seat,)).is_wanted:
            made.move = ModelSwap((seat,))
    free = memory - sum(seat.claim for seat in seats)
    spare = free if under_way is None else free + under_way.balance  # what those in front leave, once they are there
    there = [seat for seat in seats if seat.engine is not None and not seat.entry.pin and not seat.is_moving]
    wanted = [seat for seat in seats if seat.queue and seat.needs is not None and not seat.is_moving]
    for seat in sorted(wanted, key=lambda seat: seat.turn(swap_wait_s)):
        turn, needs = seat.turn(swap_wait_s), seat.needs or 0
        if needs > memory - sum(each.claim for each in seats if each.entry.pin):
            made.refused.append(seat)
            continue
        times.append(turn)
        going = _models_to_unload(there, needs - min(free, spare), now)
        if going is None:
            continue  # those in front have what it needs
        move = ModelSwap(going, seat)
        stay_until = {each: each.since + min_residency_s for each in going}
        closed_at = seat.others_closed if seat.others_closed >= turn else max([turn, *stay_until.values()])
        last_call = min(waiter.deadline for waiter in seat.queue) - swap_wait_s
        times += [*stay_until.values(), closed_at + swap_wait_s, last_call]
        is_held_up = any(began < closed_at for each in going for began in each.leases)
        is_reopened = is_held_up and closed_at + swap_wait_s <= now < last_call
        is_due = now >= turn and not is_reopened
        if is_due:
            made.closed |= {each for each in going if now >= stay_until[each]}
        if now >= closed_at:
            made.closed_for[seat] = closed_at
        begins = all(now >= stay_until[each] and not each.leases for each in going)
        if begins and made.move is None:
            made.move = move
        if begins or is_due:
            spare += move.balance
            there = [each for each in there if each not in going]
    made.again_at = min((at for at in times if at > now), default=inf)
    return made


def _models_to_unload(there: Sequence[ModelSlot], lacking: int, now: float) -> tuple[ModelSlot, ...] | None:
    """Those whose room is enough, and no others; None where all of them have too little."""
    idle = sorted((seat for seat in there if seat.idle), key=lambda seat: -seat.weight(now))
    used = sorted((seat for seat in there if not seat.idle), key=lambda seat: seat.since)
    going: list[ModelSlot] = []
    for seat in [*idle, *used]:
        if lacking > 0:
            going.append(seat)
            lacking -= seat.claim
    for seat in tuple(going):  # whoever came later may have freed so much that one before it can stay
        if lacking + seat.claim <= 0:
            going.remove(seat)
            lacking += seat.claim
    return None if lacking > 0 else tuple(going)


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


if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine


@dataclass(eq=False, slots=True, frozen=True)
class LeaseWaiter:
    """A request that waits for a lease, which it is told the beginning of."""

    lease: asyncio.Future[float]
    arrived: float
    deadline: float  # when it gives up; infinite where it does not


@dataclass(eq=False, slots=True)
class ModelSlot:
    """`Fleet` alone changes it."""

    entry: ModelEntry
    clock: Callable[[], float]
    state: ModelState = "unloaded"
    since: float = 0.0
    engine: ModelEngine | None = None
    claim: int = 0  # bytes that it has: while it is loaded, and while it is being loaded and unloaded
    needs: int | None = None  # bytes that it is to have, once that is known and until it has them
    leases: list[float] = field(default_factory=list)  # when each began
    queue: list[LeaseWaiter] = field(default_factory=list)
    used: float = 0.0  # when the last lease ended
    unload_after_s: float = inf  # how long it stays without a request
    expired: bool = False  # it has stayed so long
    unload_waiters: list[asyncio.Future[None]] = field(default_factory=list)  # of those who asked for it to be unloaded
    is_being_measured: bool = False  # its files are being looked at
    is_moving: bool = False
    is_closed: bool = False  # it takes on nobody for now
    others_closed: float = -inf  # since when others are closed to make room for it
    progress: float | None = None
    failure: str | None = None
    expiry: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.since = self.used = self.clock()

    @property
    def idle(self) -> bool:
        return not self.leases and not self.queue

    @property
    def is_open(self) -> bool:
        """Whether a request may use it now."""
        return self.engine is not None and not self.is_moving and not self.is_closed

    def set_state(self, state: ModelState, failure: str | None = None) -> None:
        self.state, self.since, self.failure, self.progress = state, self.clock(), failure, None

    def begin_lease(self) -> float:
        self.stop_expiry()
        began = self.clock()
        self.leases.append(began)
        return began

    def grant(self) -> None:
        """A lease to each who waits."""
        for waiter in self._waiters():
            waiter.lease.set_result(self.begin_lease())

    def refuse(self, error: IngotError) -> None:
        for waiter in self._waiters():
            waiter.lease.set_exception(error)

    def notify_unloaded(self) -> None:
        """It is not loaded any more: tell those who asked for that."""
        gone, self.unload_waiters = self.unload_waiters, []
        for each in gone:
            if not each.done():
                each.set_result(None)

    def _waiters(self) -> list[LeaseWaiter]:
        waiters, self.queue = self.queue, []
        return [waiter for waiter in waiters if not waiter.lease.done()]

    def turn(self, swap_wait_s: float) -> float:
        """When others are to make room for it, however much they have to do: what the most impatient waiter says."""
        return min(each.arrived + min(swap_wait_s, (each.deadline - each.arrived) / 2) for each in self.queue)

    def weight(self, now: float) -> float:
        """The larger, the better it goes: what was not used for long, and frees much."""
        return (now - self.used) * self.claim

    def stop_expiry(self) -> None:
        self.expired = False
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def standing(self) -> ModelStatus:
        left = None if self.expiry is None else max(0.0, self.expiry.when() - self.clock())
        return ModelStatus(
            self.entry.name,
            self.state,
            self.entry.kind,
            self.entry.aliases,
            self.entry.pin,
            round(self.clock() - self.since, 3),
            self.claim,
            self.progress,
            self.failure,
            len(self.leases),
            len(self.queue),
            left,
            self.entry.resident,
        )
