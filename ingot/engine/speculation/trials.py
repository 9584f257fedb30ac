"""Tries now and then what does not seem best: what is never tried is never known to have become better."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

from ingot.engine.speculation.purse import Purse
from ingot.engine.speculation.slots import Slots
from ingot.engine.speculation.table import Table

SOONEST, LATEST = 8, 64
"""Rounds between two trials of a kind, while they cost next to nothing."""
RAREST = 512
"""And however much they cost."""
TRYING = 0.004
"""Of all time, so much may be lost to trials of other guesses where guessing pays."""
ROUNDS = 2
"""How long those last: in the second round it shows what such rounds cost."""
DEPTHS = (1, 3)
"""How much is guessed for rows that are woken, by turns: what a round costs for more guesses is to be known, too."""

Counts = tuple[int, ...]
Trial = Callable[[Table, Slots], Counts | None]
"""How many guesses for each row, instead of what seems best; None: that is the same."""


class Trials:
    """Of two kinds. Rows that sleep, as guessing for them seems not to pay, are woken for a round, and for further ones
    while most of what is guessed is right: twice as much each time, if all was. And where guessing pays, so might other
    guesses, or none.

    What to try is decided once a round, however often it is asked for.
    """

    def __init__(self, purse: Purse) -> None:
        self._purse, self._others = purse, _Timer(TRYING)
        self._kinds: tuple[Trial, ...] = (_deeper, _another, _plain)
        self._turn = 0
        self._decided = False
        self._trial: Trial | None = None  # of this round
        self._rounds = 0  # for which it goes on
        self._since = 0  # rounds since rows were woken
        self._turns = 0  # how often that was
        self._tried: dict[Hashable, int] = {}  # at which of these turns a row was, for the last time
        self._woken: dict[Hashable, int] = {}  # how much is guessed for those that are awake

    def instead(self, table: Table, best: Slots) -> Slots:
        """What to do in this round: what seems best, or a trial."""
        if not self._decided:
            self._decided, self._trial = True, self._next(table, best)
        counts = self._trial(table, best) if self._trial is not None else None
        return best if counts is None else table.choice.exactly(counts)

    def observe(self, guessed: Iterable[tuple[Hashable, int, int]]) -> None:
        """A round was run: for whom it guessed, how many tokens, and how many of them were right."""
        self._decided = False
        woken, self._woken = self._woken, {}
        for key, proposed, right in guessed:
            if key in woken and 2 * right >= proposed:
                self._woken[key] = 2 * proposed if right == proposed else proposed

    def passed(self, rounds: int) -> None:
        """So many were run that nobody chose anything for."""
        self._since += rounds
        self._others.tick(rounds)

    def reset(self) -> None:
        """What seems best has changed: other things may have, too."""
        self._others.reset()
        self._rounds = 0

    def forget(self, key: Hashable) -> None:
        self._woken.pop(key, None)
        self._tried.pop(key, None)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences that were woken."""
        return self._tried

    def _next(self, table: Table, best: Slots) -> Trial | None:
        self._since += 1
        self._others.tick()
        if self._rounds:
            self._rounds -= 1
            return self._trial
        return self._wake(table, best) or self._other(table, best)

    def _wake(self, table: Table, best: Slots) -> Trial | None:
        asleep = [
            key for key, count, reach in zip(table.keys, best.counts, table.reach, strict=True) if reach and not count
        ]
        self._woken = self._going_on({key: self._woken[key] for key in asleep if key in self._woken}, table, best)
        if asleep and not self._woken and self._since >= SOONEST:
            self._begin_with(asleep, table, best)
        return partial(_with, self._woken) if self._woken else None

    def _begin_with(self, asleep: list[Hashable], table: Table, best: Slots) -> None:
        """As many as can be paid for, those first that were not woken for longest."""
        asleep.sort(key=lambda key: self._tried.get(key, -1))
        turn = self._turns % len(DEPTHS)
        depths = [*DEPTHS[turn:], *DEPTHS[:turn]]
        while asleep:
            ways = [dict.fromkeys(asleep, depth) for depth in depths]
            woken = next((way for way in ways if table.choice.there(_with(way, table, best))), ways[0])
            if self._affordable(woken, table, best):
                self._woken, self._since, self._turns = woken, 0, self._turns + 1
                self._tried |= dict.fromkeys(woken, self._turns)
                return
            del asleep[len(asleep) // 2 :]

    def _going_on(self, woken: dict[Hashable, int], table: Table, best: Slots) -> dict[Hashable, int]:
        """As much for each as can be paid for."""
        while woken and not self._affordable(woken, table, best):
            woken = {key: depth // 2 for key, depth in woken.items() if depth > 1}
        return woken

    def _affordable(self, woken: Mapping[Hashable, int], table: Table, best: Slots) -> bool:
        tried = table.choice.exactly(_with(woken, table, best))
        back = 0.0 if best.guesses else table.wait
        lost = (tried.seconds + back - tried.tokens / best.rate) / best.seconds
        return lost <= self._purse.left and table.choice.payable(tried)

    def _other(self, table: Table, best: Slots) -> Trial | None:
        if not self._others.due or not best.guesses:
            return None
        for _ in self._kinds:
            self._turn = (self._turn + 1) % len(self._kinds)
            trial = self._kinds[self._turn]
            counts = trial(table, best)
            if counts is not None and (not any(counts) or _payable(table, counts)):
                self._others.restart(ROUNDS * _lost(table, best, counts))
                self._rounds = ROUNDS - 1
                return trial
        return None


def _with(woken: Mapping[Hashable, int], table: Table, best: Slots) -> Counts:
    return tuple(
        count or min(woken.get(key, 0), reach)
        for key, count, reach in zip(table.keys, best.counts, table.reach, strict=True)
    )


def _lost(table: Table, best: Slots, counts: Counts) -> float:
    """How many of the best rounds it takes to make up for one that is tried."""
    tried = table.choice.exactly(counts)
    return (tried.seconds - tried.tokens / best.rate) / best.seconds


def _payable(table: Table, counts: Counts) -> bool:
    return table.choice.payable(table.choice.exactly(counts))


def _deeper(table: Table, best: Slots) -> Counts | None:
    counts = tuple(min(reach, count + (count + 1) // 2) for count, reach in zip(best.counts, table.reach, strict=True))
    return counts if counts != best.counts else None


def _another(table: Table, best: Slots) -> Counts | None:
    """Of others than those that seem to guess best, where there are any."""
    if not table.turn():
        return None
    return tuple(min(reach, count) for count, reach in zip(best.counts, table.reach, strict=True))


def _plain(table: Table, best: Slots) -> Counts | None:
    return (0,) * len(best.counts) if best.guesses else None


class _Timer:
    """Counts rounds until trials are due. They become rarer while nothing changes, until they are LATEST rounds apart,
    or further where they cost more than a share of all time."""

    def __init__(self, share: float) -> None:
        self._share, self._wait = share, SOONEST
        self._affordable = 0.0
        self._since = 0

    def tick(self, rounds: int = 1) -> None:
        self._since += rounds

    @property
    def due(self) -> bool:
        return self._since >= max(self._wait, self._affordable)

    def restart(self, lost: float) -> None:
        """A trial begins. It loses as much time as so many rounds take."""
        self._affordable = min(max(lost, 0.0) / self._share, RAREST)
        self._wait = min(2 * self._wait, LATEST)
        self._since = 0

    def reset(self) -> None:
        self._wait = SOONEST
