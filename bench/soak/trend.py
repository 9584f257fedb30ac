"""Whether figures stay the same over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

WARM: Final = 1 / 2
"""The part of the time in which whatever is kept may still fill up."""


@dataclass(frozen=True, slots=True)
class Trend:
    level: float
    growth: float  # from the end of the warm part to the end, as the slope that half of all pairs exceed says

    @property
    def share(self) -> float:
        return self.growth / self.level if self.level else 0.0


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Of what was read after the warm part. Median slope: a single peak says nothing."""
    begin, end = times[0] + WARM * (times[-1] - times[0]), times[-1]
    kept = [(time, value) for time, value in zip(times, values, strict=True) if time >= begin]
    slopes = [(later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in combinations(kept, 2)]
    level = statistics.median(value for _, value in kept)
    return Trend(level, (statistics.median(slopes) if slopes else 0.0) * (end - begin))
