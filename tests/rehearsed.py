"""A proposer that knows answers beforehand and errs as often as it is told to: for tests of what becomes of guesses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Many

from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal


class Rehearsed:
    """`answers` by prompt and index. Guesses are of up to `most` tokens, each right at the rate `right`."""

    name = "rehearsed"

    def __init__(
        self,
        answers: Mapping[tuple[tuple[int, ...], int], Many[int]],
        *,
        right: float = 0.8,
        most: int = 6,
        seed: int = 0,
    ) -> None:
        self.answers, self.right, self.most = dict(answers), right, most
        self._rng = random.Random(seed)
        self.forgotten: list[TokenSequence] = []

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return [DraftOffer(self.name, self._rng.randrange(self.most + 1)) for _ in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        return [Proposal(self._guess(row, count), self.name) for row, count in zip(rows, counts, strict=True)]

    def _guess(self, row: TokenSequence, count: int) -> tuple[int, ...]:
        assert row.known, "guesses are asked for a sequence that does not know its own tokens"
        following = self.answers.get((row.prompt, row.index), ())[row.produced : row.produced + count]
        return tuple(token if self._rng.random() < self.right else self._rng.randrange(95) for token in following)

    def forget(self, sequence: TokenSequence) -> None:
        self.forgotten.append(sequence)

    @property
    def follows(self) -> Many[TokenSequence]:
        return ()

    def rest(self) -> None:
        pass
