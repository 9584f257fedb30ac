"""Page groups and their memory pools.

A group is all layers with the same window, or all append layers: one page table serves all of them. A pool is the
memory for the pages of a group in one form, raw or coded, in slabs or one reserved array. Each layer has a storage in
it; `kv_storage.py` has the kinds of storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from math import ceil
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout
from ingot.cache.pages import PAGE, PageAllocator, PageCopy, PageForms, PageSlots, PageTable
from ingot.kernels.cpu import native
from ingot.kernels.paged_attention.inputs import page_number

SMALLEST_SLAB = 4
"""Pages."""
FIRST_SHARE = 1 / 54
"""The first slab's share of the pages that the budget allows."""
LEAST_SHARE = 1 / 128
"""The least size of a further slab, as a share of what exists, which bounds the number of slabs."""


class PoolStorage(ABC):
    """A layer's part of a pool."""

    most_slabs: int | None = None
    """The most slabs that its kernels can read."""

    @property
    @abstractmethod
    def token_bytes(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that exists for it now."""

    def join(self, first: int) -> None:  # noqa: B027  (reserved memory has no slabs to join)
        """Join slab `first` and the next one."""

    @abstractmethod
    def trim(self) -> None:
        """Free the memory of unused slots, as far as possible."""

    @abstractmethod
    def pending(self) -> list[mx.array]:
        """The arrays that were written to since the last call."""

    @abstractmethod
    def free(self) -> None:
        """Free all memory, whoever uses it. Must be the last call."""


StorageKind = TypeVar("StorageKind", bound=PoolStorage)


class PagePool(Generic[StorageKind]):
    """Memory for pages of one form, in all layers of a group: slabs, or one reserved array."""

    def __init__(self, slots: PageSlots, token_bytes: int = 0) -> None:
        """`token_bytes` are the bytes of a token in all layers, if they are known before anything is written."""
        self.slots, self._token_bytes = slots, token_bytes
        self.storages: list[StorageKind] = []
        self.slabs: list[int] = []  # pages of each
        self._ends: list[int] = []
        self.encoded: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(0, np.int32)
        """By slot, its number in the kernels' page tables."""
        self._trimmed = (0, 0)

    @property
    def page_bytes(self) -> int:
        return PAGE * (self._token_bytes or sum(storage.token_bytes for storage in self.storages))

    @property
    def provided(self) -> bool:
        """Whether there is a slab for every slot."""
        return bool(self._ends) and self._ends[-1] >= self.slots.made

    def provide(self, most: int | None = None, left: int = 0) -> None:
        """Add a slab for the slots that have none. Of the `most` bytes of the budget, `left` are unused."""
        limit = min((storage.most_slabs for storage in self.storages if storage.most_slabs is not None), default=None)
        if limit is not None:
            self.join(limit - 1)
        total = sum(self.slabs)
        size = max(SMALLEST_SLAB, total // 4) if most is None else self._slab_size(total, limit, most, left)
        self.slabs.append(max(self.slots.made - total, size))
        self._number()

    def _slab_size(self, total: int, limit: int | None, most: int, left: int) -> int:
        """A quarter of the pages that exist; more where the slabs that are still allowed would not add up to the
        budget."""
        bytes_each = max(1, self.page_bytes)
        pages = most // bytes_each
        size = max(SMALLEST_SLAB, total // 4, int(FIRST_SHARE * pages))
        if limit is not None and total:
            size = max(size, ceil(total * ((pages / total) ** (1 / (limit - len(self.slabs))) - 1)))
        return max(int(LEAST_SHARE * total), min(size, max(0, left) // bytes_each))

    def join(self, most: int) -> None:
        """Join slabs, smallest neighbours first, until there are at most `most`. That copies them. A single group's
        growth avoids it; groups that share a budget may need it."""
        while len(self.slabs) > most:
            self._join(min(range(len(self.slabs) - 1), key=lambda slab: self.slabs[slab] + self.slabs[slab + 1]))
        self._number()

    def _join(self, first: int) -> None:
        for storage in self.storages:
            storage.join(first)
        self.slabs[first : first + 2] = [self.slabs[first] + self.slabs[first + 1]]

    def grow_like(self, slabs: Sequence[int]) -> None:
        """Take the slabs of another pool of the same pages that has grown: some may have been joined, others added."""
        for number, pages in enumerate(slabs):
            while number + 1 < len(self.slabs) and self.slabs[number] < pages:
                self._join(number)
        self.slabs += slabs[len(self.slabs) :]
        assert self.slabs == list(slabs), "the other pool did not grow from these slabs"
        self._number()

    def _number(self) -> None:
        self._ends = list(accumulate(self.slabs))
        self.encoded = np.concatenate(
            [np.arange(pages, dtype=np.int32) + page_number(slab, 0) for slab, pages in enumerate(self.slabs)]
            or [np.zeros(0, np.int32)]
        )

    def slab_of(self, slot: int) -> tuple[int, int]:
        """Its slab, and its index there."""
        slab = bisect_right(self._ends, slot)
        return slab, slot - (self._ends[slab - 1] if slab else 0)

    def trim(self) -> bool:
        """Free the memory of unused pages: any that are reserved, but only the last slabs. Returns whether anything was
        used since the last call."""
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
        """Keep only the first `count` slabs, and free unused slots."""
        del self.slabs[count:]
        self._ends = list(accumulate(self.slabs))
        for storage in self.storages:
            storage.trim()

    def free(self) -> None:
        """Free all memory, whoever uses it. Must be the last call."""
        for storage in self.storages:
            storage.free()
        self.storages.clear()  # which refer to their pool


class CodedStorage(PoolStorage):
    """A layer's coded pages."""

    def __init__(self, pool: PagePool, form: CodedPageLayout) -> None:
        self._pool, self.form = pool, form
        pool.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.form.token_bytes

    @abstractmethod
    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        """Write bytes [pages, heads, head_bytes]."""

    @abstractmethod
    def read(self, slots: Sequence[int]) -> mx.array:
        """Bytes [pages, heads, head_bytes]."""


class PageIndex:
    """Pages in order, as runs of pages of the same slab and form."""

    def __init__(self, pages: Iterable[tuple[bool, int, int, int]]) -> None:
        """Of each page whether it is coded, its slot, and that slot's slab and index there."""
        runs: list[tuple[bool, int]] = []
        numbers: list[list[int]] = []
        self.slots: list[list[int]] = []
        """Of each run, its pages' slots."""
        for coded, slot, slab, number in pages:
            if not runs or runs[-1] != (coded, slab):
                runs.append((coded, slab))
                numbers.append([])
                self.slots.append([])
            numbers[-1].append(number)
            self.slots[-1].append(slot)
        self.runs: Sequence[tuple[bool, int]] = runs
        """Of each, whether its pages are coded, and their slab."""
        self._numbers = [mx.array(own, dtype=mx.int32) for own in numbers]
        self._by_heads: dict[int, list[mx.array]] = {}

    @property
    def has_coded(self) -> bool:
        return any(coded for coded, _ in self.runs)

    def numbers(self, heads: int) -> list[mx.array]:
        """Of each run [heads * pages]: its pages' indices in a slab [pages * heads, ...], head by head. Made once for
        all layers."""
        if heads not in self._by_heads:
            every = mx.arange(heads, dtype=mx.int32)[:, None]
            self._by_heads[heads] = [(numbers * heads + every).reshape(-1) for numbers in self._numbers]
        return self._by_heads[heads]


TokenRun = tuple[int, int, int, int]
"""Consecutive tokens that are written to one page: the index of the first in the forward batch, how many, the slot of
the page, and the offset in it."""


class KVStorage(PoolStorage):
    """A layer's keys and values, in arrays [pages, heads, PAGE, size]."""

    def __init__(self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        self._group, self.heads, self.sizes, self.dtype = group, heads, sizes, dtype
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.coded: CodedStorage | None = None
        """The layer's coded pages, where the group has a codec."""
        group.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.heads * sum(self.sizes) * self.dtype.size

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()

    @abstractmethod
    def write(self, keys: mx.array, values: mx.array, runs: Sequence[TokenRun]) -> None:
        """Write keys and values [tokens, heads, size] to the runs."""

    @classmethod
    @abstractmethod
    def copy_all(cls, storages: Sequence[Any], copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages in several layers of this kind of storage."""

    @abstractmethod
    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, pages * PAGE, size]."""

    @abstractmethod
    def whole_pages(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and values [pages, heads, PAGE, size] of raw slots."""

    def encode(self, raw: Sequence[int], coded: Sequence[int]) -> mx.array:
        """Encode raw slots into coded ones. Returns the bytes, which must be evaluated before the raw slots are written
        again."""
        assert self.coded is not None
        made = self.coded.form.encode(*self.whole_pages(raw))
        self.coded.put(coded, made)
        return made

    def decoded(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and values [pages, heads, PAGE, size] of coded slots."""
        assert self.coded is not None
        return self.coded.form.decode(self.coded.read(slots))


class PageGroup(PagePool[KVStorage]):
    """All layers with the same window, or all append layers: one page table serves all of them."""

    def __init__(
        self,
        number: int,
        window: int | None,
        token_bytes: int = 0,
        codec: PairCodec | None = None,
        coded_bytes: int = 0,
    ) -> None:
        """With a codec, full pages may be coded; a token then takes `coded_bytes`, if that is known."""
        self.number, self.window, self.codec = number, window, codec
        forms = None if codec is None else PageForms()
        self.pages = PageAllocator(forms)
        super().__init__(self.pages if forms is None else forms.raw, token_bytes)
        self.coded: PagePool[CodedStorage] | None = None if forms is None else PagePool(forms.coded, coded_bytes)

    @property
    def pools(self) -> tuple[PagePool[Any], ...]:
        return (self,) if self.coded is None else (self, self.coded)

    def bytes_of(self, pages: Sequence[int]) -> int:
        """The bytes of some pages. One in both forms counts as coded, since its raw form belongs to a running row."""
        forms = self.pages.forms
        if forms is None or self.coded is None:
            return self.page_bytes * len(pages)
        coded = sum(map(forms.is_coded, pages))
        return self.coded.page_bytes * coded + self.page_bytes * (len(pages) - coded)

    def by_form(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Pages as a row that reuses them reads them: raw ones, and coded ones."""
        forms = self.pages.forms
        if forms is None:
            return list(pages), []
        coded = [page for page in pages if forms.is_coded(page)]
        return [page for page in pages if not forms.is_coded(page)], coded

    @property
    def held_bytes(self) -> int:
        return sum(pool.page_bytes * pool.slots.used for pool in self.pools)

    @property
    def uncharged_bytes(self) -> int:
        """Bytes that records hold and none is charged for: pages that windows see, whose charged record is gone."""
        return self.page_bytes * self.pages.uncharged

    @property
    def shared_bytes(self) -> int:
        """Bytes that both running rows and records hold, in the form that the records are charged for."""
        if self.coded is None:
            return self.page_bytes * self.pages.both
        forms, coded, raw = self.pages.forms, 0, 0
        assert forms is not None
        for page in self.pages.shared():
            coded += forms.sees_coded(page)
            raw += not forms.is_coded(page)
        return self.coded.page_bytes * coded + self.page_bytes * raw

    def slot_of(self, page: int) -> int:
        """The slot of its raw form."""
        return page if self.pages.forms is None else self.pages.forms.raw_of[page]

    def runs(self, table: PageTable, begin: int, end: int, token: int = 0) -> list[TokenRun]:
        """Where tokens [begin, end) of a sequence are written, of which `token` is the first's index in what is
        written."""
        runs: list[TokenRun] = []
        at = begin
        while at < end:
            count = min(PAGE - at % PAGE, end - at)
            slot = self.slot_of(table.numbers[at // PAGE - table.first])
            runs.append((token + at - begin, count, slot, at % PAGE))
            at += count
        return runs

    def coded_slots(self, pages: Sequence[int]) -> list[int]:
        """The slots of the leading pages that are coded."""
        forms = self.pages.forms
        return [] if forms is None else [forms.coded_of[page] for page in takewhile(forms.is_coded, pages)]

    def raw_slots(self, pages: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        numbers: np.ndarray[Any, np.dtype[np.int32]] = np.frombuffer(pages, np.int32)
        return numbers if self.pages.forms is None else np.frombuffer(self.pages.forms.raw_of, np.int32)[numbers]

    def numbered(self, tables: Sequence[PageTable]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Rows' pages as the GPU kernels take them, row by row: coded ones as -1 and less."""
        raw = self.encoded[self.raw_slots(b"".join(table.numbers for table in tables))]
        if self.coded is not None:
            begin = 0
            for table in tables:
                if table.coded:
                    raw[begin : begin + table.coded] = ~self.coded.encoded[self._row_coded_slots(table)]
                begin += len(table.numbers)
        return raw

    def _row_coded_slots(self, table: PageTable) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The slots of the pages that a row reads coded."""
        assert self.pages.forms is not None
        numbers = np.frombuffer(table.numbers, np.int32)[: table.coded]
        return np.frombuffer(self.pages.forms.coded_of, np.int32)[numbers]

    def slots_as_read(self, table: PageTable) -> bytes:
        """The slots of a row's pages in the form it reads, the first `coded` coded; as int32."""
        if self.pages.forms is None or not table.coded:
            return self.raw_slots(table.numbers).tobytes()
        return self._row_coded_slots(table).tobytes() + self.raw_slots(table.numbers[table.coded :]).tobytes()

    def native_table(self, table: PageTable) -> native.NativePageTable:
        """A row's pages as the native kernels take them."""
        if self.pages.forms is None:
            return table.first, table.numbers
        return table.coded, self.raw_slots(table.numbers[table.coded :]), self._row_coded_slots(table)

    def form(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> CodedPageLayout:
        """The layout of a coded page of such a layer."""
        assert self.codec is not None
        return CodedPageLayout(self.codec, heads, sizes, dtype)

    def encode(self, pages: Sequence[int]) -> None:
        """Encode full pages in all layers, once the caller has provided memory for it."""
        self.encode_slots(*self.both_slots(pages))
        self.pages.settle(pages)

    def both_slots(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """The raw and the coded slots of pages that have both."""
        forms = self.pages.forms
        assert forms is not None
        return [forms.raw_of[page] for page in pages], [forms.coded_of[page] for page in pages]

    def encode_slots(self, raw: Sequence[int], coded: Sequence[int]) -> None:
        for storage in self.storages:  # one by one: encoding takes much temporary memory
            made = storage.encode(raw, coded)
            assert storage.coded is not None
            mx.eval(made, storage.coded.pending())

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages in all layers."""
        for copy in (copy for copy in copies if copy.coded):
            for storage in self.storages:
                keys, values = (part[0, :, : copy.tokens] for part in storage.decoded([copy.source]))
                storage.write(keys.swapaxes(0, 1), values.swapaxes(0, 1), [(0, copy.tokens, copy.target, 0)])
        if raw := [copy for copy in copies if not copy.coded]:
            for kind in {type(storage) for storage in self.storages}:
                kind.copy_all([storage for storage in self.storages if type(storage) is kind], raw)

    def index(self, pages: Sequence[int], coded: int | None = None) -> PageIndex:
        """The index of pages of which the first `coded` are read coded; by default all that are."""
        forms = self.pages.forms
        if forms is None or coded is None:
            return self.placed(self.places(pages))
        return self.placed([*(~forms.coded_of[page] for page in pages[:coded]), *map(self.slot_of, pages[coded:])])

    def places(self, pages: Sequence[int]) -> list[int]:
        """The slots of pages: coded ones, where they are coded, as -1 and less; otherwise raw ones."""
        forms = self.pages.forms
        if forms is None:
            return list(pages)
        return [~forms.coded_of[page] if forms.is_coded(page) else forms.raw_of[page] for page in pages]

    def placed(self, slots: Sequence[int]) -> PageIndex:
        """The index of such slots."""
        return PageIndex(map(self._located, slots))

    def _located(self, slot: int) -> tuple[bool, int, int, int]:
        if slot >= 0:
            return False, slot, *self.slab_of(slot)
        assert self.coded is not None
        return True, ~slot, *self.coded.slab_of(~slot)

    def trim(self) -> bool:
        forms = self.pages.forms
        if forms is None or self.coded is None:
            return super().trim()
        self.pages.trim(self.pages.occupied)
        return any([super().trim(), self.coded.trim()])
