"""Keys and values into pages, in place, and beginnings of pages into others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.paged_attention.inputs import PAGE_LIMIT, KVSlabs, order_after, page_copies, page_number, token_slots
from ingot.kernels.paged_attention.shapes import AttentionShape
from tests.kernels.paged_attention.memory import START, Memory, Variant, check, emulated

pytestmark = emulated
PAGE, EACH = 64, 3


def _slabs(count: int, key_size: int, value_size: int, dtype: mx.Dtype) -> KVSlabs:
    """Numbers that say where they stand."""
    made = [
        [
            (mx.arange(EACH * 2 * PAGE * size).reshape(EACH, 2, PAGE, size) % 251 + slab).astype(dtype)
            for slab in range(count)
        ]
        for size in (key_size, value_size)
    ]
    mx.eval(made)
    return KVSlabs(*made)


def _bits(slabs: KVSlabs) -> list[np.ndarray]:
    return [np.array(slab.view(mx.uint16) if slab.dtype.size == 2 else slab) for slab in (*slabs.keys, *slabs.values)]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, EACH - 1), st.integers(0, PAGE - 1)), unique=True, max_size=12
    ),
    st.sets(st.integers(0, 11)),
    st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_tokens_are_written_to_their_slots_and_nothing_else_is(
    places: list[tuple[int, int, int]], left_out: set[int], seed: int
) -> None:
    slabs = _slabs(3, 32, 48, mx.bfloat16)
    before = _bits(slabs)
    slots = [
        (-1 if token in left_out else page_number(slab, at), place) for token, (slab, at, place) in enumerate(places)
    ]
    slots.append((-1, 0))
    keys, values = (mx.random.normal((len(slots), 2, size)).astype(mx.bfloat16) for size in (32, 48))
    attention = Variant(AttentionShape(4, 2, 32, 48)).attention(Emulator(seed))
    done = attention.write(keys, values, token_slots(slots), slabs, START + 6)
    assert done.item() == 7, "a token tells how many came before it"
    for token, (page, place) in enumerate(slots):
        if page >= 0:
            before[page // PAGE_LIMIT][page % PAGE_LIMIT, :, place] = np.array(keys[token].view(mx.uint16))
            before[3 + page // PAGE_LIMIT][page % PAGE_LIMIT, :, place] = np.array(values[token].view(mx.uint16))
    assert all(map(np.array_equal, _bits(slabs), before))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_keys_are_read_as_they_lie(dtype: mx.Dtype) -> None:
    slabs, before = _slabs(1, 64, 64, dtype), _slabs(1, 64, 64, dtype)
    heads_first = mx.random.normal((2, 5, 64)).astype(dtype)
    wide = mx.random.normal((5, 3, 2, 64)).astype(dtype)
    places = (3, 9, 0, 63, 20)
    attention = Variant(AttentionShape(2, 2, 64, 64), dtype).attention()
    mx.eval(
        attention.write(
            heads_first.transpose(1, 0, 2), wide[:, 1], token_slots([(1, place) for place in places]), slabs, START
        )
    )
    for token, place in enumerate(places):
        before.keys[0][1, :, place] = heads_first[:, token]
        before.values[0][1, :, place] = wide[token, 1]
    assert all(map(np.array_equal, _bits(slabs), _bits(before)))


@given(st.lists(st.tuples(st.integers(0, PAGE), st.booleans()), min_size=1, max_size=3), st.permutations(range(9)))
@settings(max_examples=25, deadline=None)
def test_beginnings_of_pages_are_copied_and_nothing_else_is(wanted: list[tuple[int, bool]], order: list[int]) -> None:
    slabs = _slabs(3, 48, 32, mx.float16)
    before, free = _bits(slabs), [page_number(at // EACH, at % EACH) for at in order]
    copies = [(free.pop() if copied else -1, free.pop(), places) for places, copied in wanted]
    attention = Variant(AttentionShape(2, 2, 48, 32), mx.float16).attention()
    assert attention.copy(page_copies(copies), slabs, START).item() == 1
    for source, target, places in copies:
        for first in (0, 3):
            if source >= 0:
                copied = before[first + source // PAGE_LIMIT][source % PAGE_LIMIT, :, :places]
                before[first + target // PAGE_LIMIT][target % PAGE_LIMIT, :, :places] = copied
    assert all(map(np.array_equal, _bits(slabs), before))


def test_rows_that_part_in_an_open_page_go_on_in_one_of_their_own() -> None:
    variant = Variant(AttentionShape(4, 2, 64, 64))
    memory = Memory(variant, [70, 71])
    attention = variant.attention()
    first, second = memory.tables
    # The second row takes the first's 70 places over: one whole page, and six places of the open one.
    second[0] = first[0]
    done = attention.copy(page_copies([(first[1], second[1], 6)]), memory.slabs, START)
    done = attention.write(
        memory.drawn(1, 2, 64), memory.drawn(1, 2, 64), token_slots([(second[1], 6)]), memory.slabs, done
    )
    check(memory, attention.attend(memory.queries, memory.rows(), memory.slabs, done))


@pytest.mark.parametrize("after", [mx.zeros((1,), mx.int32), mx.full((2, 3), mx.nan), mx.ones((4,), mx.bfloat16)])
def test_what_is_ordered_stays_what_it_was(after: mx.array) -> None:
    indices = mx.array([[3, 1], [2, 0]])
    assert order_after(indices, after).tolist() == indices.tolist()
