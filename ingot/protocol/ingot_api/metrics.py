"""`GET /metrics` and `GET /v1/loads`: what the server did and does, for Prometheus and for routers.

Metrics that vLLM's dashboards and routers know have vLLM's names; those that only this server has, its own. Loads are
as SGLang's routers ask for them, a model being a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Final

from msgspec import Struct

from ingot.distributed.heartbeat import RankStatus
from ingot.engine.request import ModelCard, RequestStatus
from ingot.engine.status import Health
from ingot.observe.metrics import (
    EngineMetrics,
    ExpertStats,
    Histogram,
    Metric,
    MetricSample,
    SpeculationMetrics,
    TaskMetrics,
    exposition_text,
)
from ingot.version import __version__

ENGINE_LABEL: Final = "0"
"""Which engine of the server; dashboards for several ask for it."""
# Of models of all kinds.
ABOUT_PROMPT_TOKENS: Final = "Tokens of prompts that began to run."
ABOUT_GENERATION_TOKENS: Final = "Tokens of answers."


class MetricFamily:
    """Metrics whose names begin alike and that carry the same labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix, self._labels = prefix, dict(labels)

    def counter(self, name: str, help: str, value: float) -> Metric:
        return Metric(f"{self._prefix}{name}_total", "counter", help, (MetricSample(value, self._labels),))

    def counters(self, name: str, help: str, label: str, values: Mapping[str, int]) -> Metric:
        samples = tuple(MetricSample(value, self._labels | {label: each}) for each, value in values.items())
        return Metric(f"{self._prefix}{name}_total", "counter", help, samples)

    def gauge(self, name: str, help: str, value: int | float) -> Metric:
        return self.gauges(name, help, [({}, value)])

    def gauges(self, name: str, help: str, values: list[tuple[dict[str, str], int | float]]) -> Metric:
        samples = tuple(MetricSample(value, self._labels | labels) for labels, value in values)
        return Metric(f"{self._prefix}{name}", "gauge", help, samples)

    def histogram(self, name: str, help: str, values: Histogram) -> Metric:
        return Metric.of(f"{self._prefix}{name}", help, values, self._labels)


def render_metrics(models: Iterable[Iterable[Metric]], statuses: Mapping[int, int]) -> str:
    """Of all tenants together: each model's metrics, and how many answers had each HTTP status."""
    return exposition_text((*_merge_families(models), *_status_counters(statuses)))


def _merge_families(models: Iterable[Iterable[Metric]]) -> Iterable[Metric]:
    """A metric is described once, with the samples of all models behind it."""
    found: dict[str, Metric] = {}
    for metric in chain.from_iterable(models):
        before = found.get(metric.name)
        found[metric.name] = metric if before is None else replace(before, samples=before.samples + metric.samples)
    return found.values()


def generating_model_metrics(
    card: ModelCard,
    health: Health,
    figures: EngineMetrics,
    speculation: SpeculationMetrics,
    further: Iterable[Metric] = (),
) -> Iterator[Metric]:
    vllm = MetricFamily("vllm:", {"model_name": card.name, "engine": ENGINE_LABEL})
    yield from _current_gauges(vllm, health, figures)
    yield from _token_counters(vllm, health, figures)
    yield from _duration_histograms(vllm, figures)
    yield from _length_histograms(vllm, figures)
    yield from _speculation_counters(vllm, speculation)
    yield from further
    yield from _ingot_metrics(MetricFamily("ingot_", {"model_name": card.name}), card, figures)
    if figures.experts is not None:
        yield from _expert_metrics(MetricFamily("ingot_", {"model_name": card.name}), figures.experts)


def task_model_metrics(name: str, health: Health, figures: TaskMetrics) -> Iterator[Metric]:
    """Of a model that does not generate, by vLLM's names for pooling models."""
    vllm = MetricFamily("vllm:", {"model_name": name, "engine": ENGINE_LABEL})
    yield from _request_metrics(vllm, health, figures)
    yield vllm.counter("prompt_tokens", ABOUT_PROMPT_TOKENS, figures.read_tokens)
    yield vllm.counter("generation_tokens", ABOUT_GENERATION_TOKENS, figures.written_tokens)


def _request_metrics(family: MetricFamily, health: Health, figures: EngineMetrics | TaskMetrics) -> Iterator[Metric]:
    """Of a model of any kind."""
    yield family.gauge("num_requests_running", "Requests that are being computed.", health.running)
    yield family.gauge("num_requests_waiting", "Requests that wait for their turn.", health.queued)
    yield family.counters("request_success", "Requests by how they ended.", "finished_reason", figures.endings)
    yield family.histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", figures.request_s)
    yield family.histogram("request_queue_time_seconds", "What requests waited for their turn.", figures.queue_s)
    yield family.histogram("request_inference_time_seconds", "From their turn to their end.", figures.inference_s)


