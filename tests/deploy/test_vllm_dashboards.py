"""Dashboards that were published for vLLM find what they ask for.

What the panels of vLLM's examples query (examples/observability, August 2026) is written down here: each metric, and
the labels by which it is filtered or grouped.
"""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.protocol.ingot_api.metrics import generating_model_metrics, render_metrics
from tests.http.scripted import ScriptedEngine

LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
MODEL, ENGINE = frozenset({"model_name"}), frozenset({"model_name", "engine"})
ASKED = {
    **{f"vllm:{name}_{part}": MODEL for name in LATENCIES for part in ("sum", "count")},
    **{f"vllm:{name}_bucket": MODEL | {"le"} for name in LATENCIES},
    "vllm:iteration_tokens_total_count": MODEL,
    "vllm:prompt_tokens_total": ENGINE,
    "vllm:generation_tokens_total": ENGINE,
    "vllm:prompt_tokens_cached_total": ENGINE,
    "vllm:prefix_cache_queries_total": ENGINE,
    "vllm:prefix_cache_hits_total": ENGINE,
    "vllm:external_prefix_cache_queries_total": ENGINE,
    "vllm:external_prefix_cache_hits_total": ENGINE,
    "vllm:num_preemptions_total": ENGINE,
    "vllm:num_requests_running": ENGINE,
    "vllm:num_requests_waiting": ENGINE,
    "vllm:num_requests_waiting_by_reason": ENGINE | {"reason"},
    "vllm:kv_cache_usage_perc": ENGINE,
    "vllm:request_success_total": ENGINE | {"finished_reason"},
    "vllm:request_prompt_tokens_bucket": MODEL | {"le"},
    "vllm:request_generation_tokens_bucket": MODEL | {"le"},
    "vllm:request_max_num_generation_tokens_sum": MODEL,
    "vllm:request_queue_time_seconds_sum": MODEL,
    "vllm:request_prefill_time_seconds_sum": MODEL,
    "vllm:request_decode_time_seconds_sum": MODEL,
    "vllm:spec_decode_num_drafts_total": ENGINE,
    "vllm:spec_decode_num_draft_tokens_total": ENGINE,
    "vllm:spec_decode_num_accepted_tokens_total": ENGINE,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ENGINE | {"position"},
    "http_requests_total": frozenset({"status"}),
}


@pytest.fixture(scope="module")
def told() -> dict[str, frozenset[str]]:
    engine = ScriptedEngine()
    engine.speculation.add(proposed=1, accepted=1)
    text = render_metrics(
        [generating_model_metrics(engine.card, engine.health(), engine.figures, engine.speculation)], {200: 1}
    )
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: frozenset(sample.labels) for sample in samples}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_panel_asks_for_is_told_with_its_labels(name: str, told: dict[str, frozenset[str]]) -> None:
    assert ASKED[name] <= told[name]
