"""A sequence as it will be if its next tokens are what was guessed: what a draw there needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from ingot.engine.request import Sampling
from ingot.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Ahead:
    sequence: Sequence
    guessed: tuple[int, ...] = ()

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling

    @property
    def seed(self) -> int:
        return self.sequence.seed

    @property
    def sampled(self) -> int:
        return self.sequence.sampled + len(self.guessed)

    @property
    def banned(self) -> Many[int]:
        return self.sequence.banned_at(self.sampled)


def places(sequence: Sequence, guess: tuple[int, ...]) -> list[Ahead]:
    """Where a token is drawn to verify a guess: now, and behind each guessed token."""
    return [Ahead(sequence, guess[:count]) for count in range(len(guess) + 1)]


def agreement(guess: Many[int], drawn: Many[int]) -> int:
    """How many of the guessed tokens were drawn. The draw behind them counts as well: it is the sequence's own."""
    return next((at for at, (mine, own) in enumerate(zip(guess, drawn, strict=False)) if mine != own), len(guess))
