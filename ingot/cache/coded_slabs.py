"""Pages in fewer bits as slabs of bytes [pages, heads, bytes], written and read by mlx's own operations. Only the
engine thread may call anything here."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ingot.cache.groups import CodedStorage, Pool
from ingot.cache.page_form import PageForm


class CodedSlabs(CodedStorage):
    def __init__(self, pool: Pool[CodedStorage], form: PageForm) -> None:
        super().__init__(pool, form)
        self.slabs: list[mx.array] = []
        self._written: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def provide(self) -> None:
        for pages in self._pool.slabs[len(self.slabs) :]:
            self.slabs.append(mx.zeros((pages, self.form.heads, self.form.head_bytes), mx.uint8))

    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        self.provide()
        by_slab: dict[int, list[tuple[int, int]]] = {}
        for place, slot in enumerate(slots):
            slab, number = self._pool.slab_of(slot)
            by_slab.setdefault(slab, []).append((place, number))
        for slab, written in by_slab.items():
            places, numbers = (mx.array(list(each), dtype=mx.int32) for each in zip(*written, strict=True))
            self._put(slab, numbers, pages if len(written) == len(slots) else pages[places])

    def _put(self, slab: int, numbers: mx.array, pages: mx.array) -> None:
        self.slabs[slab][numbers] = pages
        self._written.add(slab)

    def read(self, slots: Sequence[int]) -> mx.array:
        self.provide()
        found = [(slab, number) for slab, number in map(self._pool.slab_of, slots)]
        return mx.concatenate([self.slabs[slab][number : number + 1] for slab, number in found])

    def read_slab(self, slab: int, numbers: mx.array) -> mx.array:
        """The bytes [numbers, head_bytes] of heads of pages: the numbers of heads, one page's behind another's."""
        self.provide()
        return mx.take(self.slabs[slab].reshape(-1, self.form.head_bytes), numbers, axis=0)

    def join(self, first: int) -> None:
        self.provide()
        self.slabs[first : first + 2] = [mx.concatenate(self.slabs[first : first + 2])]
        mx.eval(self.slabs[first])
        self._written = {slab if slab <= first else slab - 1 for slab in self._written}

    def trim(self) -> None:
        del self.slabs[len(self._pool.slabs) :]
        self._written = set()

    def pending(self) -> list[mx.array]:
        written, self._written = self._written, set()
        return [self.slabs[slab] for slab in written]
