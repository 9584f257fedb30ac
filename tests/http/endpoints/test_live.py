"""`GET /v1/live` and `/v1/cache/tree`: what the page draws; each key sees its own, the administrator everything."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import Overloaded
from ingot.http.endpoints.table import build_app
from ingot.protocol.ingot_api.requests import MOST
from tests import scripted
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, failing, settings

pytestmark = pytest.mark.anyio

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
KEYS = {"api_key": "a-tenants-key", "admin_api_key": "the-admins-key"}
TENANT, ADMIN = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("api_key", "admin_api_key"))


def app(engine: Any, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))


async def test_a_request_that_ended_is_told_with_what_its_phases_took() -> None:
    served = app(ScriptedEngine())
    made = await call(served, body=MESSAGES)
    [past] = (await call(served, "GET", "/v1/live")).json()["past"]
    assert (past["id"], past["path"], past["outcome"]) == (made.json()["id"], "/v1/chat/completions", "ended")
    assert (past["queued_s"], past["prompt_s"], past["answer_s"]) == (0.1, 0.2, 0.3)
    assert past["completion_tokens"] == 3
    assert 0 <= past["ended_ago_s"] < 10


async def test_one_that_failed_is_told_by_its_error() -> None:
    served = app(ScriptedEngine(failing(Overloaded("full"))))
    await call(served, body=MESSAGES)
    [past] = (await call(served, "GET", "/v1/live")).json()["past"]
    assert past["outcome"] == Overloaded.code


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


async def test_one_that_runs_is_told_while_it_does() -> None:
    engine = ScriptedEngine(None)
    served = app(engine)
    async with Call(served, body={**MESSAGES, "stream": True}) as waiting:
        await waiting.until(lambda: bool(engine.running))
        [request] = (await call(served, "GET", "/v1/live")).json()["requests"]
        assert request["id"] in engine.running
        assert {"queued_s", "prompt_s", "answer_s", "cached_tokens", "phase"} <= request.keys()


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


async def test_a_key_sees_its_own_requests_and_nothing_of_the_whole() -> None:
    served = app(ScriptedEngine(), **KEYS)
    await call(served, body=MESSAGES, headers=TENANT)
    await call(served, body=MESSAGES, headers=ADMIN)
    own = (await call(served, "GET", "/v1/live", headers=TENANT)).json()
    assert len(own["past"]) == 1 and "engines" not in own
    everything = (await call(served, "GET", "/v1/live", headers=ADMIN)).json()
    assert len(everything["past"]) == 2 and "engines" in everything
    assert (await call(served, "GET", "/v1/live")).status == 401


async def test_what_is_told_is_bounded_whatever_went_on() -> None:
    served = app(ScriptedEngine())
    for _ in range(MOST + 10):
        await call(served, body=MESSAGES)
    assert len((await call(served, "GET", "/v1/live")).json()["past"]) == MOST


async def test_the_tree_tells_how_what_is_kept_branches() -> None:
    [first, second] = (await call(app(ScriptedEngine()), "GET", "/v1/cache/tree")).json()["data"]
    assert (first["parent"], first["begin"], first["end"], first["uses"], first["more"]) == (None, 0, 12, 4, 2)
    assert (second["parent"], second["on_disk"]) == (0, True)


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
