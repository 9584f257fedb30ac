"""Histograms: every value is counted once, whoever looks on."""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.observe.metrics import Histogram, SpeculationMetrics, one_two_five_bounds

BOUNDS = st.lists(st.floats(0, 1e6), min_size=1, max_size=8, unique=True).map(sorted)


@given(BOUNDS, st.lists(st.floats(0, 1e7), max_size=20))
def test_a_value_counts_at_every_bound_that_it_does_not_exceed(bounds: list[float], values: list[float]) -> None:
    result = Histogram(bounds)
    for value in values:
        result.add(value)
    below = [sum(value <= bound for value in values) for bound in bounds]
    assert result.cumulative() == (*below, len(values))
    assert result.sum == pytest.approx(sum(values))
    assert bisect_left(result.cumulative(), len(values)) <= len(bounds)


def test_bounds_rise() -> None:
    with pytest.raises(AssertionError):
        Histogram((1.0, 0.5))


def test_whoever_looks_on_sees_counts_that_only_grow() -> None:
    result = Histogram((0.5,))
    writer = threading.Thread(target=lambda: [result.add(number % 2) for number in range(20_000)])
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(result.cumulative())
    writer.join()
    assert all(one[0] <= other[0] and one[1] <= other[1] for one, other in pairwise(seen))
    assert result.cumulative() == (10_000, 20_000)


def test_bounds_of_lengths_end_at_the_context() -> None:
    assert [*one_two_five_bounds(300)] == [1, 2, 5, 10, 20, 50, 100, 200]


GUESSES = st.integers(0, 20).flatmap(lambda proposed: st.tuples(st.just(proposed), st.integers(0, proposed)))


@given(st.lists(GUESSES))
def test_guesses_add_up_in_all_and_by_position(drafts: list[tuple[int, int]]) -> None:
    counts = SpeculationMetrics()
    for proposed, accepted in drafts:
        counts.add(proposed, accepted)
    assert counts.drafts == len(drafts)
    assert counts.draft_tokens == sum(proposed for proposed, _ in drafts)
    assert counts.accepted_tokens == sum(accepted for _, accepted in drafts) == sum(counts.accepted_per_position)
    longest = max((accepted for _, accepted in drafts), default=0)
    expected = [sum(accepted > position for _, accepted in drafts) for position in range(longest)]
    assert counts.accepted_per_position == expected


def test_rounds_add_up_by_rows_and_tokens() -> None:
    counts = SpeculationMetrics()
    for rows, tokens, seconds in ((1, 4, 0.5), (1, 4, 0.25), (2, 4, 1.0)):
        counts.ran(rows, tokens, seconds)
    assert counts.rounds == {(1, 4): (2, 0.75), (2, 4): (1, 1.0)}
