"""Keys and values of one layer, in the pages of its group: arrays [pages, heads, PAGE, size].

Where mlx's own operations write, pages lie in slabs: each a quarter of what there is already, so that what exists is at
most a quarter more than what was ever held, nothing is copied when it grows, and a write that mlx cannot do in place
copies one slab. A GPU's kernels write to slabs too, always in place. Where the native kernels write, they lie in memory
that only exists where it was written. Only the engine thread may call anything here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ingot.cache.pages import PAGE, PageCopy, Pages, Table
from ingot.kernels import native
from ingot.kernels.device import total_memory
from ingot.kernels.paged.kernels import PagedAttention, Slabs, page_number
from ingot.kernels.paged.kernels import Rows as KernelRows

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


class Storage(Protocol):
    keys: list[mx.array]
    values: list[mx.array]
    heads: int
    sizes: tuple[int, int]

    @property
    def token_bytes(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that exists for it now."""
        ...

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        """Put keys and values [tokens, heads, size] where the runs say."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> None: ...

    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, pages * PAGE, size]."""
        ...

    def trim(self) -> None:
        """Give back the memory of pages that nobody holds, as far as that goes."""
        ...

    def pending(self) -> list[mx.array]:
        """What was written to since the last time."""
        ...


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


def _integers(numbers: list[int]) -> mx.array:
    return mx.array(numbers, dtype=mx.int32)


class SlabStorage:
    """Written and read by mlx's own operations."""

    def __init__(self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        self._group, self.heads, self.sizes, self._dtype = group, heads, sizes, dtype
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self._written: set[int] = set()
        group.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.heads * sum(self.sizes) * self._dtype.size

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in (*self.keys, *self.values))

    def provide(self) -> None:
        for pages in self._group.slabs[len(self.keys) :]:
            for slabs, size in zip((self.keys, self.values), self.sizes, strict=True):
                slabs.append(mx.zeros((pages, self.heads, PAGE, size), self._dtype))

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        self.provide()
        for slabs, new in ((self.keys, keys), (self.values, values)):
            if new.size:
                self._put(slabs, new.astype(self._dtype), runs)

    def _put(self, slabs: list[mx.array], new: mx.array, runs: Sequence[Run]) -> None:
        single: dict[int, list[tuple[int, int, int]]] = {}
        for token, count, page, at in runs:
            slab, number = self._group.slab_of(page)
            self._written.add(slab)
            if count == 1:
                single.setdefault(slab, []).append((token, number, at))
            else:
                slabs[slab][number, :, at : at + count] = new[token : token + count].swapaxes(0, 1)
        for slab, written in single.items():
            tokens, numbers, places = (_integers(list(each)) for each in zip(*written, strict=True))
            slabs[slab][numbers, :, places] = new if len(written) == new.shape[0] else new[tokens]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self.provide()
        for slabs in (self.keys, self.values):
            for source, target, tokens in copies:
                (from_slab, from_number), (to_slab, to_number) = map(self._group.slab_of, (source, target))
                self._written.add(to_slab)
                if slabs[to_slab].size:
                    slabs[to_slab][to_number, :, :tokens] = slabs[from_slab][from_number, :, :tokens]

    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        return self._read(self.keys, index), self._read(self.values, index)

    def _read(self, slabs: list[mx.array], index: PageIndex) -> mx.array:
        size = slabs[0].shape[3]
        if not size:
            return mx.zeros((1, self.heads, len(index.pages) * PAGE, 0), self._dtype)
        taken = [
            mx.take(slabs[slab].reshape(-1, PAGE, size), self._ordered(numbers), axis=0).reshape(
                1, self.heads, -1, size
            )
            for slab, numbers in zip(index.slabs, index.numbers(self.heads), strict=True)
        ]
        return taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=2)

    def _ordered(self, numbers: mx.array) -> mx.array:
        """The same numbers, not before what was written is there: mlx's own writing sees to that."""
        return numbers

    def trim(self) -> None:
        del self.keys[len(self._group.slabs) :], self.values[len(self._group.slabs) :]
        self._written = set()

    def pending(self) -> list[mx.array]:
        written, self._written = self._written, set()
        return [slabs[slab] for slab in written for slabs in (self.keys, self.values)]


