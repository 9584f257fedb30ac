"""Which pages of a long row the next tokens of a prompt see, where they need not see all of them: then reading on takes
as long behind many tokens as behind some.

A page is known by the mean of its keys. It is worth the largest share of attention that any of the tokens that ask, in
any head, would give to that; the first page, which attention rests on, and the newest are always seen. Where attention
is native, it chooses so by itself (`native/src/choice.h`).
"""

from __future__ import annotations

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import Row
from ingot.cache.pages import PAGE
from ingot.kernels.native import KernelChoice

FROM = 16384
"""Tokens behind which not all of them are seen any more."""
SEEN = 8192 // PAGE
"""Pages that are seen instead."""
NEWEST = 2048 // PAGE
"""Of them, those right before the tokens that ask."""
ASKING = 64
"""Of so many tokens that do not see all pages, one asks which of them it is to be."""


class PageChoice:
    """One layer's, of a row that is being read."""

    def __init__(self, state: AppendState, row: Row) -> None:
        self._state, self._table = state, row.tables[state.group.number]
        self._means: mx.array | None = None  # [heads, pages, size]

    def narrows(self, start: int) -> bool:
        """Whether tokens from place `start` on do not see all."""
        return start > FROM and start // PAGE > SEEN and not self._table.coded

    @property
    def limits(self) -> KernelChoice:
        return SEEN, NEWEST, ASKING

    def __call__(self, queries: mx.array, scale: float, start: int) -> mx.array | None:
        """The pages among those that are full at place `start` which tokens that ask [tokens, heads, size] see: int32
        places in the row's table, in order. None: all of them."""
        full = start // PAGE
        if not self.narrows(start):
            return None
        means = self._known(full)
        heads, _, size = means.shape
        asked = queries.astype(mx.float32).swapaxes(0, 1).reshape(heads, -1, size)
        worth = mx.softmax(scale * (asked @ means.swapaxes(-1, -2)), axis=-1).max(axis=(0, 1))
        places = mx.arange(full)
        worth = mx.where((places == 0) | (places >= full - NEWEST), 2.0, worth)
        return mx.sort(mx.argpartition(-worth, SEEN)[:SEEN]).astype(mx.int32)

    def _known(self, full: int) -> mx.array:
        """The means of so many pages, of which those that are new are read."""
        known = 0 if self._means is None else self._means.shape[1]
        if known < full:
            index = self._state.group.index(self._table.numbers[known:full], 0)
            keys, _ = self._state.stored.gathered(index)
            new = keys[0].reshape(keys.shape[1], full - known, PAGE, -1).astype(mx.float32).mean(axis=2)
            self._means = new if self._means is None else mx.concatenate([self._means, new], axis=1)
        assert self._means is not None
        return self._means[:, :full]
