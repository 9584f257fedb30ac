"""Which guesses to verify: those most likely to be needed, as many as make tokens come fastest."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, repeat
from operator import add, neg, truediv

from ingot.engine.speculation.step_costs import RoundCosts

LONGEST = 3.0
"""No round takes longer than a plain one by more than so many of these, whatever it promises."""

May = Callable[[int, float, float], bool]
"""Whether a round may be run, by its guesses, seconds and tokens."""


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
    """Of guesses for some rows: `survival[row][i]` is how likely the i-th and all before it are right.

    `computed` says whose guesses take time to make, `purse` how many plain rounds may be lost, `seconds` how long the
    round takes for other reasons.
    """

    def __init__(
        self,
        survival: Sequence[Sequence[float]],
        computed: Sequence[bool],
        costs: RoundCosts,
        purse: float = math.inf,
        seconds: float = 0.0,
    ) -> None:
        self._survival, self._computed, self._costs, self._seconds = survival, computed, costs, seconds
        self._rows, self._purse = len(survival), purse
        self._plain = costs.plain(self._rows)

    def plain(self) -> Slots:
        return Slots((0,) * self._rows, self._rows, self._plain + self._seconds)

    @property
    def plain_at_best(self) -> float:
        """Tokens a second plainly, if that is as fast as it may well be."""
        return self._rows / (self._costs.plain_at_best(self._rows) + self._seconds)

    def exactly(self, counts: tuple[int, ...]) -> Slots:
        guessed = sum(counts)
        if not guessed:
            return self.plain()
        tokens = self._rows + sum(sum(row[:count]) for row, count in zip(self._survival, counts, strict=True))
        depth = max(count * computed for count, computed in zip(counts, self._computed, strict=True))
        seconds = self._costs.guessing(self._rows, range(guessed, guessed + 1))[0] + depth * self._costs.step
        return Slots(counts, tokens, seconds + self._seconds)

    def payable(self, slots: Slots) -> bool:
        return self._payable_and_there(sum(slots.counts), slots.seconds, slots.tokens)

    def there(self, counts: tuple[int, ...]) -> bool:
        """Whether nothing has to be made for such a round, or may be."""
        return self._costs.makings.affords(self._rows, sum(counts))

    def best(self) -> Slots | None:
        """The best way to guess at all; None: there is nothing to guess, or nothing that can be paid for."""
        return self._best(self._payable)

    def best_there(self) -> Slots | None:
        """The same among rounds for which nothing has to be made, or for which it may be."""
        return self._best(self._payable_and_there)

    def _payable(self, guessed: int, seconds: float, tokens: float) -> bool:
        """Whether the purse can bear that all of it is wrong, but for half of what is expected of it."""
        if self._rows <= self._costs.widest < self._rows + guessed:
            return False
        longer, expected = (seconds - self._seconds) / self._plain - 1, tokens / self._rows - 1
        return 0 < self._purse >= longer - expected / 2 and longer <= LONGEST

    def _payable_and_there(self, guessed: int, seconds: float, tokens: float) -> bool:
        return self._payable(guessed, seconds, tokens) and self._costs.makings.affords(self._rows, guessed)

    def _best(self, may: May) -> Slots | None:
        """As what is likelier to be needed is verified first, the question is only how many, and how long the longest
        may be of those that take time to make."""
        making = [row for row, computed in zip(self._survival, self._computed, strict=True) if computed]
        there = [row for row, computed in zip(self._survival, self._computed, strict=True) if not computed]
        slots = [one for row in there for one in row]
        longest = max(map(len, making), default=0)
        seconds = self._costs.guessing(self._rows, range(len(slots) + sum(map(len, making)) + 1))
        best, least, depth = 0.0, 0.0, 0
        for cap in range(longest + 1):
            if cap:
                slots += [row[cap - 1] for row in making if len(row) >= cap]
            if slots:
                rate, last = self._fastest(slots, seconds, cap * self._costs.step + self._seconds, may)
                if rate > best:
                    best, least, depth = rate, last, cap
        return self.exactly(self._down_to(least, depth)) if best else None

    def _fastest(self, slots: list[float], seconds: list[float], more: float, may: May) -> tuple[float, float]:
        """The most tokens a second that the likeliest of them give, and how likely the last of these is. Sorts them.
        Those that are as likely are taken together."""
        slots.sort(reverse=True)
        tokens = list(accumulate(slots, initial=float(self._rows)))
        rates = list(map(truediv, tokens, map(add, seconds, repeat(more))))
        rates[0] = 0.0
        for place in [place for place, (one, next) in enumerate(pairwise(slots), 1) if one == next]:
            rates[place] = 0.0
        best = max(rates)
        guessed = rates.index(best)
        if best and not may(guessed, seconds[guessed] + more, tokens[guessed]):
            ways = zip(count(), rates, seconds, tokens, strict=False)
            rates = [rate if rate and may(number, taken + more, given) else 0.0 for number, rate, taken, given in ways]
            best = max(rates)
        return best, slots[rates.index(best) - 1]

    def _down_to(self, least: float, depth: int) -> tuple[int, ...]:
        """All guesses that are as likely to be needed, of those that take time to make the first few."""
        return tuple(
            bisect_right(row, -least, 0, min(depth, len(row)) if computed else len(row), key=neg)
            for row, computed in zip(self._survival, self._computed, strict=True)
        )
