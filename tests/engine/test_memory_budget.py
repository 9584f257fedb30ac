from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.footprint import REWIND_STATE_BYTES, Footprint, GatherCost
from ingot.engine.memory_budget import DEEPEST_REWIND, REWIND_SHARE, MemoryBudget, PassPart

SHAPE = Footprint(groups=((None, 100), (64, 50)), recurrent=5000, activation=200, score=4, logits=400)


def budget(total: int) -> MemoryBudget:
    return MemoryBudget(total, weights=1000, footprint=SHAPE, context=4096, widest=256, rows=8)


def _inexact(reserved: list[int]) -> list[tuple[int, bool]]:
    return [(tokens, False) for tokens in reserved]


@given(st.integers(0, 10_000_000), st.lists(st.integers(1, 4096), min_size=1, max_size=8), st.integers(1, 4096))
def test_one_sequence_more_or_a_longer_one_never_fits_where_less_did_not(
    total: int, reserved: list[int], more: int
) -> None:
    memory = budget(total)
    if not memory.fits(_inexact(reserved)):
        assert not memory.fits(_inexact([*reserved, more]))
        assert not memory.fits(_inexact([*reserved[:-1], reserved[-1] + more]))


@given(st.integers(0, 10_000_000))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(total: int) -> None:
    memory = budget(total)
    longest = memory.longest(4096)
    assert longest == 0 or memory.fits([(longest, False)])
    assert longest == 4096 or not memory.fits([(longest + 1, False)])


def test_no_sequences_always_fit() -> None:
    assert budget(0).fits([])


def test_a_model_without_attention_fits_as_many_sequences_as_states() -> None:
    shape = replace(SHAPE, groups=(), score=0)
    memory = MemoryBudget(10_000_000, 0, shape, context=4096, widest=256, rows=8)
    assert memory.fits([(4096, False)] * 8) and not memory.fits([(1, False)] * 2000)


def test_launches_narrow_as_the_context_grows() -> None:
    memory = MemoryBudget(3_000_000, 0, SHAPE, context=100_000, widest=256, rows=8)
    widths = [memory.widest_pass(context) for context in (0, 1000, 10_000, 100_000)]
    assert widths == sorted(widths, reverse=True) and widths[-1] >= 1
    assert widths[0] > widths[-1]


@given(st.integers(1000, 10_000_000))
def test_what_rows_may_go_back_to_is_counted(total: int) -> None:
    memory = budget(total)
    assert memory.states + memory.transient + memory.earlier + memory.weights == total
    assert memory.earlier == min(DEEPEST_REWIND * 8 * SHAPE.recurrent, int((total - 1000) * REWIND_SHARE))


def test_nothing_is_set_aside_to_go_back_to_where_no_layer_is_recurrent() -> None:
    shape = replace(SHAPE, recurrent=0)
    assert MemoryBudget(1 << 30, 1000, shape, context=4096, widest=256, rows=8).earlier == 0


def test_no_more_is_set_aside_than_rows_would_take() -> None:
    large = replace(SHAPE, recurrent=1 << 24)
    assert MemoryBudget(1 << 40, 1000, large, context=4096, widest=256, rows=8).earlier == REWIND_STATE_BYTES


GATHERING = replace(SHAPE, score=0, gathered=GatherCost(few=10, many=30, width=16))


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 4096))
def test_gathered_pages_of_every_row_are_counted(rows: int, width: int, context: int) -> None:
    memory = MemoryBudget(1 << 40, 0, GATHERING, context=4096, widest=256, rows=64)
    part = PassPart(rows * width, context, rows)
    each = 10 if width <= 16 else 30
    gathered = memory.pass_bytes([part]) - rows * width * SHAPE.activation
    assert 2 * each * rows * context <= gathered <= 4 * each * rows * context
    assert memory.pass_bytes([part, part]) == 2 * memory.pass_bytes([part])


@pytest.mark.parametrize("rows", [1, 3])
def test_pages_that_kernels_unpack_for_prompts_are_counted_once(rows: int) -> None:
    shape = replace(GATHERING, gathered=GatherCost(few=0, many=0, width=16, unpacked=30))
    memory = MemoryBudget(1 << 40, 0, shape, context=4096, widest=256, rows=8)
    few, many = (PassPart(rows * width, 1000, rows) for width in (16, 17))
    assert memory.pass_bytes([few]) == few.tokens * SHAPE.activation
    assert memory.pass_bytes([many]) == many.tokens * SHAPE.activation + 30 * rows * 1000


@given(st.integers(1000, 20_000_000), st.integers(0, 4096))
def test_a_launch_beside_gathered_pages_is_as_wide_as_fits(total: int, context: int) -> None:
    memory = MemoryBudget(total, 1000, GATHERING, context=4096, widest=256, rows=8)
    width = memory.widest_pass(context)
    assert width == 1 or memory.runs([PassPart(width + min(8, width), context + width)])
    assert width == 256 or not memory.runs([PassPart(width + 1 + min(8, width + 1), context + width + 1)])


def test_a_window_is_gathered_no_further_than_it_reaches() -> None:
    shape = replace(GATHERING, groups=((64, 50),))
    memory = MemoryBudget(1 << 40, 0, shape, context=1 << 20, widest=256, rows=1)
    parts = [[PassPart(1, context)] for context in (64 + 256, 1 << 20)]
    assert memory.pass_bytes(parts[0]) == memory.pass_bytes(parts[1])
