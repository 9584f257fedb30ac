"""What proposers are, and what they hand over."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

from ingot.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence's known ones, in order."""

    tokens: tuple[int, ...]
    source: str  # the proposer's name
    confidences: tuple[float, ...] = ()  # how likely each is, given those before it; empty where nobody can say


@dataclass(frozen=True, slots=True)
class Offer:
    """What a proposer could guess for a sequence, before it is asked to."""

    source: str
    most: int  # tokens
    confidences: tuple[float, ...] = ()
    free: bool = False
    """To make the guess costs nothing (it is there already); else proposing takes time, and more of it for more
    tokens."""

    def behind(self, unread: int) -> Offer | None:
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

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        """What it could guess for each of them now; None: nothing."""
        ...

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        """At most so many tokens for each of them, which had an offer a moment ago. May give fewer, or none."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It ended, or was preempted: whatever is held for it goes. Called for sequences that it never saw, too."""
        ...

    @property
    def follows(self) -> Collection[Sequence]:
        """The sequences that something is held for."""
        ...

    def rest(self) -> None:
        """Nothing runs: give back memory that nobody needs. Raises AssertionError if something was lost."""
        ...
