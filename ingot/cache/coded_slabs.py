"""Pages in fewer bits, in slabs [pages, heads, words]. Only the engine thread may call anything here."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ingot.cache.coded_pages import PageForm
from ingot.cache.pools import CodedStorage, Pool
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import CodedPages, CodedShape


class CodedSlabs(CodedStorage):
    """Written and read by mlx's own operations."""

    def __init__(self, pool: Pool[CodedStorage], form: PageForm) -> None:
        super().__init__(pool, form)
        self.slabs: list[mx.array] = []
        self._written: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def provide(self) -> None:
        for pages in self._pool.slabs[len(self.slabs) :]:
            self.slabs.append(mx.zeros((pages, self.form.heads, self.form.head_bytes // 4), mx.int32))

    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        self.provide()
        pages = pages.view(mx.int32)
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
        return mx.concatenate([self.slabs[slab][number : number + 1] for slab, number in found]).view(mx.uint8)

    def read_slab(self, slab: int, numbers: mx.array) -> mx.array:
        """The bytes [numbers, head_bytes] of heads of pages: the numbers of heads, one page's behind another's."""
        self.provide()
        words = self.slabs[slab].shape[2]
        return mx.take(self.slabs[slab].reshape(-1, words), numbers, axis=0).view(mx.uint8)

    def join(self, first: int) -> None:
        self.provide()
        self.slabs[first : first + 2] = [mx.concatenate(self.slabs[first : first + 2])]
        mx.eval(self.slabs[first])
        self._written = {slab if slab <= first else slab - 1 for slab in self._written}

    def trim(self) -> None:
        del self.slabs[len(self._pool.slabs) :]
        self._written = set()

    def free(self) -> None:
        self.slabs.clear()

    def pending(self) -> list[mx.array]:
        written, self._written = self._written, set()
        return [self.slabs[slab] for slab in written]


class KernelCodedSlabs(CodedSlabs):
    """Written in place and read as they lie by the kernels of a GPU, which find slabs by their addresses: these arrays
    stay the same."""

    def __init__(self, pool: Pool[CodedStorage], form: PageForm, shape: CodedShape, kernel: PagedAttention) -> None:
        super().__init__(pool, form)
        self._kernel, self.shape = kernel, shape
        self._constants = shape.constants(form.sizes[1])
        self._pages: CodedPages | None = None
        self._stored = mx.zeros(1, mx.int32)

    def provide(self) -> None:
        if len(self.slabs) != len(self._pool.slabs) or self._pages is None:
            super().provide()
            mx.eval(self.slabs)
            addresses = self._kernel.locate(self.slabs)
            mx.eval(addresses)
            self._pages = CodedPages(self.shape, self._constants, addresses)

    @property
    def pages(self) -> CodedPages:
        """As the kernels take them: another object when they lie elsewhere."""
        self.provide()
        assert self._pages is not None
        return self._pages

    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        numbers = mx.array(self._pool.encoded[list(slots)])
        self._stored = self._kernel.store(pages.view(mx.int32), numbers, self.pages.addresses, self._stored)

    def join(self, first: int) -> None:
        mx.eval(self._stored)
        super().join(first)
        self._pages = None

    def trim(self) -> None:
        super().trim()
        self._pages = None

    def free(self) -> None:
        super().free()
        self._pages = None

    def pending(self) -> list[mx.array]:
        return [self._stored]
