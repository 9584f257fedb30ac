"""How likely guesses are right, learned from those that were verified.

A rate says how often a guess is right that follows right ones. It depends on who guesses, on the position or on how
sure the guesser says it is, and most of all on the text: one sequence copies, its neighbour invents. So each source has
rates by position (or a calibration of what it says itself), and each sequence has odds of its own relative to these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from itertools import accumulate
from typing import NamedTuple

from ingot.engine.speculation.proposer import Offer

UNKNOWN, DOUBT = 0.6, 6.0
"""How often the first guess of a source is thought to be right, and how many have to be verified to weigh as much."""
ALIKE = 2.0
"""The same for guesses of further positions, which are thought to be like those before them."""
TRUSTED = 4.0
"""Verified guesses that say something of a group of positions. No more than one group beyond these is looked at."""
WELL_KNOWN = 16.0
"""Verified first guesses by which a source is known so well that a sequence can be told to be different."""
PECULIAR = 4.0
"""So many of a sequence's have to be to weigh as much as the source's rate."""
OF_SOURCE, OF_SEQUENCE = 64.0, 36.0
"""First guesses that are remembered of a source, and guesses of a sequence."""
NEWEST = 8.0
"""So many guesses are held against all that are remembered."""
UNLIKE = 2.5
"""How many standard deviations they are apart where what is older says nothing any more."""
MOST_LIFT = 50.0
LEAST_RATE, MOST_RATE = 0.01, 0.99
STEP = 0.05
"""How fast a calibration follows."""


class Judged(NamedTuple):
    """Of the guesses for a sequence, the first `judged` were compared with what came; `right` of them were right."""

    key: Hashable
    offer: Offer
    judged: int
    right: int


class Acceptance:
    """Rates of at most `most` positions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[str, _Source] = {}
        self._own: dict[Hashable, dict[str, _Own]] = {}

    def reach(self, offer: Offer) -> int:
        """How many of its guesses anything is known of."""
        return min(offer.most, self._source(offer.source).reach)

    def survival(self, key: Hashable, offer: Offer, least: float) -> list[float]:
        """How likely each guess and all before it are right: of the first, and of as many as are at least so likely."""
        source, own = self._source(offer.source), self._own.get(key)
        lift = own[offer.source].lift if own is not None and offer.source in own else 1.0
        survival: list[float] = []
        survives = 1.0
        for odds in source.odds(offer):
            survives *= lift * odds / (1 + lift * odds)
            if survives < least and survival:
                break
            survival.append(survives)
        return survival

    def observe(self, round: Iterable[Judged]) -> None:
        by_source: dict[str, list[Judged]] = {}
        for judged in round:
            if judged.judged:
                by_source.setdefault(judged.offer.source, []).append(judged)
        for name, verified in by_source.items():
            source = self._source(name)
            for one in verified if source.well_known else ():
                own = self._own.setdefault(one.key, {}).setdefault(name, _Own())
                own.observe(one, source)
            source.observe(verified)

    def forget(self, key: Hashable) -> None:
        self._own.pop(key, None)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences of which anything is known."""
        return self._own

    def _source(self, name: str) -> _Source:
        if name not in self._sources:
            self._sources[name] = _Source(self._most)
        return self._sources[name]


class _Tally:
    """Of guesses: how many were judged, right, and would usually be right. What is older counts less, and nothing where
    the newest are too unlike it."""

    __slots__ = ("_new_judged", "_new_right", "_new_usual", "judged", "right", "usual")

    def __init__(self) -> None:
        self.judged = self.right = self.usual = 0.0
        self._new_judged = self._new_right = self._new_usual = 0.0

    def add(self, judged: float, right: float, usual: float = 0.0, *, kept: float) -> None:
        """`kept`: how much of what was is remembered."""
        self.judged = self.judged * kept + judged
        self.right = self.right * kept + right
        self.usual = self.usual * kept + usual
        if judged:
            newer = max(0.0, 1 - judged / NEWEST)
            self._new_judged = self._new_judged * newer + judged
            self._new_right = self._new_right * newer + right
            self._new_usual = self._new_usual * newer + usual
            if self._unlike():
                self.judged, self.right, self.usual = self._new_judged, self._new_right, self._new_usual

    def _unlike(self) -> bool:
        rate = self.right / self.judged
        variance = self._new_judged * rate * (1 - rate) + 0.5  # of half a guess, at least: a few say little
        return (self._new_right - self._new_judged * rate) ** 2 > UNLIKE**2 * variance


class _Own:
    """A sequence's guesses of one source."""

    __slots__ = ("_tally", "lift")

    def __init__(self) -> None:
        self._tally = _Tally()
        self.lift = 1.0

    def observe(self, one: Judged, source: _Source) -> None:
        tally = self._tally
        tally.add(
            one.judged, one.right, source.usual(one.offer, one.judged), kept=max(0.0, 1 - one.judged / OF_SEQUENCE)
        )
        usual = _bounded(tally.usual / tally.judged)
        seen = _bounded((tally.right + PECULIAR * usual) / (tally.judged + PECULIAR))
        self.lift = min(max(_odds(seen) / _odds(usual), 1 / MOST_LIFT), MOST_LIFT)


