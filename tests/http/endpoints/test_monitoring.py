"""`GET /metrics` and `/v1/loads`: true figures, by the names that others know, for the administrator alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.errors import Overloaded
from ingot.http.endpoints.table import build_app
from tests import scripted
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, settings
from tests.http.scripted_encoders import EncodingEngine

pytestmark = pytest.mark.anyio

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {"api_key": "a-tenants-key", "admin_api_key": "the-admins-key"}
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "request_params_n", "iteration_tokens_total"),
    "request_max_num_generation_tokens",
}


def app(engine: Any, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))


def figures(body: bytes) -> dict[str, float]:
    """Values by name, with the label that tells one sample from the next."""
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            told = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            found[sample.name.removeprefix("vllm:") + (f"[{','.join(told)}]" if told else "")] = sample.value
    return found


async def test_every_figure_is_told_by_its_name() -> None:
    engine = ScriptedEngine()
    engine.speculation.add(proposed=4, accepted=2)
    engine.speculation.add(proposed=3, accepted=1)
    made = await call(app(engine), "GET", "/metrics")
    assert made.status == 200
    assert made.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    told = figures(made.body)
    assert {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "num_requests_waiting_by_reason[capacity]": 0,
        "num_requests_waiting_by_reason[deferred]": 0,
        "kv_cache_usage_perc": 0.25,
        "cache_config_info[64,10]": 1,
        "prompt_tokens_total": 90,
        "prompt_tokens_cached_total": 60,
        "generation_tokens_total": 30,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 60,
        "request_success_total[stop]": 3,
        "request_success_total[length]": 0,
        "num_preemptions_total": 0,
        "mm_cache_queries_total": 6,
        "mm_cache_hits_total": 2,
        "time_to_first_token_seconds_bucket[0.25]": 1,
        "time_to_first_token_seconds_bucket[0.5]": 2,
        "time_to_first_token_seconds_bucket[+Inf]": 3,
        "time_to_first_token_seconds_count": 3,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 7,
        "spec_decode_num_accepted_tokens_total": 3,
        "spec_decode_num_accepted_tokens_per_pos_total[0]": 2,
        "spec_decode_num_accepted_tokens_per_pos_total[1]": 1,
        "ingot_prompts_total[unseen]": 2,
    }.items() <= told.items()
    assert {name.removesuffix("_count") for name in told} >= HISTOGRAMS


async def test_each_metric_is_described_once_and_carries_the_models_name() -> None:
    made = await call(app(ScriptedEngine()), "GET", "/metrics")
    families = list(text_string_to_metric_families(made.body.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert all(family.documentation and family.type in ("counter", "gauge", "histogram") for family in families)
    told = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    assert {(sample.labels["model_name"], sample.labels["engine"]) for sample in told} == {("org/toy", "0")}


async def test_answers_are_counted_by_their_status() -> None:
    engine = ScriptedEngine()
    served = app(engine)
    await call(served, body=MESSAGES)
    engine.refusal = Overloaded("The queue is full", retry_after=1)
    await call(served, body=MESSAGES)
    told = figures((await call(served, "GET", "/metrics")).body)
    assert (told["ingot_http_responses_total[200]"], told["ingot_http_responses_total[429]"]) == (1, 1)
    assert (told["http_requests_total[2xx]"], told["http_requests_total[4xx]"]) == (1, 1)


async def test_requests_under_way_are_counted() -> None:
    engine = ScriptedEngine(None)
    served = app(engine)
    async with Call(served, body=MESSAGES | {"stream": True}) as made:
        await made.until(lambda: made.status == 200)
        assert figures((await call(served, "GET", "/metrics")).body)["num_requests_running"] == 1
        told = (await call(served, "GET", "/v1/loads")).json()
        assert isinstance(told["timestamp"], str)  # SMG takes nothing else for loads
        [load] = told["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (1, 0, 1)
        assert (load["max_total_num_tokens"], load["token_usage"], load["cache_hit_rate"]) == (640, 0.25, 0.75)
        assert (load["utilization"], load["max_running_requests"]) == (0.125, 8)
        made.leave()


@pytest.mark.parametrize("path", ["/metrics", "/v1/loads"])
async def test_only_the_administrator_is_told(path: str) -> None:
    served = app(ScriptedEngine(), **KEYS)
    assert (await call(served, "GET", path)).status == 401
    tenant = await call(served, "GET", path, headers={"authorization": f"Bearer {KEYS['api_key']}"})
    assert tenant.status == 403 and b"--admin-api-key" in tenant.body
    admin = await call(served, "GET", path, headers={"authorization": f"Bearer {KEYS['admin_api_key']}"})
    assert admin.status == 200


async def test_ten_thousand_requests_make_no_scrape_slow() -> None:
    served = {}
    for requests in (10, 10_000):
        engine = ScriptedEngine()
        for number in range(requests):
            engine.figures.first_token_s.add(number / 1000)
            engine.figures.request_s.add(number / 100)
            engine.figures.endings["stop"] += 1
        served[requests] = app(engine)

    async def seconds(requests: int) -> float:  # of work: others may want the machine, too
        began = time.thread_time()
        await call(served[requests], "GET", "/metrics")
        return time.thread_time() - began

    few, many = zip(*[(await seconds(10), await seconds(10_000)) for _ in range(10)], strict=True)
    assert min(many) < 2 * min(few)


async def test_the_engines_own_figures_are_true_and_no_step_is_waited_for() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        served = app(engine)
        first = (await call(served, body=MESSAGES)).json()
        again = (await call(served, body=MESSAGES)).json()
        off = (await call(served, body=MESSAGES | {"cache": "off"})).json()
    finally:
        engine.close()
    told = figures((await call(served, "GET", "/metrics")).body)  # though no thread answers any more
    prompt = first["usage"]["prompt_tokens"]
    assert told["prompt_tokens_total"] == 3 * prompt
    assert told["generation_tokens_total"] == 3 * first["usage"]["completion_tokens"] == 3 * 6
    assert told["prefix_cache_queries_total"] == 2 * prompt
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert told["prefix_cache_hits_total"] == cached > 0
    assert off["ingot"]["cache"]["reason"] == "off"
    assert told["ingot_prompts_total[off]"] == 1
    assert told["e2e_request_latency_seconds_count"] == told["request_success_total[stop]"] == 3
    assert told["kv_cache_usage_perc"] == told["num_requests_running"] == 0


async def test_a_model_that_generates_nothing_has_figures_under_its_own_name() -> None:
    engine = EncodingEngine()
    made = app(engine)
    assert (await call(made, "POST", "/v1/embeddings", body={"input": ["ab", "c"]})).status == 200
    engine.refusal = Overloaded("full")
    assert (await call(made, "POST", "/v1/embeddings", body={"input": "d"})).status == 429
    name = engine.encoders["embedding"].card.name
    families = text_string_to_metric_families((await call(made, "GET", "/metrics")).body.decode())
    own = {
        (sample.name.removeprefix("vllm:"), sample.labels.get("finished_reason", "")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model_name") == name and "le" not in sample.labels
    }
    assert {
        ("num_requests_running", ""): 0,
        ("num_requests_waiting", ""): 0,
        ("prompt_tokens_total", ""): engine.encodings[0].tokens,
        ("request_success_total", "stop"): 1,
        ("request_success_total", "abort"): 0,
        ("request_success_total", "error"): 1,
        ("e2e_request_latency_seconds_count", ""): 2,
        ("request_queue_time_seconds_sum", ""): 0.1,
        ("request_inference_time_seconds_sum", ""): 0.2,
    }.items() <= own.items()
