"""What a decoding round costs, learned from the rounds that were run: plain ones, and ones that verify draft tokens.

A round costs so much for being run at all, for each decoding row, for waiting (the tokens before it must be read
before it can begin), for each draft token, and for each token of the longest draft that had to be computed. All
five drift, mostly together, as contexts grow and others use the machine; so they are tracked by a Kalman filter.
Devices are not quite linear: what is left over is remembered for the sizes that were met.

On GPUs a round of a new size needs a graph capture first, which takes as long as several rounds do.
`GraphCaptures` adds up what it costs to do without; when that is as much as a capture takes, it is made: at worst
twice as much is lost as by who knows the future.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from operator import mul
from statistics import median
from typing import Final

FIRST_ROUNDS = 7
"""Plain rounds whose median says what a round costs at all: the very first may be many times slower."""
NOISE, NOISIEST = 0.06, 0.5
"""How much of its cost a round is off by, as a rule: on a quiet machine, and on one that others use as well."""
UNSETTLED_NOISE = 2.0
"""How many times more it is for a round of another kind than the one before: one that waits after one that does not, or
the other way round."""
NOISE_FOLLOWS = 0.03
"""How fast what is known of the noise follows it."""
LARGEST_SURPRISE = 0.5
"""However far off a round is, it counts as off by no more than this part of its cost."""
JOINT_DRIFT = 0.005
"""How much of their size all costs drift by in a round, together."""
OWN_DRIFT = 0.01
"""How much of its first uncertainty each of them drifts by alone, until it is as uncertain as in the beginning."""
FIRST_WEIGHT, MOST_WEIGHT = 2.0, 10.0
"""Measurements on a quiet machine that what was thought of a size weighs as much as: before any, and at most."""
PLAIN_DEVIATIONS = 1.5
"""How many standard deviations cheaper plain rounds may well be than thought."""
PLAIN_PRICES = 2
"""The first so many prices are those of a plain round."""
REMEMBERED_KINDS = 128
"""Numbers of rows of which it is remembered how far rounds are from the line; then the oldest are forgotten."""

RoundShape = tuple[float, float, float, float, float]
RoundKind = tuple[bool, int]  # whether it waits, and the number of rows


class RoundCosts:
    """Seconds. Nothing but `known` is to be asked for before that is true."""

    def __init__(self, widest: float = inf) -> None:
        """`widest`: tokens of a round, of which those with more are computed in another way, which is far slower."""
        self.widest = widest
        self._first: list[float] = []
        self._line: _CostFilter | None = None
        self._offsets = _SizeOffsets()
        self._noise = _CostNoise()
        self._waited_before: bool | None = None  # None: nobody knows
        self.makings = GraphCaptures()

    @property
    def known(self) -> bool:
        return self._line is not None

    def observe(self, seconds: float, rows: int, guessed: int, depth: int, *, waited: bool) -> None:
        """A round without prompts, of which `guessed` tokens were guesses; `depth`: the longest that was computed."""
        before, self._waited_before = self._waited_before, waited
        if self._line is None:
            self._begin(seconds, rows, guessed)
            return
        settled, shape = before == waited, _round_shape(rows, guessed, depth, waited=waited)
        if settled:
            self._noise.observe(seconds / self._line.cost(shape) - 1)
        self._line.observe(shape, seconds, self._noise.size * (1.0 if settled else UNSETTLED_NOISE))
        if settled:
            off = seconds / self._line.cost(shape)
            self._offsets.observe((waited, rows), guessed, off, (self._noise.size / NOISE) ** 2)

    def interrupted(self) -> None:
        """There was a round that says nothing of costs, and the next one follows no other of its kind."""
        self._waited_before = None

    def plain(self, rows: int) -> float:
        """A round in which nobody guesses."""
        cost = self._fitted.cost(_round_shape(rows, 0, 0, waited=False))
        return cost * self._offsets.factors((False, rows), range(1))[0]

    def plain_lower_bound(self, rows: int) -> float:
        """The same, if it is as much less as it may well be: what was not measured for long may have changed."""
        cost = self.plain(rows)
        return max(cost - PLAIN_DEVIATIONS * self._fitted.doubt(_round_shape(rows, 0, 0, waited=False)), cost / 2)

    def guessing(self, rows: int, guessed: range) -> list[float]:
        """Rounds with so many guesses each, none of which took time to make: each step of those adds `step`."""
        fixed = self._fitted.cost(_round_shape(rows, 0, 0, waited=True))
        token = self._fitted.token
        factors = self._offsets.factors((True, rows), guessed)
        return [(fixed + count * token) * factor for count, factor in zip(guessed, factors, strict=True)]

    @property
    def token(self) -> float:
        """What one more guess adds to a round."""
        return self._fitted.token

    @property
    def step(self) -> float:
        """What it takes to compute one more guess for all rows."""
        return self._fitted.step

    @property
    def wait(self) -> float:
        """What a round takes longer if it waits, for the last time before plain rounds too."""
        return self._fitted.wait

    @property
    def _fitted(self) -> _CostFilter:
        assert self._line is not None, "costs are not known yet"
        return self._line

    def _begin(self, seconds: float, rows: int, guessed: int) -> None:
        if not guessed:
            self._first.append(seconds)
        if len(self._first) == FIRST_ROUNDS:
            usual = median(self._first)
            self._line = _CostFilter(usual, rows)
            self._noise = _CostNoise(median(abs(one / usual - 1) for one in self._first))


def _round_shape(rows: int, guessed: int, depth: int, *, waited: bool) -> RoundShape:
    return (1.0, rows, waited, guessed, depth)


class _CostNoise:
    """By how much of their cost rounds are off, where they are off in both directions: in one, the cost is wrong."""

    def __init__(self, amount: float = NOISE) -> None:
        self._off, self._amount = 0.0, min(max(amount, NOISE), NOISIEST)
        self.size = self._amount

    def observe(self, off: float) -> None:
        off = min(max(off, -NOISIEST), NOISIEST)
        self._off += (off - self._off) * NOISE_FOLLOWS
        self._amount += (abs(off) - self._amount) * NOISE_FOLLOWS
        self.size = max(NOISE, self._amount - abs(self._off))


class _CostFilter:
    """The five prices, how uncertain they are, and how they are corrected."""

    def __init__(self, seconds: float, rows: int) -> None:
        """Begins with a guess: a plain round of so many rows takes so long, most of it for being run at all. Of what
        nothing is known yet, little is expected: what is cheap is tried, and what is tried is known."""
        prices = (0.8, 0.2 / rows, 0.03, 0.03 / rows, 0.02)
        deviations = (0.1, 0.3 / rows, 0.4, 0.3 / rows, 0.1)
        self._prices = [seconds * price for price in prices]
        variances = [(seconds * deviation) ** 2 for deviation in deviations]
        # What rows cost more, running at all costs less: of the two only the sum was measured.
        together = rows * variances[1]
        self._uncertain = [
            [variance if row == column else 0.0 for column in range(5)] for row, variance in enumerate(variances)
        ]
        self._uncertain[0][0] += rows * together
        self._uncertain[0][1] = self._uncertain[1][0] = -together
        self._largest = [self._uncertain[place][place] for place in range(5)]
        self._least = seconds / 1000

    @property
    def token(self) -> float:
        return max(0.0, self._prices[3])

    @property
    def step(self) -> float:
        return max(0.0, self._prices[4])

    @property
    def wait(self) -> float:
        return max(0.0, self._prices[2])

    def cost(self, shape: RoundShape) -> float:
        return max(sum(map(mul, self._prices, shape)), self._least)

    def doubt(self, shape: RoundShape) -> float:
        """The standard deviation of what it says."""
        variance = sum(one * sum(map(mul, row, shape)) for one, row in zip(shape, self._uncertain, strict=True))
        return max(variance, 0.0) ** 0.5

    def observe(self, shape: RoundShape, seconds: float, noise: float) -> None:
        expected = self.cost(shape)
        self._drift()
        reached = [sum(map(mul, row, shape)) for row in self._uncertain]
        variance = sum(map(mul, reached, shape)) + (noise * expected) ** 2
        limit = min(3 * variance**0.5, LARGEST_SURPRISE * expected)
        surprise = min(max(seconds - expected, -limit), limit) / variance
        # What plain rounds cost is learned from them alone: else what others cost more than thought, they would, too.
        sure = PLAIN_PRICES if shape[PLAIN_PRICES] else 0
        for place in range(sure, len(reached)):
            self._prices[place] += reached[place] * surprise
        for place, (row, one) in enumerate(zip(self._uncertain, reached, strict=True)):
            part, first = one / variance, sure if place < sure else 0
            row[first:] = [known - part * other for known, other in zip(row[first:], reached[first:], strict=True)]

    def _drift(self) -> None:
        for place, (row, price) in enumerate(zip(self._uncertain, self._prices, strict=True)):
            scale = price * JOINT_DRIFT**2
            row[:] = [known + scale * other for known, other in zip(row, self._prices, strict=True)]
            if row[place] < self._largest[place]:
                row[place] += self._largest[place] * OWN_DRIFT**2


class _SizeOffsets:
    """Cost over what the line says, by kind of round and size."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._factors: dict[RoundKind, list[float]] = {}
        self._weights: dict[RoundKind, list[float]] = {}

    def observe(self, kind: RoundKind, guessed: int, factor: float, doubt: float) -> None:
        """`doubt`: it takes as many measurements to say as much as one on a quiet machine."""
        size = round_size(kind[1] + guessed)
        # The one that was met last is the last.
        factors = self._factors[kind] = self._factors.pop(kind, [])
        weights = self._weights[kind] = self._weights.pop(kind, [])
        missing = size + 1 - len(factors)
        factors += [1.0] * missing
        weights += [FIRST_WEIGHT] * missing
        weights[size] = min(weights[size] + 1 / doubt, MOST_WEIGHT)
        surprise = min(max(factor / factors[size] - 1, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        factors[size] *= 1 + surprise / (doubt * weights[size])
        if len(self._factors) > REMEMBERED_KINDS:
            oldest = next(iter(self._factors))
            del self._factors[oldest], self._weights[oldest]

    def factors(self, kind: RoundKind, guessed: range) -> list[float]:
        met = self._factors.get(kind)
        if met is None:
            return [1.0] * len(guessed)
        known, rows = len(met), kind[1]
        while len(self._sizes) < rows + guessed.stop:
            self._sizes.append(round_size(len(self._sizes)))
        sizes = self._sizes[rows + guessed.start : rows + guessed.stop]
        return [met[size] if size < known else 1.0 for size in sizes]


FREE_CAPTURES: Final = 2
"""As many are made at once: without any, nothing is known of guesses."""
CAPTURE_SHARE: Final = 0.01
"""Of all time, so much may be spent on what only seems worth a trial."""
CAPTURE_FOLLOWS: Final = 0.25
"""How fast what is known of the time that it takes follows it."""
REMEMBERED_SIZES: Final = 128
"""Sizes that are remembered: whoever makes something for them keeps about as many."""

CaptureSize = tuple[int, int]


class GraphCaptures:
    """Of rounds, by rows and guesses. Where nothing ever has to be made, this forbids nothing."""

    def __init__(self) -> None:
        self._met: OrderedDict[CaptureSize, None] = OrderedDict()
        self._takes = 0.0  # seconds, for one size
        self._saved: dict[int, float] = {}  # by rows, seconds: a number of rows that is soon another is not worth it
        self._missed = 0.0
        self._free = FREE_CAPTURES

    def made(self, rows: int, guessed: int, seconds: float) -> None:
        """For a round something was, which took so long; `guessed` is 0 where nobody guessed."""
        seconds = max(0.0, seconds)
        self._takes += (seconds - self._takes) * (CAPTURE_FOLLOWS if self._takes else 1.0)
        if guessed:
            self._saved[rows] = 0.0
            self._free = max(self._free - 1, 0)
        self._remember(_capture_size(rows, guessed))

    def met(self, rows: int, guessed: int, plain: float) -> None:
        """A round ran with what was there, where a plain one takes `plain` seconds."""
        if self._takes:
            self._saved[rows] = min(self._saved.get(rows, 0.0) + self._missed + CAPTURE_SHARE * plain, self._takes)
        self._missed = 0.0
        self._remember(_capture_size(rows, guessed))

    def misses(self, seconds: float) -> None:
        """The coming round could give as much in so much less time, if it were of a size that is not there."""
        self._missed = seconds

    def affords(self, rows: int, guessed: int) -> bool:
        """Whether such a round may run: it is there, or may be made."""
        return self._free > 0 or self._saved.get(rows, 0.0) >= self._takes or _capture_size(rows, guessed) in self._met

    def _remember(self, size: CaptureSize) -> None:
        self._met[size] = None
        self._met.move_to_end(size)
        if len(self._met) > REMEMBERED_SIZES:
            self._met.popitem(last=False)


def _capture_size(rows: int, guessed: int) -> CaptureSize:
    return round_size(rows), round_size(rows + guessed)


def round_size(tokens: int) -> int:
    """Numbers them: 0, 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25-32, ..."""
    if tokens <= 4:
        return tokens
    doublings = (tokens - 1).bit_length() - 1
    return 2 * doublings + ((tokens - 1) >> (doublings - 1)) - 1
