"""How a layer's keys and values are stored: in slabs by mlx, in slabs by GPU kernels, or in reserved memory by native
CPU kernels. Each has a raw storage and, where the group has a codec, a coded one.

Slabs are arrays [pages, heads, PAGE, size]. Each new one is a quarter of what exists, so that at most a quarter more is
allocated than was ever used, growing copies nothing, and a write that mlx cannot do in place copies one slab. Where
kernels take a limited number of slabs, each is large enough for these to add up to the budget. GPU kernels always write
in place. Native kernels use one array as long as the memory, of which only pages that were written are backed by
memory. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ingot.cache.arrays import concatenate
from ingot.cache.coded_pages import CodedPageLayout, KVPair, join_pages, pace_evaluation, page_slices
from ingot.cache.page_groups import SMALLEST_SLAB, CodedStorage, KVStorage, PageGroup, PageIndex, PagePool, TokenRun
from ingot.cache.pages import PAGE, PageCopy, PageTable
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.device import total_memory
from ingot.kernels.paged_attention.inputs import (
    MOST_QUERIES,
    KernelRows,
    KVSlabs,
    order_after,
    page_copies,
    token_slots,
)
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import LatentRopeKernel, RopeKernel
from ingot.kernels.paged_attention.shapes import CodedPages, CodedShape


class SlabStorage(KVStorage):
    """Written and read by mlx's own operations."""

    def __init__(self, group: PageGroup, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        super().__init__(group, heads, sizes, dtype)
        self._written: set[int] = set()
        if group.coded is not None:
            self.coded = self._make_coded(group.coded, group.form(heads, sizes, dtype))

    def _make_coded(self, pool: PagePool[CodedStorage], form: CodedPageLayout) -> CodedSlabs:
        return CodedSlabs(pool, form)

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in (*self.keys, *self.values))

    def provide(self) -> None:
        for pages in self._group.slabs[len(self.keys) :]:
            for slabs, size in zip((self.keys, self.values), self.sizes, strict=True):
                slabs.append(mx.zeros((pages, self.heads, PAGE, size), self.dtype))

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[TokenRun]) -> None:
        self.provide()
        for slabs, new in ((self.keys, keys), (self.values, values)):
            if new.size:
                self._put(slabs, new.astype(self.dtype), runs)

    def _put(self, slabs: list[mx.array], new: mx.array, runs: Sequence[TokenRun]) -> None:
        single: dict[int, list[tuple[int, int, int]]] = {}
        for token, count, slot, at in runs:
            slab, number = self._group.slab_of(slot)
            self._written.add(slab)
            if count == 1:
                single.setdefault(slab, []).append((token, number, at))
            else:
                slabs[slab][number, :, at : at + count] = new[token : token + count].swapaxes(0, 1)
        for slab, written in single.items():
            tokens, numbers, offsets = (_int32_array(list(each)) for each in zip(*written, strict=True))
            slabs[slab][numbers, :, offsets] = new if len(written) == new.shape[0] else new[tokens]

    @classmethod
    def copy_all(cls, storages: Sequence[SlabStorage], copies: Sequence[PageCopy]) -> None:
        for storage in storages:
            storage.copy(copies)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self.provide()
        for slabs in (self.keys, self.values):
            for source, target, tokens, _ in copies:
                (from_slab, from_number), (to_slab, to_number) = map(self._group.slab_of, (source, target))
                self._written.add(to_slab)
                if slabs[to_slab].size:
                    slabs[to_slab][to_number, :, :tokens] = slabs[from_slab][from_number, :, :tokens]

    def gathered(self, index: PageIndex) -> tuple[mx.array, mx.array]:
        pieces = self._pieces(index)
        if index.has_coded:
            mx.eval(self.keys, self.values)  # frees what earlier layers gathered
        keys, values = zip(*(pace_evaluation(pieces) if index.has_coded else pieces), strict=True)
        return concatenate(keys, axis=2), concatenate(values, axis=2)

    def _pieces(self, index: PageIndex) -> Iterator[KVPair]:
        """Keys and values of pages of the same slab and form; coded ones in batches that are decoded at once."""
        for (coded, slab), numbers in zip(index.runs, index.numbers(self.heads), strict=True):
            if coded:
                by_head = numbers.reshape(self.heads, -1)
                for pages in page_slices(by_head.shape[1]):
                    yield self._decode(slab, by_head[:, pages].reshape(-1))
            else:
                yield self._read(self.keys, slab, numbers), self._read(self.values, slab, numbers)

    def _read(self, slabs: list[mx.array], slab: int, numbers: mx.array) -> mx.array:
        """[1, heads, pages * PAGE, size] of some pages of a slab, head by head."""
        size = slabs[slab].shape[3]
        if not size:
            return mx.zeros((1, self.heads, numbers.size // self.heads * PAGE, 0), self.dtype)
        pages = mx.take(slabs[slab].reshape(-1, PAGE, size), self._ordered(numbers), axis=0)
        return pages.reshape(1, self.heads, -1, size)

    def _decode(self, slab: int, numbers: mx.array) -> tuple[mx.array, mx.array]:
        """The same of coded pages, keys and values."""
        assert isinstance(self.coded, CodedSlabs)
        pages = self.coded.read_slab(slab, self._ordered(numbers))
        keys, values = self.coded.form.decode(pages.reshape(self.heads, -1, pages.shape[-1]))
        keys, values = (part.reshape(1, self.heads, -1, part.shape[-1]) for part in (keys, values))
        return keys, values

    def whole_pages(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        keys, values = self.gathered(self._group.placed(slots))
        heads = ((part.reshape(self.heads, len(slots), PAGE, -1)).swapaxes(0, 1) for part in (keys, values))
        return next(heads), next(heads)

    def _ordered(self, numbers: mx.array) -> mx.array:
        """The same numbers, available once all earlier writes are done. With mlx's own writes that is always so."""
        return numbers

    def join(self, first: int) -> None:
        self.provide()
        for slabs in (self.keys, self.values):
            slabs[first : first + 2] = [mx.concatenate(slabs[first : first + 2])]
            mx.eval(slabs[first])
        self._written = {slab if slab <= first else slab - 1 for slab in self._written}

    def trim(self) -> None:
        del self.keys[len(self._group.slabs) :], self.values[len(self._group.slabs) :]
        self._written = set()

    def pending(self) -> list[mx.array]:
        written, self._written = self._written, set()
        return [slabs[slab] for slab in written for slabs in (self.keys, self.values)]


class KernelStorage(SlabStorage):
    """Written in place by GPU kernels, even while it is read. The slabs' arrays stay the same; a dependency token
    orders reads behind writes.

    Kernels that find slabs by their addresses do not keep them alive: whatever reads or writes them is evaluated before
    they are freed, and `trim` waits until the device is idle.
    """

    def __init__(
        self,
        group: PageGroup,
        heads: int,
        sizes: tuple[int, int],
        dtype: mx.Dtype,
        kernel: PagedAttention,
        kernels: CheckedKernels | PagedAttention,
    ) -> None:
        self._kernel, self._kernels = kernel, kernels
        super().__init__(group, heads, sizes, dtype)
        self._token = mx.zeros(1, mx.int32)
        self._slabs: KVSlabs | None = None
        self.most_slabs = kernel.most_slabs
        if kernel.most_slabs is not None:
            group.join(kernel.most_slabs)

    def _make_coded(self, pool: PagePool[CodedStorage], form: CodedPageLayout) -> CodedSlabs:
        shape = form.kernel_shape
        if shape is None or not self._kernels.reads(shape):
            return super()._make_coded(pool, form)
        return KernelCodedSlabs(pool, form, shape, self._kernel)

    def reads(self, rows: KernelRows) -> bool:
        """Whether the kernels can read all pages of these rows."""
        if not rows.coded:
            return True
        if not isinstance(self.coded, KernelCodedSlabs):
            return False
        return rows.most <= MOST_QUERIES or self._kernels.unpacks(self.coded.shape)

    def provide(self) -> None:
        if len(self.keys) != len(self._group.slabs) or self._slabs is None:
            super().provide()
            mx.eval(self.keys, self.values)
            self._slabs = KVSlabs(self.keys, self.values, before=self._slabs)

    def join(self, first: int) -> None:
        mx.eval(self._token)  # joining must not miss a pending write
        super().join(first)
        self._slabs = None

    @property
    def slabs(self) -> KVSlabs:
        self.provide()
        assert self._slabs is not None
        return self._slabs

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[TokenRun]) -> None:
        self.write_at(keys, values, self.places(runs))

    def places(self, runs: Sequence[TokenRun]) -> mx.array:
        """Where the kernel writes each token. Made once for all layers of a group."""
        encoded = self._group.encoded
        return token_slots([(encoded[slot], offset) for _, count, slot, at in runs for offset in range(at, at + count)])

    def write_at(self, keys: mx.array, values: mx.array, places: mx.array) -> None:
        keys, values = (part.astype(self.dtype) for part in (keys, values))
        self._token = self._kernel.write(keys, values, places, self.slabs, self._token)

    def turn(self, turning: RopeKernel, projected: mx.array, angles: mx.array, places: mx.array) -> mx.array:
        """Apply RoPE to a projection, write its keys and values, and return its queries."""
        queries, self._token = turning(projected, angles, places, self.slabs, self._token)
        return queries

    def turn_latents(
        self,
        turning: LatentRopeKernel,
        queries: mx.array,
        latents: mx.array,
        embedded: mx.array,
        angles: mx.array,
        places: mx.array,
    ) -> mx.array:
        """The same of latent attention."""
        turned, self._token = turning(queries, latents, embedded, angles, places, self.slabs, self._token)
        return turned

    def copy(self, copies: Sequence[PageCopy]) -> None:
        encoded = self._group.encoded
        made = page_copies([(encoded[source], encoded[target], tokens) for source, target, tokens, _ in copies])
        self._token = self._kernel.copy(made, self.slabs, self._token)

    def attend(self, kernel: PagedAttention, queries: mx.array, rows: KernelRows) -> mx.array:
        """The attention output [tokens, heads, size] of queries [tokens, heads, size]."""
        return kernel.attend(queries, rows, self.slabs, self._token, self.coded_pages if rows.coded else None)

    @property
    def coded_pages(self) -> CodedPages:
        """The coded pages, where the kernels read them."""
        assert isinstance(self.coded, KernelCodedSlabs)
        return self.coded.pages

    def rows(self, tables: Sequence[PageTable], lengths: Sequence[int], counts: Sequence[int]) -> KernelRows:
        """Rows of such lengths, whose last `counts` tokens attend. Made once for all layers of a group."""
        encoded = self._group.numbered(tables)
        widths, firsts = [len(table.numbers) for table in tables], [table.first for table in tables]
        coded = any(table.coded for table in tables)
        return KernelRows.of([encoded], lengths, firsts=firsts, counts=counts, coded=coded, widths=widths)

    # For compiled and captured steps, in which the token and the slabs, or their addresses, are inputs.

    @property
    def by_address(self) -> bool:
        return self.most_slabs is None

    @property
    def token(self) -> mx.array:
        return self._token

    def go_on(self, token: mx.array) -> None:
        """Something was written; later reads depend on this token."""
        self._token = token

    @property
    def addresses(self) -> mx.array:
        return self._kernel.addresses(self.slabs)

    @property
    def found(self) -> list[mx.array]:
        """What kernels find its slabs by: their addresses, or themselves."""
        return self._kernel.found(self.slabs)

    @contextmanager
    def standing_for(self, token: mx.array, found: Sequence[mx.array]) -> Iterator[None]:
        """While this is open, these are its token and what kernels find its slabs by."""
        own, self._token = self._token, token
        try:
            with self.slabs.standing_for(*found):
                yield
        finally:
            self._token = own

    def _ordered(self, numbers: mx.array) -> mx.array:
        return order_after(numbers, self._token)

    def trim(self) -> None:
        if len(self.keys) > len(self._group.slabs):
            mx.synchronize()
        super().trim()
        self._slabs = None

    def free(self) -> None:
        super().free()
        self._slabs = None

    def pending(self) -> list[mx.array]:
        return [self._token]


def _int32_array(numbers: list[int]) -> mx.array:
    return mx.array(numbers, dtype=mx.int32)


class CodedSlabs(CodedStorage):
    """Written and read by mlx's own operations."""

    def __init__(self, pool: PagePool[CodedStorage], form: CodedPageLayout) -> None:
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
        for index, slot in enumerate(slots):
            slab, number = self._pool.slab_of(slot)
            by_slab.setdefault(slab, []).append((index, number))
        for slab, written in by_slab.items():
            indices, numbers = (_int32_array(list(each)) for each in zip(*written, strict=True))
            self.slabs[slab][numbers] = pages if len(written) == len(slots) else pages[indices]
            self._written.add(slab)

    def read(self, slots: Sequence[int]) -> mx.array:
        self.provide()
        found = map(self._pool.slab_of, slots)
        return mx.concatenate([self.slabs[slab][number : number + 1] for slab, number in found]).view(mx.uint8)

    def read_slab(self, slab: int, numbers: mx.array) -> mx.array:
        """The bytes [numbers, head_bytes] of heads, by their numbers in a slab [pages * heads, ...]."""
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
    """Written in place and read directly by GPU kernels, which find slabs by their addresses: the arrays stay the
    same."""

    def __init__(
        self, pool: PagePool[CodedStorage], form: CodedPageLayout, shape: CodedShape, kernel: PagedAttention
    ) -> None:
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
        """As the kernels take them; a new object when their addresses change."""
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


class ReservedStorage(KVStorage):
    """Written and read by the native kernels: one array each for keys and values, as long as the memory. Only what was
    written is backed by memory."""

    def __init__(self, group: PageGroup, layers: int, heads: int, sizes: tuple[int, int], dtype: mx.Dtype) -> None:
        """`layers` is how many share the memory."""
        super().__init__(group, heads, sizes, dtype)
        most = max(SMALLEST_SLAB, total_memory() // (layers * PAGE * max(1, self.token_bytes)))
        self.keys, self.values = ([native.reserve_memory((most, heads, PAGE, size), dtype)] for size in sizes)
        if group.coded is not None:
            self.coded = ReservedCodedStorage(group.coded, layers, group.form(heads, sizes, dtype))

    @property
    def is_readable(self) -> bool:
        """Whether the native kernels read its coded pages, if it has any."""
        return self.coded is None or self.coded.form.native is not None

    @property
    def native_coded(self) -> tuple[mx.array, Any] | None:
        """Its coded pages, as the native kernels take them."""
        return (self.coded.pages, self.coded.form.native) if isinstance(self.coded, ReservedCodedStorage) else None

    @property
    def nbytes(self) -> int:
        return self._group.slots.used * PAGE * self.token_bytes

    def write(self, keys: mx.array, values: mx.array, runs: Sequence[TokenRun]) -> None:
        for slabs, new in ((self.keys, keys), (self.values, values)):
            for token, count, slot, at in runs:
                part = new[token : token + count].swapaxes(0, 1).astype(self.dtype)
                slabs[0] = native.write_tokens(slabs[0], slot, at, part)

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
                    read.append(join_pages(pages))
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
            native.discard_pages(slab, free)

    def pending(self) -> list[mx.array]:
        return [self.keys[0], self.values[0]]


class ReservedCodedStorage(CodedStorage):
    """The same for coded pages: bytes [pages, heads, 1, head_bytes]."""

    def __init__(self, pool: PagePool[CodedStorage], layers: int, form: CodedPageLayout) -> None:
        super().__init__(pool, form)
        most = max(SMALLEST_SLAB, total_memory() // (layers * form.page_bytes))
        self.pages = native.reserve_memory((most, form.heads, 1, form.head_bytes), mx.uint8)

    @property
    def nbytes(self) -> int:
        return self._pool.slots.used * self.form.page_bytes

    def put(self, slots: Sequence[int], pages: mx.array) -> None:
        for index, slot in enumerate(slots):
            self.pages = native.write_tokens(self.pages, slot, 0, pages[index][:, None])

    def read(self, slots: Sequence[int]) -> mx.array:
        return mx.concatenate([self.pages[slot : slot + 1, :, 0] for slot in slots])

    def trim(self) -> None:
        native.discard_pages(self.pages, sorted(self._pool.slots.free))

    def free(self) -> None:
        self.pages = mx.zeros(0, mx.uint8)

    def pending(self) -> list[mx.array]:
        return [self.pages]
