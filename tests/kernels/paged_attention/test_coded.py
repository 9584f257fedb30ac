"""Attention over pages in fewer bits, kernel for kernel as a GPU would run it, against attention over what they are
decoded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import CodedPageLayout
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.paged_attention.inputs import PAGE_LIMIT, KernelRows, KVSlabs, page_number
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, CodedPages
from tests.kernels.paged_attention.memory import BOUNDS, START, Memory, Variant, emulated

pytestmark = emulated
CODED_SLAB = 3
"""Pages in a slab of coded ones: few, so that there are several slabs."""


class CodedMemory:
    """Rows whose first pages are coded, and the same rows with what those are decoded to."""

    def __init__(
        self, variant: Variant, lengths: Sequence[int], counts: Sequence[int], coded: Sequence[int], codec: str
    ) -> None:
        shape = variant.shape
        self.memory = Memory(variant, lengths, counts=counts)
        self.form = CodedPageLayout(
            PairCodec(CodecName.parse(codec)), shape.kv_heads, (shape.key_size, shape.value_size), variant.dtype
        )
        raw = [
            np.array(mx.stack(list(side)).astype(mx.float32))
            for side in (self.memory.slabs.keys, self.memory.slabs.values)
        ]
        self.tables = [list(table) for table in self.memory.tables]
        made: list[mx.array] = []
        for table, count in zip(self.tables, coded, strict=True):
            for place in range(count):
                slab, index = divmod(table[place], PAGE_LIMIT)
                sides = [mx.array(side[slab, index][None]).astype(variant.dtype) for side in raw]
                page = self.form.encode(sides[0], sides[1])
                for side, decoded in zip(raw, self.form.decode(page), strict=True):
                    side[slab, index] = np.array(decoded[0].astype(mx.float32))
                table[place] = ~page_number(len(made) // CODED_SLAB, len(made) % CODED_SLAB)
                made.append(page.view(mx.int32))
        made += [mx.zeros_like(made[0])] * (-len(made) % CODED_SLAB)
        self.coded = [mx.concatenate(made[at : at + CODED_SLAB]) for at in range(0, len(made), CODED_SLAB)]
        sides = [[mx.array(slab).astype(variant.dtype) for slab in side] for side in raw]
        self.decoded = KVSlabs(sides[0], sides[1])
        mx.eval(self.coded, sides)

    def pages(self, attention: PagedAttention) -> CodedPages:
        found = self.form.kernel_shape
        assert found is not None and attention.reads(found)
        return CodedPages(found, found.constants(self.form.sizes[1]), attention.locate(self.coded))

    def rows(self) -> KernelRows:
        return KernelRows.of(self.tables, self.memory.lengths, counts=self.memory.counts)


@pytest.mark.parametrize("codec", ["k8v4", "affine8", "affine4", "affine4/affine8"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_coded_pages_are_read_as_what_they_are_decoded_to(codec: str, dtype: mx.Dtype) -> None:
    variant = Variant(AttentionShape(8, 2, 64, 64), dtype, tuning=TUNINGS["cuda"])
    memory = CodedMemory(variant, [70, 700, 1300], [1, 1, 1], [1, 9, 16], codec)
    _compare(variant, memory)


@pytest.mark.parametrize(("group", "size", "codec"), [(4, 128, "k8v4"), (6, 64, "k8v4"), (5, 96, "affine4/affine8")])
def test_many_queries_over_heads_of_any_size(group: int, size: int, codec: str) -> None:
    variant = Variant(AttentionShape(group, 1, size, size), mx.bfloat16, tuning=TUNINGS["cuda"])
    _compare(variant, CodedMemory(variant, [600, 1100], [5, 3], [8, 15], codec))


def test_a_warp_may_take_more_keys_at_once() -> None:
    usual = TUNINGS["cuda"]
    assert usual.matrix is not None
    for keys in (16, 32):
        tuning = replace(usual, matrix=replace(usual.matrix, coded=keys))
        variant = Variant(AttentionShape(4, 1, 64, 64), mx.bfloat16, tuning=tuning)
        _compare(variant, CodedMemory(variant, [700, 1100], [1, 3], [9, 16], "k8v4"))


@pytest.mark.parametrize("factor", [0.0, 2.0**-100, 2.0**60], ids=str)
def test_queries_may_be_of_any_size(factor: float) -> None:
    """They are multiplied as halves, which hold neither."""
    variant = Variant(AttentionShape(4, 1, 64, 64), mx.bfloat16, tuning=TUNINGS["cuda"])
    memory = CodedMemory(variant, [700], [1], [9], "k8v4")
    memory.memory.queries = (memory.memory.queries * factor).astype(mx.bfloat16)
    _compare(variant, memory)


@pytest.mark.parametrize(("keys", "size"), [("turbo4", 64), ("affine8", 256), ("affine8", 32)])
def test_what_has_no_kernel_is_not_read(keys: str, size: int) -> None:
    form = CodedPageLayout(PairCodec(CodecName.parse(f"{keys}/turbo4")), 1, (size, size), mx.bfloat16)
    attention = Variant(AttentionShape(4, 1, size, size), mx.bfloat16, tuning=TUNINGS["cuda"]).attention()
    assert form.kernel_shape is None or not attention.reads(form.kernel_shape)


def _compare(variant: Variant, memory: CodedMemory) -> None:
    attention = variant.attention(Emulator(7))
    found = attention.attend(memory.memory.queries, memory.rows(), memory.memory.slabs, START, memory.pages(attention))
    wanted = attention.attend(memory.memory.queries, memory.memory.rows(), memory.decoded, START)
    one, other = (np.array(each.astype(mx.float32)) for each in (found, wanted))
    assert np.isfinite(one).all()
    assert np.abs(one - other).max() <= BOUNDS[variant.dtype] * np.abs(other).max()


def test_a_query_s_bits_depend_on_its_row_alone() -> None:
    variant = Variant(AttentionShape(4, 1, 64, 64), mx.bfloat16, tuning=TUNINGS["cuda"])
    memory = CodedMemory(variant, [700, 1300], [1, 1], [9, 16], "k8v4")
    attention = variant.attention(Emulator(3))
    coded, queries = memory.pages(attention), memory.memory.queries
    both = attention.attend(queries, memory.rows(), memory.memory.slabs, START, coded)
    for row in range(2):
        alone = KernelRows.of([memory.tables[row]], [memory.memory.lengths[row]])
        own = attention.attend(mx.contiguous(queries[row : row + 1]), alone, memory.memory.slabs, START, coded)
        assert mx.array_equal(own[0], both[row])


def test_a_query_s_bits_do_not_depend_on_how_many_it_is_beside() -> None:
    variant = Variant(AttentionShape(4, 1, 64, 64), mx.bfloat16, tuning=TUNINGS["cuda"])
    memory = CodedMemory(variant, [700], [6], [9], "k8v4")
    attention = variant.attention(Emulator(3))
    coded, queries, slabs = memory.pages(attention), memory.memory.queries, memory.memory.slabs
    all_six = attention.attend(queries, memory.rows(), slabs, START, coded)
    for place in range(6):
        alone = KernelRows.of(memory.tables, [700 - 5 + place])
        own = attention.attend(mx.contiguous(queries[place : place + 1]), alone, slabs, START, coded)
        assert mx.array_equal(own[0], all_six[place])
