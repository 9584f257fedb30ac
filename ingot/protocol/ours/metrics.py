"""`GET /metrics`: what the server did and does, by the names that vLLM's dashboards know."""

from __future__ import annotations

from ingot.engine.request import Health
from ingot.observe.exposition import Metric, Sample, exposition
from ingot.observe.figures import Figures
from ingot.observe.speculation import SpeculationCounts

PREFIX = "vllm:"


def metrics(model: str, health: Health, figures: Figures, speculation: SpeculationCounts) -> str:
    """Of all tenants together; encoders' requests count as requests, their tokens do not."""
    named = {"model_name": model}

    def counter(name: str, help: str, value: int) -> Metric:
        return Metric(f"{PREFIX}{name}_total", "counter", help, (Sample(value, named),))

    def gauge(name: str, help: str, value: int | float) -> Metric:
        return Metric(f"{PREFIX}{name}", "gauge", help, (Sample(value, named),))

    traffic = figures.traffic
    return exposition(
        (
            gauge("num_requests_running", "Requests that are being computed.", health.running),
            gauge("num_requests_waiting", "Requests that wait for their turn.", health.queued),
            gauge("kv_cache_usage_perc", "Memory for states that running requests hold, 1 is all.", figures.occupied),
            counter("prompt_tokens", "Tokens of prompts that began to run.", traffic.prompt),
            counter("generation_tokens", "Tokens of answers.", traffic.generated),
            counter("prefix_cache_queries", "Tokens of prompts that kept ones were searched for.", traffic.asked),
            counter("prefix_cache_hits", "Tokens of prompts that were taken over.", traffic.matched),
            counter(
                "spec_decode_num_drafts", "Times that tokens were guessed ahead for an answer.", speculation.drafts
            ),
            counter("spec_decode_num_draft_tokens", "Tokens that were guessed ahead.", speculation.draft_tokens),
            counter("spec_decode_num_accepted_tokens", "Those that were right.", speculation.accepted_tokens),
            Metric(
                f"{PREFIX}spec_decode_num_accepted_tokens_per_pos_total",
                "counter",
                "Those that were right, by their place in the guess.",
                tuple(
                    Sample(count, named | {"position": str(position)})
                    for position, count in enumerate(tuple(speculation.accepted_per_position))
                ),
            ),
        )
    )
