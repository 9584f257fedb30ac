"""Groups of layers whose keys and values lie in the same pages, and what storing them in some way takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.cache.pages import PAGE, PageCopy, Pages
from ingot.kernels.paged.kernels import page_number

SMALLEST_SLAB = 4
"""Pages."""
FIRST_SHARE = 1 / 54
"""Of the pages that there may be, those of the first slab: when each is a quarter of those before it, twelve of them,
which is what kernels take, are all."""

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

    def __init__(self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        self._group, self.heads, self.sizes, self._dtype = group, heads, sizes, dtype
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        group.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.heads * sum(self.sizes) * self._dtype.size

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
        total = sum(self.slabs)
        ahead = max(SMALLEST_SLAB, total // 4)
        if most is not None:
            pages = max(1, self.page_bytes)
            ahead = min(max(ahead, int(FIRST_SHARE * most) // pages), max(0, left) // pages)
        self.slabs.append(max(self.pages.made - total, ahead))
        self._ends = list(accumulate(self.slabs))
        self.encoded = np.array([page_number(*self.slab_of(page)) for page in range(self._ends[-1])], np.int32)

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
