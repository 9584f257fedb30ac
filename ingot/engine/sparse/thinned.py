"""What is left of a prompt: some of its tokens, at the positions that they have in the whole of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from ingot.engine.sight import Sight
from ingot.engine.specprefill.selection import Places
from ingot.models.vision.tower import PositionArray

GAP = 1 << 32
"""What the key of a token is raised by for each token that was left out before it: then it is no token's number."""


@dataclass(frozen=True, eq=False, slots=True)
class Thinned:
    whole: tuple[int, ...]  # all of the prompt
    kept: Places  # where in it the tokens stand that are left, in order; the prompt's last is among them
    sight: Sight | None = None  # what is left of what it shows

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.whole[place] for place in self.kept.tolist())

    def keyed(self, tokens: Many[int]) -> list[int]:
        """Tokens as the prefix index knows them. All that their states depend on is told: which tokens stand before
        them, and where. So what stands behind a gap is found by nobody who has not left out the same."""
        left = len(self.kept)
        shown = tokens if self.sight is None else self.sight.keyed(tokens)
        before = np.diff(self.kept, prepend=-1).astype(np.int64) - 1
        own = np.asarray(shown[:left], dtype=np.int64) + GAP * before[: len(shown)]
        keys: list[int] = own.tolist()
        return [*keys, *shown[left:]]

    def position(self, place: int) -> int:
        """Of what is stored at `place`: behind the prompt one follows another again."""
        if self.sight is not None and self.sight.positions is not None:
            return self.sight.position(place)
        left = len(self.kept)
        return int(self.kept[place]) if place < left else len(self.whole) + place - left

    def stated(self, begin: int, end: int) -> PositionArray | None:
        """Where the tokens at places [begin, end) stand; None where one follows another, the one behind them too."""
        sight, follow = self.sight, self.position(end) - self.position(begin) == end - begin
        if sight is not None and sight.positions is not None:
            seen = sight.stated(begin, end)
            return seen if seen is not None or follow else sight.axes(sight.positions, begin, end)
        if follow:
            return None
        behind = np.arange(len(self.whole), len(self.whole) + end - len(self.kept), dtype=np.int32)
        return np.concatenate([self.kept[begin:end], behind])

    def places(self, lengths: frozenset[int]) -> frozenset[int]:
        """How much is stored when so much of the whole prompt has passed."""
        return frozenset(int(np.searchsorted(self.kept, length)) for length in lengths)
