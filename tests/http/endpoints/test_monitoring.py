"""`GET /v1/live` and `/v1/cache/tree`: what the page draws; each key sees its own, the administrator everything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingot.engine.request import CacheReport, Ended, SequenceEnded, TextDelta, Timing, Usage
from ingot.errors import Overloaded
from ingot.observe.metrics import ExpertStats
from ingot.protocol.ingot_api.requests import MOST_LISTED_REQUESTS
from tests import scripted
from tests.http.asgi import Call, call, events
from tests.http.scripted import ScriptedEngine, build_app, failing, settings
from tests.http.scripted_encoders import EncodingEngine

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {"api_key": "a-tenants-key", "admin_api_key": "the-admins-key"}
TENANT, ADMIN = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("api_key", "admin_api_key"))


def app(engine: Any, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))


@pytest.mark.anyio
async def test_a_request_that_ended_is_told_with_what_its_phases_took() -> None:
    served = app(ScriptedEngine())
    made = await call(served, body=MESSAGES)
    [past] = (await call(served, "GET", "/v1/live")).json()["past"]
    assert (past["id"], past["path"], past["outcome"]) == (made.json()["id"], "/v1/chat/completions", "ended")
    assert (past["queued_s"], past["prompt_s"], past["answer_s"]) == (0.1, 0.2, 0.3)
    assert past["completion_tokens"] == 3
    assert 0 <= past["ended_ago_s"] < 10


@pytest.mark.anyio
async def test_one_that_failed_is_told_by_its_error() -> None:
    served = app(ScriptedEngine(failing(Overloaded("full"))))
    await call(served, body=MESSAGES)
    [past] = (await call(served, "GET", "/v1/live")).json()["past"]
    assert past["outcome"] == Overloaded.code


@pytest.mark.anyio
async def test_one_that_its_user_stopped_is_a_cancelled_one() -> None:
    engine = ScriptedEngine(None)
    served = app(engine)
    async with Call(served, body={**MESSAGES, "stream": True}) as left:
        await left.until(lambda: bool(engine.running))
        left.leave()
        await left.done()
    [past] = (await call(served, "GET", "/v1/live")).json()["past"]
    assert past["outcome"] == "cancelled"
    assert (await call(served, "GET", f"/v1/requests/{past['id']}")).json()["status"] == "cancelled"


@pytest.mark.anyio
async def test_one_that_runs_is_told_while_it_does() -> None:
    engine = ScriptedEngine(None)
    served = app(engine)
    async with Call(served, body={**MESSAGES, "stream": True}) as waiting:
        await waiting.until(lambda: bool(engine.running))
        [request] = (await call(served, "GET", "/v1/live")).json()["requests"]
        assert request["id"] in engine.running
        assert {"queued_s", "prompt_s", "answer_s", "cached_tokens", "phase"} <= request.keys()


@pytest.mark.anyio
async def test_totals_memory_and_guesses_are_told_with_the_engine() -> None:
    engine = ScriptedEngine()
    engine.speculation.add(proposed=4, accepted=2)
    engine.figures.kept_bytes = {f"key{number}": number for number in range(40)}
    [told] = (await call(app(engine), "GET", "/v1/live")).json()["engines"]
    assert told["model"] == "org/toy"
    assert told["totals"]["generated_tokens"] == 30
    assert told["memory"]["owners"][0] == {"owner": "key39", "kept_bytes": 39}
    assert len(told["memory"]["owners"]) == 16
    assert told["speculation"]["accepted_per_position"] == [1, 1]


@pytest.mark.anyio
async def test_a_key_sees_its_own_requests_and_nothing_of_the_whole() -> None:
    served = app(ScriptedEngine(), **KEYS)
    await call(served, body=MESSAGES, headers=TENANT)
    await call(served, body=MESSAGES, headers=ADMIN)
    own = (await call(served, "GET", "/v1/live", headers=TENANT)).json()
    assert len(own["past"]) == 1 and "engines" not in own
    everything = (await call(served, "GET", "/v1/live", headers=ADMIN)).json()
    assert len(everything["past"]) == 2 and "engines" in everything
    assert (await call(served, "GET", "/v1/live")).status == 401


@pytest.mark.anyio
async def test_what_is_told_is_bounded_whatever_went_on() -> None:
    served = app(ScriptedEngine())
    for _ in range(MOST_LISTED_REQUESTS + 10):
        await call(served, body=MESSAGES)
    assert len((await call(served, "GET", "/v1/live")).json()["past"]) == MOST_LISTED_REQUESTS


@pytest.mark.anyio
async def test_the_tree_tells_how_what_is_kept_branches() -> None:
    [first, second] = (await call(app(ScriptedEngine()), "GET", "/v1/cache/tree")).json()["data"]
    assert (first["parent"], first["begin"], first["end"], first["uses"], first["more"]) == (None, 0, 12, 4, 2)
    assert (second["parent"], second["on_disk"]) == (0, True)


@pytest.mark.anyio
async def test_a_real_engine_tells_of_what_it_keeps_and_what_that_was_good_for() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        served = app(engine)
        for text in ("one", "two", "three"):
            messages = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": text}]
            assert (await call(served, body={"messages": messages})).status == 200
        branches = (await call(served, "GET", "/v1/cache/tree")).json()["data"]
        told = (await call(served, "GET", "/v1/live")).json()
    finally:
        engine.close()
    roots = [branch for branch in branches if branch["parent"] is None]
    assert len(roots) == 1 and roots[0]["uses"] >= 2 and roots[0]["bytes"] > 0
    for place, branch in enumerate(branches):
        assert branch["parent"] is None or branch["parent"] < place
        assert branch["parent"] is None or branches[branch["parent"]]["end"] == branch["begin"]
    assert [past["cached_tokens"] > 0 for past in told["past"]] == [True, True, False]
    assert told["engines"][0]["memory"]["active_bytes"] > 0


HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "request_params_n", "iteration_tokens_total"),
    "request_max_num_generation_tokens",
}


def figures(body: bytes) -> dict[str, float]:
    """Values by name, with the label that tells one sample from the next."""
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            told = [value for label, value in sample.labels.items() if label not in ("model_name", "engine")]
            found[sample.name.removeprefix("vllm:") + (f"[{','.join(told)}]" if told else "")] = sample.value
    return found


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_a_mixture_that_does_not_fit_has_figures_of_its_experts() -> None:
    engine = ScriptedEngine()
    assert "expert" not in (await call(app(engine), "GET", "/metrics")).body.decode()
    engine.figures.experts = ExpertStats(0.41, 7, 2, 1, wasted=3, bytes_read=4096, waited_s=0.25, reading_s=0.5)
    told = figures((await call(app(engine), "GET", "/metrics")).body)
    assert {
        "ingot_expert_memory_share": 0.41,
        "ingot_experts_needed_total[hit]": 7,
        "ingot_experts_needed_total[predicted]": 2,
        "ingot_experts_needed_total[miss]": 1,
        "ingot_experts_wasted_total": 3,
        "ingot_expert_rounds_total": 0,
        "ingot_expert_read_bytes_total": 4096,
        "ingot_expert_wait_seconds_total": 0.25,
        "ingot_expert_read_seconds_total": 0.5,
    }.items() <= told.items()
    [live] = (await call(app(engine), "GET", "/v1/live")).json()["engines"]
    assert live["memory"]["experts"]["share"] == 0.41 and live["memory"]["experts"]["misses"] == 1


@pytest.mark.anyio
async def test_each_metric_is_described_once_and_carries_the_models_name() -> None:
    made = await call(app(ScriptedEngine()), "GET", "/metrics")
    families = list(text_string_to_metric_families(made.body.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert all(family.documentation and family.type in ("counter", "gauge", "histogram") for family in families)
    told = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    assert {(sample.labels["model_name"], sample.labels["engine"]) for sample in told} == {("org/toy", "0")}


@pytest.mark.anyio
async def test_answers_are_counted_by_their_status() -> None:
    engine = ScriptedEngine()
    served = app(engine)
    await call(served, body=MESSAGES)
    engine.refusal = Overloaded("The queue is full", retry_after=1)
    await call(served, body=MESSAGES)
    told = figures((await call(served, "GET", "/metrics")).body)
    assert (told["ingot_http_responses_total[200]"], told["ingot_http_responses_total[429]"]) == (1, 1)
    assert (told["http_requests_total[2xx]"], told["http_requests_total[4xx]"]) == (1, 1)


@pytest.mark.anyio
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


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/metrics", "/v1/loads"])
async def test_only_the_administrator_is_told(path: str) -> None:
    served = app(ScriptedEngine(), **KEYS)
    assert (await call(served, "GET", path)).status == 401
    tenant = await call(served, "GET", path, headers={"authorization": f"Bearer {KEYS['api_key']}"})
    assert tenant.status == 403 and b"--admin-api-key" in tenant.body
    admin = await call(served, "GET", path, headers={"authorization": f"Bearer {KEYS['admin_api_key']}"})
    assert admin.status == 200


@pytest.mark.anyio
async def test_a_scrape_is_as_much_work_after_ten_thousand_requests_as_after_ten() -> None:
    served = {}
    for requests in (10, 10_000):
        engine = ScriptedEngine()
        for number in range(requests):
            engine.figures.first_token_s.add(number / 1000)
            engine.figures.request_s.add(number / 100)
            engine.figures.endings["stop"] += 1
        served[requests] = app(engine)

    async def calls(requests: int) -> int:
        called: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, given: called.append(event) if event in ("call", "c_call") else None)
        try:
            await call(served[requests], "GET", "/metrics")
        finally:
            sys.setprofile(before)
        return len(called)

    for _ in range(2):  # the first ones import and compile
        few, many = await calls(10), await calls(10_000)
    assert 100 < many < 1.1 * few


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_a_model_that_generates_nothing_has_figures_under_its_own_name() -> None:
    engine = EncodingEngine()
    made = app(engine)
    assert (await call(made, "POST", "/v1/embeddings", body={"input": ["ab", "c"]})).status == 200
    engine.refusal = Overloaded("full")
    assert (await call(made, "POST", "/v1/embeddings", body={"input": "d"})).status == 429
    name = engine.alongside[0].card.name
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


REPORT = CacheReport(9, 5, 5, "diverged", tuple(b"you"), tuple(b"her"))


def cached(request: Any) -> Any:
    return [
        [TextDelta(0, "x"), SequenceEnded(0, "stop", None, 1), Ended(Usage(9, 1, 5), Timing(0.1, 0.2, 0.3), (REPORT,))]
    ]


def app_of_requests(engine: ScriptedEngine, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_every_answer_carries_what_was_cached_and_why_no_more() -> None:
    made = await call(app_of_requests(ScriptedEngine(cached)), body=MESSAGES)
    cache = made.json()["ingot"]["cache"]
    assert (cache["matched_tokens"], cache["tier"], cache["reason"]) == (5, "ram", "diverged")
    assert (cache["diverged"]["ours"], cache["diverged"]["theirs"]) == ("you", "her")
    assert made.headers["ingot-cache-matched-tokens"] == "5"
    assert made.headers["ingot-cache-reason"] == "diverged"
    assert made.headers["ingot-prefill-s"] == "0.200000"


@pytest.mark.anyio
async def test_a_stream_carries_it_in_its_last_chunk() -> None:
    made = await call(app_of_requests(ScriptedEngine(cached)), body={**MESSAGES, "stream": True})
    assert events(made.body)[-2]["ingot"]["cache"]["matched_tokens"] == 5


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ended_has_its_receipt_under_its_id(stream: bool) -> None:
    served = app_of_requests(ScriptedEngine(cached))
    made = await call(served, body={**MESSAGES, "stream": stream})
    found = (await call(served, "GET", f"/v1/requests/{made.headers['x-request-id']}")).json()
    answer = made.json() if not stream else events(made.body)[-2]
    assert found["status"] == "ended"
    assert found["ingot"] == answer["ingot"]
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


@pytest.mark.anyio
async def test_a_running_request_has_its_progress_under_its_id() -> None:
    engine = ScriptedEngine(None)
    served = app_of_requests(engine)
    async with Call(served, body=MESSAGES | {"stream": True}) as made:
        await made.until(lambda: made.status == 200)
        found = (await call(served, "GET", f"/v1/requests/{engine.requests[0].id}")).json()
        assert (found["status"], found["progress"]["prompt_tokens"]) == ("prefill", 10)
        made.leave()
    gone = (await call(served, "GET", f"/v1/requests/{engine.requests[0].id}")).json()
    assert (gone["status"], gone["error"]["code"]) == ("cancelled", "cancelled")


@pytest.mark.anyio
async def test_a_request_that_failed_says_why() -> None:
    engine = ScriptedEngine(failing(Overloaded("too much", retry_after=1)))
    served = app_of_requests(engine)
    await call(served, body=MESSAGES)
    found = (await call(served, "GET", f"/v1/requests/{engine.requests[0].id}")).json()
    assert (found["status"], found["error"]["message"]) == ("failed", "too much")


@pytest.mark.anyio
async def test_an_id_that_nobody_knows_is_a_404() -> None:
    assert (await call(app_of_requests(ScriptedEngine()), "GET", "/v1/requests/chatcmpl-0")).status == 404


@pytest.mark.anyio
async def test_each_key_is_a_tenant_that_sees_its_own_requests_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two of them\n\nann-the-key\nbob-the-key\n")
    engine = ScriptedEngine(None)
    served = app_of_requests(engine, api_key_file=keys)
    ann, bob = {"x-api-key": "ann-the-key"}, {"authorization": "Bearer bob-the-key"}
    async with Call(served, body=MESSAGES | {"stream": True}, headers=ann) as made:
        await made.until(lambda: made.status == 200)
        path = f"/v1/requests/{engine.requests[0].id}"
        assert len((await call(served, "GET", "/v1/requests", headers=ann)).json()["data"]) == 1
        assert (await call(served, "GET", "/v1/requests", headers=bob)).json()["data"] == []
        assert (await call(served, "GET", path, headers=ann)).status == 200
        assert (await call(served, "GET", path, headers=bob)).status == 404
        assert (await call(served, "DELETE", path, headers=bob)).status == 404
        assert engine.running
        assert (await call(served, "DELETE", path, headers=ann)).status == 200
        await made.done()
    assert (await call(served, "GET", path, headers=ann)).json()["status"] == "cancelled"
    assert (await call(served, "GET", path, headers=bob)).status == 404


@pytest.mark.anyio
async def test_tenants_are_named_by_their_keys_and_never_by_the_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("bob-the-key\n")
    engine = ScriptedEngine()
    served = app_of_requests(engine, api_key="ann-the-key", api_key_file=keys)
    for key in ("ann-the-key", "bob-the-key", "ann-the-key"):
        await call(served, body={**MESSAGES, "tenant": "other"}, headers={"x-api-key": key})
    names = [request.tenant for request in engine.requests]
    assert names[0] == names[2] != names[1] and all(names)
    assert not any("key" in name for name in names)
    assert (await call(served, body=MESSAGES, headers={"x-api-key": "eve-key"})).status == 401


@pytest.mark.anyio
async def test_without_keys_everybody_is_one_tenant() -> None:
    engine = ScriptedEngine()
    await call(app_of_requests(engine), body=MESSAGES)
    assert engine.requests[0].tenant == ""
