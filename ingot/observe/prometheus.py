"""Figures in Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from ingot.observe.histogram import Histogram

MEDIA_TYPE: Final = "text/plain"
CONTENT_TYPE: Final = f"{MEDIA_TYPE}; version=0.0.4; charset=utf-8"
METRIC: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Sample:
    value: int | float
    labels: Mapping[str, str] = field(default_factory=dict)
    part: Literal["", "_bucket", "_sum", "_count"] = ""  # of a histogram


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure, once for each set of labels. A counter only grows, and its name ends in `_total`; a gauge is as it is
    now; a histogram has a sample for each of its bounds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        labels = frozenset(label for sample in self.samples for label in sample.labels)
        assert _can_be_told(self.name, labels), f"{self.name} cannot be told"
        fitting = {"counter": (True,), "gauge": (False,), "histogram": (False, True)}[self.kind]
        assert self.name.endswith("_total") in fitting, f"{self.name} is no name for a {self.kind}"

    @classmethod
    def of(cls, name: str, help: str, histogram: Histogram, labels: Mapping[str, str]) -> Metric:
        counts = histogram.cumulative()
        bounds = [*map(float, histogram.bounds), float("inf")]
        buckets = (
            Sample(count, {**labels, "le": _number(bound)}, "_bucket")
            for bound, count in zip(bounds, counts, strict=True)
        )
        ends = Sample(histogram.sum, labels, "_sum"), Sample(counts[-1], labels, "_count")
        return cls(name, "histogram", help, (*buckets, *ends))


@lru_cache(4096)
def _can_be_told(name: str, labels: frozenset[str]) -> bool:
    return METRIC.fullmatch(name) is not None and all(map(LABEL.fullmatch, labels))


def exposition(metrics: Iterable[Metric]) -> str:
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric))


def _lines(metric: Metric) -> Iterable[str]:
    yield f"# HELP {metric.name} {_escaped(metric.help)}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for sample in metric.samples:
        labels = ",".join([_label(name, value) for name, value in sample.labels.items()])
        yield f"{metric.name}{sample.part}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


@lru_cache(4096)  # a server tells the same labels at each scrape
def _label(name: str, value: str) -> str:
    quoted = _escaped(value).replace('"', '\\"')
    return f'{name}="{quoted}"'


def _number(value: int | float) -> str:
    """The format has words of its own for what is no number."""
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(value), repr(value))
