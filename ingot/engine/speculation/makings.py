"""What has to be made before rounds of a size can run: on GPUs a graph, which takes as long as several rounds do.

It is made once, and there from then on; whether that is worth it depends on how often such a round will be wanted,
which nobody knows. So what it costs to do without is added up, and when that is as much as making takes, it is made: at
worst twice as much is lost as by who knows the future.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ingot.engine.speculation.sizes import size_of

FREE: Final = 2
"""As many are made at once: without any, nothing is known of guesses."""
SHARE: Final = 0.01
"""Of all time, so much may be spent on what only seems worth a trial."""
FOLLOWS: Final = 0.25
"""How fast what is known of the time that it takes follows it."""
KEPT: Final = 128
"""Sizes that are remembered: whoever makes something for them keeps about as many."""

Size = tuple[int, int]


class Makings:
    """Of rounds, by rows and guesses. Where nothing ever has to be made, this forbids nothing."""

    def __init__(self) -> None:
        self._met: OrderedDict[Size, None] = OrderedDict()
        self._takes = 0.0  # seconds, for one size
        self._saved: dict[int, float] = {}  # by rows, seconds: a number of rows that is soon another is not worth it
        self._missed = 0.0
        self._free = FREE

    def made(self, rows: int, guessed: int, seconds: float) -> None:
        """For a round something was, which took so long; `guessed` is 0 where nobody guessed."""
        seconds = max(0.0, seconds)
        self._takes += (seconds - self._takes) * (FOLLOWS if self._takes else 1.0)
        if guessed:
            self._saved[rows] = 0.0
            self._free = max(self._free - 1, 0)
        self._remember(_size(rows, guessed))

    def met(self, rows: int, guessed: int, plain: float) -> None:
        """A round ran with what was there, where a plain one takes `plain` seconds."""
        if self._takes:
            self._saved[rows] = min(self._saved.get(rows, 0.0) + self._missed + SHARE * plain, self._takes)
        self._missed = 0.0
        self._remember(_size(rows, guessed))

    def misses(self, seconds: float) -> None:
        """The coming round could give as much in so much less time, if it were of a size that is not there."""
        self._missed = seconds

    def affords(self, rows: int, guessed: int) -> bool:
        """Whether such a round may run: it is there, or may be made."""
        return self._free > 0 or self._saved.get(rows, 0.0) >= self._takes or _size(rows, guessed) in self._met

    def _remember(self, size: Size) -> None:
        self._met[size] = None
        self._met.move_to_end(size)
        if len(self._met) > KEPT:
            self._met.popitem(last=False)


def _size(rows: int, guessed: int) -> Size:
    return size_of(rows), size_of(rows + guessed)
