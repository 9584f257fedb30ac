"""Guesses that cannot be wrong: what a sequence's guide leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence as Many

from ingot.engine.sequence import Sequence
from ingot.engine.speculation.proposal import Offer, Proposal

MOST = 64
"""Tokens that are looked ahead for. A longer span is proposed in pieces."""


class Forced:
    name = "forced"

    def __init__(self) -> None:
        self._found: dict[Sequence, tuple[int, ...]] = {}

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        return [self._offer(row) for row in rows]

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        spans = [self._found.pop(row, ())[:count] for row, count in zip(rows, counts, strict=True)]
        return [Proposal(span, self.name, (1.0,) * len(span)) for span in spans]

    def forget(self, sequence: Sequence) -> None:
        self._found.pop(sequence, None)

    def _offer(self, row: Sequence) -> Offer | None:
        span = () if row.guide is None else row.guide.forced(MOST)
        if not span:
            self._found.pop(row, None)
            return None
        self._found[row] = span
        return Offer(self.name, len(span), (1.0,) * len(span), free=True)
