"""What proposers are and what they hand over; and the one that cannot be wrong, which proposes the tokens that a
sequence's grammar leaves no choice about.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx

from ingot.engine.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence's known ones, in order."""

    tokens: tuple[int, ...]
    source: str  # the proposer's name
    confidences: tuple[float, ...] = ()  # how likely each is, given those before it; empty where nobody can say


@dataclass(frozen=True, slots=True)
class DraftOffer:
    """What a proposer could guess for a sequence, before it is asked to."""

    source: str
    most: int  # tokens
    confidences: tuple[float, ...] = ()
    free: bool = False
    """To make the guess costs nothing (it is there already); else proposing takes time, and more of it for more
    tokens."""

    def behind(self, unread: int) -> DraftOffer | None:
        """What it is worth when so many tokens are drawn that its proposer does not know yet. A guess that is there
        already has named them, and leads further only if they are what it named."""
        if not unread or not self.free:
            return self
        if self.most <= unread:
            return None
        said = self.confidences + self.confidences[-1:] * (unread + 1 - len(self.confidences))
        left = (math.prod(said[: unread + 1]), *said[unread + 1 :]) if said else ()
        return replace(self, most=self.most - unread, confidences=left)


class Proposer(Protocol):
    """Guesses for sequences whose tokens are all known. Only the engine thread calls it.

    Guesses need not be right, nor even sensible: what they cost is time, never a wrong token.
    """

    @property
    def name(self) -> str: ...

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        """What it could guess for each of them now; None: nothing."""
        ...

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        """At most so many tokens for each of them, which had an offer a moment ago. May give fewer, or none."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """It ended, or was preempted: whatever is held for it goes. Called for sequences that it never saw, too."""
        ...

    @property
    def follows(self) -> Collection[TokenSequence]:
        """The sequences that something is held for."""
        ...

    def rest(self) -> None:
        """Nothing runs: give back memory that nobody needs. Raises AssertionError if something was lost."""
        ...


MOST_FORCED_TOKENS = 64
"""Tokens that are looked ahead for. A longer span is proposed in pieces."""


class ForcedTokensProposer:
    name = "forced"

    def __init__(self) -> None:
        self._found: dict[
            TokenSequence, tuple[int, tuple[int, ...]]
        ] = {}  # how many tokens were known, and what follows

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return [self._offer(row) for row in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        spans = [self._span(row)[:count] for row, count in zip(rows, counts, strict=True)]
        return [Proposal(span, self.name, (1.0,) * len(span)) for span in spans]

    def forget(self, sequence: TokenSequence) -> None:
        self._found.pop(sequence, None)

    @property
    def follows(self) -> Collection[TokenSequence]:
        return self._found.keys()

    def rest(self) -> None:
        pass

    def _offer(self, row: TokenSequence) -> DraftOffer | None:
        span = self._span(row)
        return DraftOffer(self.name, len(span), (1.0,) * len(span), free=True) if span else None

    def _span(self, row: TokenSequence) -> tuple[int, ...]:
        """What must follow the known tokens. It takes masks to say, so it is found out once."""
        if row.guide is None:
            return ()
        known, span = self._found.get(row, (-1, ()))
        if known != len(row.tokens):
            span = row.guide.forced(MOST_FORCED_TOKENS)
            self._found[row] = len(row.tokens), span
        return span


def transpose_depths(by_depth: Many[mx.array], rows: int) -> list[list[float]]:
    """What each row was given, depth by depth, where the first rows go as deep as the others or deeper."""
    found: list[list[float]] = [[] for _ in range(rows)]
    for given in by_depth:
        values: list[float] = given.tolist()  # type: ignore[assignment]
        for number, value in enumerate(values):
            found[number].append(value)
    return found
