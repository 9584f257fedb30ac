"""Who holds how much of a scarce thing, and who gives way when there is no more of it: one rule for all of them.

Those who use a thing share it equally. What one does not use of its share is lent to whoever asks, and taken back when
its owner asks: whoever holds most gives way first. A holder is a tenant, or an address where no key is known yet. The
share of one who has not come for a while is lent as a whole. Each object belongs to one thread, or to a lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

IDLE_S: Final = 900.0
"""Seconds without a request after which a tenant's share is lent as a whole."""
LEDGER: Final = {
    "connections": "the one that has sent least, of whoever holds most, is closed with a 503; else the new one is",
    "waiting connections": "above the most, until their heads are read: the oldest of whoever holds most is closed",
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
    "captures": "whoever holds most loses its oldest",
    "archive work": "exports and imports wait for their turn; beyond 4 that wait, a 429",
    "archive files": "a key has one, while it is made, sent or received; its next waits, beyond 4 that wait a 429",
    "queue": "a 429 for whoever has its share waiting",
    "prefix cache": "whoever holds more than its share loses what is worth least",
    "disk cache": "whoever holds more than its share, or has used nothing for a day, loses what it used longest ago",
    "stored responses": "whoever holds most loses its oldest",
}
"""What is shared by this rule, and what happens when it is asked for more than there is."""


class Shares:
    """One entry of the ledger."""

    def __init__(
        self, name: str, capacity: int = 0, clock: Callable[[], float] = time.monotonic, idle_s: float = IDLE_S
    ) -> None:
        """`capacity` may be left to whoever asks who exceeds it."""
        assert name in LEDGER, f"{name} is not in the ledger"
        self.name, self.capacity = name, capacity
        self._clock, self._idle_s = clock, idle_s
        self._came: dict[str, float] = {}
        self.held: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.total = 0

    def come(self, holder: str) -> None:
        """A holder has something to look up or to keep."""
        self._came[holder] = self._clock()

    def add(self, holder: str, amount: int) -> None:
        """A holder has so much more, or less."""
        self.total += amount
        self.held[holder] += amount
        if not self.held[holder]:
            del self.held[holder]

    def fits(self, holder: str, amount: int, *, spare: int = 0, sharing: Iterable[str] = ()) -> bool:
        """Whether it may have so much more: there is room, with what is to `spare`, or it stays within its share,
        however much was lent to others. `sharing` are those who hold nothing of it now but are here."""
        if self.total + amount <= self.capacity + spare:
            return True
        holders = {holder, *self.held, *sharing}
        return self.held[holder] + amount <= -(-self.capacity // len(holders))

    def exceeding(self, most: int) -> set[str]:
        """Who holds more than its share of `most`. Somebody does, where all together hold more than that."""
        since = self._clock() - self._idle_s
        return holders_exceeding(
            self.held, most, {holder for holder in self.held if self._came.get(holder, since) > since}
        )


class SharesPerSecond(Shares):
    """An entry of which there is so much in each second, such as requests that cost their sender nothing."""

    def __init__(self, name: str, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name, capacity, clock)
        self._began = clock()

    def take(self, holder: str) -> bool:
        """One more, if it may have it. Those who come after others took all have their shares too, but all together
        take no more than twice as much as there is."""
        now = self._clock()
        if now - self._began >= 1.0:
            self._began, self.total = now, 0
            self.held.clear()
        if self.total >= 2 * self.capacity or not self.fits(holder, 1):
            return False
        self.add(holder, 1)
        return True


def holders_exceeding(held: Mapping[str, int], most: int, active: Collection[str]) -> set[str]:
    """Who holds more than its share of `most`, which the `active` ones have; all others' are lent."""
    share = most / max(1, len(active))
    return {holder for holder, amount in held.items() if holder not in active or amount > share}


def heaviest_holder(held: Mapping[str, int]) -> str:
    """Who holds most, and so gives way first."""
    return max(held, key=held.__getitem__)
