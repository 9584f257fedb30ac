"""Tries now and then what does not seem best: what is never tried is never known to have become better."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

from ingot.engine.speculation.slots import Slots
from ingot.engine.speculation.table import Table

SOONEST, LATEST = 8, 512
"""Rounds between two trials of a kind."""
LONGEST_SLEEP = 8
"""The most of them for rows that could be guessed for and are not, as long as that costs next to nothing."""
WAKING, TRYING = 0.013, 0.004
"""Of all time, so much may be lost to waking them, and to other trials."""
ROUNDS = 2
"""How long trials last, except of rows that sleep: in the second round it shows what such rounds cost."""
LONGEST_WAKE = 4
"""For so many rounds at most are rows woken that are guessed for wrongly."""

Counts = tuple[int, ...]
Trial = Callable[[Table, Slots], Counts | None]
"""How many guesses for each row, instead of what seems best; None: that is the same."""


class Trials:
    """Of two kinds. Rows that sleep, as guessing for them seems not to pay, are woken for a round, and for further ones
    as long as they are guessed for rightly. And where guessing pays, so might other guesses, or none.

    What to try is decided once a round, however often it is asked for.
    """

    def __init__(self) -> None:
        self._sleepers, self._others = _Timer(LONGEST_SLEEP, WAKING), _Timer(LATEST, TRYING)
        self._kinds: tuple[Trial, ...] = (_deeper, _another, _plain)
        self._turn = 0
        self._decided = False
        self._trial: Trial | None = None  # of this round
        self._rounds = 0  # for which it goes on
        self._woken: set[Hashable] = set()
        self._awake = 0  # rounds for which they stay so, even if they are guessed for wrongly

    def instead(self, table: Table, best: Slots) -> Slots:
        """What to do in this round: what seems best, or a trial."""
        if not self._decided:
            self._decided, self._trial = True, self._next(table, best)
        counts = self._trial(table, best) if self._trial is not None else None
        return best if counts is None else table.choice.exactly(counts)

    def observe(self, guessed: Iterable[tuple[Hashable, bool]]) -> None:
        """A round was run: for whom it guessed, and whether anything of that was right."""
        self._decided = False
        if not self._awake:
            self._woken.difference_update([key for key, right in guessed if not right])

    def reset(self) -> None:
        """What seems best has changed: other things may have, too."""
        self._sleepers.reset()
        self._others.reset()
        self._rounds = 0

    def forget(self, key: Hashable) -> None:
        self._woken.discard(key)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences that were woken."""
        return self._woken

    def _next(self, table: Table, best: Slots) -> Trial | None:
        self._sleepers.tick()
        self._others.tick()
        if self._rounds:
            self._rounds -= 1
            return self._trial
        return self._wake(table, best) or self._other(table, best)

    def _wake(self, table: Table, best: Slots) -> Trial | None:
        asleep = {
            key for key, count, reach in zip(table.keys, best.counts, table.reach, strict=True) if reach and not count
        }
        self._woken &= asleep
        if asleep and self._sleepers.due:
            self._woken, self._awake = asleep, _rounds_awake(table, best, _with(asleep, table, best))
            self._sleepers.restart(0.0 if best.guesses else _changes(table, best))
        if not self._woken:
            return None
        self._awake -= self._awake > 0
        self._sleepers.spend(_lost(table, best, _with(self._woken, table, best)))
        return partial(_with, self._woken)

    def _other(self, table: Table, best: Slots) -> Trial | None:
        if not self._others.due or not best.guesses:
            return None
        for _ in self._kinds:
            self._turn = (self._turn + 1) % len(self._kinds)
            trial = self._kinds[self._turn]
            if (counts := trial(table, best)) is not None:
                changes = 0.0 if any(counts) else _changes(table, best)
                self._others.restart(ROUNDS * _lost(table, best, counts) + changes)
                self._rounds = ROUNDS - 1
                return trial
        return None


def _with(woken: set[Hashable], table: Table, best: Slots) -> Counts:
    return tuple(
        count or int(key in woken and reach > 0)
        for key, count, reach in zip(table.keys, best.counts, table.reach, strict=True)
    )


def _rounds_awake(table: Table, best: Slots, counts: Counts) -> int:
    """As long as that costs no more than to begin with guessing and to end it."""
    changes, lost = 0.0 if best.guesses else _changes(table, best), _lost(table, best, counts)
    return LONGEST_WAKE if LONGEST_WAKE * lost <= changes else max(1, int(changes / lost))


def _lost(table: Table, best: Slots, counts: Counts) -> float:
    """How many of the best rounds it takes to make up for one that is tried."""
    tried = table.choice.exactly(counts)
    return (tried.seconds - tried.tokens / best.rate) / best.seconds


def _changes(table: Table, best: Slots) -> float:
    """The same for going over to rounds of the other kind and back."""
    return 2 * table.change / best.seconds


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
    """Counts rounds until trials of a kind are due. They become rarer while nothing changes, until they are `longest`
    rounds apart, or further where they cost more than a share of all time."""

    def __init__(self, longest: int, share: float) -> None:
        self._longest, self._share, self._wait = longest, share, SOONEST
        self._affordable = 0.0
        self._since = 0

    def tick(self) -> None:
        self._since += 1

    @property
    def due(self) -> bool:
        return self._since >= max(self._wait, self._affordable)

    def restart(self, lost: float) -> None:
        """A trial begins. It loses as much time as so many rounds take."""
        self._affordable = 0.0
        self._wait = min(2 * self._wait, self._longest)
        self._since = 0
        self.spend(lost)

    def spend(self, lost: float) -> None:
        self._affordable = min(self._affordable + max(lost, 0.0) / self._share, LATEST)

    def reset(self) -> None:
        self._wait = SOONEST
