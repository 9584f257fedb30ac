"""`GET /metrics`: true figures, by the names that dashboards know, for the administrator alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ingot.http.app import build_app
from tests import scripted
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, settings

pytestmark = pytest.mark.anyio

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {"api_key": "a-tenants-key", "admin_api_key": "the-admins-key"}


def app(engine: Any, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))


def figures(body: bytes) -> dict[str, float]:
    """Values by name, and by the place in a guess where they have one."""
    found = re.findall(r'^vllm:(\w+)\{model_name="[^"]*"(?:,position="(\d+)")?\} (\S+)$', body.decode(), re.MULTILINE)
    return {name + (f"[{position}]" if position else ""): float(value) for name, position, value in found}


async def test_every_figure_comes_with_what_it_is() -> None:
    engine = ScriptedEngine()
    engine.speculation.add(proposed=4, accepted=2)
    engine.speculation.add(proposed=3, accepted=1)
    made = await call(app(engine), "GET", "/metrics")
    assert made.status == 200
    assert made.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert figures(made.body) == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 90,
        "generation_tokens_total": 30,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 60,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 7,
        "spec_decode_num_accepted_tokens_total": 3,
        "spec_decode_num_accepted_tokens_per_pos_total[0]": 2,
        "spec_decode_num_accepted_tokens_per_pos_total[1]": 1,
    }
    for name in figures(made.body):
        assert f"# TYPE vllm:{name.partition('[')[0]} ".encode() in made.body
    assert b'{model_name="org/toy"}' in made.body


async def test_requests_under_way_are_counted() -> None:
    engine = ScriptedEngine(None)
    served = app(engine)
    async with Call(served, body=MESSAGES | {"stream": True}) as made:
        await made.until(lambda: made.status == 200)
        assert figures((await call(served, "GET", "/metrics")).body)["num_requests_running"] == 1
        made.leave()


async def test_only_the_administrator_is_told() -> None:
    served = app(ScriptedEngine(), **KEYS)
    assert (await call(served, "GET", "/metrics")).status == 401
    tenant = await call(served, "GET", "/metrics", headers={"authorization": f"Bearer {KEYS['api_key']}"})
    assert tenant.status == 403 and b"--admin-api-key" in tenant.body
    admin = await call(served, "GET", "/metrics", headers={"authorization": f"Bearer {KEYS['admin_api_key']}"})
    assert admin.status == 200


async def test_the_engines_own_figures_are_true() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        served = app(engine)
        first = (await call(served, body=MESSAGES)).json()
        again = (await call(served, body=MESSAGES)).json()
        off = (await call(served, body=MESSAGES | {"cache": "off"})).json()
        told = figures((await call(served, "GET", "/metrics")).body)
    finally:
        engine.close()
    prompt = first["usage"]["prompt_tokens"]
    assert told["prompt_tokens_total"] == 3 * prompt
    assert told["generation_tokens_total"] == 3 * first["usage"]["completion_tokens"] == 3 * 6
    assert told["prefix_cache_queries_total"] == 2 * prompt
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert told["prefix_cache_hits_total"] == cached > 0
    assert off["ingot"]["cache"]["reason"] == "off"
    assert told["kv_cache_usage_perc"] == told["num_requests_running"] == 0
