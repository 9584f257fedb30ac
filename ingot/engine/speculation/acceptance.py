"""How likely draft tokens are accepted, learned from those that were verified.

A rate says how often a draft token is accepted that follows accepted ones. It depends on the proposer, on the depth or
on the confidence that the proposer states, and most of all on the text: one sequence copies, its neighbour invents. So
each proposer has rates by depth (or a calibration of its confidences), and each sequence has odds of its own relative
to these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from itertools import accumulate
from typing import Final, NamedTuple

from ingot.engine.speculation.proposer import DraftOffer

FIRST_RATE, FIRST_WEIGHT = 0.6, 6.0
"""The assumed rate of a proposer's first draft token, and how many verified ones weigh as much as the assumption."""
DEEPER_WEIGHT: Final = 2.0
"""The same weight for deeper tokens, which are assumed to be like those before them."""
TRUSTED_COUNT: Final = 4.0
"""Verified tokens after which a group of depths is trusted. At most one group beyond the trusted ones is used."""
WELL_KNOWN_COUNT: Final = 16.0
"""Verified first tokens after which a proposer is known so well that a sequence can be seen to differ from it."""
SEQUENCE_WEIGHT: Final = 4.0
"""A sequence's verified tokens that weigh as much as the proposer's rate."""
REMEMBERED_OF_PROPOSER, REMEMBERED_OF_SEQUENCE = 64.0, 36.0
"""First tokens that are remembered of a proposer, and tokens of a sequence."""
MOST_LIFT: Final = 50.0
LEAST_RATE, MOST_RATE = 0.01, 0.99
CALIBRATION_STEP: Final = 0.05


class JudgedDraft(NamedTuple):
    """Of the draft tokens of a sequence, the first `judged` were compared with the sampled ones; `accepted` matched."""

    key: Hashable
    offer: DraftOffer
    judged: int
    accepted: int


class AcceptanceRates:
    """Rates of at most `most` depths."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._proposers: dict[str, _RatesByDepth] = {}
        self._sequences: dict[Hashable, dict[str, _Tally]] = {}

    def reach(self, offer: DraftOffer) -> int:
        """How many of its tokens anything is known of."""
        return min(offer.most, len(self._rates(offer.source).odds))

    def survival(self, key: Hashable, offer: DraftOffer, least: float) -> list[float]:
        """How likely each token is accepted together with all before it: the first, and as many more as are at least so
        likely."""
        tally = self._sequences.get(key, {}).get(offer.source)
        lift = 1.0 if tally is None else tally.lift
        survival: list[float] = []
        survives = 1.0
        for odds in self._rates(offer.source).offer_odds(offer):
            own_odds = lift * odds
            survives *= own_odds / (1 + own_odds)
            if survives < least and survival:
                break
            survival.append(survives)
        return survival

    def observe(self, drafts: Iterable[JudgedDraft]) -> None:
        """All drafts of a round."""
        by_proposer: dict[str, list[JudgedDraft]] = {}
        for draft in drafts:
            if draft.judged:
                by_proposer.setdefault(draft.offer.source, []).append(draft)
        for name, verified in by_proposer.items():
            rates = self._rates(name)
            for draft in verified if rates.well_known else ():
                tally = self._sequences.setdefault(draft.key, {}).setdefault(name, _Tally())
                expected = rates.expected(draft.offer, draft.judged)
                tally.add(draft.judged, draft.accepted, expected, decay=1 - draft.judged / REMEMBERED_OF_SEQUENCE)
                tally.update_lift()
            rates.observe(verified)

    def forget(self, key: Hashable) -> None:
        self._sequences.pop(key, None)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences of which anything is known."""
        return self._sequences

    def _rates(self, proposer: str) -> _RatesByDepth:
        if proposer not in self._proposers:
            self._proposers[proposer] = _RatesByDepth(self._most)
        return self._proposers[proposer]


