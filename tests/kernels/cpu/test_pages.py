"""Keys and values in pages: wherever these lie, whoever shares them, attention gives the same bits."""

from __future__ import annotations

from array import array
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.kernels.cpu.attention_reference import Reference, in_pieces, made_rows
from tests.kernels.cpu.paging import Rows

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

PAGES = (64, 128, 256, 512)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("window", [0, 90, 700])
@pytest.mark.parametrize("halves", [False, True])
def test_where_pages_lie_and_how_large_they_are_changes_no_bit(
    one: bool, window: int, halves: bool, one_path: None
) -> None:
    native.use_one_path(one)
    reference = Reference(7, 1, 64, 64, window=window, cap=30.0, sunk=True, norm="plain", gated=True, halves=halves)
    lengths, launches = [1300, 70], [[1000, 0], [1, 60], [100, 1], [1, 9], [198, 0]]
    found = [
        in_pieces(reference, made_rows(reference, lengths, 5), launches, page=page, seed=seed)
        for seed, page in enumerate((64, *PAGES))
    ]
    for other in found[1:]:
        assert all(np.array_equal(*pair) for pair in zip(found[0], other, strict=True))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_that_share_pages_give_what_each_gives_alone(data: st.DataObject, one_path: None) -> None:
    native.use_one_path()
    reference = Reference(4, 2, 16, 16, window=data.draw(st.sampled_from([0, 80])), halves=data.draw(st.booleans()))
    page = data.draw(st.sampled_from(PAGES))
    shared = page * data.draw(st.integers(1, 3))
    own = data.draw(st.lists(st.integers(1, 130), min_size=2, max_size=4))
    rows = made_rows(reference, [shared + n for n in own], 3)
    for row in rows[1:]:
        for mine, first in zip((row.q, row.k, row.v), (rows[0].q, rows[0].k, rows[0].v), strict=True):
            mine[:shared] = first[:shared]
    alone = [in_pieces(reference, [row], [[len(row.q)]])[0] for row in rows]
    tables = Rows(len(rows), shared + max(own), page, seed=len(own))
    for pages in tables.pages[1:]:
        pages[: shared // page] = tables.pages[0][: shared // page]
    operation, states = reference.native(), reference.states(tables.count, page)
    q, k, v = (mx.array(x) for x in (rows[0].q, rows[0].k, rows[0].v))
    _, *states = operation(
        q[:shared], k[:shared], v[:shared], *states, tables.spans([(0, shared, 0, 0)]), reference.window
    )
    spans, first = [], 0
    for number, count in enumerate(own):
        spans.append((first, count, number, shared))
        first += count
    given = [mx.array(np.concatenate([getattr(row, name)[shared:] for row in rows])) for name in ("q", "k", "v")]
    attended, *_ = operation(*given, *states, tables.spans(spans), reference.window)
    for (begin, count, number, _), expected in zip(spans, alone, strict=True):
        assert np.array_equal(np.array(attended)[begin : begin + count], expected[shared:]), number


@pytest.mark.usefixtures("one_path")
def test_a_position_may_be_told_for_each_token() -> None:
    reference = Reference(2, 1, 16, 16)
    (row,) = made_rows(reference, [100], 4)
    q, k, v = (mx.array(x) for x in (row.q, row.k, row.v))
    tables, operation = Rows(1, 100), reference.native()

    def attended(positions: list[int] | None, begin: int = 0) -> np.ndarray:
        spans = native.attention_spans(
            [(0, 100, 0, 0, begin)], tables.tables(), None if positions is None else array("i", positions)
        )
        return np.array(operation(q, k, v, *reference.states(tables.count, 64), spans)[0])

    assert np.array_equal(attended(list(range(100))), attended(None))
    assert np.array_equal(attended(list(range(1000, 1100))), attended(None, 1000))
    sparse = [3 * i * i for i in range(100)]
    told = Reference(2, 1, 16, 16, positions=np.array(sparse))
    assert np.abs(attended(sparse) - told(row.q, row.k, row.v)).max() < 1e-5


@pytest.mark.usefixtures("one_path")
@pytest.mark.parametrize("place", [512, 2**30, 2**31 - 1024])
def test_a_place_is_not_a_position(place: int) -> None:
    reference = Reference(2, 1, 16, 16, window=64)
    (row,) = made_rows(reference, [128], 4)
    parts = [[mx.array(x[begin : begin + 64]) for x in (row.q, row.k, row.v)] for begin in (0, 64)]

    def second(place: int, table: tuple[int, array[int]]) -> np.ndarray:
        operation, states = reference.native(), reference.states(3, 64)
        for number, part in enumerate(parts):
            spans = native.attention_spans([(0, 64, 0, place + 64 * number, 5 + 64 * number)], [table])
            attended, *states = operation(*part, *states, spans, 64)
        return np.array(attended)

    near = second(0, (0, array("i", [2, 0])))
    assert np.isfinite(near).all()
    assert np.array_equal(near, second(place, (place // 64 - 1, array("i", [1, 0, 2]))))


def test_a_launch_without_tokens_or_without_spans_is_fine() -> None:
    operation = Reference(2, 1, 8).native()
    for tokens in (0, 3):
        q, k = mx.ones((tokens, 16)), mx.ones((tokens, 8))
        y, *_ = operation(q, k, k, *Reference(2, 1, 8).states(0, 64), native.attention_spans([], [(0, array("i"))]))
        assert y.shape == (tokens, 16) and not np.array(y).any()


def spanned(spans: list[Any], pages: list[int] | None = None, positions: list[int] | None = None, **how: Any) -> None:
    table = (how.pop("forgotten", 0), array("i", [0] if pages is None else pages))
    states = Reference(2, 1, 8).states(2, how.pop("page", 64))
    made = native.attention_spans(spans, [table], None if positions is None else array("i", positions))
    Reference(2, 1, 8).native()(mx.ones((3, 16)), mx.ones((3, 8)), mx.ones((3, 8)), *states, made, **how)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 3, 1, 0, 0)], "no table"),
        ([(0, 3, -1, 0, 0)], "no table"),
        ([(0, 3, 0, 62, 0)], "does not cover"),
        ([(0, 3, 0, -1, 0)], "not negative"),
        ([(0, 3, 0, 0, -1)], "not negative"),
        ([(0, 4, 0, 0, 0)], "the launch has not"),
        ([(0, 0, 0, 0, 0)], "follow one another"),
        ([(0, 2, 0, 0, 0), (1, 1, 0, 2, 2)], "follow one another"),
        ([(2**31 - 1, 1, 0, 0, 0)], "follow one another"),
        ([(1, 2**31 - 1, 0, 0, 0)], "follow one another"),
        ([(0, 1, 0, 2**31 - 1, 0)], "too far"),
        ([(0, 3, 0, 0, 2**31 - 1)], "too far"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spanned(spans)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"pages": [2]}, "the states have not"),
        ({"pages": [-1]}, "not negative"),
        ({"pages": []}, "does not cover"),
        ({"forgotten": 1}, "does not cover"),
        ({"forgotten": -1}, "no fewer"),
        ({"window": -1}, "not negative"),
        ({"page": 32}, "64, 128, 256 or 512"),
        ({"page": 192}, "64, 128, 256 or 512"),
        ({"page": 1024}, "64, 128, 256 or 512"),
        ({"positions": [0, 1]}, "position for each"),
        ({"positions": [0, 1, 2, 3]}, "position for each"),
        ({"positions": [0, 1, -1]}, "not negative"),
    ],
)
def test_tables_and_pages_that_do_not_fit_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spanned([(0, 3, 0, 0, 0)], **how)


def test_a_window_may_not_show_what_was_forgotten() -> None:
    spanned([(0, 3, 0, 128, 128)], pages=[1], forgotten=2, window=1)
    with pytest.raises(ValueError, match="does not cover"):
        spanned([(0, 3, 0, 128, 128)], pages=[1], forgotten=2, window=2)
