"""Page groups and their memory pools.

A group is the layers that forget alike, append layers or those of one window: one page table serves all of them. A pool
is memory for the pages of a group in one form, raw or coded: slabs of them, or as much as is reserved. What a layer has
there is its storage; `kv_storage.py` has the kinds of it.
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
"""Of the pages that there may be, those of the first slab."""
LEAST_SHARE = 1 / 128
"""Of what there is, those of any further slab, however little is left: else there would be no end of slabs."""


class PoolStorage(ABC):
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


StorageKind = TypeVar("StorageKind", bound=PoolStorage)


class PagePool(Generic[StorageKind]):
    """Memory for pages of one form, in all layers of a group: slabs of them, or as much as is reserved."""

    def __init__(self, slots: PageAllocator | PageSlots, token_bytes: int = 0) -> None:
        """`slots` say which are taken; `token_bytes` are what a token takes, if that is known before anything was
        written."""
        self.slots, self._token_bytes = slots, token_bytes
        self.storages: list[StorageKind] = []
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


class CodedStorage(PoolStorage):
    """A layer's pages in fewer bits."""

    def __init__(self, pool: PagePool, form: CodedPageLayout) -> None:
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


TokenRun = tuple[int, int, int, int]
"""Tokens that are written one behind another: the first one's number in the launch, how many, the slot of their page,
where in it."""