class _Tally:
    """How many draft tokens were judged and accepted, and how many the proposer's rates would have expected. Older ones
    count less."""

    __slots__ = ("_expected", "accepted", "judged", "lift")

    def __init__(self) -> None:
        self.judged = self.accepted = self._expected = 0.0
        self.lift = 1.0
        """How many times the proposer's odds these have."""

    def add(self, judged: int, accepted: int, expected: float = 0.0, *, decay: float) -> None:
        """`decay`: how much of what was counted remains."""
        self.judged = self.judged * decay + judged
        self.accepted = self.accepted * decay + accepted
        self._expected = self._expected * decay + expected

    def update_lift(self) -> None:
        expected = _clamp_rate(self._expected / self.judged)
        seen = _clamp_rate((self.accepted + SEQUENCE_WEIGHT * expected) / (self.judged + SEQUENCE_WEIGHT))
        self.lift = min(max(_odds(seen) / _odds(expected), 1 / MOST_LIFT), MOST_LIFT)


class _RatesByDepth:
    """A proposer's rates. Depths are grouped by doubling (1, 2-3, 4-7, ...), as few drafts get far."""

    def __init__(self, most: int) -> None:
        self._group = [(depth + 1).bit_length() - 1 for depth in range(most)]
        self._tallies = [_Tally() for _ in range(self._group[-1] + 1)]
        self._offset, self._slope = 0.0, 1.0  # from stated to true confidences, in log odds
        self._update()

    @property
    def well_known(self) -> bool:
        return self._tallies[0].judged >= WELL_KNOWN_COUNT

    def offer_odds(self, offer: DraftOffer) -> list[float]:
        """Of each token to be accepted, given that those before it are."""
        odds = self.odds if offer.most >= len(self.odds) else self.odds[: offer.most]
        if not offer.confidences:
            return odds
        calibrated = [self._calibrated(confidence) for confidence in offer.confidences[: len(odds)]]
        return calibrated + calibrated[-1:] * (len(odds) - len(calibrated))  # where they end, the last one goes on

    def expected(self, offer: DraftOffer, judged: int) -> float:
        """How many of the first `judged` tokens are accepted in sequences at large, where they are judged."""
        if not offer.confidences:
            return self._sums[min(judged, len(self._sums) - 1)]
        return sum(odds / (1 + odds) for odds in self.offer_odds(offer)[:judged])

    def observe(self, verified: list[JudgedDraft]) -> None:
        judged, accepted = [0] * len(self._tallies), [0] * len(self._tallies)
        for draft in verified:
            for group in self._group[: draft.judged]:
                judged[group] += 1
            for group in self._group[: draft.accepted]:
                accepted[group] += 1
            for depth, confidence in enumerate(draft.offer.confidences[: draft.judged]):
                self._calibrate(confidence, accepted=depth < draft.accepted)
        # Also at depths that no draft got to: what is not seen again is forgotten.
        decay = max(0.5, 1 - len(verified) / REMEMBERED_OF_PROPOSER)
        for tally, new, right in zip(self._tallies, judged, accepted, strict=True):
            tally.add(new, right, decay=decay)
        self._update()

    def _calibrated(self, confidence: float) -> float:
        return math.exp(self._offset + self._slope * math.log(_odds(_clamp_rate(confidence))))

    def _calibrate(self, confidence: float, *, accepted: bool) -> None:
        """A step of logistic regression."""
        odds = self._calibrated(confidence)
        step = CALIBRATION_STEP * (accepted - odds / (1 + odds))
        self._offset += step
        self._slope = min(max(self._slope + step * math.log(_odds(_clamp_rate(confidence))), 0.1), 3.0)

    def _update(self) -> None:
        """Make rates of the counts: a group of which little is known is like the one before it."""
        rate, rates = FIRST_RATE, list[float]()
        for tally in self._tallies:
            weight = DEEPER_WEIGHT if rates else FIRST_WEIGHT
            rate = _clamp_rate((tally.accepted + weight * rate) / (tally.judged + weight))
            rates.append(rate)
            if tally.judged < TRUSTED_COUNT:
                break
        by_depth = [rates[group] for group in self._group if group < len(rates)]
        self.odds = [_odds(rate) for rate in by_depth]
        self._sums = [0.0, *accumulate(by_depth)]


def _odds(rate: float) -> float:
    return rate / (1 - rate)


def _clamp_rate(rate: float) -> float:
    return min(max(rate, LEAST_RATE), MOST_RATE)
