"""Groups of layers whose keys and values lie in the same pages, and what storing them in some way takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.cache.pages import PAGE, PageCopy, Pages
from ingot.kernels.paged.kernels import page_number

SMALLEST_SLAB = 4
"""Pages."""
FIRST_SHARE = 1 / 54
"""Of the pages that there may be, those of the first slab."""
LEAST_SHARE = 1 / 128
"""Of what there is, those of any further slab, however little is left: else there would be no end of slabs."""

Run = tuple[int, int, int, int]
"""Tokens that are written one behind another: the first one's number in the launch, how many, the page, where in it."""


class PageIndex:
    """Pages in order, as slabs are read: runs of pages of the same slab."""

    def __init__(self, pages: Sequence[int], runs: Sequence[tuple[int, list[int]]]) -> None:
        self.pages, self.slabs = tuple(pages), tuple(slab for slab, _ in runs)
        self._numbers = [mx.array(numbers, dtype=mx.int32) for _, numbers in runs]
        self._by_heads: dict[int, list[mx.array]] = {}

    def numbers(self, heads: int) -> list[mx.array]:
        """Of each run [heads * pages]: where its pages are found in a slab [pages * heads, ...], head by head. Made
        once for all layers."""
        if heads not in self._by_heads:
            every = mx.arange(heads, dtype=mx.int32)[:, None]
            self._by_heads[heads] = [(numbers * heads + every).reshape(-1) for numbers in self._numbers]
        return self._by_heads[heads]


class Storage(ABC):
    """A layer's keys and values, in arrays [pages, heads, PAGE, size]."""

    most_slabs: int | None = None
    """Slabs that whoever reads it takes at most."""

    def __init__(self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        self._group, self.heads, self.sizes, self.dtype = group, heads, sizes, dtype
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        group.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.heads * sum(self.sizes) * self.dtype.size

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that exists for it now."""

    @abstractmethod
    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        """Put keys and values [tokens, heads, size] where the runs say."""

    @classmethod
    @abstractmethod
    def copy_all(cls, storages: Sequence[Any], copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages in several layers that are stored alike."""

    @abstractmethod
    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, pages * PAGE, size]."""

    def join(self, first: int) -> None:  # noqa: B027  (what is not stored in slabs has none to join)
        """Of the group's slabs, `first` and the one behind it become one."""

    @abstractmethod
    def trim(self) -> None:
        """Give back the memory of pages that nobody holds, as far as that goes."""

    @abstractmethod
    def pending(self) -> list[mx.array]:
        """What was written to since the last time."""


class PageGroup:
    """Layers that forget alike, append layers or those of one window: one table of pages serves all of them."""

    def __init__(self, number: int, window: int | None, token_bytes: int = 0) -> None:
        """`token_bytes` are what a token takes, if that is known before anything was written."""
        self.number, self.window, self._token_bytes = number, window, token_bytes
        self.pages = Pages()
        self.storages: list[Storage] = []
        self.slabs: list[int] = []  # pages of each
        self._ends: list[int] = []
        self.encoded: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(0, np.int32)
        """By page, what the kernels know it by."""
        self._trimmed = (0, 0)

    @property
    def page_bytes(self) -> int:
        return PAGE * (self._token_bytes or sum(storage.token_bytes for storage in self.storages))

    @property
    def provided(self) -> bool:
        """Whether there is a slab for every page."""
        return bool(self._ends) and self._ends[-1] >= self.pages.made

    def provide(self, most: int | None = None, left: int = 0) -> None:
        """Add one for the pages that have none. Of the `most` bytes that states may take, `left` are not taken yet."""
        limit = min((storage.most_slabs for storage in self.storages if storage.most_slabs is not None), default=None)
        if limit is not None:
            self.join(limit - 1)
        total = sum(self.slabs)
        ahead = max(SMALLEST_SLAB, total // 4) if most is None else self._ahead(total, limit, most, left)
        self.slabs.append(max(self.pages.made - total, ahead))
        self._number()

    def _ahead(self, total: int, limit: int | None, most: int, left: int) -> int:
        """A quarter of what there is; more, where as many slabs as there may still be would not come to all."""
        bytes_each = max(1, self.page_bytes)
        pages = most // bytes_each
        wanted = max(SMALLEST_SLAB, total // 4, int(FIRST_SHARE * pages))
        if limit is not None and total:
            wanted = max(wanted, ceil(total * ((pages / total) ** (1 / (limit - len(self.slabs))) - 1)))
        return max(int(LEAST_SHARE * total), min(wanted, max(0, left) // bytes_each))

    def join(self, most: int) -> None:
        """Have no more slabs than `most`: the smallest neighbours become one, and are copied. What growing foresees
        needs none of that; groups that share a budget may."""
        while len(self.slabs) > most:
            first = min(range(len(self.slabs) - 1), key=lambda slab: self.slabs[slab] + self.slabs[slab + 1])
            for storage in self.storages:
                storage.join(first)
            self.slabs[first : first + 2] = [self.slabs[first] + self.slabs[first + 1]]
        self._number()

    def _number(self) -> None:
        self._ends = list(accumulate(self.slabs))
        self.encoded = np.concatenate(
            [np.arange(pages, dtype=np.int32) + page_number(slab, 0) for slab, pages in enumerate(self.slabs)]
            or [np.zeros(0, np.int32)]
        )

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages in all layers."""
        for kind in {type(storage) for storage in self.storages}:
            kind.copy_all([storage for storage in self.storages if type(storage) is kind], copies)

    def slab_of(self, page: int) -> tuple[int, int]:
        """Its slab, and its number there."""
        slab = bisect_right(self._ends, page)
        return slab, page - (self._ends[slab - 1] if slab else 0)

    def index(self, pages: Sequence[int]) -> PageIndex:
        runs: list[tuple[int, list[int]]] = []
        for page in pages:
            slab, number = self.slab_of(page)
            if not runs or runs[-1][0] != slab:
                runs.append((slab, []))
            runs[-1][1].append(number)
        return PageIndex(pages, runs)

    def trim(self) -> bool:
        """Give back the memory of pages that nobody holds: of reserved ones any, of slabs the last. Whether there was
        something to do since the last time."""
        if self._trimmed == (self.pages.taken, self.pages.used):
            return False
        self._trimmed = (self.pages.taken, self.pages.used)
        occupied = self.pages.occupied
        while self.slabs and sum(self.slabs[:-1]) >= occupied:
            self.slabs.pop()
        self._ends = list(accumulate(self.slabs))
        for storage in self.storages:
            storage.trim()
        self.pages.trim(min(self.pages.made, sum(self.slabs)))
        return True
