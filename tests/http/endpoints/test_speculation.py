"""Who may guess ahead for a request, and what came of it, in every protocol."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ingot.engine.request import Ended, Event, Request, SpeculationReport
from tests.http.asgi import call
from tests.http.scripted import ScriptedEngine, build_app, hello, settings

pytestmark = pytest.mark.anyio

OFFERED = ("forced", "lookup", "mtp")
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
WIRES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": MESSAGES | {"max_tokens": 5},
    "/api/chat": MESSAGES | {"stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
REPORT = SpeculationReport(proposed=20, accepted=12, passes=8)
TOLD = {"proposed": 20, "accepted": 12, "passes": 8, "tokens_per_pass": 2.5}

wires = pytest.mark.parametrize("path", WIRES)


def guessed(request: Request, report: SpeculationReport = REPORT) -> list[list[Event]]:
    *batches, [ended] = hello(request)
    assert isinstance(ended, Ended)
    return [*batches, [Ended(ended.usage, ended.timing, ended.cache, report)]]


def plain(request: Request) -> list[list[Event]]:
    return guessed(request, SpeculationReport(passes=3))


def app(engine: ScriptedEngine, **changes: Any) -> Any:
    return build_app(engine, settings(**changes))  # type: ignore[arg-type]


def asking(path: str, words: Any, **more: Any) -> dict[str, Any]:
    own = {"options": {"speculate": words}} if path.startswith("/api/") else {"speculate": words}
    return WIRES[path] | own | more


def last_line(path: str, body: bytes) -> Any:
    """What of a stream holds the receipt."""
    lines = body.splitlines() if path.startswith("/api/") else re.findall(rb"^data: (\{.*)$", body, re.MULTILINE)
    made = [json.loads(line) for line in lines]
    told = [event["response"] if path == "/v1/responses" and "response" in event else event for event in made]
    return next(event for event in reversed(told) if "ingot" in event)


@wires
@pytest.mark.parametrize(
    ("words", "meant"), [("auto", None), (None, None), ("off", ()), ("mtp,lookup", ("mtp", "lookup"))]
)
async def test_every_protocol_says_who_may_guess(path: str, words: Any, meant: Any) -> None:
    engine = ScriptedEngine(proposers=OFFERED)
    made = await call(app(engine), path=path, body=asking(path, words))
    assert made.status == 200, made.body
    assert engine.requests[0].speculate == meant


@wires
@pytest.mark.parametrize("words", ["draft", "mtp,draft:org/name", "ngram", 3])
async def test_every_protocol_refuses_what_is_not_offered(path: str, words: Any) -> None:
    engine = ScriptedEngine(proposers=OFFERED)
    made = await call(app(engine), path=path, body=asking(path, words))
    assert made.status == 400 and not engine.requests
    assert b"forced, lookup, mtp" in made.body


@wires
async def test_a_server_that_offers_nothing_takes_off_and_refuses_names(path: str) -> None:
    engine = ScriptedEngine()
    assert (await call(app(engine), path=path, body=asking(path, "off"))).status == 200
    assert (await call(app(engine), path=path, body=asking(path, "lookup"))).status == 400


@wires
async def test_every_protocol_tells_what_came_of_it(path: str) -> None:
    made = await call(app(ScriptedEngine(guessed)), path=path, body=WIRES[path])
    assert made.json()["ingot"]["speculation"] == TOLD


@wires
async def test_every_stream_tells_it_at_its_end(path: str) -> None:
    made = await call(app(ScriptedEngine(guessed)), path=path, body=WIRES[path] | {"stream": True})
    assert last_line(path, made.body)["ingot"]["speculation"] == TOLD


@wires
async def test_where_nothing_was_guessed_only_who_asked_is_told(path: str) -> None:
    served = app(ScriptedEngine(plain, proposers=OFFERED))
    silent = [await call(served, path=path, body=asking(path, words)) for words in (None, "auto", "off")]
    assert all("speculation" not in made.json()["ingot"] for made in silent)
    made = await call(served, path=path, body=asking(path, "mtp"))
    assert made.json()["ingot"]["speculation"] == {"proposed": 0, "accepted": 0, "passes": 3, "tokens_per_pass": 1.0}


async def test_an_answer_that_took_no_pass_has_no_tokens_a_pass() -> None:
    served = app(ScriptedEngine(lambda request: guessed(request, SpeculationReport()), proposers=OFFERED))
    made = await call(served, body=MESSAGES | {"speculate": "mtp"})
    assert made.json()["ingot"]["speculation"]["tokens_per_pass"] == 0


async def test_the_receipt_under_a_requests_id_has_it_too() -> None:
    served = app(ScriptedEngine(guessed))
    made = await call(served, body=MESSAGES)
    found = (await call(served, "GET", f"/v1/requests/{made.headers['x-request-id']}")).json()
    assert found["ingot"]["speculation"] == TOLD


async def test_the_model_says_whom_a_request_may_name() -> None:
    [model] = (await call(app(ScriptedEngine(proposers=OFFERED)), "GET", "/v1/models")).json()["data"]
    assert model["proposers"] == list(OFFERED)


async def test_the_document_has_the_words_in_it() -> None:
    document = (await call(app(ScriptedEngine(proposers=OFFERED)), "GET", "/openapi.json")).json()
    for path in WIRES:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        field = body["options"]["properties"] if path.startswith("/api/") else body
        assert "lookup" in json.dumps(field["speculate"])
