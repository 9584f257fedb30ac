"""`GET /metrics`: what the server did and does. What vLLM's dashboards and routers know is told by vLLM's names, what
only this server has by its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from ingot.engine.health import Health
from ingot.engine.model_card import ModelCard
from ingot.observe.histogram import Histogram
from ingot.observe.metrics import Figures
from ingot.observe.prometheus import Metric, Sample, exposition
from ingot.observe.side_figures import SideFigures
from ingot.observe.speculation import SpeculationCounts
from ingot.version import __version__

ENGINE: Final = "0"
"""Which engine of the server; dashboards for several ask for it."""
# What is told of models of all kinds.
PROMPT_TOKENS: Final = "Tokens of prompts that began to run."
GENERATION_TOKENS: Final = "Tokens of answers."
ENDED: Final = "Requests by how they ended."
REQUEST: Final = "From a request's arrival to its end."
QUEUE: Final = "What requests waited for their turn."
INFERENCE: Final = "From their turn to their end."


class Family:
    """Metrics whose names begin alike and that carry the same labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix, self._labels = prefix, dict(labels)

    def counter(self, name: str, help: str, value: int) -> Metric:
        return Metric(f"{self._prefix}{name}_total", "counter", help, (Sample(value, self._labels),))

    def counters(self, name: str, help: str, label: str, values: Mapping[str, int]) -> Metric:
        samples = tuple(Sample(value, self._labels | {label: each}) for each, value in values.items())
        return Metric(f"{self._prefix}{name}_total", "counter", help, samples)

    def gauge(self, name: str, help: str, value: int | float) -> Metric:
        return self.gauges(name, help, [({}, value)])

    def gauges(self, name: str, help: str, values: list[tuple[dict[str, str], int | float]]) -> Metric:
        samples = tuple(Sample(value, self._labels | labels) for labels, value in values)
        return Metric(f"{self._prefix}{name}", "gauge", help, samples)

    def histogram(self, name: str, help: str, values: Histogram) -> Metric:
        return Metric.of(f"{self._prefix}{name}", help, values, self._labels)


@dataclass(frozen=True, slots=True)
class Measured:
    """One model's figures, and what is told besides."""

    card: ModelCard
    health: Health
    figures: Figures
    speculation: SpeculationCounts
    further: Sequence[Metric] = ()


@dataclass(frozen=True, slots=True)
class SideMeasured:
    """The same of a model that does not generate."""

    name: str
    running: int
    waiting: int
    figures: SideFigures


def metrics(models: Iterable[Measured], statuses: Mapping[int, int], sides: Iterable[SideMeasured] = ()) -> str:
    """Of all tenants together. `statuses` says how many answers had each HTTP status."""
    each = chain((_of(model) for model in models), (_of_side(side) for side in sides))
    return exposition((*_joined(each), *_answers(statuses)))


def _joined(models: Iterable[Iterable[Metric]]) -> Iterable[Metric]:
    """A metric is described once, with the samples of all models behind it."""
    found: dict[str, Metric] = {}
    for metric in chain.from_iterable(models):
        before = found.get(metric.name)
        found[metric.name] = metric if before is None else replace(before, samples=before.samples + metric.samples)
    return found.values()


def _of(model: Measured) -> Iterator[Metric]:
    card, health, figures = model.card, model.health, model.figures
    theirs = Family("vllm:", {"model_name": card.name, "engine": ENGINE})
    ours = Family("ingot_", {"model_name": card.name})
    yield from _now(theirs, health, figures)
    yield from _tokens(theirs, health, figures)
    yield from _durations(theirs, figures)
    yield from _lengths(theirs, figures)
    yield from _speculation(theirs, model.speculation)
    yield from model.further
    yield from _own(ours, card, figures)


def _of_side(side: SideMeasured) -> Iterator[Metric]:
    """By vLLM's names for models that pool."""
    told, figures = Family("vllm:", {"model_name": side.name, "engine": ENGINE}), side.figures
    yield from _requests(told, side.running, side.waiting)
    yield told.counter("prompt_tokens", PROMPT_TOKENS, figures.read_tokens)
    yield told.counter("generation_tokens", GENERATION_TOKENS, figures.written_tokens)
    yield told.counters("request_success", ENDED, "finished_reason", figures.endings)
    yield told.histogram("e2e_request_latency_seconds", REQUEST, figures.request_s)
    yield told.histogram("request_queue_time_seconds", QUEUE, figures.queue_s)
    yield told.histogram("request_inference_time_seconds", INFERENCE, figures.inference_s)


def _requests(told: Family, running: int, waiting: int) -> Iterator[Metric]:
    yield told.gauge("num_requests_running", "Requests that are being computed.", running)
    yield told.gauge("num_requests_waiting", "Requests that wait for their turn.", waiting)


def _answers(statuses: Mapping[int, int]) -> Iterator[Metric]:
    """As they are, and as the instrumentation tells them that vLLM has: by their kinds."""
    by_code = {str(code): count for code, count in sorted(statuses.items())}
    yield Family("ingot_", {}).counters("http_responses", "Answers by their HTTP status.", "code", by_code)
    kinds: Counter[str] = Counter()
    for code, count in statuses.items():
        kinds[f"{code // 100}xx"] += count
    yield Family("", {}).counters("http_requests", "Answers by the kind of their HTTP status.", "status", kinds)


