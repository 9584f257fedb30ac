"""Groups of layers whose keys and values lie in the same pages, and what storing them in some way takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import PageForm
from ingot.cache.forms import Forms
from ingot.cache.pages import PageCopy, Pages, Table
from ingot.cache.pools import CodedStorage, PageIndex, Pool, Stored
from ingot.kernels import native

Run = tuple[int, int, int, int]
"""Tokens that are written one behind another: the first one's number in the launch, how many, the slot of their page,
where in it."""


class Storage(Stored):
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


class PageGroup(Pool[Storage]):
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
        forms = None if codec is None else Forms()
        self.pages = Pages(forms)
        super().__init__(self.pages if forms is None else forms.raw, token_bytes)
        self.coded: Pool[CodedStorage] | None = None if forms is None else Pool(forms.coded, coded_bytes)

    @property
    def pools(self) -> tuple[Pool[Any], ...]:
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
    def unpaid_bytes(self) -> int:
        """What records hold and none counts: pages that windows see, which a record that is gone had paid for."""
        return self.page_bytes * self.pages.unpaid

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

    def numbered(self, table: Table) -> np.ndarray[Any, np.dtype[np.int32]]:
        """A row's pages as the kernels know them: those that it sees in fewer bits as -1 and less."""
        raw = self.encoded[self.raw_slots(table.numbers)]
        if self.coded is None or not table.coded:
            return raw
        assert self.pages.forms is not None
        coded = np.frombuffer(self.pages.forms.coded_of, np.int32)[
            np.frombuffer(table.numbers, np.int32)[: table.coded]
        ]
        return np.concatenate([~self.coded.encoded[coded], raw[table.coded :]])

    def seen_slots(self, table: Table) -> bytes:
        """Where a row's pages lie as it sees them, the first `coded` in fewer bits; as int32."""
        forms = self.pages.forms
        if forms is None or not table.coded:
            return self.raw_slots(table.numbers).tobytes()
        raw = self.raw_slots(table.numbers[table.coded :])
        coded = np.frombuffer(forms.coded_of, np.int32)[np.frombuffer(table.numbers, np.int32)[: table.coded]]
        return coded.tobytes() + raw.tobytes()

    def native_table(self, table: Table) -> native.PageTable:
        """A row's pages as the native kernels take them."""
        forms = self.pages.forms
        if forms is None:
            return table.first, table.numbers
        coded, raw = table.numbers[: table.coded], table.numbers[table.coded :]
        return table.coded, self.raw_slots(raw), np.frombuffer(forms.coded_of, np.int32)[np.frombuffer(coded, np.int32)]

    def form(self, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> PageForm:
        """What a page of such a layer is in fewer bits."""
        assert self.codec is not None
        return PageForm(self.codec, heads, sizes, dtype)

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
