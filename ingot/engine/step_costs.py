"""What a step costs, learned from the steps that were run.

The fixed part of a cost can only be told from steps of different sizes, and alongside a steady stream all steps have
one size. So the line goes through two medians, of the small and of the large ones of the last 32 passes; while fewer
than four of those were at most half the size, every second step that could be full takes a quarter of its tokens. That
costs some 3 % of a prompt's speed. With fewer than three small ones the fixed part counts as unknown, and the latency
target alone decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

LEAST_SLOPE = 0.25
"""Whatever the measurements, this share of the mean cost grows with size, so that no size seems free."""
LARGEST_EFFICIENT = 128
"""No fixed cost makes chunks of more tokens than this necessary."""
REMEMBERED_COSTS = 32
"""The last measurements, to which a line is fitted."""
SURE_COSTS = 3
"""Small and large measurements that it takes to know the fixed part: the median of three tolerates an outlier."""
TELLING_RATIO = 2.0
"""How many times larger sizes must be to determine the slope. Between closer sizes, noise dominates."""
VARIED_BY = 4
"""How many times smaller a step is made to learn the fixed part."""
FAR_BELOW = 1 / 3
"""A measurement below this share of the expected cost shows that those before included something else, such as the
compilation of kernels: they are forgotten."""
FARTHEST = 32
"""How many times longer than a measured pass a prompt may be whose cost is to be sure."""

RECENT_COSTS = 4
"""Measurements of which the least is taken."""


class CostLine:
    """cost = fixed + slope * size, through the medians of recent measurements: of small sizes and of large ones."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_COSTS)
        self._fit: _Fit | None = None  # computed on demand

    def observe(self, size: float, cost: float) -> None:
        if self.known and cost < FAR_BELOW * self.cost(size):
            self._recent.clear()
        self._recent.append((size, cost))
        self._fit = None

    @property
    def known(self) -> bool:
        return bool(self._recent)

    @property
    def sure(self) -> bool:
        """Whether the fixed part is known, and not only the cost of the usual size."""
        return self.known and self._fitted().sure

    def fit(self) -> tuple[float, float]:
        """(fixed, slope), neither negative."""
        found = self._fitted()
        return found.fixed, found.slope

    def cost(self, size: float) -> float:
        fixed, slope = self.fit()
        return fixed + slope * size

    def size_for(self, cost: float) -> float:
        """The largest size that costs at most `cost`; may be negative."""
        fixed, slope = self.fit()
        return (cost - fixed) / slope if slope > 0 else float("inf")

    @property
    def count(self) -> int:
        """Of recent measurements."""
        return len(self._recent)

    @property
    def largest(self) -> float:
        """Of the recent sizes."""
        return max((size for size, _ in self._recent), default=0.0)

    def lacks_smaller(self, size: float) -> bool:
        """Whether a much smaller size than this should be measured next. Never twice in a row."""
        smaller = [TELLING_RATIO * measured <= size for measured, _ in self._recent]
        return self.known and sum(smaller) <= SURE_COSTS and not smaller[-1]

    def _fitted(self) -> _Fit:
        if self._fit is None:
            self._fit = _fit_line(self._recent)
        return self._fit


@dataclass(frozen=True, slots=True)
class _Fit:
    fixed: float
    slope: float
    sure: bool


def _fit_line(measured: Iterable[tuple[float, float]]) -> _Fit:
    """A line through the medians of the small and of the large sizes."""
    by_size = sorted(measured)
    if by_size[-1][0] < TELLING_RATIO * by_size[0][0]:
        return _fit_proportional(by_size)
    small, large = _split_by_size(by_size)
    (below, cheaper), (size, cost) = _median_point(small), _median_point(large)
    if size < TELLING_RATIO * below:
        return _fit_proportional(by_size)
    proportional = cost / size
    # With noise, more may seem to cost less.
    slope = min(max((cost - cheaper) / (size - below), LEAST_SLOPE * proportional), proportional)
    smaller = sum(TELLING_RATIO * each <= size for each, _ in small)
    return _Fit(max(0.0, cost - slope * size), slope, sure=min(smaller, len(large)) >= SURE_COSTS)


def _fit_proportional(measured: Iterable[tuple[float, float]]) -> _Fit:
    size, cost = _median_point(measured)
    return _Fit(0.0, cost / max(size, 1e-9), sure=False)


