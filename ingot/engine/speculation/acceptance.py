"""How likely draft tokens are accepted, learned from those that were verified, and how many to verify for each row.

A rate says how often a draft token is accepted that follows accepted ones. It depends on the proposer, on the
position or on the confidence that the proposer states, and most of all on the text: one sequence copies, its
neighbour invents. So each source has rates by position (or a calibration of its confidences), and each sequence
has odds of its own relative to these. Verified are the tokens most likely to be accepted, as many as make tokens
come fastest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise, repeat
from operator import add, neg, truediv
from typing import NamedTuple

from ingot.engine.speculation.proposer import DraftOffer
from ingot.engine.speculation.step_costs import RoundCosts

UNKNOWN_RATE, UNKNOWN_WEIGHT = 0.6, 6.0
"""How often the first guess of a source is thought to be right, and how many have to be verified to weigh as much."""
FURTHER_WEIGHT = 2.0
"""The same for guesses of further positions, which are thought to be like those before them."""
TRUSTED_COUNT = 4.0
"""Verified guesses that say something of a group of positions. No more than one group beyond these is looked at."""
WELL_KNOWN_COUNT = 16.0
"""Verified first guesses by which a source is known so well that a sequence can be told to be different."""
SEQUENCE_WEIGHT = 4.0
"""So many of a sequence's have to be to weigh as much as the source's rate."""
REMEMBERED_OF_SOURCE, REMEMBERED_OF_SEQUENCE = 64.0, 36.0
"""First guesses that are remembered of a source, and guesses of a sequence."""
NEWEST_COUNT = 8.0
"""So many guesses are held against all that are remembered."""
UNLIKE_DEVIATIONS = 2.5
"""How many standard deviations they are apart where what is older says nothing any more."""
MOST_LIFT = 50.0
LEAST_RATE, MOST_RATE = 0.01, 0.99
CALIBRATION_STEP = 0.05
"""How fast a calibration follows."""


class JudgedDraft(NamedTuple):
    """Of the guesses for a sequence, the first `judged` were compared with what came; `right` of them were right."""

    key: Hashable
    offer: DraftOffer
    judged: int
    right: int


class AcceptanceRates:
    """Rates of at most `most` positions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[str, _SourceRates] = {}
        self._own: dict[Hashable, dict[str, _SequenceRates]] = {}

    def reach(self, offer: DraftOffer) -> int:
        """How many of its guesses anything is known of."""
        return min(offer.most, self._source(offer.source).reach)

    def survival(self, key: Hashable, offer: DraftOffer, least: float) -> list[float]:
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

    def observe(self, round: Iterable[JudgedDraft]) -> None:
        by_source: dict[str, list[JudgedDraft]] = {}
        for judged in round:
            if judged.judged:
                by_source.setdefault(judged.offer.source, []).append(judged)
        for name, verified in by_source.items():
            source = self._source(name)
            for one in verified if source.well_known else ():
                own = self._own.setdefault(one.key, {}).setdefault(name, _SequenceRates())
                own.observe(one, source)
            source.observe(verified)

    def forget(self, key: Hashable) -> None:
        self._own.pop(key, None)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences of which anything is known."""
        return self._own

    def _source(self, name: str) -> _SourceRates:
        if name not in self._sources:
            self._sources[name] = _SourceRates(self._most)
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
            newer = max(0.0, 1 - judged / NEWEST_COUNT)
            self._new_judged = self._new_judged * newer + judged
            self._new_right = self._new_right * newer + right
            self._new_usual = self._new_usual * newer + usual
            if self._unlike():
                self.judged, self.right, self.usual = self._new_judged, self._new_right, self._new_usual

    def _unlike(self) -> bool:
        rate = self.right / self.judged
        variance = self._new_judged * rate * (1 - rate) + 0.5  # of half a guess, at least: a few say little
        return (self._new_right - self._new_judged * rate) ** 2 > UNLIKE_DEVIATIONS**2 * variance


class _SequenceRates:
    """A sequence's guesses of one source."""

    __slots__ = ("_tally", "lift")

    def __init__(self) -> None:
        self._tally = _Tally()
        self.lift = 1.0

    def observe(self, one: JudgedDraft, source: _SourceRates) -> None:
        tally = self._tally
        tally.add(
            one.judged,
            one.right,
            source.usual(one.offer, one.judged),
            kept=max(0.0, 1 - one.judged / REMEMBERED_OF_SEQUENCE),
        )
        usual = _clamp_rate(tally.usual / tally.judged)
        seen = _clamp_rate((tally.right + SEQUENCE_WEIGHT * usual) / (tally.judged + SEQUENCE_WEIGHT))
        self.lift = min(max(_odds(seen) / _odds(usual), 1 / MOST_LIFT), MOST_LIFT)


