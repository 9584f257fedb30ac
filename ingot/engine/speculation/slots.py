"""Which guesses to verify: those most likely to be needed, as many as make tokens come fastest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.engine.speculation.round_costs import Floats, RoundCosts

UNLIKELY = 0.02
"""What survives more rarely is not worth looking at."""


@dataclass(frozen=True, slots=True)
class Slots:
    """So many guesses for each row, what they should give, and how long that takes."""

    counts: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def guesses(self) -> bool:
        return any(self.counts)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Choice:
    """Of guesses for some rows: `survival[row, i]` is how likely the i-th and all before it are right.

    `computed` says whose guesses cost time to make, `seconds` how long the round takes for other reasons.
    """

    def __init__(self, survival: Floats, computed: Floats, costs: RoundCosts, seconds: float = 0.0) -> None:
        self._survival, self._computed, self._costs, self._seconds = survival, computed, costs, seconds
        self._rows = len(survival)

    def plain(self) -> Slots:
        return Slots((0,) * self._rows, self._rows, self._costs.plain(self._rows) + self._seconds)

    def exactly(self, counts: tuple[int, ...]) -> Slots:
        if not any(counts):
            return self.plain()
        some = np.array(counts)
        within = np.arange(self._survival.shape[1]) < some[:, None]
        depth = (some * self._computed).max()
        seconds = self._costs.guessing(self._rows, some.sum(keepdims=True), depth)[0]
        return Slots(counts, self._rows + float(self._survival[within].sum()), float(seconds) + self._seconds)

    def best(self) -> Slots | None:
        """The best way to guess at all; None: there is nothing to guess.

        As what is likelier to be needed is verified first, the question is only how many, and how long the longest
        may be of those that take time to make.
        """
        flat = self._survival.ravel()
        order = (-flat).argsort(kind="stable")[: np.count_nonzero(flat >= UNLIKELY)]
        if not len(order):
            return None
        row, position = np.divmod(order, self._survival.shape[1])
        depth = np.where(self._computed[row], position + 1, 0)
        longest = np.arange(depth.max() + 1)[:, None]
        allowed = depth <= longest
        tokens = self._rows + (flat[order] * allowed).cumsum(axis=1)
        guessed = allowed.cumsum(axis=1)
        seconds = self._costs.guessing(self._rows, guessed, longest) + self._seconds
        rates = np.where(guessed > 0, tokens / seconds, 0.0)
        cap, last = divmod(int(rates.argmax()), len(order))
        counts = np.bincount(row[: last + 1][allowed[cap, : last + 1]], minlength=self._rows)
        return Slots(tuple(counts.tolist()), float(tokens[cap, last]), float(seconds[cap, last]))
