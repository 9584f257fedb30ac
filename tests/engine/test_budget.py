from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.footprint import EARLIER_BYTES, Footprint
from ingot.engine.budget import DEEPEST, EARLIER_SHARE, Budget

SHAPE = Footprint(groups=((None, 100), (64, 50)), recurrent=5000, activation=200, score=4, logits=400)


def budget(total: int) -> Budget:
    return Budget(total, weights=1000, footprint=SHAPE, context=4096, widest=256, rows=8)


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


def test_launches_narrow_as_the_context_grows() -> None:
    memory = Budget(3_000_000, 0, SHAPE, context=100_000, widest=256, rows=8)
    widths = [memory.widest_launch(context) for context in (0, 1000, 10_000, 100_000)]
    assert widths == sorted(widths, reverse=True) and widths[-1] >= 1
    assert widths[0] > widths[-1]


@given(st.integers(1000, 10_000_000))
def test_what_rows_may_go_back_to_is_counted(total: int) -> None:
    memory = budget(total)
    assert memory.states + memory.transient + memory.earlier + memory.weights == total
    assert memory.earlier == min(DEEPEST * 8 * SHAPE.recurrent, int((total - 1000) * EARLIER_SHARE))


def test_nothing_is_set_aside_to_go_back_to_where_no_layer_is_recurrent() -> None:
    shape = replace(SHAPE, recurrent=0)
    assert Budget(1 << 30, 1000, shape, context=4096, widest=256, rows=8).earlier == 0


def test_no_more_is_set_aside_than_rows_would_take() -> None:
    large = replace(SHAPE, recurrent=1 << 24)
    assert Budget(1 << 40, 1000, large, context=4096, widest=256, rows=8).earlier == EARLIER_BYTES
