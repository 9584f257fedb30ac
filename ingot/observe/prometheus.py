"""Metrics in Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from ingot.observe.metrics import Histogram

MEDIA_TYPE: Final = "text/plain"
CONTENT_TYPE: Final = f"{MEDIA_TYPE}; version=0.0.4; charset=utf-8"
METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class MetricSample:
    value: int | float
    labels: Mapping[str, str] = field(default_factory=dict)
    part: Literal["", "_bucket", "_sum", "_count"] = ""  # of a histogram


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with a sample for each set of labels. A counter only grows, and its name ends in `_total`; a histogram
    has a sample for each of its bounds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[MetricSample, ...]

    def __post_init__(self) -> None:
        labels = frozenset(label for sample in self.samples for label in sample.labels)
        assert _is_valid_metric(self.name, labels), f"{self.name} or a label of it is not a valid name"
        fitting = {"counter": (True,), "gauge": (False,), "histogram": (False, True)}[self.kind]
        assert self.name.endswith("_total") in fitting, f"{self.name} is not a name for a {self.kind}"

    @classmethod
    def of(cls, name: str, help: str, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
        counts = histogram.cumulative()
        bounds = [*map(float, histogram.bounds), float("inf")]
        buckets = (
            MetricSample(count, {**labels, "le": _number_text(bound)}, "_bucket")
            for bound, count in zip(bounds, counts, strict=True)
        )
        ends = MetricSample(histogram.sum, labels, "_sum"), MetricSample(counts[-1], labels, "_count")
        return cls(name, "histogram", help, (*buckets, *ends))


@lru_cache(4096)
def _is_valid_metric(name: str, labels: frozenset[str]) -> bool:
    return METRIC_NAME.fullmatch(name) is not None and all(map(LABEL_NAME.fullmatch, labels))


def exposition_text(metrics: Iterable[Metric]) -> str:
    return "".join(f"{line}\n" for metric in metrics for line in _metric_lines(metric))


def _metric_lines(metric: Metric) -> Iterable[str]:
    yield f"# HELP {metric.name} {_escape_text(metric.help)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for sample in metric.samples:
        labels = ",".join([_label_text(name, value) for name, value in sample.labels.items()])
        yield f"{metric.name}{sample.part}{f'{{{labels}}}' if labels else ''} {_number_text(sample.value)}"


def _escape_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


@lru_cache(4096)  # each scrape has the same labels
def _label_text(name: str, value: str) -> str:
    quoted = _escape_text(value).replace('"', '\\"')
    return f'{name}="{quoted}"'


def _number_text(value: int | float) -> str:
    """With the format's own words for infinities and NaN."""
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(value), repr(value))
