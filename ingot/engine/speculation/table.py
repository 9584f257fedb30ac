"""The rows of a coming round, who would guess for each, and how likely that is right."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ingot.engine.speculation.acceptance import Acceptance
from ingot.engine.speculation.proposer import Offer
from ingot.engine.speculation.slots import Choice
from ingot.engine.speculation.step_costs import RoundCosts

WORTH_A_LOOK = 0.7
"""A guess that is needed more rarely than this part of what it costs is none that could pay."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A decoding row of the coming round."""

    key: Hashable  # the sequence
    offers: tuple[Offer, ...]  # by preference; empty: nothing can be guessed for it


class Table:
    """Takes for each row the offer that is worth most, the first of those that are worth the same."""

    def __init__(
        self, rows: Sequence[Asked], acceptance: Acceptance, costs: RoundCosts, purse: float, prompt_tokens: int
    ) -> None:
        self._rows, self._acceptance, self._costs, self._purse = rows, acceptance, costs, purse
        self._seconds = prompt_tokens * costs.token
        plainly = len(rows) / costs.plain(len(rows))
        # In tokens that would come plainly in the same time.
        self._price, self._price_of_step = costs.token * plainly, costs.step * plainly / len(rows)
        self.offers = [self._preferred(row) for row in rows]
        self._lay()

    @property
    def keys(self) -> list[Hashable]:
        return [row.key for row in self._rows]

    @property
    def wait(self) -> float:
        """Seconds that the first plain round behind others takes longer."""
        return self._costs.wait

    def turn(self) -> bool:
        """Take for each row the offer behind the one that it has; whether that changes anything."""
        turned = [_after(row.offers, offer) for row, offer in zip(self._rows, self.offers, strict=True)]
        if turned == self.offers:
            return False
        self.offers = turned
        self._lay()
        return True

    def _lay(self) -> None:
        self.reach = [0 if offer is None else self._acceptance.reach(offer) for offer in self.offers]
        """How many guesses of each row anything is known of."""
        survival = [
            () if offer is None else self._survival(row.key, offer)
            for row, offer in zip(self._rows, self.offers, strict=True)
        ]
        computed = [offer is not None and not offer.free for offer in self.offers]
        self.choice = Choice(survival, computed, self._costs, self._purse, self._seconds)

    def _survival(self, key: Hashable, offer: Offer) -> Sequence[float]:
        """How likely each guess and all before it are right: the first, and as many more as could be worth it."""
        return self._acceptance.survival(key, offer, self._price * WORTH_A_LOOK)

    def _preferred(self, row: Asked) -> Offer | None:
        if len(row.offers) < 2:
            return row.offers[0] if row.offers else None
        return max(row.offers, key=lambda offer: self._worth(row, offer))  # of equals, the first

    def _worth(self, row: Asked, offer: Offer) -> float:
        """Tokens that it saves, less those that would come plainly in the time that it takes."""
        made = 0.0 if offer.free else self._price_of_step
        return sum(max(0.0, one - self._price - made) for one in self._survival(row.key, offer))


def _after(offers: tuple[Offer, ...], offer: Offer | None) -> Offer | None:
    return offer if offer is None else offers[(offers.index(offer) + 1) % len(offers)]
