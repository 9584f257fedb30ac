"""What a step costs, learned from the steps that were run."""

from __future__ import annotations

from collections import deque

LEAST_SLOPE = 0.25
"""However the measurements lie, this part of the mean cost grows with size, so that no size seems free."""
LARGEST_EFFICIENT = 128
"""No fixed cost makes chunks of more tokens than this necessary."""
MEMORY = 0.95
"""How much of what was known is kept at each new measurement."""
FAR_BELOW = 1 / 3
"""A measurement that is less than this part of what was expected shows that something else was in those before, such as
kernels that were compiled when they were first met: they are forgotten."""

LATELY = 4
"""Times that the least is taken of."""


class CostLine:
    """cost = fixed + slope * size, fitted to recent measurements."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, size: float, cost: float) -> None:
        if self.known and cost < FAR_BELOW * self.cost(size):
            self._forget()
        self._n = self._n * MEMORY + 1
        self._x = self._x * MEMORY + size
        self._y = self._y * MEMORY + cost
        self._xx = self._xx * MEMORY + size * size
        self._xy = self._xy * MEMORY + size * cost

    @property
    def known(self) -> bool:
        return self._n > 0

    def fit(self) -> tuple[float, float]:
        """(fixed, slope), neither negative."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        proportional = mean_y / max(mean_x, 1e-9)
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-9 * mean_x * mean_x:
            return 0.0, proportional
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        # Sizes that lie close together say little of the slope, and noise may say that more costs less.
        slope = min(max(slope, LEAST_SLOPE * proportional), proportional)
        return max(0.0, mean_y - slope * mean_x), slope

    def cost(self, size: float) -> float:
        fixed, slope = self.fit()
        return fixed + slope * size

    def size_for(self, cost: float) -> float:
        """The largest size that costs at most `cost`; may be negative."""
        fixed, slope = self.fit()
        return (cost - fixed) / slope if slope > 0 else float("inf")


class LeastCost:
    """What work of about a size costs that is done seldom: the least, by size, of the last few times. The first time
    does not count: something was made then that others find."""

    def __init__(self) -> None:
        self._lately: dict[int, deque[float]] = {}  # cost over size, by the size's power of two

    def observe(self, size: int, cost: float) -> None:
        known = self._lately.get(size.bit_length())
        if known is None:
            self._lately[size.bit_length()] = deque(maxlen=LATELY)
        else:
            known.append(cost / max(size, 1))

    def cost(self, size: int) -> float:
        """0 where it is not known: what was measured once may have been anything."""
        known = self._lately.get(size.bit_length(), ())
        return min(known) * size if len(known) > 1 else 0.0


class StepCosts:
    """Milliseconds of decoding rows and of prefilling tokens.

    Where a model `mixes`, both share forward passes, whose price is that of as many tokens; else their prices add up.
    """

    def __init__(self, *, mixes: bool = False) -> None:
        self._mixes = mixes
        self._decode, self._prefill = CostLine(), CostLine()

    def observe_decode(self, rows: int, milliseconds: float) -> None:
        self._decode.observe(rows, milliseconds)

    def observe_prefill(self, tokens: int, milliseconds: float) -> None:
        """A forward pass over prompt tokens; those of rows that decoded in it are counted like any other."""
        self._prefill.observe(tokens, milliseconds)

    def decode_ms(self, rows: int) -> float:
        """Of a step in which rows decode and nothing else happens."""
        if not self._mixes or not self._prefill.known:
            return self._decode.cost(rows) if rows and self._decode.known else 0.0
        # There may have been no such step yet, or none of nearly as many rows; but they cost no more than a prompt.
        return min(self._decode.cost(rows), self.prefill_ms(rows)) if self._decode.known else self.prefill_ms(rows)

    def prefill_ms(self, tokens: int) -> float:
        return self._prefill.cost(tokens) if tokens and self._prefill.known else 0.0

    def efficient_tokens(self, rows: int) -> int:
        """The fewest tokens of which the fixed cost of computing any takes no more than a fifth.

        Beside rows that decode in the same forward pass there is no such cost.
        """
        if self._mixes and rows:
            return 1
        fixed, slope = self._prefill.fit() if self._prefill.known else (0.0, 1.0)
        return int(min(4 * fixed / slope, LARGEST_EFFICIENT)) if slope > 0 else LARGEST_EFFICIENT

    def tokens_within(self, milliseconds: float, rows: int, default: int) -> int:
        """How many tokens can be prefilled in a step that takes so long and in which so many rows decode.

        `default` as long as nothing was measured.
        """
        if not self._prefill.known:
            return default
        if self._mixes:
            most = self._prefill.size_for(milliseconds) - rows
        else:
            most = self._prefill.size_for(milliseconds - self.decode_ms(rows))
        return int(min(max(most, 0.0), 1 << 30))
