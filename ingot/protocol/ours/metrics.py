"""`GET /metrics`: what the server did and does. What vLLM's dashboards and routers know is told by vLLM's names, what
only this server has by its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.engine.request import Health, ModelCard
from ingot.observe.exposition import Metric, Sample, exposition
from ingot.observe.figures import Figures
from ingot.observe.histogram import Histogram
from ingot.observe.speculation import SpeculationCounts
from ingot.version import __version__


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


def metrics(
    card: ModelCard, health: Health, figures: Figures, speculation: SpeculationCounts, statuses: Mapping[int, int]
) -> str:
    """Of all tenants together; encoders' requests count as requests, their tokens do not. `statuses` says how many
    answers had each HTTP status."""
    theirs, ours = Family("vllm:", {"model_name": card.name}), Family("ingot_", {"model_name": card.name})
    return exposition(
        (
            *_now(theirs, health, figures),
            *_tokens(theirs, health, figures),
            *_durations(theirs, figures),
            *_lengths(theirs, figures),
            *_speculation(theirs, speculation),
            *_own(ours, card, figures),
            Family("ingot_", {}).counters(
                "http_responses", "Answers by their HTTP status.", "code", {str(k): v for k, v in statuses.items()}
            ),
        )
    )


def _now(told: Family, health: Health, figures: Figures) -> Iterator[Metric]:
    yield told.gauge("num_requests_running", "Requests that are being computed.", health.running)
    yield told.gauge("num_requests_waiting", "Requests that wait for their turn.", health.queued)
    yield told.gauge("kv_cache_usage_perc", "Memory for states that running requests hold, 1 is all.", figures.occupied)
    pages = {
        "block_size": str(figures.page_tokens),
        "num_gpu_blocks": str(figures.most_tokens // max(1, figures.page_tokens)),
    }
    yield told.gauges("cache_config_info", "Tokens of a page, and pages that memory holds.", [(pages, 1)])


def _tokens(told: Family, health: Health, figures: Figures) -> Iterator[Metric]:
    yield told.counter("prompt_tokens", "Tokens of prompts that began to run.", figures.prompt_tokens)
    yield told.counter("prompt_tokens_cached", "Those that were taken over.", figures.matched_tokens)
    yield told.counter("generation_tokens", "Tokens of answers.", figures.generated_tokens)
    yield told.counter(
        "prefix_cache_queries", "Tokens of prompts that kept ones were searched for.", figures.asked_tokens
    )
    yield told.counter("prefix_cache_hits", "Tokens of prompts that were taken over.", figures.matched_tokens)
    yield told.counter("num_preemptions", "Times that a sequence had to make way.", figures.preemptions)
    yield told.counter("admission_rejections", "Requests that found the queue full.", health.refused)
    yield told.counters("request_success", "Requests by how they ended.", "finished_reason", figures.endings)


def _durations(told: Family, figures: Figures) -> Iterator[Metric]:
    yield told.histogram(
        "time_to_first_token_seconds", "From a request's arrival to its first token.", figures.first_token_s
    )
    yield told.histogram("inter_token_latency_seconds", "Between two tokens of an answer.", figures.between_tokens_s)
    yield told.histogram(
        "request_time_per_output_token_seconds", "The same, on average over each answer.", figures.token_s
    )
    yield told.histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", figures.request_s)
    yield told.histogram("request_queue_time_seconds", "What requests waited for their turn.", figures.queue_s)
    yield told.histogram("request_prefill_time_seconds", "From there to their first token.", figures.prefill_s)
    yield told.histogram("request_decode_time_seconds", "From there to their end.", figures.decode_s)
    yield told.histogram("request_inference_time_seconds", "From their turn to their end.", figures.inference_s)


def _lengths(told: Family, figures: Figures) -> Iterator[Metric]:
    yield told.histogram("request_prompt_tokens", "Tokens of a request's prompts.", figures.prompt_lengths)
    yield told.histogram("request_generation_tokens", "Tokens of a request's answers.", figures.answer_lengths)
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
    }
    yield told.gauges(
        "memory_bytes",
        "The budget, and of it the weights and the states that exist; of these, what requests and kept prompts hold.",
        [({"part": part}, value) for part, value in parts.items()],
    )
