"""Guesses that cannot be wrong: what a sequence's guide leaves no choice about."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

from ingot.engine.sequence import Sequence
from ingot.engine.speculation.proposer import Offer, Proposal

MOST = 64
"""Tokens that are looked ahead for. A longer span is proposed in pieces."""


class Forced:
    name = "forced"

    def __init__(self) -> None:
        self._found: dict[Sequence, tuple[int, tuple[int, ...]]] = {}  # how many tokens were known, and what follows

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        return [self._offer(row) for row in rows]

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        spans = [self._span(row)[:count] for row, count in zip(rows, counts, strict=True)]
        return [Proposal(span, self.name, (1.0,) * len(span)) for span in spans]

    def forget(self, sequence: Sequence) -> None:
        self._found.pop(sequence, None)

    @property
    def follows(self) -> Collection[Sequence]:
        return self._found.keys()

    def rest(self) -> None:
        pass

    def _offer(self, row: Sequence) -> Offer | None:
        span = self._span(row)
        return Offer(self.name, len(span), (1.0,) * len(span), free=True) if span else None

    def _span(self, row: Sequence) -> tuple[int, ...]:
        """What must follow the known tokens. It takes masks to say, so it is found out once."""
        if row.guide is None:
            return ()
        known, span = self._found.get(row, (-1, ()))
        if known != len(row.tokens):
            span = row.guide.forced(MOST)
            self._found[row] = len(row.tokens), span
        return span
