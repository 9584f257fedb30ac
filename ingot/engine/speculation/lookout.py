"""In which rounds anybody is asked for guesses at all.

To ask, to choose and to learn from a round takes time, too, which nothing hides where the device waits for the host.
So looks that are in vain are paid for from a share of all time, and where that is used up, rounds go by.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Final

SHARE: Final = 0.004
"""Of all time, so much may be spent on looks that are in vain;"""
FULL: Final = 0.25
"""and besides, of a plain round's time, so much for rows that are new, and since something was found."""
LONGEST: Final = 64
"""Rounds that go by, at most;"""
HOPELESS: Final = 256
"""and where not even right guesses would pay."""
FIRST: Final = 2e-5
"""Seconds that a look is thought to take, for each row."""
FOLLOWS: Final = 0.1
"""How fast what is known of that follows it. One that takes very long, as a prompt's first, counts as twice as long."""


class Lookout:
    """Rows are named by anything that can be."""

    def __init__(self) -> None:
        self._seconds = FIRST  # of a look, for each row
        self._credit = FULL  # for looks in vain, in plain rounds
        self._seen: set[Hashable] = set()
        self._left = 0  # rounds that are still to go by

    def rests(self, rows: Collection[Hashable]) -> bool:
        """Whether the coming round, which is one of these rows, is to go by."""
        if self._left and (len(rows) != len(self._seen) or not self._seen.issuperset(rows)):
            self._meet(rows)
        return self._left > 0

    @property
    def resting(self) -> bool:
        return self._left > 0

    def passes(self) -> bool:
        """A round goes by; whether it was the last before a look."""
        self._left -= 1
        return self._left == 0

    def looked(self, seconds: float, rows: Collection[Hashable]) -> None:
        """A look took so long."""
        self._meet(rows)
        each = min(seconds / len(rows), 2 * self._seconds)
        self._seconds += (each - self._seconds) * FOLLOWS
        self._left = 0

    def found(self) -> None:
        """Something that seems to pay."""
        self._credit = FULL

    def found_nothing(self, plain: float, *, hopeless: bool) -> None:
        """A plain round takes `plain`; `hopeless`: whatever were guessed, and right, would not pay."""
        self._credit = min(self._credit + SHARE, FULL) - self._seconds * len(self._seen) / plain
        rounds = HOPELESS if hopeless else min(int(-self._credit / SHARE), LONGEST)
        if rounds > 0:
            self._credit = min(self._credit + rounds * SHARE, FULL)
            self._left = rounds + 1  # the round that was looked at goes by, too

    def forget(self, row: Hashable) -> None:
        self._seen.discard(row)

    def _meet(self, rows: Collection[Hashable]) -> None:
        """For whoever is new, nobody looked yet; and fewer rows have more to win."""
        same = len(self._seen.intersection(rows)) / max(len(self._seen), len(rows))
        self._credit = min(self._credit + (1 - same) * FULL, FULL)
        self._left = int(self._left * same)
        self._seen = set(rows)
