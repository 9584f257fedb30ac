"""Records on paper, for tests of the index that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner

TOKEN, CHECKPOINT = 10, 100
"""Bytes."""
APPEND = ResumeNeeds()
WINDOW = ResumeNeeds(windows=((0, 4),))
HYBRID = ResumeNeeds(checkpoint=True)
BOTH = ResumeNeeds(checkpoint=True, windows=((0, 4),))
ANYBODY = CacheOwner()


@dataclass(frozen=True)
class Paper:
    """Ten bytes a token, a hundred for a checkpoint; layer 0 keeps tokens from `first` on."""

    begin: int
    end: int
    first: int
    checkpoint: tuple[()] | None
    halved: bool = False  # five bytes a token

    @property
    def nbytes(self) -> int:
        tokens = TOKEN * (self.end - self.begin) // (2 if self.halved else 1)
        return tokens + (CHECKPOINT if self.checkpoint is not None else 0)

    def split(self, at: int) -> tuple[Paper, Paper]:
        if self.first < self.begin:
            return Paper(self.begin, at, at, None), replace(self, begin=at)
        return Paper(self.begin, at, min(self.first, at), None), replace(self, begin=at, first=max(at, self.first))

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint is not None

    codec = "raw"
    parts = ()

    @property
    def idle_bytes(self) -> int:
        return self.nbytes

    def renewed(self, newer: Paper) -> Paper:
        return newer

    def without_checkpoint(self) -> Paper:
        return replace(self, checkpoint=None)

    def oldest(self, layer: int) -> int:
        return self.first


def index(needs: ResumeNeeds) -> PrefixIndex:
    return PrefixIndex(needs, lambda tokens: float(tokens))


def store(
    held: PrefixIndex, tokens: Sequence[int], needs: ResumeNeeds, owner: CacheOwner = ANYBODY, *, landmark: bool = False
) -> None:
    end = len(tokens)
    checkpoint = () if needs.checkpoint else None
    window = needs.windows[0][1] if needs.windows else end

    def make(begin: int, back: int) -> Paper:
        return Paper(begin, end, max(back, end - window + 1), checkpoint)

    held.insert(owner, tokens, end, make, landmark=landmark)  # type: ignore[arg-type]
