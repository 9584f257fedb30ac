"""What the measured requests of one concurrency level amount to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are seconds on one clock; `arrivals` are those of the chunks that held text."""

    started: float
    ended: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int | None = None  # as the server counted them
    completion_tokens: int | None = None
    error: str | None = None

    @property
    def problem(self) -> str | None:
        return self.error or (None if self.arrivals else "the answer held no text")

    @property
    def tokens(self) -> int:
        """The server's own count, or the number of chunks where it gives none."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def seconds_per_token(self) -> float:
        """After the first one; unlike a gap, right also where a chunk holds several tokens."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.ended - self.started)


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Level:
    """All the requests at one concurrency. A spread is None when nothing was measured."""

    concurrency: int
    requests: int
    seconds: float  # from the first request's start to the last one's end
    prompt_tokens: int
    output_tokens: int
    chunks: int
    counted_by: str  # what output_tokens rests on: usage, chunks, or (over several requests) both
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    ttft: Spread | None
    inter_token: Spread | None  # between the chunks of a stream
    seconds_per_token: Spread | None  # one value a request
    request_seconds: Spread | None
    request_tokens_per_second: Spread | None
    errors: dict[str, int]  # message: how often

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted `values` lie, interpolated between neighbours."""
    place = share * (len(values) - 1)
    low, high = math.floor(place), math.ceil(place)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    return Spread(mean, quantile(ordered, 0.5), quantile(ordered, 0.9), quantile(ordered, 0.99), ordered[-1])


def summarise(concurrency: int, samples: Sequence[Sample]) -> Level:
    """Failed requests count as errors alone: their tokens and times are in no other figure."""
    good = [sample for sample in samples if sample.problem is None]
    errors = Counter(sample.problem for sample in samples if sample.problem is not None)
    seconds = max(s.ended for s in samples) - min(s.started for s in samples)
    output = sum(sample.tokens for sample in good)
    prompt = sum(sample.prompt_tokens or 0 for sample in good)
    counts = {"chunks" if sample.completion_tokens is None else "usage" for sample in good}
    return Level(
        concurrency=concurrency,
        requests=len(samples),
        seconds=seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        chunks=sum(len(sample.arrivals) for sample in good),
        counted_by=" and ".join(sorted(counts)),
        output_tokens_per_second=output / seconds,
        prompt_tokens_per_second=prompt / seconds,
        requests_per_second=len(good) / seconds,
        ttft=spread([sample.ttft for sample in good]),
        inter_token=spread([gap for sample in good for gap in sample.gaps]),
        seconds_per_token=spread([sample.seconds_per_token for sample in good if sample.tokens > 1]),
        request_seconds=spread([sample.ended - sample.started for sample in good]),
        request_tokens_per_second=spread([sample.tokens_per_second for sample in good]),
        errors=dict(errors),
    )
