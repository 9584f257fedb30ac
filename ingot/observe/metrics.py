"""The engine's metrics since its start, its use of memory, and the requests that ended lately; and metrics in
Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/

One thread writes; any thread may read, without a lock: counts only grow, each is read at once, and no dictionary
changes its size.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate
from typing import Final, Generic, Literal, TypeVar

# vLLM's bounds, so that its dashboards' heat maps fit, with lower ones for faster tokens.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWER_COUNTS = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Of a mixture whose experts are read when they are needed, since it was loaded. An expert that a pass needs in a
    layer is counted once; in layers that have all of theirs in memory, none is."""

    share: float = 0.0
    """Of all experts, those that fit in memory."""
    hits: int = 0
    """It was in its slot."""
    predicted: int = 0
    """It had been guessed, and was in its slot or on its way."""
    misses: int = 0
    """It had to be read while the pass waited."""
    wasted: int = 0
    """It was read, as it had been guessed, and made room for others before anybody used it."""
    rounds: int = 0
    """How often a layer was computed in another round."""
    bytes_read: int = 0
    waited_s: float = 0.0
    """Seconds that passes waited for reads."""
    reading_s: float = 0.0
    """Seconds in which anything was read."""

    def since(self, earlier: ExpertStats) -> ExpertStats:
        names = (each.name for each in fields(self) if each.name != "share")
        return ExpertStats(self.share, **{name: getattr(self, name) - getattr(earlier, name) for name in names})


class EngineMetrics:
    def __init__(self, context: int, endings: Iterable[str], reasons: Iterable[str]) -> None:
        """`context` is the longest sequence, `endings` are how requests end, `reasons` why no more of a prompt was
        reused."""
        self.prompt_tokens = 0  # of prompts that began to run;
        self.queried_tokens = 0  # of those, the ones looked up in the prefix cache,
        self.matched_tokens = 0  # those it had,
        self.read_tokens = 0  # and those of the latter that were read from disk
        self.disk_queried_tokens = 0  # looked up on disk, as memory lacked them
        self.media_queries = 0  # images and videos of prompts to compute,
        self.media_hits = 0  # and those of them whose features were there, or being computed
        self.generated_tokens = 0
        self.preemptions = 0
        self.endings = dict.fromkeys(endings, 0)
        self.reasons = dict.fromkeys(reasons, 0)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(TOKEN_S)
        self.token_s = Histogram(TOKEN_S)  # of each answer, on average
        self.request_s = Histogram(REQUEST_S)
        self.queue_s, self.prefill_s, self.decode_s, self.inference_s = (Histogram(REQUEST_S) for _ in range(4))
        self.prompt_lengths, self.answer_lengths, self.longest_answers, self.answer_limits = (
            Histogram(tuple(one_two_five_bounds(context))) for _ in range(4)
        )
        self.answers = Histogram(ANSWER_COUNTS)
        self.step_s = Histogram(STEP_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.occupied = 0.0  # the share of the memory for KV that running sequences have reserved
        self.most_tokens = 0  # that fit into it
        self.page_tokens = 0  # of a page
        self.state_bytes = 0  # allocated for KV
        self.held_bytes = 0  # of those, used by running sequences and cached prefixes
        self.kept_bytes: Mapping[str, int] = {}  # of cached prefixes, by tenant; replaced, never changed
        self.active_bytes = 0  # that mlx has allocated: weights, KV, what is being computed
        self.experts: ExpertStats | None = None  # where experts are read when they are needed


TASK_ENDINGS: Final = ("stop", "abort", "error")
"""How requests end, as vLLM calls it."""


class TaskMetrics:
    """Of a model that does not generate. The event loop writes; any thread may read, without a lock."""

    def __init__(self) -> None:
        self.endings = dict.fromkeys(TASK_ENDINGS, 0)
        self.read_tokens = 0  # of texts that were encoded
        self.written_tokens = 0  # of transcripts
        self.request_s, self.queue_s, self.inference_s = (Histogram(REQUEST_S) for _ in range(3))


class SpeculationMetrics:
    def __init__(self) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self.rounds: dict[tuple[int, int], tuple[int, float]] = {}
        """By rows and tokens: how many decoding rounds were measured, and their seconds. Without those that computed
        prompts as well."""
        self.made = 0
        """Rounds that captured a graph, and so were not measured."""

    def ran(self, rows: int, tokens: int, seconds: float) -> None:
        count, spent = self.rounds.get((rows, tokens), (0, 0.0))
        self.rounds[rows, tokens] = (count + 1, spent + seconds)

    def add(self, proposed: int, accepted: int) -> None:
        """A draft of so many tokens, of which the first so many were accepted."""
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        self.accepted_per_position.extend([0] * (accepted - len(self.accepted_per_position)))
        for position in range(accepted):
            self.accepted_per_position[position] += 1


class Histogram:
    """A value counts at the first bound that it does not exceed, or at none."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must rise"
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> tuple[int, ...]:
        """The number of values up to each bound, and of all."""
        return tuple(accumulate(tuple(self._counts)))


def one_two_five_bounds(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return
            yield digit * power
        power *= 10


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


REMEMBERED_SPANS: Final = 512


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Seconds that a request waited, and that its prefill and decode took; `ended` is of time.monotonic(). Holds
    nothing of its prompt or answer."""

    id: str
    tenant: str
    path: str
    outcome: str
    ended: float
    queued_s: float
    prompt_s: float
    answer_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def took_s(self) -> float:
        return self.queued_s + self.prompt_s + self.answer_s


class RequestTimeline:
    def __init__(self, most: int = REMEMBERED_SPANS) -> None:
        self._spans: deque[RequestSpan] = deque(maxlen=most)

    def add(self, span: RequestSpan) -> None:
        self._spans.append(span)

    def since(self, then: float) -> Iterator[RequestSpan]:
        """Those that ended after `then`, newest first."""
        for span in reversed(self._spans):
            if span.ended < then:
                return
            yield span


T = TypeVar("T")
REMEMBERED_BY_TENANT: Final = 512


class RecentByTenant(Generic[T]):
    """Each tenant has room of its own, so that a busy one does not displace others'."""

    def __init__(self, most: int = REMEMBERED_BY_TENANT) -> None:
        self._most = most
        self._by_tenant: dict[str, OrderedDict[str, T]] = {}

    def add(self, tenant: str, id: str, value: T) -> None:
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[id] = value
        own.move_to_end(id)
        if len(own) > self._most:
            own.popitem(last=False)

    def get(self, tenant: str, id: str) -> T | None:
        return self._by_tenant.get(tenant, OrderedDict()).get(id)
