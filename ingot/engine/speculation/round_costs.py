"""What a round costs, learned from the rounds that were run: plain ones, and ones that verify guesses.

A round costs so much for being run at all, for each decoding row, for guessing at all (its tokens must be read before
the next round can begin), for each guessed token, for each token of the longest guess that somebody had to compute, and
for being of another kind than the round before: one that guesses after a plain one, or the other way round. All six drift, mostly together, as contexts grow and others use the machine; so they are tracked by a Kalman filter.
Devices are not quite linear: what is left over is remembered for the shapes that were met.
"""

from __future__ import annotations

from statistics import median

import numpy as np

FIRST = 3
"""Plain rounds whose median says what a round costs at all: the very first may be many times slower."""
NOISE = 0.06
"""How much of its cost a round is off by, as a rule."""
UNSETTLED = 0.2
"""The same of a round of another kind than the one before."""
LARGEST_SURPRISE = 0.5
"""However far off a round is, it counts as off by no more than this part of its cost."""
TOGETHER = 0.005
"""How much of their size all costs drift by in a round, together."""
APART = 0.01
"""How much of its first uncertainty each of them drifts by alone, until it is as uncertain as in the beginning."""
REMEMBERED = 0.1
"""The least weight of a new measurement of a shape among those before it."""
SHAPES = 512
"""Shapes of which it is remembered how far they are from the line; then the oldest are forgotten."""

Floats = np.ndarray


class RoundCosts:
    def __init__(self) -> None:
        self._first: list[tuple[float, int]] = []
        self._line: _Line | None = None
        self._offsets = _Offsets()
        self._plain_before: bool | None = None  # None: nobody knows

    @property
    def known(self) -> bool:
        return self._line is not None

    def observe(self, seconds: float, rows: int, guessed: int, depth: int, *, plain: bool) -> None:
        """A round without prompts, of which `guessed` tokens were guesses; `depth`: the longest that was computed."""
        before, self._plain_before = self._plain_before, plain
        if self._line is None:
            self._begin(seconds, rows, plain)
        elif before is not None:
            settled = before == plain
            shape = _shape(rows, guessed, depth, plain=plain, changed=not settled)
            if settled:
                self._offsets.observe((plain, rows), guessed, seconds / self._line.cost(shape))
            self._line.observe(shape, seconds, NOISE if settled else UNSETTLED)

    def interrupted(self) -> None:
        """There was a round that says nothing of costs, and the next one follows no other of its kind."""
        self._plain_before = None

    def plain(self, rows: int) -> float:
        """Seconds of a round in which nobody guesses. Only where costs are known, like all below."""
        assert self._line is not None
        return self._line.cost(_shape(rows, 0, 0, plain=True, changed=False)) * self._offsets.factor((True, rows), 0)

    def guessing(self, rows: int, guessed: Floats, depth: Floats) -> Floats:
        """Seconds of rounds with so many guessed tokens, of which so many at most were computed for one row."""
        assert self._line is not None
        cost: Floats = self._line.costs(rows, guessed, depth)
        offsets = self._offsets.curve((False, rows), int(guessed.max(initial=0)))
        return cost if offsets is None else cost * offsets[guessed]

    @property
    def token(self) -> float:
        """Seconds that one more guess adds to a round."""
        assert self._line is not None
        return self._line.token

    @property
    def step(self) -> float:
        """Seconds that it takes to compute one more guess for all rows."""
        assert self._line is not None
        return self._line.step

    @property
    def change(self) -> float:
        """Seconds that the first round of another kind takes longer than those after it."""
        assert self._line is not None
        return self._line.change

    def _begin(self, seconds: float, rows: int, plain: bool) -> None:
        if plain:
            self._first.append((seconds, rows))
        if len(self._first) == FIRST:
            self._line = _Line(median(seconds for seconds, _ in self._first), rows)


def _shape(rows: int, guessed: int, depth: int, *, plain: bool, changed: bool) -> Floats:
    return np.array((1.0, rows, not plain, guessed, depth, changed))


