"""One model of a fleet: whether it is loaded, who uses it, who waits for it, and until when it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from ingot.config import ModelEntry
from ingot.engine.fleet_standing import ModelState, Standing
from ingot.errors import IngotError

if TYPE_CHECKING:
    from ingot.engine.side_engine import SideEngine


@dataclass(eq=False, slots=True, frozen=True)
class Waiter:
    """A request that waits for a lease, which it is told the beginning of."""

    lease: asyncio.Future[float]
    arrived: float
    deadline: float  # when it gives up; infinite where it does not


@dataclass(eq=False, slots=True)
class Seat:
    """`Fleet` alone changes it."""

    entry: ModelEntry
    clock: Callable[[], float]
    state: ModelState = "unloaded"
    since: float = 0.0
    engine: SideEngine | None = None
    claim: int = 0  # bytes that it has: while it is loaded, and while it is being loaded and unloaded
    needs: int | None = None  # bytes that it is to have, once that is known and until it has them
    leases: list[float] = field(default_factory=list)  # when each began
    queue: list[Waiter] = field(default_factory=list)
    used: float = 0.0  # when the last lease ended
    kept_s: float = inf  # how long it stays without a request
    expired: bool = False  # it has stayed so long
    dismissals: list[asyncio.Future[None]] = field(default_factory=list)  # of those who asked for it to be unloaded
    is_sought: bool = False  # its files are being looked at
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

    def become(self, state: ModelState, failure: str | None = None) -> None:
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

    def dismiss(self) -> None:
        """It is not loaded any more: tell those who asked for that."""
        gone, self.dismissals = self.dismissals, []
        for each in gone:
            if not each.done():
                each.set_result(None)

    def _waiters(self) -> list[Waiter]:
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

    def standing(self) -> Standing:
        left = None if self.expiry is None else max(0.0, self.expiry.when() - self.clock())
        return Standing(
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
        )