def _now(told: Family, health: Health, figures: Figures) -> Iterator[Metric]:
    yield from _requests(told, health.running, health.queued)
    yield told.gauges(
        "num_requests_waiting_by_reason",
        "The same, by what they wait for. Here that is always a place among those that are computed.",
        [({"reason": "capacity"}, health.queued), ({"reason": "deferred"}, 0)],
    )
    yield told.gauge("kv_cache_usage_perc", "Memory for states that running requests hold, 1 is all.", figures.occupied)
    pages = {
        "block_size": str(figures.page_tokens),
        "num_gpu_blocks": str(figures.most_tokens // max(1, figures.page_tokens)),
    }
    yield told.gauges("cache_config_info", "Tokens of a page, and pages that memory holds.", [(pages, 1)])


def _tokens(told: Family, health: Health, figures: Figures) -> Iterator[Metric]:
    yield told.counter("prompt_tokens", PROMPT_TOKENS, figures.prompt_tokens)
    yield told.counter("prompt_tokens_cached", "Those that were taken over.", figures.matched_tokens)
    yield told.counter("generation_tokens", GENERATION_TOKENS, figures.generated_tokens)
    yield told.counter(
        "prefix_cache_queries", "Tokens of prompts that kept ones were searched for.", figures.asked_tokens
    )
    yield told.counter("prefix_cache_hits", "Tokens of prompts that were taken over.", figures.matched_tokens)
    yield told.counter(
        "external_prefix_cache_queries",
        "Tokens that memory lacked and the disk was asked for.",
        figures.filed_asked_tokens,
    )
    yield told.counter("external_prefix_cache_hits", "Tokens of prompts that were read from disk.", figures.read_tokens)
    yield told.counter("mm_cache_queries", "Pictures and clips that were to be looked at.", figures.media_asked)
    yield told.counter("mm_cache_hits", "Those that had been, and were not again.", figures.media_found)
    yield told.counter("num_preemptions", "Times that a sequence had to make way.", figures.preemptions)
    yield told.counter("admission_rejections", "Requests that found the queue full.", health.refused)
    yield told.counters("request_success", ENDED, "finished_reason", figures.endings)


def _durations(told: Family, figures: Figures) -> Iterator[Metric]:
    yield told.histogram(
        "time_to_first_token_seconds", "From a request's arrival to its first token.", figures.first_token_s
    )
    yield told.histogram("inter_token_latency_seconds", "Between two tokens of an answer.", figures.between_tokens_s)
    yield told.histogram(
        "request_time_per_output_token_seconds", "The same, on average over each answer.", figures.token_s
    )
    yield told.histogram("e2e_request_latency_seconds", REQUEST, figures.request_s)
    yield told.histogram("request_queue_time_seconds", QUEUE, figures.queue_s)
    yield told.histogram("request_prefill_time_seconds", "From there to their first token.", figures.prefill_s)
    yield told.histogram("request_decode_time_seconds", "From there to their end.", figures.decode_s)
    yield told.histogram("request_inference_time_seconds", INFERENCE, figures.inference_s)


def _lengths(told: Family, figures: Figures) -> Iterator[Metric]:
    yield told.histogram("request_prompt_tokens", "Tokens of a request's prompts.", figures.prompt_lengths)
    yield told.histogram("request_generation_tokens", "Tokens of a request's answers.", figures.answer_lengths)
    yield told.histogram(
        "request_max_num_generation_tokens", "Tokens of the longest of a request's answers.", figures.longest_answers
    )
    yield told.histogram("request_params_max_tokens", "The most that it asked for.", figures.answer_limits)
    yield told.histogram("request_params_n", "Answers that it asked for.", figures.answers)
    yield told.histogram("iteration_tokens_total", "Tokens computed in a step.", figures.step_tokens)


def _speculation(told: Family, counts: SpeculationCounts) -> Iterator[Metric]:
    yield told.counter("spec_decode_num_drafts", "Times that tokens were guessed ahead for an answer.", counts.drafts)
    yield told.counter("spec_decode_num_draft_tokens", "Tokens that were guessed ahead.", counts.draft_tokens)
    yield told.counter("spec_decode_num_accepted_tokens", "Those that were right.", counts.accepted_tokens)
    yield told.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Those that were right, by their place in the guess.",
        "position",
        {str(place): count for place, count in enumerate(tuple(counts.accepted_per_position))},
    )


def _own(told: Family, card: ModelCard, figures: Figures) -> Iterator[Metric]:
    built = {"version": __version__, "device": card.device, "formats": card.formats or card.dtype}
    yield told.gauges("build_info", "What serves the model, on what, in which number formats.", [(built, 1)])
    yield told.gauge("model_loaded_timestamp_seconds", "When the model was loaded.", card.created)
    yield told.counters("prompts", "Prompts by why no more of them was taken over.", "reason", figures.reasons)
    yield told.counter("prompt_tokens_read", "Tokens of prompts that were taken over from disk.", figures.read_tokens)
    yield told.histogram("step_seconds", "What the engine's steps took.", figures.step_s)
    parts = {
        "budget": card.memory_budget,
        "weights": card.weight_bytes,
        "states": figures.state_bytes,
        "states_held": figures.held_bytes,
        "active": figures.active_bytes,
    }
    yield told.gauges(
        "memory_bytes",
        "The budget; of it the weights, the states that exist and what of these is held; all that MLX has in use.",
        [({"part": part}, value) for part, value in parts.items()],
    )