class KernelStorage(SlabStorage):
    """Written in place by the kernels of a GPU, whatever still reads it. The slabs' arrays stay the same; a token
    orders what is read behind what was written."""

    def __init__(
        self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype, kernel: PagedAttention
    ) -> None:
        super().__init__(group, heads, sizes, dtype)
        self._kernel = kernel
        self._token = mx.zeros(1, mx.int32)
        self._slabs: Slabs | None = None

    def provide(self) -> None:
        if len(self.keys) != len(self._group.slabs) or self._slabs is None:
            super().provide()
            mx.eval(self.keys, self.values)
            self._slabs = Slabs(self.keys, self.values)

    @property
    def slabs(self) -> Slabs:
        self.provide()
        assert self._slabs is not None
        return self._slabs

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        self.write_at(keys, values, self.places(runs))

    def places(self, runs: Sequence[Run]) -> mx.array:
        """Where the kernel writes each token: made once for all layers of a group."""
        pages = np.repeat([int(self._group.encoded[page]) for _, _, page, _ in runs], [run[1] for run in runs])
        places = np.concatenate([np.arange(at, at + count) for _, count, _, at in runs])
        return mx.array(np.stack([pages, places], axis=1).astype(np.int32))

    def write_at(self, keys: mx.array, values: mx.array, places: mx.array) -> None:
        keys, values = (mx.contiguous(part.astype(self._dtype)) for part in (keys, values))
        self._token = self._kernel.write(keys, values, places, self.slabs, self._token)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        encoded = self._group.encoded
        made = [(encoded[source], encoded[target], tokens) for source, target, tokens in copies]
        self._token = self._kernel.copy(mx.array(np.array(made, np.int32)), self.slabs, self._token)

    def attend(self, kernel: PagedAttention, queries: mx.array, rows: KernelRows) -> mx.array:
        """What queries [tokens, heads, size] see, [tokens, heads, size]."""
        return kernel.attend(queries, rows, self.slabs, self._token)

    def rows(self, tables: Sequence[Table], lengths: Sequence[int], count: int) -> KernelRows:
        """Rows of so many tokens, whose last `count` attend: made once for all layers of a group."""
        encoded = [self._group.encoded[np.frombuffer(table.numbers, np.int32)] for table in tables]
        firsts = [table.first for table in tables]
        return KernelRows.of(encoded, lengths, firsts=firsts, counts=[count] * len(tables))

    def _ordered(self, numbers: mx.array) -> mx.array:
        # By what is read of the token: a device that sees no other link between the two runs them side by side.
        return numbers + 0 * self._token

    def trim(self) -> None:
        super().trim()
        self._slabs = None

    def pending(self) -> list[mx.array]:
        return [self._token]


class ReservedStorage:
    """Written and read by the native kernels. One array each, as long as memory could be; what is not written to does
    not exist."""

    def __init__(self, group: PageGroup, layers: int, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        """`layers` are those that share the memory."""
        self._group, self.heads, self.sizes, self._dtype = group, heads, sizes, dtype
        most = max(SMALLEST_SLAB, total_memory() // (layers * PAGE * max(1, self.token_bytes)))
        self.keys, self.values = ([native.reserve((most, heads, PAGE, size), dtype)] for size in sizes)
        group.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.heads * sum(self.sizes) * self._dtype.size

    @property
    def nbytes(self) -> int:
        return self._group.pages.used * PAGE * self.token_bytes

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        for slabs, new in ((self.keys, keys), (self.values, values)):
            for token, count, page, at in runs:
                own = new[token : token + count].swapaxes(0, 1).astype(self._dtype)
                slabs[0] = native.write_tokens(slabs[0], page, at, own)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self.keys[0], self.values[0] = native.copy_tokens([self.keys[0], self.values[0]], copies)

    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        keys, values = (self._read(slab, index) for slab in (self.keys[0], self.values[0]))
        return keys, values

    def _read(self, slab: mx.array, index: PageIndex) -> mx.array:
        return mx.concatenate([slab[page : page + 1] for page in index.pages], axis=2)

    def trim(self) -> None:
        free = sorted(self._group.pages.free)
        for slab in (self.keys[0], self.values[0]):
            native.discard(slab, free)

    def pending(self) -> list[mx.array]:
        return [self.keys[0], self.values[0]]
