"""Histograms: every value is counted once, whoever looks on."""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ingot.observe.metrics import (
    LABEL_NAME,
    METRIC_NAME,
    Histogram,
    Metric,
    MetricSample,
    SpeculationMetrics,
    exposition_text,
    one_two_five_bounds,
)

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


NAMES = st.from_regex(METRIC_NAME, fullmatch=True).filter(lambda name: not name.endswith("_total"))
NUMBERS = st.integers() | st.floats()
SAMPLES = st.builds(
    MetricSample, NUMBERS, st.dictionaries(st.from_regex(LABEL_NAME, fullmatch=True), st.text(), max_size=3)
)
METRICS = st.builds(
    lambda name, counts, help, samples: Metric(
        name + "_total" * counts, "counter" if counts else "gauge", help, tuple(samples)
    ),
    NAMES,
    st.booleans(),
    st.text(),
    st.lists(SAMPLES, max_size=3),
)


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def read(text: str) -> list[Any]:
    """(name, kind, help, [(labels, value)]) of each metric, by the format's own rules."""
    found: list[Any] = []
    for line in text.split("\n")[:-1]:
        if help := re.fullmatch(r"# HELP (\S+) (.*)", line, re.DOTALL):
            found.append([help[1], "", unescaped(help[2]), []])
        elif kind := re.fullmatch(r"# TYPE (\S+) (counter|gauge)", line):
            assert kind[1] == found[-1][0]
            found[-1][1] = kind[2]
        else:
            sample = re.fullmatch(r"([a-zA-Z0-9_:]+)(?:\{(.*)\})? (\S+)", line, re.DOTALL)
            assert sample is not None and sample[1] == found[-1][0], line
            pairs = re.findall(r'([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"', sample[2] or "", re.DOTALL)
            found[-1][3].append(({name: unescaped(value) for name, value in pairs}, float(sample[3])))
    return found


@given(st.lists(METRICS, max_size=3))
def test_what_is_written_is_read_back(metrics: list[Metric]) -> None:
    for metric, (name, kind, help, samples) in zip(metrics, read(exposition_text(metrics)), strict=True):
        assert (name, kind, help) == (metric.name, metric.kind, metric.help)
        for written, (labels, value) in zip(metric.samples, samples, strict=True):
            assert labels == written.labels
            assert value == float(written.value) or math.isnan(value)


def test_it_looks_as_scrapers_expect() -> None:
    metric = Metric(
        "a:b_total", "counter", "What is\ncounted.", (MetricSample(3, {"model_name": 'a"b\\c\n'}), MetricSample(1))
    )
    assert exposition_text([metric]) == (
        "# HELP a:b_total What is\\ncounted.\n"
        "# TYPE a:b_total counter\n"
        'a:b_total{model_name="a\\"b\\\\c\\n"} 3\n'
        "a:b_total 1\n"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (0.25, "0.25")]
)
def test_what_is_no_number_has_a_word(value: float, text: str) -> None:
    assert exposition_text([Metric("a", "gauge", "", (MetricSample(value),))]).endswith(f"\na {text}\n")


@pytest.mark.parametrize(("name", "labels"), [("a-b", {}), ("", {}), ("a", {"b-c": "d"}), ("a", {"": "d"})])
def test_a_name_that_cannot_be_written_is_no_metric(name: str, labels: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        Metric(name, "gauge", "", (MetricSample(1, labels),))


def test_only_counters_are_called_totals() -> None:
    with pytest.raises(AssertionError):
        Metric("a", "counter", "", ())
    with pytest.raises(AssertionError):
        Metric("a_total", "gauge", "", ())


def test_a_histogram_is_read_back_by_prometheus_own_library() -> None:
    times = Histogram((0.1, 1, 5.0))
    for value in (0.1, 0.2, 1.0, 7.0):
        times.add(value)
    [family] = text_string_to_metric_families(
        exposition_text([Metric.of("a_seconds", "How long.", times, {"model": "m"})])
    )
    assert (family.name, family.type, family.documentation) == ("a_seconds", "histogram", "How long.")
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        *(
            ("a_seconds_bucket", {"model": "m", "le": bound}, count)
            for bound, count in (("0.1", 1), ("1.0", 3), ("5.0", 3), ("+Inf", 4))
        ),
        ("a_seconds_sum", {"model": "m"}, pytest.approx(8.3)),
        ("a_seconds_count", {"model": "m"}, 4),
    ]
