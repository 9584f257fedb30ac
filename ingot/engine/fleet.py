"""The models of a server: loaded when somebody asks for them, unloaded when nobody does, or to make room.

For the event loop alone. A request holds a lease on its model from when it is known which one it means until it has
ended, and a model with leases is never unloaded. Models are moved one at a time; which one, and who is let in
meanwhile, is decided anew whenever something has changed, from what is so at that moment: see `decide`. So a request
that leaves takes its wish along, however far that was.

- Requests that name a model which is being loaded wait for that one load.
- A load that fails fails the requests that wait for it, and is tried again by one that comes later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from ingot.config import ModelEntry
from ingot.engine.fleet_seat import Seat, Waiter
from ingot.engine.fleet_standing import Standing
from ingot.errors import DeadlineExceeded, IngotError, Unavailable

if TYPE_CHECKING:
    from ingot.engine.side_engine import SideEngine

log = logging.getLogger("ingot.fleet")

RETRY_S: Final = 5.0
"""For so long after a load that failed, requests are told why, and nothing is tried."""
LOGGED: Final = "the server's log says why"

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


@dataclass(frozen=True, slots=True)
class Move:
    """Unload `going`, one after the other, and then load `coming`; each only if it is still wanted by then."""

    going: tuple[Seat, ...]
    coming: Seat | None = None

    @property
    def seats(self) -> tuple[Seat, ...]:
        return self.going if self.coming is None else (*self.going, self.coming)

    @property
    def balance(self) -> int:
        """The bytes that are free afterwards and are not yet."""
        return sum(seat.claim for seat in self.going) - (0 if self.coming is None else self.coming.needs or 0)

    @property
    def is_wanted(self) -> bool:
        if self.coming is not None:
            return bool(self.coming.queue)
        return all(seat.dismissals or (seat.expired and not seat.queue) for seat in self.going)


@dataclass(slots=True)
class Decision:
    move: Move | None = None  # the next one
    closed: set[Seat] = field(default_factory=set)  # loaded models that take on nobody for now
    closed_for: dict[Seat, float] = field(default_factory=dict)  # wanted models, and since when others are closed
    refused: list[Seat] = field(default_factory=list)  # models whose requests can never be served
    again_at: float = inf  # when to decide again, though nothing else happens


def decide(
    seats: Collection[Seat],
    memory: int,
    under_way: Move | None = None,
    *,
    now: float,
    min_residency_s: float,
    swap_wait_s: float,
) -> Decision:
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
    made, times = Decision(closed={seat for seat in seats if seat.dismissals}), list[float]()
    for seat in seats:
        if seat.engine is not None and not seat.leases and Move((seat,)).is_wanted:
            made.move = Move((seat,))
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
        going = _to_go(there, needs - min(free, spare), now)
        if going is None:
            continue  # those in front have what it needs
        move = Move(going, seat)
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


def _to_go(there: Sequence[Seat], lacking: int, now: float) -> tuple[Seat, ...] | None:
    """Those whose room is enough, and no others; None where all of them have too little."""
    idle = sorted((seat for seat in there if seat.idle), key=lambda seat: -seat.weight(now))
    used = sorted((seat for seat in there if not seat.idle), key=lambda seat: seat.since)
    going: list[Seat] = []
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
        opens: Opens,
        memory: int,
        *,
        min_residency_s: float = 0.0,
        swap_wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` are the bytes that all loaded models may have together."""
        self._clock = clock
        self._seats = {entry.name: Seat(entry, clock) for entry in entries}
        self._opens, self._memory = opens, memory
        self._min_residency_s, self._swap_wait_s = min_residency_s, swap_wait_s
        self._under_way: Move | None = None
        self._again: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
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
        """Whether a request may use it now, without waiting."""
        return self._seats[name].is_open

    @asynccontextmanager
    async def lease(self, name: str, kept_s: float | None = None, within_s: float = inf) -> AsyncIterator[SideEngine]:
        """The engine of a model, which stays for as long as the block lasts; waits until it is loaded. `kept_s` says
        how long it is to stay after the last request, from now on; None: as before. `within_s` is the time that the
        request may take.

        Raises Unavailable with what went wrong, or cannot be; and DeadlineExceeded where time is up before the model
        is there.
        """
        seat = self._seats[name]
        began = await self._taken(seat, within_s)
        try:
            assert seat.engine is not None
            yield seat.engine
        finally:
            if kept_s is not None and not seat.entry.pin:
                seat.kept_s = kept_s
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
        seat.dismissals.append(gone)
        self._stir()
        try:
            await gone
        finally:
            if gone in seat.dismissals:
                seat.dismissals.remove(gone)
                self._stir()

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

    async def _taken(self, seat: Seat, within_s: float) -> float:
        """When the lease began."""
        if seat.is_open:
            return seat.begin_lease()
        if seat.failure is not None and (left := seat.since + RETRY_S - self._clock()) > 0:
            raise Unavailable(f"{seat.entry.name} could not be loaded: {seat.failure}", retry_after=left)
        now = self._clock()
        waiter = Waiter(asyncio.get_running_loop().create_future(), now, now + within_s)
        seat.queue.append(waiter)
        self._stir()
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

    def _withdraw(self, seat: Seat, waiter: Waiter) -> None:
        """Whoever waited does not any more, or not for what it was given in the same moment."""
        if waiter in seat.queue:
            seat.queue.remove(waiter)
            self._stir()
        elif not waiter.lease.cancelled() and waiter.lease.exception() is None:
            self._end_lease(seat, waiter.lease.result())

    def _end_lease(self, seat: Seat, began: float) -> None:
        seat.leases.remove(began)
        seat.used = self._clock()
        self._rest(seat)
        self._stir()

    # Deciding

    def _stir(self) -> None:
        """Something has changed, or it is time: do what is to be done now."""
        if self._is_over:
            return
        now, seats = self._clock(), self._seats.values()
        limits = {"min_residency_s": self._min_residency_s, "swap_wait_s": self._swap_wait_s}
        made = decide(seats, self._memory, self._under_way, now=now, **limits)
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
            if seat.queue and not seat.claim and seat.needs is None and not seat.is_sought:
                seat.is_sought = True
                self._begin(self._find(seat))
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if made.again_at < inf:
            self._again = asyncio.get_running_loop().call_later(made.again_at - now, self._stir)

    def _too_large(self, seat: Seat) -> str:
        pinned = [each.entry.name for each in self._seats.values() if each.claim and each.entry.pin]
        beside = f" beside {', '.join(pinned)}, which is pinned" if pinned else ""
        return (
            f"it takes {_gb(seat.needs or 0)}, and the memory budget is {_gb(self._memory)}{beside}. Raise --memory, "
            "or give it less context"
        )

    @property
    def _free(self) -> int:
        return self._memory - sum(seat.claim for seat in self._seats.values())

    def _rest(self, seat: Seat) -> None:
        """A request has ended, or a load: where nobody is left, the time begins after which it goes."""
        seat.stop_expiry()
        if seat.engine is not None and not seat.leases and seat.kept_s < inf:
            seat.expiry = asyncio.get_running_loop().call_later(seat.kept_s, self._expire, seat)

    def _expire(self, seat: Seat) -> None:
        seat.expired = True
        self._stir()

    # Moving

    async def _find(self, seat: Seat) -> None:
        """How much memory a model needs. Its files may have to be fetched for that."""
        seat.become("loading")
        try:
            seat.needs = await self._opens.measure(seat.entry)
            seat.become("unloaded")
        except IngotError as error:
            self._fail(seat, error.message)
        except Exception:
            log.exception("%s could not be found", seat.entry.name)
            self._fail(seat, LOGGED)
        finally:
            seat.is_sought = False
            self._stir()

    async def _carry_out(self, move: Move) -> None:
        coming = move.coming
        try:
            if coming is not None:
                coming.become("loading")
            for seat in move.going:
                if move.is_wanted:
                    await self._unload(seat)
            if coming is not None and move.is_wanted:
                await self._load(coming)
        except Exception as error:
            if not isinstance(error, IngotError):
                log.exception("%s could not be moved", ", ".join(seat.entry.name for seat in move.seats))
            if coming is not None:
                self._fail(coming, error.message if isinstance(error, IngotError) else LOGGED)
        finally:
            if coming is not None and coming.state == "loading":
                coming.become("unloaded")
            for seat in move.seats:
                seat.is_moving = False
            self._under_way = None
            self._stir()

    async def _load(self, seat: Seat) -> None:
        assert seat.needs is not None
        seat.claim, seat.needs = seat.needs, None
        engine = await self._opens.load(seat.entry, seat.claim, lambda share: _told(seat, share))
        try:
            await self.arriving(seat.entry, engine)
        except Exception:
            await self._opens.unload(engine)
            raise
        seat.engine = engine
        seat.kept_s = inf if seat.entry.idle_s is None else seat.entry.idle_s
        seat.become("loaded")
        seat.grant()  # whoever waited for this load has it, though the model may be to go again by now
        self._rest(seat)

    async def _unload(self, seat: Seat) -> None:
        engine, seat.engine = seat.engine, None
        assert engine is not None
        if seat.expired:
            log.info("%s is unloaded: nobody asked for it for %g s", seat.entry.name, seat.kept_s)
        seat.stop_expiry()
        seat.become("unloading")
        try:
            await self.leaving(engine)
            await self._opens.unload(engine)
        finally:
            seat.claim = 0
            seat.become("unloaded")
            seat.dismiss()

    def _fail(self, seat: Seat, words: str) -> None:
        seat.claim, seat.needs = 0, None
        seat.become("failed", words)
        seat.refuse(Unavailable(f"{seat.entry.name} could not be loaded: {words}", retry_after=RETRY_S))
        seat.dismiss()

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _nothing_to_make(entry: ModelEntry, engine: SideEngine) -> None:
    """Its engine is all that it needs."""


async def _nothing_to_leave(engine: SideEngine) -> None:
    """There is nobody who made anything for it."""


def _told(seat: Seat, share: float) -> None:
    seat.progress = share


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