def _status_counters(statuses: Mapping[int, int]) -> Iterator[Metric]:
    """As they are, and as the instrumentation tells them that vLLM has: by their kinds."""
    by_code = {str(code): count for code, count in sorted(statuses.items())}
    yield MetricFamily("ingot_", {}).counters("http_responses", "Answers by their HTTP status.", "code", by_code)
    kinds: Counter[str] = Counter()
    for code, count in statuses.items():
        kinds[f"{code // 100}xx"] += count
    yield MetricFamily("", {}).counters("http_requests", "Answers by the kind of their HTTP status.", "status", kinds)


def _current_gauges(family: MetricFamily, health: Health, figures: EngineMetrics) -> Iterator[Metric]:
    yield from _request_metrics(family, health, figures)
    yield family.gauges(
        "num_requests_waiting_by_reason",
        "The same, by what they wait for. Here that is always capacity.",
        [({"reason": "capacity"}, health.queued), ({"reason": "deferred"}, 0)],
    )
    yield family.gauge("kv_cache_usage_perc", "The part of KV memory that running requests hold.", figures.occupied)
    pages = {
        "block_size": str(figures.page_tokens),
        "num_gpu_blocks": str(figures.most_tokens // max(1, figures.page_tokens)),
    }
    yield family.gauges("cache_config_info", "Tokens of a page, and pages that memory holds.", [(pages, 1)])


def _token_counters(family: MetricFamily, health: Health, figures: EngineMetrics) -> Iterator[Metric]:
    yield family.counter("prompt_tokens", ABOUT_PROMPT_TOKENS, figures.prompt_tokens)
    yield family.counter("prompt_tokens_cached", "Those reused from the prefix cache.", figures.matched_tokens)
    yield family.counter("generation_tokens", ABOUT_GENERATION_TOKENS, figures.generated_tokens)
    yield family.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", figures.queried_tokens)
    yield family.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", figures.matched_tokens)
    yield family.counter(
        "external_prefix_cache_queries",
        "Tokens that memory lacked and the disk was asked for.",
        figures.disk_queried_tokens,
    )
    yield family.counter("external_prefix_cache_hits", "Prompt tokens read from disk.", figures.read_tokens)
    yield family.counter("mm_cache_queries", "Images and videos looked up among encoded ones.", figures.media_queries)
    yield family.counter("mm_cache_hits", "Those found there, or on their way.", figures.media_hits)
    yield family.counter("num_preemptions", "Times that a sequence was preempted.", figures.preemptions)
    yield family.counter("admission_rejections", "Requests that found the queue full.", health.refused)


def _duration_histograms(family: MetricFamily, figures: EngineMetrics) -> Iterator[Metric]:
    yield family.histogram(
        "time_to_first_token_seconds", "From a request's arrival to its first token.", figures.first_token_s
    )
    yield family.histogram("inter_token_latency_seconds", "Between two tokens of an answer.", figures.between_tokens_s)
    yield family.histogram(
        "request_time_per_output_token_seconds", "The same, on average over each answer.", figures.token_s
    )
    yield family.histogram("request_prefill_time_seconds", "From their turn to their first token.", figures.prefill_s)
    yield family.histogram("request_decode_time_seconds", "From their first token to their end.", figures.decode_s)


def _length_histograms(family: MetricFamily, figures: EngineMetrics) -> Iterator[Metric]:
    yield family.histogram("request_prompt_tokens", "Tokens of a request's prompts.", figures.prompt_lengths)
    yield family.histogram("request_generation_tokens", "Tokens of a request's answers.", figures.answer_lengths)
    yield family.histogram(
        "request_max_num_generation_tokens", "Tokens of the longest of a request's answers.", figures.longest_answers
    )
    yield family.histogram("request_params_max_tokens", "The max_tokens of a request.", figures.answer_limits)
    yield family.histogram("request_params_n", "The n of a request.", figures.answers)
    yield family.histogram("iteration_tokens_total", "Tokens computed in a step.", figures.step_tokens)


def _speculation_counters(family: MetricFamily, counts: SpeculationMetrics) -> Iterator[Metric]:
    yield family.counter("spec_decode_num_drafts", "Drafts of speculative decoding.", counts.drafts)
    yield family.counter("spec_decode_num_draft_tokens", "Draft tokens.", counts.draft_tokens)
    yield family.counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", counts.accepted_tokens)
    yield family.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by their position in the draft.",
        "position",
        {str(position): count for position, count in enumerate(tuple(counts.accepted_per_position))},
    )


