"""A proposer for benchmarks: it knows the answers, and its draft tokens are wrong at a given rate."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Many

from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal

Prompt = tuple[int, ...]


class Synthetic:
    """`answers` by prompt. `rates` say how often a guess is right that follows right ones, by position: the last of
    them is that of all further positions. Guesses behind a wrong one are wrong."""

    name = "synthetic"

    def __init__(self, answers: Mapping[Prompt, Many[int]], rates: Many[float], most: int = 16, seed: int = 0) -> None:
        self.answers, self.rates, self.most = dict(answers), tuple(rates), most
        self._dice = random.Random(seed)
        self.judged = 0  # guesses up to the first wrong one: as many are judged where tokens are those it knows

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        """They are there already, so that what is measured is what verifying costs."""
        return [DraftOffer(self.name, self.most, free=True) if self._following(row) else None for row in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        return [
            Proposal(self._erring(self._following(row)[:count]), self.name)
            for row, count in zip(rows, counts, strict=True)
        ]

    def forget(self, sequence: TokenSequence) -> None:
        """Nothing is held for one."""

    @property
    def follows(self) -> Many[TokenSequence]:
        return ()

    def rest(self) -> None:
        pass

    def _following(self, row: TokenSequence) -> Many[int]:
        return self.answers.get(row.prompt, ())[row.produced :]

    def _erring(self, tokens: Many[int]) -> tuple[int, ...]:
        right = 0
        while right < len(tokens) and self._dice.random() < self.rates[min(right, len(self.rates) - 1)]:
            right += 1
        self.judged += min(right + 1, len(tokens))
        return (*tokens[:right], *(token ^ 1 for token in tokens[right:]))
