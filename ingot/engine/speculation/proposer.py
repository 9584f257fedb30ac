"""What a proposer is and what it hands over; and `ForcedTokensProposer`, which cannot be wrong: it proposes the tokens
that a sequence's grammar leaves no choice about.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx

from ingot.engine.forward_pass import DraftTokens
from ingot.engine.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence's known ones, in order."""

    tokens: DraftTokens
    source: str  # the proposer's name
    confidences: tuple[float, ...] = ()  # how likely each is, given those before it; empty where that is not known


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """What a proposer could propose for a sequence, before it is asked to."""

    source: str
    most: int  # tokens
    confidences: tuple[float, ...] = ()
    free: bool = False
    """The draft tokens are there already; else proposing takes time, and more of it for more tokens."""

    def behind(self, unread: int) -> DraftOffer | None:
        """What it is worth when so many tokens are sampled that its proposer does not know yet. Draft tokens that are
        there already have named them, and lead further only if they were right."""
        if not unread or not self.free:
            return self
        if self.most <= unread:
            return None
        stated = self.confidences + self.confidences[-1:] * (unread + 1 - len(self.confidences))
        left = (math.prod(stated[: unread + 1]), *stated[unread + 1 :]) if stated else ()
        return replace(self, most=self.most - unread, confidences=left)


class Proposer(Protocol):
    """Proposes draft tokens for sequences whose tokens are all known. Only the engine thread calls it.

    They need not be right, nor even sensible: a wrong one costs time, never a wrong token.
    """

    @property
    def name(self) -> str: ...

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        """What it could propose for each of them now; None: nothing."""
        ...

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        """At most so many tokens for each of them, which had an offer a moment ago. May give fewer, or none."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """It ended, or was preempted: drop its state. Also called for sequences that it never saw."""
        ...

    @property
    def follows(self) -> Collection[TokenSequence]:
        """The sequences that it has state of."""
        ...

    def rest(self) -> None:
        """Nothing runs: free unused memory. Raises AssertionError if something was lost."""
        ...


MOST_FORCED_TOKENS = 64
"""A longer span is proposed in pieces."""


class ForcedTokensProposer:
    name = "forced"

    def __init__(self) -> None:
        self._spans: dict[TokenSequence, tuple[int, tuple[int, ...]]] = {}  # known tokens, and what must follow them

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return [self._offer(row) for row in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        spans = [self._span(row)[:count] for row, count in zip(rows, counts, strict=True)]
        return [Proposal(span, self.name, (1.0,) * len(span)) for span in spans]

    def forget(self, sequence: TokenSequence) -> None:
        self._spans.pop(sequence, None)

    @property
    def follows(self) -> Collection[TokenSequence]:
        return self._spans.keys()

    def rest(self) -> None:
        pass

    def _offer(self, row: TokenSequence) -> DraftOffer | None:
        span = self._span(row)
        return DraftOffer(self.name, len(span), (1.0,) * len(span), free=True) if span else None

    def _span(self, row: TokenSequence) -> tuple[int, ...]:
        """What must follow the known tokens. That takes token masks to compute, so it is done once."""
        if row.matcher is None:
            return ()
        known, span = self._spans.get(row, (-1, ()))
        if known != len(row.tokens):
            span = row.matcher.forced(MOST_FORCED_TOKENS)
            self._spans[row] = len(row.tokens), span
        return span


def transpose_depths(by_depth: Many[mx.array], rows: int) -> list[list[float]]:
    """Each row's values, where the first rows go as deep as the others or deeper."""
    by_row: list[list[float]] = [[] for _ in range(rows)]
    for values in by_depth:
        own: list[float] = values.tolist()  # type: ignore[assignment]
        for number, value in enumerate(own):
            by_row[number].append(value)
    return by_row