def _expert_metrics(family: MetricFamily, stats: ExpertStats) -> Iterator[Metric]:
    """Of a mixture whose experts are read when they are needed."""
    lookups = {"hit": stats.hits, "predicted": stats.predicted, "miss": stats.misses}
    yield family.gauge("expert_memory_share", "Of all experts, those that fit in memory.", round(stats.share, 4))
    yield family.counters("experts_needed", "Experts of a pass's layers, by where they were.", "found", lookups)
    yield family.counter("experts_wasted", "Experts that were read ahead and not used.", stats.wasted)
    yield family.counter("expert_rounds", "Further rounds of layers with more experts than slots.", stats.rounds)
    yield family.counter("expert_read_bytes", "Bytes of experts that were read.", stats.bytes_read)
    yield family.counter("expert_wait_seconds", "Seconds that passes waited for experts.", stats.waited_s)
    yield family.counter("expert_read_seconds", "Seconds in which experts were read.", stats.reading_s)


def _ingot_metrics(family: MetricFamily, card: ModelCard, figures: EngineMetrics) -> Iterator[Metric]:
    built = {"version": __version__, "device": card.device, "formats": card.formats or card.dtype}
    yield family.gauges("build_info", "What serves the model, on what, in which number formats.", [(built, 1)])
    yield family.gauge("model_loaded_timestamp_seconds", "When the model was loaded.", card.created)
    yield family.counters("prompts", "Prompts by why no more of them was reused.", "reason", figures.reasons)
    yield family.counter("prompt_tokens_read", "Prompt tokens reused from disk.", figures.read_tokens)
    yield family.histogram("step_seconds", "What the engine's steps took.", figures.step_s)
    parts = {
        "budget": card.memory_budget,
        "weights": card.weight_bytes,
        "states": figures.state_bytes,
        "states_held": figures.held_bytes,
        "active": figures.active_bytes,
    }
    yield family.gauges(
        "memory_bytes",
        "The budget; of it the weights, the KV memory that exists and what of it is held; all that MLX has in use.",
        [({"part": part}, value) for part, value in parts.items()],
    )


def rank_metrics(model: str, rank_statuses: Sequence[RankStatus]) -> Sequence[Metric]:
    """Nothing for a model that one process runs."""
    if not rank_statuses:
        return ()
    family = MetricFamily("ingot_rank_", {"model_name": model})
    by_rank = [({"rank": str(one.rank)}, one) for one in rank_statuses]
    return (
        family.gauges("step", "The last step that the process did.", [(rank, one.step) for rank, one in by_rank]),
        family.gauges("silent_seconds", "Since its last heartbeat.", [(rank, one.silent_s) for rank, one in by_rank]),
        family.gauges("late_seconds", "Since it ought to have gone on.", [(rank, one.late_s) for rank, one in by_rank]),
    )


class ModelLoad(Struct, kw_only=True):
    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


class LoadsBody(Struct, kw_only=True):
    timestamp: str  # in ISO's form: routers that read it are strict
    dp_rank_count: int = 1
    loads: list[ModelLoad]


def loads_body(models: Iterable[tuple[ModelCard, Sequence[RequestStatus], EngineMetrics]]) -> LoadsBody:
    """A rank for each model that is loaded."""
    ranks = [_model_load(rank, *model) for rank, model in enumerate(models)]
    return LoadsBody(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=len(ranks), loads=ranks)


def _model_load(rank: int, card: ModelCard, statuses: Sequence[RequestStatus], figures: EngineMetrics) -> ModelLoad:
    """Tokens of prompts that wait count as a whole: what is cached of them is known when their turn comes."""
    running = [status for status in statuses if status.phase != "queued"]
    waiting = [status for status in statuses if status.phase == "queued"]
    return ModelLoad(
        dp_rank=rank,
        num_running_reqs=len(running),
        num_waiting_reqs=len(waiting),
        num_waiting_uncached_tokens=sum(status.prompt_tokens for status in waiting),
        num_total_reqs=len(statuses),
        num_used_tokens=sum(status.prefilled_tokens + status.completion_tokens for status in running),
        max_total_num_tokens=figures.most_tokens,
        token_usage=round(figures.occupied, 4),
        gen_throughput=round(sum((status.tokens_per_second for status in running), 0.0), 2),
        cache_hit_rate=round(figures.matched_tokens / max(1, figures.queried_tokens), 4),
        utilization=round(len(running) / card.max_sequences, 4),
        max_running_requests=card.max_sequences,
    )
