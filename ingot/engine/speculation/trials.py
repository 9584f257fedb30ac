"""Tries now and then what does not seem best: what is never tried is never known to have become better."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

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
    as long as they are guessed for rightly. And where guessing pays, so might other guesses, or none."""

    def __init__(self) -> None:
        self._sleepers, self._others = _Timer(LONGEST_SLEEP, WAKING), _Timer(LATEST, TRYING)
        self._kinds: tuple[Trial, ...] = (_deeper, _another, _plain)
        self._turn = 0
        self._running: tuple[Trial, int] | None = None  # and for how many rounds more
        self._woken: set[Hashable] = set()
        self._awake = 0  # rounds more for which they are, even if they are guessed for wrongly

    def instead(self, table: Table, best: Slots) -> Slots:
        """What to do in this round: what seems best, or a trial."""
        self._sleepers.tick()
        self._others.tick()
        counts = self._go_on(table, best) or self._wake(table, best) or self._begin(table, best)
        return best if counts is None else table.choice.exactly(counts)

    def observe(self, guessed: Iterable[tuple[Hashable, bool]]) -> None:
        """For whom a round guessed, and whether anything of that was right."""
        if not self._awake:
            self._woken.difference_update([key for key, right in guessed if not right])

    def reset(self) -> None:
        """What seems best has changed: other things may have, too."""
        self._sleepers.reset()
        self._others.reset()
        self._running = None

    def forget(self, key: Hashable) -> None:
        self._woken.discard(key)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences that were woken."""
        return self._woken

    def _wake(self, table: Table, best: Slots) -> Counts | None:
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
        counts = _with(self._woken, table, best)
        self._sleepers.spend(_lost(table, best, counts))
        return counts

    def _begin(self, table: Table, best: Slots) -> Counts | None:
        if not self._others.due or not best.guesses:
            return None
        for _ in self._kinds:
            self._turn = (self._turn + 1) % len(self._kinds)
            trial = self._kinds[self._turn]
            if (counts := trial(table, best)) is not None:
                changes = 0.0 if any(counts) else _changes(table, best)
                self._others.restart(ROUNDS * _lost(table, best, counts) + changes)
                self._running = (trial, ROUNDS - 1)
                return counts
        return None

    def _go_on(self, table: Table, best: Slots) -> Counts | None:
        if self._running is None:
            return None
        trial, left = self._running
        self._running = (trial, left - 1) if left > 1 else None
        return trial(table, best)


def _with(woken: set[Hashable], table: Table, best: Slots) -> Counts:
    return tuple(count or int(key in woken) for key, count in zip(table.keys, best.counts, strict=True))


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
