"""Attention over pages, kernel for kernel as a GPU would run it, against float64."""

from __future__ import annotations

import re
from dataclasses import replace
from operator import is_

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, KernelText, LaunchConfig, OutputSpec
from ingot.kernels.paged_attention.inputs import KernelRows, KVSlabs, page_copies, token_slots
from ingot.kernels.paged_attention.shapes import TUNINGS, AttentionShape, AttentionTuning, KVSplits
from tests.kernels.paged_attention.memory import START, VECTORS, Memory, Variant, check, emulated

pytestmark = emulated
AWKWARD = [1, 63, 64, 65, 700]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("group", range(1, 17))
def test_any_number_of_queries_shares_a_head_of_keys(group: int) -> None:
    variant = Variant(AttentionShape(2 * group, 2, 32, 32))
    memory = Memory(variant, [1, 70, 515])
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [16, 48, 64, 80, 96, 112, 128, 192, 256])
def test_heads_of_any_size(size: int) -> None:
    variant = Variant(AttentionShape(4, 2, size, size), mx.float16, tuning=TUNINGS["metal"])
    memory = Memory(variant, AWKWARD)
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("key_size", "value_size"), [(64, 128), (192, 112)])
def test_keys_and_values_of_different_sizes_in_any_dtype(key_size: int, value_size: int, dtype: mx.Dtype) -> None:
    variant = Variant(AttentionShape(6, 2, key_size, value_size, page=128), dtype)
    memory = Memory(variant, AWKWARD)
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize("page", [64, 512])
def test_caps_sinks_and_windows_together(kind: str, page: int) -> None:
    shape = AttentionShape(8, 1, 64, 64, page)
    variant = Variant(shape, mx.float32, 5.0, True, 300, TUNINGS[kind])  # type: ignore[index]
    memory = Memory(variant, [1, 300, 301, 1100])
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


@pytest.mark.parametrize(
    "tuning", [AttentionTuning(64, 8, 4, 8), AttentionTuning(256, 1, 2, 4), AttentionTuning(128, 2, 8, 8)], ids=repr
)
def test_the_result_is_the_same_however_the_work_is_cut(tuning: AttentionTuning) -> None:
    variant = Variant(AttentionShape(5, 1, 64, 64), mx.float32, tuning=tuning)
    memory = Memory(variant, [1, 255, 1500])
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


def test_more_splits_than_threads_that_merge_them() -> None:
    variant = Variant(AttentionShape(1, 1, 16, 16), mx.float32, tuning=AttentionTuning(16, 1, 1, 4))
    memory = Memory(variant, [64 * 130 + 5, 64 * 128])
    check(memory, variant.attention(Emulator(3)).attend(memory.queries, memory.rows(), memory.slabs, START))


lengths = st.lists(st.integers(1, 1300), min_size=1, max_size=4)