class _Source:
    """Positions are grouped by doubling (1, 2-3, 4-7, ...), as few guesses get far."""

    def __init__(self, most: int) -> None:
        self._group = [(position + 1).bit_length() - 1 for position in range(most)]
        self._tallies = [_Tally() for _ in range(self._group[-1] + 1)]
        self._offset, self._slope = 0.0, 1.0
        self._update()

    @property
    def well_known(self) -> bool:
        return self._tallies[0].judged >= WELL_KNOWN

    @property
    def reach(self) -> int:
        return len(self._odds)

    def odds(self, offer: Offer) -> list[float]:
        """Of each guess to be right, given that those before it are."""
        known = self._odds if offer.most >= len(self._odds) else self._odds[: offer.most]
        if not offer.confidences:
            return known
        said = [self._calibrated(confidence) for confidence in offer.confidences[: len(known)]]
        # Where its confidences end, the last of them goes on.
        return said + said[-1:] * (len(known) - len(said))

    def usual(self, offer: Offer, judged: int) -> float:
        """How many of the first guesses are right in sequences at large, where they are judged."""
        if not offer.confidences:
            return self._sums[min(judged, len(self._sums) - 1)]
        return sum(odds / (1 + odds) for odds in self.odds(offer)[:judged])

    def observe(self, verified: list[Judged]) -> None:
        judged, right = [0] * len(self._tallies), [0] * len(self._tallies)
        for one in verified:
            for group in self._group[: one.judged]:
                judged[group] += 1
            for group in self._group[: one.right]:
                right[group] += 1
            if one.offer.confidences:
                self._calibrate(one)
        # Also of positions that no guess got to: what is not seen again is forgotten.
        kept = max(0.5, 1 - len(verified) / OF_SOURCE)
        for tally, new, true in zip(self._tallies, judged, right, strict=True):
            tally.add(new, true, kept=kept)
        self._update()

    def _calibrated(self, confidence: float) -> float:
        return math.exp(self._offset + self._slope * math.log(_odds(_bounded(confidence))))

    def _calibrate(self, one: Judged) -> None:
        for position, said in enumerate(one.offer.confidences[: one.judged]):
            odds = self._calibrated(said)
            error = (position < one.right) - odds / (1 + odds)
            self._offset += STEP * error
            slope = self._slope + STEP * error * math.log(_odds(_bounded(said)))
            self._slope = min(max(slope, 0.1), 3.0)

    def _update(self) -> None:
        """Make rates of what was counted: a group of which little is known is like the one before it."""
        rate, rates = UNKNOWN, list[float]()
        for tally in self._tallies:
            prior = ALIKE if rates else DOUBT
            rate = _bounded((tally.right + prior * rate) / (tally.judged + prior))
            rates.append(rate)
            if tally.judged < TRUSTED:
                break
        by_position = [rates[group] for group in self._group if group < len(rates)]
        self._odds = [_odds(rate) for rate in by_position]
        self._sums = [0.0, *accumulate(by_position)]


def _odds(rate: float) -> float:
    return rate / (1 - rate)


def _bounded(rate: float) -> float:
    return min(max(rate, LEAST_RATE), MOST_RATE)
