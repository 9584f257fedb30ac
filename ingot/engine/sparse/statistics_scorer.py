"""Statistics of tokens score: what is rare in a prompt and stands at its end, too, is what the end is about. No model
is run, and none is needed; it is what scoring by one has to beat."""

from __future__ import annotations

import numpy as np

from ingot.engine.sequence import Sequence
from ingot.engine.sparse.scorer import Scoring
from ingot.engine.specprefill.selection import Scores

TAIL = 64
"""Tokens at the end of a prompt that are looked for in the rest."""


class StatisticsScorer:
    name = "statistics"

    def unread(self, sequence: Sequence) -> int:
        return len(sequence.whole_prompt)

    def able(self, sequence: Sequence) -> bool:
        return True

    def score(self, sequence: Sequence) -> Scoring:
        return by_statistics(sequence.whole_prompt)
        yield  # there is but one piece

    def rest(self) -> None: ...

    def check(self) -> None: ...


def by_statistics(prompt: tuple[int, ...]) -> Scores:
    """How much rarer a token is that also stands at the end."""
    tokens = np.asarray(prompt)
    _, which, often = np.unique(tokens, return_inverse=True, return_counts=True)
    return np.where(np.isin(tokens, tokens[-TAIL:]), 1 / often[which], 0.0).astype(np.float32)
