"""Keys and values for the native kernels: arrays [pages, heads, PAGE, size] as long as memory could be, of which only
what was written to exists. Only the engine thread may call anything here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ingot.cache.coded_pages import PageForm, in_one
from ingot.cache.page_groups import PageGroup, Run, Storage
from ingot.cache.pages import PAGE, PageCopy
from ingot.cache.pools import SMALLEST_SLAB, CodedStorage, PageIndex, Pool
from ingot.kernels import native
from ingot.kernels.device import total_memory


class ReservedStorage(Storage):
    """Written and read by the native kernels. One array each, as long as memory could be; what is not written to does
    not exist."""

    def __init__(self, group: PageGroup, layers: int, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        """`layers` are those that share the memory."""
        super().__init__(group, heads, sizes, dtype)
        most = max(SMALLEST_SLAB, total_memory() // (layers * PAGE * max(1, self.token_bytes)))
        self.keys, self.values = ([native.reserve((most, heads, PAGE, size), dtype)] for size in sizes)
        if group.coded is not None:
            self.coded = CodedReserve(group.coded, layers, group.form(heads, sizes, dtype))

    @property
    def is_readable(self) -> bool:
        """Whether the native kernels read what it has in fewer bits, if it has any."""
        return self.coded is None or self.coded.form.native is not None

    @property
    def native_coded(self) -> tuple[mx.array, Any] | None:
        """Its pages in fewer bits, as the native kernels take them."""
        return (self.coded.pages, self.coded.form.native) if isinstance(self.coded, CodedReserve) else None

    @property
    def nbytes(self) -> int:
        return self._group.slots.used * PAGE * self.token_bytes

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        for slabs, new in ((self.keys, keys), (self.values, values)):
            for token, count, slot, at in runs:
                own = new[token : token + count].swapaxes(0, 1).astype(self.dtype)
                slabs[0] = native.write_tokens(slabs[0], slot, at, own)

    @classmethod
    def copy_all(cls, storages: Sequence[ReservedStorage], copies: Sequence[PageCopy]) -> None:
        """In one operation for all layers."""
        arrays = [slab for storage in storages for slab in (storage.keys[0], storage.values[0])]
        copied = iter(native.copy_tokens(arrays, [copy[:3] for copy in copies]))
        for storage in storages:
            storage.keys[0], storage.values[0] = next(copied), next(copied)

    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        keys: list[mx.array] = []
        values: list[mx.array] = []
        for (coded, _), slots in zip(index.runs, index.slots, strict=True):
            if coded:
                for read, pages in zip((keys, values), self.decoded(slots), strict=True):
                    read.append(in_one(pages))
            else:
                keys += [self.keys[0][slot : slot + 1] for slot in slots]
                values += [self.values[0][slot : slot + 1] for slot in slots]
        return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)

    def whole_pages(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        keys, values = (
            mx.concatenate([slab[slot : slot + 1] for slot in slots]) for slab in (self.keys[0], self.values[0])
        )
        return keys, values

    def trim(self) -> None:
        free = sorted(self._group.slots.free)
        for slab in (self.keys[0], self.values[0]):
            native.discard(slab, free)

    def pending(self) -> list[mx.array]:
        return [self.keys[0], self.values[0]]


class CodedReserve(CodedStorage):
    """The same for pages in fewer bits: bytes [pages, heads, 1, head_bytes]."""

    def __init__(self, pool: Pool[CodedStorage], layers: int, form: PageForm) -> None:
        super().__init__(pool, form)
        most = max(SMALLEST_SLAB, total_memory() // (layers * form.page_bytes))
        self.pages = native.reserve((most, form.heads, 1, form.head_bytes), mx.uint8)

    @property
    def nbytes(self) -> int:
        return self._pool.slots.used * self.form.page_bytes

    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        for place, slot in enumerate(slots):
            self.pages = native.write_tokens(self.pages, slot, 0, pages[place][:, None])

    def read(self, slots: Sequence[int]) -> mx.array:
        return mx.concatenate([self.pages[slot : slot + 1, :, 0] for slot in slots])

    def trim(self) -> None:
        native.discard(self.pages, sorted(self._pool.slots.free))

    def free(self) -> None:
        self.pages = mx.zeros(0, mx.uint8)

    def pending(self) -> list[mx.array]:
        return [self.pages]