class KVStorage(PoolStorage):
    """A layer's keys and values, in arrays [pages, heads, PAGE, size]."""

    def __init__(self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        self._group, self.heads, self.sizes, self.dtype = group, heads, sizes, dtype
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.coded: CodedStorage | None = None
        """The same layer's pages in fewer bits, where the group has some."""
        group.storages.append(self)

    @property
    def token_bytes(self) -> int:
        return self.heads * sum(self.sizes) * self.dtype.size

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()

    @abstractmethod
    def write(self, keys: mx.array, values: mx.array, runs: Sequence[TokenRun]) -> None:
        """Put keys and values [tokens, heads, size] where the runs say."""

    @classmethod
    @abstractmethod
    def copy_all(cls, storages: Sequence[Any], copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages in several layers that are stored alike."""

    @abstractmethod
    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, pages * PAGE, size]."""

    @abstractmethod
    def whole_pages(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and values [pages, heads, PAGE, size] of raw slots."""

    def encode(self, raw: Sequence[int], coded: Sequence[int]) -> mx.array:
        """Put what lies in some slots into fewer bits, into others. Gives the bytes, which are to be computed before
        anything is written to those slots again."""
        assert self.coded is not None
        made = self.coded.form.encode(*self.whole_pages(raw))
        self.coded.put(coded, made)
        return made

    def decoded(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and values [pages, heads, PAGE, size] of coded slots."""
        assert self.coded is not None
        return self.coded.form.decode(self.coded.read(slots))


class PageGroup(PagePool[KVStorage]):
    """Layers that forget alike, append layers or those of one window: one table of pages serves all of them."""

    def __init__(
        self,
        number: int,
        window: int | None,
        token_bytes: int = 0,
        codec: PairCodec | None = None,
        coded_bytes: int = 0,
    ) -> None:
        """With a codec, pages that are full may lie in fewer bits, of which a token takes `coded_bytes`, if that is
        known."""
        self.number, self.window, self.codec = number, window, codec
        forms = None if codec is None else PageForms()
        self.pages = PageAllocator(forms)
        super().__init__(self.pages if forms is None else forms.raw, token_bytes)
        self.coded: PagePool[CodedStorage] | None = None if forms is None else PagePool(forms.coded, coded_bytes)

    @property
    def pools(self) -> tuple[PagePool[Any], ...]:
        return (self,) if self.coded is None else (self, self.coded)

    def bytes_of(self, pages: Sequence[int]) -> int:
        """What some pages take: in fewer bits, where they are, since a raw form beside that is some running row's."""
        forms = self.pages.forms
        if forms is None or self.coded is None:
            return self.page_bytes * len(pages)
        coded = sum(map(forms.is_coded, pages))
        return self.coded.page_bytes * coded + self.page_bytes * (len(pages) - coded)

    def by_form(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Pages as whoever takes them over sees them: raw ones, and those in fewer bits."""
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
        """What records hold and none counts: pages that windows see, which a record that is gone had paid for."""
        return self.page_bytes * self.pages.uncharged

    @property
    def shared_bytes(self) -> int:
        """What running rows and records hold together, in the form that is counted as the records'."""
        if self.coded is None:
            return self.page_bytes * self.pages.both
        forms, coded, raw = self.pages.forms, 0, 0
        assert forms is not None
        for page in self.pages.shared():
            coded += forms.sees_coded(page)
            raw += not forms.is_coded(page)
        return self.coded.page_bytes * coded + self.page_bytes * raw

    def slot_of(self, page: int) -> int:
        """Where its raw form lies."""
        return page if self.pages.forms is None else self.pages.forms.raw_of[page]

    def coded_slots(self, pages: Sequence[int]) -> list[int]:
        """Where the coded forms of the first pages lie, up to one that has none."""
        forms = self.pages.forms
        return [] if forms is None else [forms.coded_of[page] for page in takewhile(forms.is_coded, pages)]

    def raw_slots(self, pages: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The same of many."""
        numbers: np.ndarray[Any, np.dtype[np.int32]] = np.frombuffer(pages, np.int32)
        return numbers if self.pages.forms is None else np.frombuffer(self.pages.forms.raw_of, np.int32)[numbers]

    def numbered(self, table: PageTable) -> np.ndarray[Any, np.dtype[np.int32]]:
        """A row's pages as the kernels know them: those that it sees in fewer bits as -1 and less."""
        raw = self.encoded[self.raw_slots(table.numbers)]
        if self.coded is None or not table.coded:
            return raw
        assert self.pages.forms is not None
        coded = np.frombuffer(self.pages.forms.coded_of, np.int32)[
            np.frombuffer(table.numbers, np.int32)[: table.coded]
        ]
        return np.concatenate([~self.coded.encoded[coded], raw[table.coded :]])

    def seen_slots(self, table: PageTable) -> bytes:
        """Where a row's pages lie as it sees them, the first `coded` in fewer bits; as int32."""
        forms = self.pages.forms
        if forms is None or not table.coded:
            return self.raw_slots(table.numbers).tobytes()
        raw = self.raw_slots(table.numbers[table.coded :])
        coded = np.frombuffer(forms.coded_of, np.int32)[np.frombuffer(table.numbers, np.int32)[: table.coded]]
        return coded.tobytes() + raw.tobytes()

    def native_table(self, table: PageTable) -> native.NativePageTable:
        """A row's pages as the native kernels take them."""
        forms = self.pages.forms
        if forms is None:
            return table.first, table.numbers
        coded, raw = table.numbers[: table.coded], table.numbers[table.coded :]
        return table.coded, self.raw_slots(raw), np.frombuffer(forms.coded_of, np.int32)[np.frombuffer(coded, np.int32)]

    def form(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> CodedPageLayout:
        """What a page of such a layer is in fewer bits."""
        assert self.codec is not None
        return CodedPageLayout(self.codec, heads, sizes, dtype)

    def encode(self, pages: Sequence[int]) -> None:
        """Put full pages into fewer bits, in all layers. The caller has provided for it."""
        self.encode_slots(*self.both_slots(pages))
        self.pages.settle(pages)

    def both_slots(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where pages that have both forms lie: raw, and in fewer bits."""
        forms = self.pages.forms
        assert forms is not None
        return [forms.raw_of[page] for page in pages], [forms.coded_of[page] for page in pages]

    def encode_slots(self, raw: Sequence[int], coded: Sequence[int]) -> None:
        for storage in self.storages:  # one by one: what is computed on the way takes much memory
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
        """Of pages of which the first `coded` are read in fewer bits; or, if that is not said, all that can be."""
        return PageIndex(
            self._found(page, None if coded is None else count < coded) for count, page in enumerate(pages)
        )

    def _found(self, page: int, coded: bool | None) -> tuple[bool, int, int, int]:
        forms = self.pages.forms
        if forms is None or self.coded is None:
            return False, page, *self.slab_of(page)
        if coded if coded is not None else forms.is_coded(page):
            slot = forms.coded_of[page]
            return True, slot, *self.coded.slab_of(slot)
        slot = forms.raw_of[page]
        return False, slot, *self.slab_of(slot)

    def places(self, pages: Sequence[int]) -> list[int]:
        """Where some lie, in fewer bits wherever they do: those slots as -1 and less."""
        forms = self.pages.forms
        if forms is None:
            return list(pages)
        return [~forms.coded_of[page] if forms.is_coded(page) else forms.raw_of[page] for page in pages]

    def placed(self, places: Sequence[int]) -> PageIndex:
        """Of pages that lie there, whosever they are."""
        return PageIndex(map(self._placed, places))

    def _placed(self, place: int) -> tuple[bool, int, int, int]:
        if place >= 0:
            return False, place, *self.slab_of(place)
        assert self.coded is not None
        return True, ~place, *self.coded.slab_of(~place)

    def raw_index(self, slots: Sequence[int]) -> PageIndex:
        """Of raw slots, whosever they are."""
        return PageIndex((False, slot, *self.slab_of(slot)) for slot in slots)

    def trim(self) -> bool:
        forms = self.pages.forms
        if forms is None or self.coded is None:
            return super().trim()
        self.pages.trim(self.pages.occupied)
        return any([super().trim(), self.coded.trim()])