class _Line:
    """The six prices, how uncertain they are, and how they are corrected."""

    def __init__(self, seconds: float, rows: int) -> None:
        """Begins with a guess: a plain round of so many rows takes so long, most of it for being run at all."""
        self._prices = seconds * np.array((0.8, 0.2 / rows, 0.03, 0.03 / rows, 0.02, 0.05))
        deviations = seconds * np.array((0.1, 0.3 / rows, 0.15, 0.3 / rows, 0.1, 0.1))
        self._uncertain = np.diag(deviations**2)
        # What rows cost more, running at all costs less: of the two only the sum was measured.
        of_rows = deviations[1] ** 2
        self._uncertain[0, 0] += rows * rows * of_rows
        self._uncertain[0, 1] = self._uncertain[1, 0] = -rows * of_rows
        self._largest = self._uncertain.diagonal().copy()
        self._drift = self._largest * APART**2
        self._least = seconds / 1000

    @property
    def token(self) -> float:
        return max(0.0, float(self._prices[3]))

    @property
    def step(self) -> float:
        return max(0.0, float(self._prices[4]))

    @property
    def change(self) -> float:
        return max(0.0, float(self._prices[5]))

    def cost(self, shape: Floats) -> float:
        return max(float(self._prices @ shape), self._least)

    def costs(self, rows: int, guessed: Floats, depth: Floats) -> Floats:
        fixed = float(self._prices[0] + rows * self._prices[1] + self._prices[2])
        total: Floats = max(fixed, self._least) + self.token * guessed + self.step * depth
        return total

    def observe(self, shape: Floats, seconds: float, noise: float) -> None:
        expected = self.cost(shape)
        self._uncertain += TOGETHER**2 * np.outer(self._prices, self._prices)
        known = self._uncertain.diagonal() < self._largest
        self._uncertain[np.diag_indices(6)] += np.where(known, self._drift, 0.0)
        reached = self._uncertain @ shape
        variance = float(shape @ reached) + (noise * expected) ** 2
        limit = min(3 * variance**0.5, LARGEST_SURPRISE * expected)
        surprise = min(max(seconds - expected, -limit), limit)
        self._prices = self._prices + reached * (surprise / variance)
        self._uncertain -= np.outer(reached, reached) / variance


class _Offsets:
    """By kind of round and number of guesses: cost over what the line says. Between those met, it is interpolated."""

    def __init__(self) -> None:
        self._met: dict[tuple[bool, int], dict[int, tuple[float, float]]] = {}  # factor and weight
        self._curves: dict[tuple[bool, int], Floats] = {}
        self._count = 0

    def observe(self, kind: tuple[bool, int], guessed: int, factor: float) -> None:
        met = self._met.pop(kind, {})
        self._met[kind] = met  # the one that was met last is the last
        known, weight = met.get(guessed, (1.0, 2.0))
        self._count += guessed not in met
        surprise = min(max(factor / known - 1, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        weight = min(weight + 1, 1 / REMEMBERED)
        met[guessed] = (known * (1 + surprise / weight), weight)
        self._curves.pop(kind, None)
        while self._count > SHAPES and len(self._met) > 1:
            oldest = next(iter(self._met))
            self._count -= len(self._met.pop(oldest))
            self._curves.pop(oldest, None)

    def factor(self, kind: tuple[bool, int], guessed: int) -> float:
        met = self._met.get(kind)
        if not met:
            return 1.0
        if guessed in met:
            return met[guessed][0]
        sizes = sorted(met)
        return float(np.interp(guessed, sizes, [met[size][0] for size in sizes]))

    def curve(self, kind: tuple[bool, int], most: int) -> Floats | None:
        """Factors for no guess up to so many; None: all are one."""
        met = self._met.get(kind)
        if not met:
            return None
        curve = self._curves.get(kind)
        if curve is None or len(curve) <= most:
            sizes = sorted(met)
            curve = np.interp(np.arange(most + 1), sizes, [met[size][0] for size in sizes])
            self._curves[kind] = curve
        return curve