def _split_by_size(by_size: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Small and large sizes: split where the gap is wide and there are many on both sides."""
    count = len(by_size)
    least = min(SURE_COSTS, count // 2)

    def gap(split: int) -> float:
        apart = math.log(max(by_size[split][0], 1e-9) / max(by_size[split - 1][0], 1e-9))
        return split * (count - split) * apart * apart

    split = max(range(least, count - least + 1), key=gap)
    return by_size[:split], by_size[split:]


def _median_point(measured: Iterable[tuple[float, float]]) -> tuple[float, float]:
    sizes, costs = zip(*measured, strict=True)
    return median(sizes), median(costs)


class LeastCost:
    """The cost of infrequent work: the least of the last few measurements, by size. The first does not count, as it
    includes one-time work."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}  # cost over size, by the size's power of two

    def observe(self, size: int, cost: float) -> None:
        recent = self._recent.get(size.bit_length())
        if recent is None:
            self._recent[size.bit_length()] = deque(maxlen=RECENT_COSTS)
        else:
            recent.append(cost / max(size, 1))

    def cost(self, size: int) -> float:
        """0 where it is not known: a single measurement proves nothing."""
        recent = self._recent.get(size.bit_length(), ())
        return min(recent) * size if len(recent) > 1 else 0.0


class StepCosts:
    """Milliseconds of decoding rows and of prefilling tokens.

    Where a model `mixes`, both share forward passes, which cost as much as so many tokens; else their costs add up.
    """

    def __init__(self, *, mixes: bool = False) -> None:
        self._mixes = mixes
        self._decode, self._prefill = CostLine(), CostLine()

    def observe_decode(self, rows: int, milliseconds: float) -> None:
        self._decode.observe(rows, milliseconds)

    def observe_prefill(self, tokens: int, milliseconds: float) -> None:
        """A forward pass over prompt tokens; the tokens of rows that decode in it are counted too."""
        self._prefill.observe(tokens, milliseconds)

    def decode_ms(self, rows: int) -> float:
        """Of a step in which rows only decode."""
        if not self._mixes or not self._prefill.known:
            return self._decode.cost(rows) if rows and self._decode.known else 0.0
        # There may have been no such step yet, or none of nearly as many rows; but it costs no more than a prompt.
        return min(self._decode.cost(rows), self.prefill_ms(rows)) if self._decode.known else self.prefill_ms(rows)

    def prefill_ms(self, tokens: int) -> float:
        return self._prefill.cost(tokens) if tokens and self._prefill.known else 0.0

    def prompt_ms(self, tokens: int) -> float:
        """Of a whole prompt: where it is longer than any pass so far, of as many passes as that takes."""
        largest = int(self._prefill.largest)
        return self.prefill_ms(tokens) if tokens <= largest else self.prefill_ms(largest) * tokens / max(1, largest)

    def sure_prompt_ms(self, tokens: int) -> float:
        """The same; 0 where there were few passes so far, or only much shorter ones."""
        is_sure = self._prefill.count >= SURE_COSTS and tokens <= FARTHEST * self._prefill.largest
        return self.prompt_ms(tokens) if is_sure else 0.0

    def fixed_ms(self, rows: int) -> float:
        """What a step with at most one decoding row costs before its first prompt token; 0 where that is not sure."""
        if not self._prefill.sure:
            return 0.0
        fixed, _ = self._prefill.fit()
        return fixed if self._mixes else fixed + self.decode_ms(min(rows, 1))

    def varied(self, tokens: int, rows: int) -> int:
        """So many prompt tokens, or far fewer where no recent step was so small: steps of one size do not show which
        part of their cost is fixed."""
        fewer, decoding = max(1, tokens // VARIED_BY), rows if self._mixes else 0
        is_telling = TELLING_RATIO * (fewer + decoding) <= tokens + decoding
        return fewer if is_telling and self._prefill.lacks_smaller(tokens + decoding) else tokens

    def further_tokens(self) -> int:
        """How many tokens a further prompt costs besides its own, where each takes a forward pass of its own."""
        if self._mixes or not self._prefill.known:
            return 0
        fixed, slope = self._prefill.fit()
        return int(fixed / slope) if slope > 0 else 0

    @property
    def largest_tokens(self) -> int:
        """Of recent forward passes over prompts."""
        return int(self._prefill.largest)

    def efficient_tokens(self, rows: int) -> int:
        """The fewest prompt tokens for which the fixed cost of a pass takes at most a fifth. Alongside rows that decode
        in the same pass there is no such cost."""
        if self._mixes and rows:
            return 1
        fixed, slope = self._prefill.fit() if self._prefill.known else (0.0, 1.0)
        return int(min(4 * fixed / slope, LARGEST_EFFICIENT)) if slope > 0 else LARGEST_EFFICIENT

    def tokens_within(self, milliseconds: float, rows: int, default: int) -> int:
        """How many tokens can be prefilled in a step of that time in which so many rows decode; `default` as long as
        nothing was measured."""
        if not self._prefill.known:
            return default
        if self._mixes:
            most = self._prefill.size_for(milliseconds) - rows
        else:
            most = self._prefill.size_for(milliseconds - self.decode_ms(rows))
        return int(min(max(most, 0.0), 1 << 30))
