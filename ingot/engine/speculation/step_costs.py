"""What a decoding round costs, learned from the rounds that were run: plain ones, and ones that verify draft tokens.

The cost is a line: so much for a round at all, for each row, for waiting (the tokens before it must be read before it
can begin), for each draft token, and for each step of a proposer that computes them. All five prices drift, mostly
together, as contexts grow and others use the machine, so a Kalman filter tracks them. Devices are not quite linear:
how far the rounds of a size are off the line is remembered.

On GPUs a round of a new size needs a graph capture first, which takes as long as several rounds do. `GraphCache` adds
up what it costs to do without; when that is as much as a capture takes, the graph is captured. At worst that loses
twice as much as knowing the future would.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from math import inf
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

FIRST_ROUNDS: Final = 7
"""Plain rounds whose median is the first estimate: the very first may be many times slower."""
NOISE: Final = 0.06
"""The part of its cost that a round is usually off by."""
UNSETTLED_NOISE: Final = 0.12
"""The same for a round that waits after one that does not, or the other way round."""
LARGEST_SURPRISE: Final = 0.5
"""However far off a round is, it counts as off by no more than this part of its cost."""
JOINT_DRIFT, OWN_DRIFT = 0.005, 0.01
"""The part of their size by which all prices drift together in a round, and the part of its first uncertainty by which
each drifts alone, until it is as uncertain as in the beginning."""
PLAIN_DEVIATIONS: Final = 0.75
"""How many standard deviations cheaper plain rounds may well be than the estimate."""
SIZE_WEIGHTS: Final = 2.0, 10.0
"""Rounds that the estimate of a size weighs as much as: before any was measured, and at most."""
REMEMBERED_KINDS: Final = 128
"""Numbers of rows whose sizes are remembered, those met last."""
PLAIN_PRICES: Final = 2
"""The first so many prices are those of a plain round."""

RoundShape = tuple[int, int, bool, int, int]
"""1, rows, whether it waits, draft tokens, and the most of a row that a proposer had to compute: one for each price."""
Floats = npt.NDArray[np.float64]


class RoundCosts:
    """Seconds. Only `known` may be read before it is true."""

    def __init__(self, widest: float = inf) -> None:
        """`widest`: the most tokens of a round before another, far slower implementation computes it."""
        self.widest = widest
        self.graphs = GraphCache()
        self._first: list[float] = []
        self._line: _CostLine | None = None
        self._sizes: OrderedDict[tuple[bool, int], _SizeFactors] = OrderedDict()  # by whether it waits, and rows
        self._waited_before: bool | None = None  # None: unknown

    @property
    def known(self) -> bool:
        return self._line is not None

    def observe(self, seconds: float, rows: int, drafted: int, depth: int, *, waited: bool) -> None:
        """A round without prompts that verified `drafted` tokens; `depth`: the most of a row that were computed."""
        before, self._waited_before = self._waited_before, waited
        if self._line is None:
            if not drafted:
                self._first.append(seconds)
            if len(self._first) == FIRST_ROUNDS:
                self._line = _CostLine(median(self._first), rows)
            return
        settled, shape = before == waited, (1, rows, waited, drafted, depth)
        self._line.observe(shape, seconds, NOISE if settled else UNSETTLED_NOISE)
        if settled:
            factors = self._sizes.get((waited, rows)) or _SizeFactors()
            factors.observe(round_size(rows + drafted), seconds / self._line.cost(shape))
            self._sizes[waited, rows] = factors
            self._sizes.move_to_end((waited, rows))
            if len(self._sizes) > REMEMBERED_KINDS:
                self._sizes.popitem(last=False)

    def interrupted(self) -> None:
        """There was a round that says nothing of costs, and the next one follows no other of its kind."""
        self._waited_before = None

    def plain(self, rows: int) -> float:
        """A round without draft tokens."""
        factors = self._sizes.get((False, rows))
        return self._fitted.cost((1, rows, False, 0, 0)) * (factors.factors[round_size(rows)] if factors else 1.0)

    def plain_lower_bound(self, rows: int) -> float:
        """The same, as cheap as it may well be: what was not measured for long may have changed."""
        cost = self.plain(rows)
        return max(cost - PLAIN_DEVIATIONS * self._fitted.deviation((1, rows, False, 0, 0)), cost / 2)

    def verifying(self, rows: int, drafted: int) -> list[float]:
        """Rounds with 0, 1, ... up to so many draft tokens, none of which had to be computed."""
        fixed, token = self._fitted.cost((1, rows, True, 0, 0)), self.token
        line, factors = [fixed + count * token for count in range(drafted + 1)], self._sizes.get((True, rows))
        if factors is None:
            return line
        sizes = _size_table(1 << (rows + drafted).bit_length())[rows : rows + drafted + 1]
        return [cost * factors.factors[size] for cost, size in zip(line, sizes, strict=True)]

    def round(self, rows: int, drafted: int, depth: int) -> float:
        """A round with so many draft tokens; `depth`: the most of a row that are computed."""
        factors = self._sizes.get((True, rows))
        cost = self._fitted.cost((1, rows, True, drafted, 0))
        return cost * (factors.factors[round_size(rows + drafted)] if factors else 1.0) + depth * self.step

    @property
    def token(self) -> float:
        """What one more draft token adds to a round."""
        return max(0.0, self._fitted.prices[3])

    @property
    def step(self) -> float:
        """What it takes to compute one more draft token for all rows."""
        return max(0.0, self._fitted.prices[4])

    @property
    def wait(self) -> float:
        """What a round that waits takes longer, as the first plain one behind others does."""
        return max(0.0, self._fitted.prices[2])

    @property
    def _fitted(self) -> _CostLine:
        assert self._line is not None, "costs are not known yet"
        return self._line


class _CostLine:
    """The five prices, and their covariance."""

    def __init__(self, seconds: float, rows: int) -> None:
        """Assumes that a plain round of so many rows takes so long, most of it for being run at all. What is not
        measured yet is assumed to be cheap: then it is tried, and measured."""
        self._prices = seconds * np.array((0.8, 0.2 / rows, 0.03, 0.03 / rows, 0.02))
        self._covariance = np.diag((seconds * np.array((0.1, 0.3 / rows, 0.4, 0.3 / rows, 0.1))) ** 2)
        # What rows cost more, running at all costs less: of the two only the sum was measured.
        together = rows * self._covariance[1, 1]
        self._covariance[0, 0] += rows * together
        self._covariance[0, 1] = self._covariance[1, 0] = -together
        self._largest = self._covariance.diagonal().copy()
        self._least = seconds / 1000
        self.prices: list[float] = self._prices.tolist()

    def cost(self, shape: RoundShape) -> float:
        _, rows, waits, drafted, depth = shape
        fixed, row, wait, token, step = self.prices
        return max(fixed + row * rows + wait * waits + token * drafted + step * depth, self._least)

    def deviation(self, shape: RoundShape) -> float:
        counts = np.array(shape, dtype=float)
        return max(float(counts @ self._covariance @ counts), 0.0) ** 0.5

    def observe(self, shape: RoundShape, seconds: float, noise: float) -> None:
        counts, expected = np.array(shape, dtype=float), self.cost(shape)
        self._drift()
        reached: Floats = self._covariance @ counts
        variance = float(reached @ counts) + (noise * expected) ** 2
        limit = min(3 * variance**0.5, LARGEST_SURPRISE * expected)
        gain = reached / variance
        correction = np.outer(gain, reached)
        if shape[PLAIN_PRICES]:
            # Only plain rounds say what they cost: else whatever makes others slower would be held against them, too.
            gain[:PLAIN_PRICES] = 0.0
            correction[:PLAIN_PRICES, :PLAIN_PRICES] = 0.0
        self._prices += gain * min(max(seconds - expected, -limit), limit)
        self._covariance -= correction
        self.prices = self._prices.tolist()

    def _drift(self) -> None:
        self._covariance += JOINT_DRIFT**2 * np.outer(self._prices, self._prices)
        variances = self._covariance.diagonal()
        self._covariance += np.diag(np.where(variances < self._largest, OWN_DRIFT**2 * self._largest, 0.0))


class _SizeFactors:
    """Cost over the line's, by size."""

    def __init__(self) -> None:
        self.factors, self._weights = [1.0] * SIZES, [SIZE_WEIGHTS[0]] * SIZES

    def observe(self, size: int, factor: float) -> None:
        self._weights[size] = min(self._weights[size] + 1, SIZE_WEIGHTS[1])
        surprise = min(max(factor / self.factors[size] - 1, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self.factors[size] *= 1 + surprise / self._weights[size]


FREE_CAPTURES: Final = 2
"""Graphs that are captured at once: without any, nothing is learned of draft tokens."""
CAPTURE_SHARE: Final = 0.01
"""Of all time, so much may be spent on captures that only seem worth a trial."""
CAPTURE_RATE: Final = 0.25
"""How fast the estimate of a capture's time follows."""
REMEMBERED_GRAPHS: Final = 128
"""Sizes with a graph that are remembered: devices keep about as many."""


class GraphCache:
    """Which sizes of rounds have a graph, by rows and draft tokens. Where nothing is ever captured, all may run."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._capture_s = 0.0
        self._saved: dict[int, float] = {}  # seconds, by rows: a number of rows that soon changes is not worth it
        self._missed = 0.0
        self._free = FREE_CAPTURES

    def captured(self, rows: int, drafted: int, seconds: float) -> None:
        """Such a round captured its graph first, which took so long."""
        self._capture_s += (max(0.0, seconds) - self._capture_s) * (CAPTURE_RATE if self._capture_s else 1.0)
        if drafted:
            self._saved[rows] = 0.0
            self._free = max(self._free - 1, 0)
        self._remember(rows, drafted)

    def ran(self, rows: int, drafted: int, plain: float) -> None:
        """Such a round ran with a graph that was there; a plain one takes `plain` seconds."""
        if self._capture_s:
            saved = self._saved.get(rows, 0.0) + self._missed + CAPTURE_SHARE * plain
            self._saved[rows] = min(saved, self._capture_s)
        self._missed = 0.0
        self._remember(rows, drafted)

    def misses(self, seconds: float) -> None:
        """The coming round would be so much faster with a graph that is not there."""
        self._missed = seconds

    def affords(self, rows: int, drafted: int) -> bool:
        """Whether such a round may run: its graph is there, or may be captured."""
        return (
            self._free > 0
            or self._saved.get(rows, 0.0) >= self._capture_s
            or (round_size(rows), round_size(rows + drafted)) in self._graphs
        )

    def _remember(self, rows: int, drafted: int) -> None:
        graph = round_size(rows), round_size(rows + drafted)
        self._graphs[graph] = None
        self._graphs.move_to_end(graph)
        if len(self._graphs) > REMEMBERED_GRAPHS:
            self._graphs.popitem(last=False)


SIZES: Final = 128
"""More than any round's."""


def round_size(tokens: int) -> int:
    """Numbers the sizes that devices compute alike: 0, 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25-32, ..."""
    if tokens <= 4:
        return tokens
    doublings = (tokens - 1).bit_length() - 1
    return 2 * doublings + ((tokens - 1) >> (doublings - 1)) - 1


@cache
def _size_table(tokens: int) -> list[int]:
    return [round_size(count) for count in range(tokens)]
