from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cli.bench_stats import Sample, Spread, quantile, spread, summarise

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def test_the_figures_of_a_level_are_what_they_say() -> None:
    fast = Sample(started=0.0, ended=4.0, arrivals=(1.0, 2.0, 4.0), prompt_tokens=10, completion_tokens=3)
    slow = Sample(started=1.0, ended=10.0, arrivals=(4.0, 10.0), prompt_tokens=12, completion_tokens=4)
    level = summarise(2, [fast, slow])
    assert (level.concurrency, level.requests, level.failed, level.seconds) == (2, 2, 0, 10.0)
    assert (level.prompt_tokens, level.output_tokens, level.chunks, level.counted_by) == (22, 7, 5, "usage")
    assert level.output_tokens_per_second == pytest.approx(0.7)
    assert level.prompt_tokens_per_second == pytest.approx(2.2)
    assert level.requests_per_second == pytest.approx(0.2)
    assert level.ttft == Spread(mean=2.0, p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98), most=3.0)
    assert level.inter_token is not None and level.inter_token.p50 == 2.0 and level.inter_token.most == 6.0
    assert level.seconds_per_token is not None and level.seconds_per_token.mean == pytest.approx((1.5 + 2.0) / 2)
    assert level.request_tokens_per_second is not None
    assert level.request_tokens_per_second.mean == pytest.approx((3 / 4 + 4 / 9) / 2)


def test_chunks_are_counted_where_the_server_counts_no_tokens() -> None:
    bare = Sample(started=0.0, ended=2.0, arrivals=(1.0, 2.0))
    counted = Sample(started=0.0, ended=2.0, arrivals=(1.0,), completion_tokens=5)
    assert (summarise(1, [bare]).output_tokens, summarise(1, [bare]).counted_by) == (2, "chunks")
    assert summarise(1, [bare, counted]).counted_by == "chunks and usage"


def test_failed_requests_are_errors_and_nothing_else() -> None:
    good = Sample(started=0.0, ended=2.0, arrivals=(1.0, 2.0), completion_tokens=2)
    failed = Sample(started=0.0, ended=9.0, arrivals=(5.0,), error="full (HTTP 429)")
    empty = Sample(started=0.0, ended=1.0, completion_tokens=0)
    level = summarise(3, [good, failed, failed, empty])
    assert level.errors == {"full (HTTP 429)": 2, "the answer held no text": 1}
    assert (level.failed, level.output_tokens) == (3, 2)
    assert level.ttft is not None and level.ttft.most == 1.0


def test_a_level_without_a_success_has_no_spreads() -> None:
    level = summarise(1, [Sample(0.0, 1.0, error="no")])
    assert (level.ttft, level.inter_token, level.output_tokens_per_second) == (None, None, 0.0)


@given(VALUES, st.floats(0, 1))
def test_a_quantile_lies_between_its_neighbours(values: list[float], share: float) -> None:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    slack = 1e-9 * max(1.0, high)
    assert low - slack <= quantile(ordered, share) <= high + slack


@given(VALUES)
def test_a_spread_is_ordered_and_does_not_depend_on_the_order_of_its_values(values: list[float]) -> None:
    found = spread(values)
    assert found is not None and found == spread(values[::-1])
    slack = 1e-9 * max(1.0, found.most)
    assert min(values) <= found.p50 + slack <= found.p90 + 2 * slack <= found.p99 + 3 * slack
    assert found.p99 <= found.most + slack == max(values) + slack
