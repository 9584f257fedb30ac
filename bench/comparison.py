"""Rounds of the same load on two servers, summarised: medians, and their ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ingot.cli.bench import LoadLevel


@dataclass(frozen=True, slots=True)
class Figures:
    """One round's, or the medians of several. Times are seconds; the times are medians over requests."""

    tokens_per_second: float
    ttft: float
    seconds_per_token: float  # after the first one

    @classmethod
    def of(cls, level: LoadLevel) -> Figures:
        assert level.ttft is not None and level.seconds_per_token is not None
        return cls(level.output_tokens_per_second, level.ttft.p50, level.seconds_per_token.p50)

    def over(self, other: Figures) -> Figures:
        return Figures(*(mine / theirs for mine, theirs in zip(self._all(), other._all(), strict=True)))

    def _all(self) -> list[float]:
        return [self.tokens_per_second, self.ttft, self.seconds_per_token]

    @classmethod
    def combined(cls, rounds: Sequence[Figures], choose: Any) -> Figures:
        return cls(*(choose(values) for values in zip(*(each._all() for each in rounds), strict=True)))


NAMES = [each.name for each in fields(Figures)]


def middle(rounds: Sequence[Figures]) -> Figures:
    return Figures.combined(rounds, statistics.median)


@dataclass
class Duel:
    """Two servers at one number of streams. `ours[i]` and `theirs[i]` were measured one right after the other."""

    streams: int
    ours: list[Figures] = field(default_factory=list)
    theirs: list[Figures] = field(default_factory=list)

    @property
    def ratio(self) -> Figures:
        """Of the medians. Above 1 is ahead for throughput, below 1 for times."""
        return middle(self.ours).over(middle(self.theirs))

    @property
    def spread(self) -> tuple[Figures, Figures]:
        """The least and the greatest ratio that a single round gave."""
        each = [mine.over(other) for mine, other in zip(self.ours, self.theirs, strict=True)]
        return Figures.combined(each, min), Figures.combined(each, max)

    @property
    def ahead(self) -> bool:
        return self.ratio.tokens_per_second > 1 > self.ratio.ttft


def unequal(levels: Sequence[LoadLevel], output_tokens: int) -> str | None:
    """Why these levels, of the same prompts on different servers, cannot be compared; None when they can."""
    for level in levels:
        if level.errors:
            return f"{level.failed} of {level.requests} requests failed: {'; '.join(level.errors)}"
        if level.output_tokens != level.requests * output_tokens:
            return f"answers have {level.output_tokens / level.requests:.1f} tokens instead of {output_tokens}"
    if len({level.prompt_tokens for level in levels}) > 1:
        return f"prompts were counted differently: {[level.prompt_tokens for level in levels]} tokens"
    return None
