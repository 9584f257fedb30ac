"""Which models are swapped next: what is known of each, and one function without state that decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from ingot.config import ModelEntry
from ingot.engine.status import ModelState, ModelStatus
from ingot.errors import IngotError

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine


@dataclass(frozen=True, slots=True)
class ModelSwap:
    """Unload `going`, one after the other, and then load `coming`; each only if it is still wanted by then."""

    going: tuple[ModelSlot, ...]
    coming: ModelSlot | None = None

    @property
    def slots(self) -> tuple[ModelSlot, ...]:
        return self.going if self.coming is None else (*self.going, self.coming)

    @property
    def balance(self) -> int:
        """The bytes that are free afterwards and are not yet."""
        return sum(slot.claim for slot in self.going) - (0 if self.coming is None else self.coming.needs or 0)

    @property
    def is_wanted(self) -> bool:
        if self.coming is not None:
            return bool(self.coming.queue)
        return all(slot.unload_waiters or (slot.expired and not slot.queue) for slot in self.going)


@dataclass(slots=True)
class SwapDecision:
    swap: ModelSwap | None = None  # the next one
    closed: set[ModelSlot] = field(default_factory=set)  # loaded models that take on nobody for now
    closed_for: dict[ModelSlot, float] = field(default_factory=dict)  # wanted models, and since when others are closed
    refused: list[ModelSlot] = field(default_factory=list)  # models whose requests can never be served
    again_at: float = inf  # when to decide again, though nothing else happens


def decide_swap(
    slots: Collection[ModelSlot],
    memory: int,
    current: ModelSwap | None = None,
    *,
    now: float,
    min_residency_s: float,
    swap_wait_s: float,
) -> SwapDecision:
    """Which model to move next, once what is `current` is done, and which loaded ones take on nobody for now.

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
    decision, times = SwapDecision(closed={slot for slot in slots if slot.unload_waiters}), list[float]()
    for slot in slots:
        if slot.engine is not None and not slot.leases and ModelSwap((slot,)).is_wanted:
            decision.swap = ModelSwap((slot,))
    free = memory - sum(slot.claim for slot in slots)
    spare = free if current is None else free + current.balance  # what those in front leave, once they are there
    loaded = [slot for slot in slots if slot.engine is not None and not slot.entry.pin and not slot.is_moving]
    wanted = [slot for slot in slots if slot.queue and slot.needs is not None and not slot.is_moving]
    for slot in sorted(wanted, key=lambda slot: slot.turn(swap_wait_s)):
        turn, needs = slot.turn(swap_wait_s), slot.needs or 0
        if needs > memory - sum(each.claim for each in slots if each.entry.pin):
            decision.refused.append(slot)
            continue
        times.append(turn)
        going = _models_to_unload(loaded, needs - min(free, spare), now)
        if going is None:
            continue  # those in front have what it needs
        swap = ModelSwap(going, slot)
        stay_until = {each: each.since + min_residency_s for each in going}
        closed_at = slot.others_closed if slot.others_closed >= turn else max([turn, *stay_until.values()])
        last_call = min(waiter.deadline for waiter in slot.queue) - swap_wait_s
        times += [*stay_until.values(), closed_at + swap_wait_s, last_call]
        is_held_up = any(began < closed_at for each in going for began in each.leases)
        is_reopened = is_held_up and closed_at + swap_wait_s <= now < last_call
        is_due = now >= turn and not is_reopened
        if is_due:
            decision.closed |= {each for each in going if now >= stay_until[each]}
        if now >= closed_at:
            decision.closed_for[slot] = closed_at
        begins = all(now >= stay_until[each] and not each.leases for each in going)
        if begins and decision.swap is None:
            decision.swap = swap
        if begins or is_due:
            spare += swap.balance
            loaded = [each for each in loaded if each not in going]
    decision.again_at = min((at for at in times if at > now), default=inf)
    return decision


def _models_to_unload(loaded: Sequence[ModelSlot], lacking: int, now: float) -> tuple[ModelSlot, ...] | None:
    """Those whose room is enough, and no others; None where all of them have too little."""
    idle = sorted((slot for slot in loaded if slot.idle), key=lambda slot: -slot.weight(now))
    used = sorted((slot for slot in loaded if not slot.idle), key=lambda slot: slot.since)
    going: list[ModelSlot] = []
    for slot in [*idle, *used]:
        if lacking > 0:
            going.append(slot)
            lacking -= slot.claim
    for slot in tuple(going):  # whoever came later may have freed so much that one before it can stay
        if lacking + slot.claim <= 0:
            going.remove(slot)
            lacking += slot.claim
    return None if lacking > 0 else tuple(going)


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

    def status(self) -> ModelStatus:
        left = None if self.expiry is None else max(0.0, self.expiry.when() - self.clock())
        return ModelStatus(
            self.entry.name,
            self.state,
            self.entry.kind,
            self.entry.aliases,
            self.entry.pin,
            self.claim,
            self.progress,
            self.failure,
            len(self.leases),
            len(self.queue),
            left,
            self.entry.resident,
        )
