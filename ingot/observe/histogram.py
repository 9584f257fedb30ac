"""How often values fell between bounds, which is what Prometheus makes quantiles of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """One thread adds; any thread may read, without a lock. A value counts at the first bound that it does not exceed,
    or at none."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds rise"
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> tuple[int, ...]:
        """Values up to each bound, and all of them."""
        return tuple(accumulate(tuple(self._counts)))


def one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return
            yield digit * power
        power *= 10
