"""Memory for pages of one form: slabs of them, or as much as is reserved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from ingot.cache.coded_pages import PageForm
from ingot.cache.forms import Slots
from ingot.cache.pages import PAGE, Pages
from ingot.kernels.paged.slabs import page_number

SMALLEST_SLAB = 4
"""Pages."""
FIRST_SHARE = 1 / 54
"""Of the pages that there may be, those of the first slab."""
LEAST_SHARE = 1 / 128
"""Of what there is, those of any further slab, however little is left: else there would be no end of slabs."""


class Stored(ABC):
    """A layer's part of a pool."""

    most_slabs: int | None = None
    """Slabs that whoever reads it takes at most."""

    @property
    @abstractmethod
    def token_bytes(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that exists for it now."""

    def join(self, first: int) -> None:  # noqa: B027  (what is not stored in slabs has none to join)
        """Of the pool's slabs, `first` and the one behind it become one."""

    @abstractmethod
    def trim(self) -> None:
        """Give back the memory of slots that nobody has, as far as that goes."""

    @abstractmethod
    def pending(self) -> list[mx.array]:
        """What was written to since the last time."""

    @abstractmethod
    def free(self) -> None:
        """Let go of all memory, whoever has slots. The last call."""


Kind = TypeVar("Kind", bound=Stored)


class Pool(Generic[Kind]):
    """Memory for pages of one form, in all layers of a group: slabs of them, or as much as is reserved."""

    def __init__(self, slots: Pages | Slots, token_bytes: int = 0) -> None:
        """`slots` say which are taken; `token_bytes` are what a token takes, if that is known before anything was
        written."""
        self.slots, self._token_bytes = slots, token_bytes
        self.storages: list[Kind] = []
        self.slabs: list[int] = []  # pages of each
        self._ends: list[int] = []
        self.encoded: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(0, np.int32)
        """By slot, what the kernels know it by."""
        self._trimmed = (0, 0)

    @property
    def page_bytes(self) -> int:
        return PAGE * (self._token_bytes or sum(storage.token_bytes for storage in self.storages))

    @property
    def provided(self) -> bool:
        """Whether there is a slab for every slot."""
        return bool(self._ends) and self._ends[-1] >= self.slots.made

    def provide(self, most: int | None = None, left: int = 0) -> None:
        """Add one for the pages that have none. Of the `most` bytes that states may take, `left` are not taken yet."""
        limit = min((storage.most_slabs for storage in self.storages if storage.most_slabs is not None), default=None)
        if limit is not None:
            self.join(limit - 1)
        total = sum(self.slabs)
        ahead = max(SMALLEST_SLAB, total // 4) if most is None else self._ahead(total, limit, most, left)
        self.slabs.append(max(self.slots.made - total, ahead))
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
            self._join(min(range(len(self.slabs) - 1), key=lambda slab: self.slabs[slab] + self.slabs[slab + 1]))
        self._number()

    def _join(self, first: int) -> None:
        for storage in self.storages:
            storage.join(first)
        self.slabs[first : first + 2] = [self.slabs[first] + self.slabs[first + 1]]

    def grow_like(self, slabs: Sequence[int]) -> None:
        """Have the slabs that another pool of the same pages has come to by growing: some of those that are here may
        have become one, and others are new."""
        for number, pages in enumerate(slabs):
            while number + 1 < len(self.slabs) and self.slabs[number] < pages:
                self._join(number)
        self.slabs += slabs[len(self.slabs) :]
        assert self.slabs == list(slabs), "slabs do not come from one another"
        self._number()

    def _number(self) -> None:
        self._ends = list(accumulate(self.slabs))
        self.encoded = np.concatenate(
            [np.arange(pages, dtype=np.int32) + page_number(slab, 0) for slab, pages in enumerate(self.slabs)]
            or [np.zeros(0, np.int32)]
        )

    def slab_of(self, slot: int) -> tuple[int, int]:
        """Its slab, and its number there."""
        slab = bisect_right(self._ends, slot)
        return slab, slot - (self._ends[slab - 1] if slab else 0)

    def trim(self) -> bool:
        """Give back the memory of pages that nobody holds: of reserved ones any, of slabs the last. Whether there was
        something to do since the last time."""
        if self._trimmed == (self.slots.taken, self.slots.used):
            return False
        self._trimmed = (self.slots.taken, self.slots.used)
        occupied = self.slots.occupied
        while self.slabs and sum(self.slabs[:-1]) >= occupied:
            self.slabs.pop()
        self.keep(len(self.slabs))
        self.slots.trim(min(self.slots.made, sum(self.slabs)))
        return True

    def keep(self, count: int) -> None:
        """Have the first `count` slabs alone, and nothing in slots that nobody has."""
        del self.slabs[count:]
        self._ends = list(accumulate(self.slabs))
        for storage in self.storages:
            storage.trim()

    def free(self) -> None:
        """Let go of all memory, whoever has slots. The last call."""
        for storage in self.storages:
            storage.free()
        self.storages.clear()  # which refer to their pool


class CodedStorage(Stored):
    """A layer's pages in fewer bits."""

    def __init__(self, pool: Pool, form: PageForm) -> None:
        self._pool, self.form = pool, form
        pool.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.form.token_bytes

    @abstractmethod
    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        """Write bytes [pages, heads, head_bytes] there."""

    @abstractmethod
    def read(self, slots: Sequence[int]) -> mx.array:
        """The bytes [pages, heads, head_bytes] of some."""


class PageIndex:
    """Pages in order, as slabs are read: runs of pages of the same slab, and of the same form."""

    def __init__(self, found: Iterable[tuple[bool, int, int, int]]) -> None:
        """Of each page whether it is read in fewer bits, its slot, and that slot's slab and number there."""
        runs: list[tuple[bool, int]] = []
        numbers: list[list[int]] = []
        self.slots: list[list[int]] = []
        """Of each run, its pages' slots."""
        for coded, slot, slab, number in found:
            if not runs or runs[-1] != (coded, slab):
                runs.append((coded, slab))
                numbers.append([])
                self.slots.append([])
            numbers[-1].append(number)
            self.slots[-1].append(slot)
        self.runs: Sequence[tuple[bool, int]] = runs
        """Of each, whether its pages are in fewer bits, and their slab."""
        self._numbers = [mx.array(own, dtype=mx.int32) for own in numbers]
        self._by_heads: dict[int, list[mx.array]] = {}

    @property
    def has_coded(self) -> bool:
        return any(coded for coded, _ in self.runs)

    def numbers(self, heads: int) -> list[mx.array]:
        """Of each run [heads * pages]: where its pages are found in a slab [pages * heads, ...], head by head. Made
        once for all layers."""
        if heads not in self._by_heads:
            every = mx.arange(heads, dtype=mx.int32)[:, None]
            self._by_heads[heads] = [(numbers * heads + every).reshape(-1) for numbers in self._numbers]
        return self._by_heads[heads]
