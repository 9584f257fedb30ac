"""What is left of a prompt: some of its tokens, at the positions that they have in the whole of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from ingot.engine.sparse.selection import Places

GAP = 1 << 32
"""What the key of a token is raised by for each token that was left out before it: then it is no token's number."""


@dataclass(frozen=True, eq=False, slots=True)
class Thinned:
    whole: tuple[int, ...]  # all of the prompt
    positions: Places  # of the tokens that are left, in order; the prompt's last is among them

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.whole[place] for place in self.positions.tolist())

    def keyed(self, tokens: Many[int]) -> list[int]:
        """Tokens as the prefix index knows them. All that their states depend on is told: which tokens stand before
        them, and where. So what stands behind a gap is found by nobody who has not left out the same."""
        left = len(self.positions)
        before = np.diff(self.positions, prepend=-1).astype(np.int64) - 1
        own = np.asarray(tokens[:left], dtype=np.int64) + GAP * before[: len(tokens)]
        keys: list[int] = own.tolist()
        return [*keys, *tokens[left:]]

    def position(self, place: int) -> int:
        """Of what is stored at `place`: behind the prompt one follows another again."""
        left = len(self.positions)
        return int(self.positions[place]) if place < left else len(self.whole) + place - left

    def stated(self, begin: int, end: int) -> Places | None:
        """Where the tokens at places [begin, end) stand; None where one follows another, the one behind them too."""
        first = self.position(begin)
        if self.position(end) - first == end - begin:
            return None
        behind = np.arange(len(self.whole), len(self.whole) + end - len(self.positions), dtype=np.int32)
        return np.concatenate([self.positions[begin:end], behind])

    def places(self, lengths: frozenset[int]) -> frozenset[int]:
        """How much is stored when so much of the whole prompt has passed."""
        return frozenset(int(np.searchsorted(self.positions, length)) for length in lengths)