@given(lengths, st.integers(0, 3), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_rows_of_any_lengths_that_share_pages(lengths: list[int], shared: int, seed: int) -> None:
    variant = Variant(AttentionShape(4, 1, 64, 64))
    memory = Memory(variant, lengths, shared=shared, seed=seed)
    attended = variant.attention(Emulator(seed)).attend(memory.queries, memory.rows(), memory.slabs, START)
    check(memory, attended)


@given(lengths, st.booleans(), st.sampled_from([1, 100, 513]), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_a_table_may_begin_where_the_window_does(lengths: list[int], trimmed: bool, window: int, seed: int) -> None:
    variant = Variant(AttentionShape(3, 1, 64, 64), mx.float32, window=window)
    memory = Memory(variant, lengths, seed=seed)
    rows = memory.rows(trimmed=trimmed)
    check(memory, variant.attention(Emulator(seed)).attend(memory.queries, rows, memory.slabs, START))


@given(st.lists(st.tuples(st.integers(1, 1100), st.integers(1, 16)), min_size=1, max_size=3), st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_several_queries_of_a_row_see_what_comes_before_them(rows: list[tuple[int, int]], seed: int) -> None:
    variant = Variant(AttentionShape(6, 2, 64, 64), mx.float32, window=90)
    counts = [*(min(length, count) for length, count in rows), 4]
    memory = Memory(variant, [*(length for length, _ in rows), 4], counts=counts, seed=seed)
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_sixteen_queries_beside_one_with_caps_and_sinks(kind: str, size: int) -> None:
    variant = Variant(AttentionShape(4, 1, size, size), mx.bfloat16, 5.0, True, None, TUNINGS[kind])  # type: ignore[index]
    memory = Memory(variant, [600, 16, 90, 530], counts=[1, 16, 16, 5])
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


def test_groups_before_a_window_are_not_launched() -> None:
    rows = KernelRows.of([range(2000)], [100_000])
    assert rows.splits(KVSplits(512, False), 0) == 256, "room for 196"
    assert rows.splits(KVSplits(512, False), 128) == 1
    assert rows.splits(KVSplits(512, False), 1024) == 4
    assert rows.splits(KVSplits(128, True), 0) == 256, "room for 206"


@given(st.sampled_from([64, 128]), st.booleans(), st.integers(0, 40_000))
def test_kv_splits_lie_one_behind_another_and_are_of_three_sizes(size: int, grow: bool, place: int) -> None:
    splits = KVSplits(size, grow)
    number = splits.number_at(place)
    begin = next(at for at in range(place, -1, -1) if at == 0 or splits.number_at(at - 1) < number)
    assert splits.number_at(begin) == number and place - begin < splits.most
    assert begin % size == 0 and (begin == 0 or splits.number_at(begin - 1) == number - 1)
    wanted = 1 if not grow or number < 8 else 2 if number < 16 else 4
    assert splits.number_at(begin + wanted * size - 1) == number
    assert splits.number_at(begin + wanted * size) == number + 1


@pytest.mark.parametrize("tuning", [VECTORS, TUNINGS["cuda"], TUNINGS["metal"]], ids=str)
def test_rows_that_reach_into_larger_splits(tuning: AttentionTuning) -> None:
    variant = Variant(AttentionShape(2, 1, 64, 64), mx.bfloat16, None, False, None, replace(tuning, split=64))
    memory = Memory(variant, [511, 513, 1540, 2000], counts=[1, 3, 2, 1])
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


class Launched(Emulator):
    """Keeps what was launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, list[mx.array]]] = []

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        self.launched.append((kernel.name, inputs))
        return super().__call__(kernel, inputs, work)


def test_slabs_are_padded_to_what_there_are_kernels_for() -> None:
    variant, launched = Variant(AttentionShape(1, 1, 64, 64), mx.float32, tuning=TUNINGS["metal"]), Launched()
    attention, slab, other = variant.attention(launched), *(mx.zeros((1, 1, 64, 64)) for _ in range(2))
    for count, taken in [(1, 4), (4, 4), (5, 11), (11, 11)]:
        attention.copy(page_copies([(-1, 0, 1)]), KVSlabs([slab] * count, [other] * count), START)
        slabs = launched.launched[-1][1][2:]
        assert all(map(is_, slabs, [slab] * taken + [other] * taken)) and len(slabs) == 2 * taken
    with pytest.raises(ValueError, match="12 slabs: kernels take at most 11"):
        attention.copy(page_copies([(-1, 0, 1)]), KVSlabs([slab] * 12, [other] * 12), START)


def test_slabs_that_are_found_by_address_are_located_once_each_and_are_no_inputs() -> None:
    variant, launched = Variant(AttentionShape(1, 1, 64, 64), mx.float32), Launched()
    attention, made = variant.attention(launched), [mx.zeros((1, 1, 64, 64)) for _ in range(42)]
    first = KVSlabs(made[:20], made[:20])
    attention.copy(page_copies([(-1, 0, 1)]), first, START)
    more = KVSlabs(made, made, before=first)
    for _ in range(2):
        attention.copy(page_copies([(-1, 0, 1)]), more, START)
    assert [name for name, _ in launched.launched] == [*["locate"] * 20, "copy", *["locate"] * 22, "copy", "copy"]
    assert [len(inputs) for name, inputs in launched.launched if name == "copy"] == [3] * 3


@pytest.mark.parametrize("kind", ["cuda", "metal"])
def test_pages_lie_in_any_slab(kind: str) -> None:
    variant = Variant(AttentionShape(2, 1, 32, 48), mx.float16, tuning=TUNINGS[kind])  # type: ignore[index]
    memory = Memory(variant, [700, 130, 64], slabs=40 if kind == "cuda" else 11)
    check(memory, variant.attention().attend(memory.queries, memory.rows(), memory.slabs, START))


def test_no_input_is_so_small_that_metal_compiles_another_kernel_for_it() -> None:
    rows = KernelRows.of([[3]], [1])
    small = [rows.table, rows.rows, token_slots([(0, 1)]), page_copies([(0, 1, 2)])]
    assert all(8 <= array.size <= 12 for array in small)
    assert token_slots([(0, 1)]).tolist() == [[0, 1], *[[-1, -1]] * 3]


class Exact(Emulator):
    """Does not round what it gives, as rounding hides in which order numbers were added up."""

    def __call__(self, kernel: Kernel, inputs: list[mx.array], work: LaunchConfig) -> list[mx.array]:
        exact = tuple(OutputSpec(output.shape, mx.float32) for output in work.outputs)
        return super().__call__(kernel, inputs, work._replace(outputs=exact))

    def rewritten(self, text: KernelText) -> KernelText:
        return text._replace(body=re.sub(r"T\((\S+) / sum\)", r"\1 / sum", text.body))


def _alone(variant: Variant, memory: Memory, row: int, place: int, count: int) -> np.ndarray:
    """What the row's query at `place` of its queries gives, asked for as the last of so many."""
    first, behind = sum(memory.counts[:row]), memory.counts[row] - 1 - place
    rows = KernelRows.of([memory.tables[row]], [memory.lengths[row] - behind], counts=[count])
    queries = memory.queries[first + place + 1 - count : first + place + 1]
    return np.array(variant.attention(Exact()).attend(queries, rows, memory.slabs, START)[-1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tuning", [VECTORS, TUNINGS["cuda"]], ids=["vectors", "matrices"])
@pytest.mark.parametrize(
    ("heads", "dtype", "window"),
    [(6, mx.bfloat16, None), (6, mx.bfloat16, 100), (2, mx.float16, 600), (8, mx.float32, None)],
    ids=str,
)
def test_a_querys_bits_are_the_same_alone_beside_others_and_among_other_queries(
    heads: int, dtype: mx.Dtype, window: int | None, tuning: AttentionTuning
) -> None:
    variant = Variant(AttentionShape(heads, 2, 64, 80), dtype, window=window, tuning=tuning)
    memory = Memory(variant, [3, 130, 1029], counts=[1, 3, 16])
    attended = np.array(variant.attention(Exact()).attend(memory.queries, memory.rows(), memory.slabs, START))
    for row, count in enumerate(memory.counts):
        for place in range(count):
            found = attended[sum(memory.counts[:row]) + place]
            for before in {1, min(place + 1, 2), place + 1}:
                assert np.array_equal(_alone(variant, memory, row, place, before), found), (row, place, before)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("tuning", "kernel"), [(VECTORS, "attend"), (TUNINGS["cuda"], "attend_wide")], ids=str)
def test_rows_of_one_split_need_no_merging_and_have_the_same_bits_without(
    tuning: AttentionTuning, kernel: str, sinks: bool
) -> None:
    variant, launched = Variant(AttentionShape(6, 2, 64, 80), mx.bfloat16, None, sinks, None, tuning), Launched()
    memory = Memory(variant, [3, 90, 128, 129], counts=[1, 3, 2, 1])
    attention = variant.attention(launched)
    together = attention.attend(memory.queries, memory.rows(), memory.slabs, START)
    short = KernelRows.of(memory.tables[:3], memory.lengths[:3], counts=memory.counts[:3])
    alone = attention.attend(memory.queries[:6], short, memory.slabs, START)
    names = [name for name, _ in launched.launched if name != "locate"]
    assert names == [kernel, "merge", kernel]
    assert mx.array_equal(alone, together[:6]).item()
    check(memory, together)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (AttentionShape(8, 2, 72, 64), "multiples of 16 up to 576 and 512"),
        (AttentionShape(8, 2, 64, 528), "multiples of 16 up to 576 and 512"),
        (AttentionShape(8, 1, 512, 80, latent=True), "multiples of 16 up to 576 and 512"),
        (AttentionShape(258, 2, 64, 64), "at most 128 share one"),
        (AttentionShape(5, 2, 64, 64), "at most 128 share one"),
        (AttentionShape(8, 2, 64, 64, page=96), "64, 128, 256, 512"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_name(shape: AttentionShape, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Variant(shape).attention()


def test_too_many_slabs_queries_or_dtypes_are_refused() -> None:
    slab = mx.zeros((1, 1, 64, 64), mx.bfloat16)
    with pytest.raises(ValueError, match="at most 2047"):
        KVSlabs([slab] * 2048, [slab] * 2048)
    with pytest.raises(ValueError, match="different dtypes"):
        KVSlabs([slab], [slab.astype(mx.float16)])
    attention, slabs = Variant(AttentionShape(1, 1, 64, 64)).attention(), KVSlabs([slab], [slab])
    with pytest.raises(ValueError, match=r"float16 where .*bfloat16 was said"):
        attention.attend(mx.zeros((1, 1, 64), mx.float16), KernelRows.of([[0]], [1]), slabs, START)
    for dtype, kind in ((mx.float32, "cuda"), (mx.bfloat16, "metal")):
        attention, slab = (
            Variant(AttentionShape(1, 1, 64, 64), dtype, tuning=TUNINGS[kind]).attention(),
            slab.astype(dtype),
        )  # type: ignore[index]
        with pytest.raises(ValueError, match="17 queries in a row: at most 16"):
            rows = KernelRows.of([[0]], [17], counts=[17])
            attention.attend(mx.zeros((17, 1, 64), dtype), rows, KVSlabs([slab], [slab]), START)
    with pytest.raises(ValueError, match="int32: there are kernels for"):
        Variant(AttentionShape(1, 1, 64, 64), mx.int32).attention()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [48, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_matrix_units_attend_for_rows_of_any_width(size: int, dtype: mx.Dtype) -> None:
    variant = Variant(AttentionShape(10, 2, size, size), dtype, 7.0, True, 290, TUNINGS["cuda"])
    memory = Memory(variant, [1, 63, 700, 16, 1029], counts=[1, 4, 16, 16, 3])
    in_order = variant.attention().attend(memory.queries, memory.rows(trimmed=True), memory.slabs, START)
    check(memory, in_order)
    drawn = variant.attention(Emulator(5)).attend(memory.queries, memory.rows(), memory.slabs, START)
    assert mx.array_equal(in_order, drawn).item(), "whatever the order of threads"


LARGE = [
    AttentionShape(4, 2, 512, 512),
    AttentionShape(3, 1, 320, 288, page=128),
    AttentionShape(20, 1, 512, 64, latent=True),
    AttentionShape(5, 1, 48, 16, latent=True),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("tuning", [VECTORS, TUNINGS["metal"], TUNINGS["cuda"]], ids=["vectors", "metal", "matrices"])
def test_large_heads_and_latents_with_caps_and_sinks(shape: AttentionShape, tuning: AttentionTuning) -> None:
    variant = Variant(shape, mx.bfloat16, 7.0, True, tuning=tuning)
    memory = Memory(variant, [1, 64, 16, 577], counts=[1, 2, 16, 3])
    attention = variant.attention()
    found = attention.attend(memory.queries, memory.rows(), memory.slabs, START)
    check(memory, found)
    drawn = variant.attention(Emulator(5)).attend(memory.queries, memory.rows(), memory.slabs, START)
    assert mx.array_equal(found, drawn).item(), "whatever the order of threads"


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
def test_large_heads_with_windows(kind: str, dtype: mx.Dtype) -> None:
    variant = Variant(AttentionShape(6, 1, 512, 512), dtype, window=90, tuning=TUNINGS[kind])  # type: ignore[index]
    memory = Memory(variant, [63, 130, 700], counts=[1, 4, 2])
    check(memory, variant.attention().attend(memory.queries, memory.rows(trimmed=True), memory.slabs, START))


@pytest.mark.parametrize("tuning", [VECTORS, TUNINGS["cuda"]], ids=["vectors", "matrices"])
@pytest.mark.parametrize(("heads", "window"), [(6, None), (40, None), (6, 100)], ids=str)
def test_a_querys_bits_over_latents_are_the_same_alone_and_among_other_queries(
    heads: int, window: int | None, tuning: AttentionTuning
) -> None:
    variant = Variant(AttentionShape(heads, 1, 64, 16, latent=True), window=window, tuning=tuning)
    memory = Memory(variant, [3, 130, 529], counts=[1, 3, 8])
    attended = np.array(variant.attention(Exact()).attend(memory.queries, memory.rows(), memory.slabs, START))
    for row, count in enumerate(memory.counts):
        for place in range(0, count, 3):
            found = attended[sum(memory.counts[:row]) + place]
            for before in {1, place + 1}:
                assert np.array_equal(_alone(variant, memory, row, place, before), found), (row, place, before)


def test_kernels_are_compiled_for_few_widths() -> None:
    assert Variant(AttentionShape(8, 2, 64, 64), tuning=TUNINGS["cuda"]).attention().widths == [4, 8, 16, 48]
    assert Variant(AttentionShape(8, 2, 64, 64)).attention().widths == [1, 16, 48], "the last for prompts"
    assert Variant(AttentionShape(8, 1, 64, 64)).attention().widths == [16, 48]
    assert Variant(AttentionShape(2, 2, 64, 64)).attention().widths == [1, 2, 4, 16, 48]
