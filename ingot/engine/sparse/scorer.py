"""Who says how much each token of a prompt matters."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from ingot.engine.sequence import Sequence
from ingot.engine.specprefill.selection import Scores

Scoring = Generator[None, None, Scores]
"""Goes on by a bounded piece each time, and gives a score for each token in the end. Whoever closes it early leaves
nothing behind."""


class Scorer(Protocol):
    name: str

    def unread(self, sequence: Sequence) -> int:
        """Tokens of its prompt that would have to be read for it."""
        ...

    def able(self, sequence: Sequence) -> bool:
        """Whether such a prompt can be scored."""
        ...

    def score(self, sequence: Sequence) -> Scoring: ...

    def rest(self) -> None:
        """Nothing runs."""
        ...

    def check(self) -> None: ...
