"""Fair shares of scarce resources: one rule for all of them.

The holders of a resource share it equally. Unused shares are lent to others and taken back when their owner asks: the
heaviest holder gives way first. A holder is a tenant, or an address where no key is known yet. The whole share of a
holder that has been idle for a while is lent. Each object belongs to one thread, or to a lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

IDLE_S: Final = 900.0
"""Seconds without a request after which a tenant's whole share is lent."""
LEDGER: Final = {
    "connections": "the heaviest holder's connection that has sent least is closed with a 503; else the new one is",
    "waiting connections": "above the limit, until their heads are read: the heaviest holder's oldest is closed",
    "probes": "a 429 for the address that sent most in this second",
    "requests without a key": "a 429 for the address that sent most in this second",
    "read": "waits for its turn; beyond 256 that wait, a 429",
    "read-long": "waits for its turn; beyond 16 that wait, a 429",
    "fetch": "waits for its turn; beyond 64 that wait, a 429",
    "media headers": "waits for its turn, at most one worker for a key",
    "media pixels": "waits for its turn and for memory, one worker fewer than there are for a key",
    "media sounds": "waits for its turn, at most half of the workers for a key",
    "compile": "waits for its turn; beyond 8 that wait, a 429",
    "speech": "transcriptions and speech wait for their turns; with its share waiting, a key gets a 429",
    "encodings": "with its share waiting, a key gets a 429",
    "bodies": "a key that has three quarters of the bytes gets a 503",
    "captures": "the heaviest holder loses its oldest",
    "archive work": "exports and imports wait for their turn; beyond 4 that wait, a 429",
    "archive files": "a key has one, while it is made, sent or received; its next waits, beyond 4 that wait a 429",
    "queue": "a 429 for a key that has its share waiting",
    "prefix cache": "a holder of more than its share loses what is cheapest to compute again",
    "disk cache": "a holder of more than its share, or one idle for a day, loses what it used longest ago",
    "stored responses": "the heaviest holder loses its oldest",
}
"""What is shared by this rule, and what happens when there is not enough."""


class Shares:
    """One entry of the ledger."""

    def __init__(
        self, name: str, capacity: int = 0, clock: Callable[[], float] = time.monotonic, idle_s: float = IDLE_S
    ) -> None:
        """Without a `capacity`, `exceeding` is given one."""
        assert name in LEDGER, f"{name} is not in the ledger"
        self.name, self.capacity = name, capacity
        self._clock, self._idle_s = clock, idle_s
        self._came: dict[str, float] = {}
        self.held: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.total = 0

    def come(self, holder: str) -> None:
        """A holder is active."""
        self._came[holder] = self._clock()

    def add(self, holder: str, amount: int) -> None:
        """A holder has so much more, or less where negative."""
        self.total += amount
        self.held[holder] += amount
        if not self.held[holder]:
            del self.held[holder]

    def fits(self, holder: str, amount: int, *, spare: int = 0, sharing: Iterable[str] = ()) -> bool:
        """Whether it may have so much more: there is room, including `spare`, or it stays within its share, however
        much was lent to others. `sharing` are further active holders, which hold nothing now."""
        if self.total + amount <= self.capacity + spare:
            return True
        holders = {holder, *self.held, *sharing}
        return self.held[holder] + amount <= -(-self.capacity // len(holders))

    def exceeding(self, most: int) -> set[str]:
        """Holders of more than their share of `most`. There are some if all together hold more than that."""
        since = self._clock() - self._idle_s
        return holders_exceeding(
            self.held, most, {holder for holder in self.held if self._came.get(holder, since) > since}
        )


class SharesPerSecond(Shares):
    """An entry with a capacity for each second, such as requests that cost their sender nothing."""

    def __init__(self, name: str, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name, capacity, clock)
        self._began = clock()

    def take(self, holder: str) -> bool:
        """Take one, if there is one. Holders that come after others took everything still have their shares, but all
        together take at most twice the capacity."""
        now = self._clock()
        if now - self._began >= 1.0:
            self._began, self.total = now, 0
            self.held.clear()
        if self.total >= 2 * self.capacity or not self.fits(holder, 1):
            return False
        self.add(holder, 1)
        return True


def holders_exceeding(held: Mapping[str, int], most: int, active: Collection[str]) -> set[str]:
    """Holders of more than their share of `most`; only `active` ones have a share."""
    share = most / max(1, len(active))
    return {holder for holder, amount in held.items() if holder not in active or amount > share}


def heaviest_holder(held: Mapping[str, int]) -> str:
    """The one that gives way first."""
    return max(held, key=held.__getitem__)
