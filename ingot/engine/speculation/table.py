"""The rows of a coming round, who would guess for each, and how likely that is right."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.engine.speculation.acceptance import Acceptance
from ingot.engine.speculation.proposal import Offer
from ingot.engine.speculation.round_costs import Floats, RoundCosts
from ingot.engine.speculation.slots import Choice


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoding row of the coming round."""

    key: Hashable  # the sequence
    offers: tuple[Offer, ...]  # by preference; empty: nothing can be guessed for it


class Table:
    """Takes for each row the offer that is worth most, the first of those that are worth the same."""

    def __init__(self, rows: Sequence[Asked], acceptance: Acceptance, costs: RoundCosts, prompt_tokens: int) -> None:
        self._rows, self._acceptance, self._costs = rows, acceptance, costs
        self._seconds = prompt_tokens * costs.token
        self.offers = [self._preferred(row) for row in rows]
        self._lay()

    @property
    def keys(self) -> list[Hashable]:
        return [row.key for row in self._rows]

    @property
    def change(self) -> float:
        """Seconds that it takes to begin with guessing, or to end it."""
        return self._costs.change

    def turn(self) -> bool:
        """Take for each row the offer behind the one that it has; whether that changes anything."""
        turned = [_after(row.offers, offer) for row, offer in zip(self._rows, self.offers, strict=True)]
        if turned == self.offers:
            return False
        self.offers = turned
        self._lay()
        return True

    def _lay(self) -> None:
        odds = [None if offer is None else self._acceptance.odds(offer) for offer in self.offers]
        self.reach = [0 if one is None else len(one) for one in odds]
        """How many guesses of each row anything is known of."""
        laid = np.zeros((len(odds), max(self.reach)))
        for place, (row, offer, one) in enumerate(zip(self._rows, self.offers, odds, strict=True)):
            if offer is not None and one is not None:
                laid[place, : len(one)] = one * self._acceptance.lift(row.key, offer.source)
        computed = np.array([offer is not None and not offer.free for offer in self.offers])
        self.choice = Choice((laid / (1 + laid)).cumprod(axis=1), computed, self._costs, self._seconds)

    def _preferred(self, row: Asked) -> Offer | None:
        if len(row.offers) < 2:
            return row.offers[0] if row.offers else None
        return max(row.offers, key=lambda offer: self._worth(row, offer))  # of equals, the first

    def _worth(self, row: Asked, offer: Offer) -> float:
        """Tokens that it saves, less those that would come plainly in the time that it takes."""
        odds = self._acceptance.odds(offer) * self._acceptance.lift(row.key, offer.source)
        survival: Floats = (odds / (1 + odds)).cumprod()
        made = 0.0 if offer.free else self._costs.step / len(self._rows)
        price = (self._costs.token + made) * len(self._rows) / self._costs.plain(len(self._rows))
        return float((survival - price).clip(0.0).sum())


def _after(offers: tuple[Offer, ...], offer: Offer | None) -> Offer | None:
    return offer if offer is None else offers[(offers.index(offer) + 1) % len(offers)]