class _SourceRates:
    """Positions are grouped by doubling (1, 2-3, 4-7, ...), as few guesses get far."""

    def __init__(self, most: int) -> None:
        self._group = [(position + 1).bit_length() - 1 for position in range(most)]
        self._tallies = [_Tally() for _ in range(self._group[-1] + 1)]
        self._offset, self._slope = 0.0, 1.0
        self._update()

    @property
    def well_known(self) -> bool:
        return self._tallies[0].judged >= WELL_KNOWN_COUNT

    @property
    def reach(self) -> int:
        return len(self._odds)

    def odds(self, offer: DraftOffer) -> list[float]:
        """Of each guess to be right, given that those before it are."""
        known = self._odds if offer.most >= len(self._odds) else self._odds[: offer.most]
        if not offer.confidences:
            return known
        said = [self._calibrated(confidence) for confidence in offer.confidences[: len(known)]]
        # Where its confidences end, the last of them goes on.
        return said + said[-1:] * (len(known) - len(said))

    def usual(self, offer: DraftOffer, judged: int) -> float:
        """How many of the first guesses are right in sequences at large, where they are judged."""
        if not offer.confidences:
            return self._sums[min(judged, len(self._sums) - 1)]
        return sum(odds / (1 + odds) for odds in self.odds(offer)[:judged])

    def observe(self, verified: list[JudgedDraft]) -> None:
        judged, right = [0] * len(self._tallies), [0] * len(self._tallies)
        for one in verified:
            for group in self._group[: one.judged]:
                judged[group] += 1
            for group in self._group[: one.right]:
                right[group] += 1
            if one.offer.confidences:
                self._calibrate(one)
        # Also of positions that no guess got to: what is not seen again is forgotten.
        kept = max(0.5, 1 - len(verified) / REMEMBERED_OF_SOURCE)
        for tally, new, true in zip(self._tallies, judged, right, strict=True):
            tally.add(new, true, kept=kept)
        self._update()

    def _calibrated(self, confidence: float) -> float:
        return math.exp(self._offset + self._slope * math.log(_odds(_clamp_rate(confidence))))

    def _calibrate(self, one: JudgedDraft) -> None:
        for position, said in enumerate(one.offer.confidences[: one.judged]):
            odds = self._calibrated(said)
            error = (position < one.right) - odds / (1 + odds)
            self._offset += CALIBRATION_STEP * error
            slope = self._slope + CALIBRATION_STEP * error * math.log(_odds(_clamp_rate(said)))
            self._slope = min(max(slope, 0.1), 3.0)

    def _update(self) -> None:
        """Make rates of what was counted: a group of which little is known is like the one before it."""
        rate, rates = UNKNOWN_RATE, list[float]()
        for tally in self._tallies:
            prior = FURTHER_WEIGHT if rates else UNKNOWN_WEIGHT
            rate = _clamp_rate((tally.right + prior * rate) / (tally.judged + prior))
            rates.append(rate)
            if tally.judged < TRUSTED_COUNT:
                break
        by_position = [rates[group] for group in self._group if group < len(rates)]
        self._odds = [_odds(rate) for rate in by_position]
        self._sums = [0.0, *accumulate(by_position)]


def _odds(rate: float) -> float:
    return rate / (1 - rate)


def _clamp_rate(rate: float) -> float:
    return min(max(rate, LEAST_RATE), MOST_RATE)


LONGEST_ROUND = 3.0
"""No round takes longer than a plain one by more than so many of these, whatever it promises."""

MayRun = Callable[[int, float, float], bool]
"""Whether a round may be run, by its guesses, seconds and tokens."""


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """So many guesses for each row, what they should give, and how long that takes."""

    counts: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def drafts(self) -> bool:
        return any(self.counts)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DraftLengthSearch:
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
        self._rows, self._exploration_budget = len(survival), purse
        self._plain = costs.plain(self._rows)

    def plain(self) -> DraftLengths:
        return DraftLengths((0,) * self._rows, self._rows, self._plain + self._seconds)

    @property
    def plain_lower_bound(self) -> float:
        """Tokens a second plainly, if that is as fast as it may well be."""
        return self._rows / (self._costs.plain_lower_bound(self._rows) + self._seconds)

    def exactly(self, counts: tuple[int, ...]) -> DraftLengths:
        guessed = sum(counts)
        if not guessed:
            return self.plain()
        tokens = self._rows + sum(sum(row[:count]) for row, count in zip(self._survival, counts, strict=True))
        depth = max(count * computed for count, computed in zip(counts, self._computed, strict=True))
        seconds = self._costs.guessing(self._rows, range(guessed, guessed + 1))[0] + depth * self._costs.step
        return DraftLengths(counts, tokens, seconds + self._seconds)

    def payable(self, slots: DraftLengths) -> bool:
        return self._payable_and_there(sum(slots.counts), slots.seconds, slots.tokens)

    def there(self, counts: tuple[int, ...]) -> bool:
        """Whether nothing has to be made for such a round, or may be."""
        return self._costs.makings.affords(self._rows, sum(counts))

    def best(self) -> DraftLengths | None:
        """The best way to guess at all; None: there is nothing to guess, or nothing that can be paid for."""
        return self._best(self._payable)

    def best_there(self) -> DraftLengths | None:
        """The same among rounds for which nothing has to be made, or for which it may be."""
        return self._best(self._payable_and_there)

    def _payable(self, guessed: int, seconds: float, tokens: float) -> bool:
        """Whether the purse can bear that all of it is wrong, but for half of what is expected of it."""
        if self._rows <= self._costs.widest < self._rows + guessed:
            return False
        longer, expected = (seconds - self._seconds) / self._plain - 1, tokens / self._rows - 1
        return 0 < self._exploration_budget >= longer - expected / 2 and longer <= LONGEST_ROUND

    def _payable_and_there(self, guessed: int, seconds: float, tokens: float) -> bool:
        return self._payable(guessed, seconds, tokens) and self._costs.makings.affords(self._rows, guessed)

    def _best(self, may: MayRun) -> DraftLengths | None:
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

    def _fastest(self, slots: list[float], seconds: list[float], more: float, may: MayRun) -> tuple[float, float]:
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
