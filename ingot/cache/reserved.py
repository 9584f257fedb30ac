"""Keys and values for the native kernels: arrays [pages, heads, PAGE, size] as long as memory could be, of which only
what was written to exists. Only the engine thread may call anything here."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ingot.cache.groups import SMALLEST_SLAB, PageGroup, PageIndex, Run, Storage
from ingot.cache.pages import PAGE, PageCopy
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

    @property
    def nbytes(self) -> int:
        return self._group.pages.used * PAGE * self.token_bytes

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[Run]) -> None:
        for slabs, new in ((self.keys, keys), (self.values, values)):
            for token, count, page, at in runs:
                own = new[token : token + count].swapaxes(0, 1).astype(self.dtype)
                slabs[0] = native.write_tokens(slabs[0], page, at, own)

    @classmethod
    def copy_all(cls, storages: Sequence[ReservedStorage], copies: Sequence[PageCopy]) -> None:
        """In one operation for all layers."""
        arrays = [slab for storage in storages for slab in (storage.keys[0], storage.values[0])]
        copied = iter(native.copy_tokens(arrays, copies))
        for storage in storages:
            storage.keys[0], storage.values[0] = next(copied), next(copied)

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
