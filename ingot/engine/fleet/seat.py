"""One model of a fleet: whether it is loaded, who uses it, and until when it stays."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from ingot.config import ModelEntry
from ingot.engine.fleet.standing import ModelState, Standing
from ingot.errors import IngotError

if TYPE_CHECKING:
    from ingot.engine.side_engine import SideEngine


@dataclass(eq=False, slots=True)
class Seat:
    """`Fleet` alone changes it."""

    entry: ModelEntry
    state: ModelState = "unloaded"
    since: float = field(default_factory=time.monotonic)
    engine: SideEngine | None = None
    claim: int = 0  # bytes
    leases: int = 0
    queue: list[asyncio.Future[None]] = field(default_factory=list)  # of those who wait for a lease
    used: float = field(default_factory=time.monotonic)  # when the last lease ended
    kept_s: float = inf  # how long it stays without a request
    draining: bool = False  # it is to go, and takes nobody on
    progress: float | None = None
    failure: str | None = None
    coming: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return not self.leases and not self.queue

    @property
    def takes(self) -> bool:
        """Whether a request may use it now."""
        return self.engine is not None and self.state == "loaded" and not self.draining

    def become(self, state: ModelState, failure: str | None = None) -> None:
        self.state, self.since, self.failure, self.progress = state, time.monotonic(), failure, None

    def grant(self) -> None:
        """A lease to each who waits."""
        for place in self._places():
            self.leases += 1
            place.set_result(None)

    def refuse(self, error: IngotError) -> None:
        for place in self._places():
            place.set_exception(error)

    def _places(self) -> list[asyncio.Future[None]]:
        places, self.queue = self.queue, []
        return [place for place in places if not place.done()]

    def resides_for(self, least_s: float) -> float:
        """Seconds that are left of those that it stays at least."""
        return max(0.0, self.since + least_s - time.monotonic())

    def weight(self) -> float:
        """The larger, the better it goes: what was not used for long, and frees much."""
        return (time.monotonic() - self.used) * self.claim

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def standing(self) -> Standing:
        left = None if self.expiry is None else max(0.0, self.expiry.when() - asyncio.get_running_loop().time())
        return Standing(
            self.entry.name,
            self.state,
            self.entry.kind,
            self.entry.aliases,
            self.entry.pin,
            round(time.monotonic() - self.since, 3),
            self.claim,
            self.progress,
            self.failure,
            self.leases,
            len(self.queue),
            left,
        )
