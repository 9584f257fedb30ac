"""Requests by their id: while they run, after they ended, and for nobody but their own tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.engine.request import CacheReport, Ended, SequenceEnded, TextDelta, Timing, Usage
from ingot.errors import Overloaded
from ingot.http.endpoints.table import build_app
from tests.http.asgi import Call, call, events
from tests.http.scripted import ScriptedEngine, failing, settings

pytestmark = pytest.mark.anyio

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
REPORT = CacheReport(9, 5, 5, "diverged", tuple(b"you"), tuple(b"her"))


def cached(request: Any) -> Any:
    return [
        [TextDelta(0, "x"), SequenceEnded(0, "stop", None, 1), Ended(Usage(9, 1, 5), Timing(0.1, 0.2, 0.3), (REPORT,))]
    ]


def app(engine: ScriptedEngine, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))  # type: ignore[arg-type]


async def test_every_answer_carries_what_was_cached_and_why_no_more() -> None:
    made = await call(app(ScriptedEngine(cached)), body=MESSAGES)
    cache = made.json()["ingot"]["cache"]
    assert (cache["matched_tokens"], cache["tier"], cache["reason"]) == (5, "ram", "diverged")
    assert (cache["diverged"]["ours"], cache["diverged"]["theirs"]) == ("you", "her")
    assert made.headers["ingot-cache-matched-tokens"] == "5"
    assert made.headers["ingot-cache-reason"] == "diverged"
    assert made.headers["ingot-prefill-s"] == "0.200000"


async def test_a_stream_carries_it_in_its_last_chunk() -> None:
    made = await call(app(ScriptedEngine(cached)), body={**MESSAGES, "stream": True})
    assert events(made.body)[-2]["ingot"]["cache"]["matched_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ended_has_its_receipt_under_its_id(stream: bool) -> None:
    served = app(ScriptedEngine(cached))
    made = await call(served, body={**MESSAGES, "stream": stream})
    found = (await call(served, "GET", f"/v1/requests/{made.headers['x-request-id']}")).json()
    answer = made.json() if not stream else events(made.body)[-2]
    assert found["status"] == "ended"
    assert found["ingot"] == answer["ingot"]
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


async def test_a_running_request_has_its_progress_under_its_id() -> None:
    engine = ScriptedEngine(None)
    served = app(engine)
    async with Call(served, body=MESSAGES | {"stream": True}) as made:
        await made.until(lambda: made.status == 200)
        found = (await call(served, "GET", f"/v1/requests/{engine.requests[0].id}")).json()
        assert (found["status"], found["progress"]["prompt_tokens"]) == ("prefill", 10)
        made.leave()
    gone = (await call(served, "GET", f"/v1/requests/{engine.requests[0].id}")).json()
    assert (gone["status"], gone["error"]["code"]) == ("cancelled", "cancelled")


async def test_a_request_that_failed_says_why() -> None:
    engine = ScriptedEngine(failing(Overloaded("too much", retry_after=1)))
    served = app(engine)
    await call(served, body=MESSAGES)
    found = (await call(served, "GET", f"/v1/requests/{engine.requests[0].id}")).json()
    assert (found["status"], found["error"]["message"]) == ("failed", "too much")


async def test_an_id_that_nobody_knows_is_a_404() -> None:
    assert (await call(app(ScriptedEngine()), "GET", "/v1/requests/chatcmpl-0")).status == 404


async def test_each_key_is_a_tenant_that_sees_its_own_requests_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two of them\n\nann-the-key\nbob-the-key\n")
    engine = ScriptedEngine(None)
    served = app(engine, api_key_file=keys)
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


async def test_tenants_are_named_by_their_keys_and_never_by_the_request(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("bob-the-key\n")
    engine = ScriptedEngine()
    served = app(engine, api_key="ann-the-key", api_key_file=keys)
    for key in ("ann-the-key", "bob-the-key", "ann-the-key"):
        await call(served, body={**MESSAGES, "tenant": "other"}, headers={"x-api-key": key})
    names = [request.tenant for request in engine.requests]
    assert names[0] == names[2] != names[1] and all(names)
    assert not any("key" in name for name in names)
    assert (await call(served, body=MESSAGES, headers={"x-api-key": "eve-key"})).status == 401


async def test_without_keys_everybody_is_one_tenant() -> None:
    engine = ScriptedEngine()
    await call(app(engine), body=MESSAGES)
    assert engine.requests[0].tenant == ""
