"""Long prompts of which only what matters is computed: how each protocol asks for it, and what it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ingot.engine.request import Ended, Event, Request, SpecPrefillReport, SpecPrefillRequest
from ingot.protocol.chat.specprefill import TURN_BEGIN, TURN_END
from tests.http.asgi import call
from tests.http.endpoints.test_speculation import WIRES, app, last_line, wires
from tests.http.scripted import ScriptedEngine, hello

pytestmark = pytest.mark.anyio

TOLD = {"scorer": "draft", "scored": 9000, "kept": 2900, "scoring_s": 0.5, "share": 0.3222}


def thinned(request: Request, *reports: SpecPrefillReport) -> list[list[Event]]:
    *batches, [ended] = hello(request)
    assert isinstance(ended, Ended)
    told = reports or (SpecPrefillReport("draft", 9000, 2900, 0.5),)
    timing = replace(ended.timing, prefill=0.75)
    return [*batches, [replace(ended, timing=timing, specprefill=told if request.specprefill is not None else ())]]


def asking(path: str, **said: Any) -> dict[str, Any]:
    return WIRES[path] | ({"options": said} if path.startswith("/api/") else said)


@wires
async def test_every_protocol_asks_for_it(path: str) -> None:
    engine = ScriptedEngine()
    for said in ({"specprefill": True}, {"specprefill": True, "specprefill_keep_pct": 0.1}):
        made = await call(app(engine), path=path, body=asking(path, **said))
        assert made.status == 200, made.body
    keeps = [request.specprefill and request.specprefill.keep for request in engine.requests]
    assert keeps == [None, 0.1] and all(
        isinstance(request.specprefill, SpecPrefillRequest) for request in engine.requests
    )


@wires
async def test_true_asks_for_it_however_short_a_prompt_is_and_a_share_alone_for_long_ones(path: str) -> None:
    engine = ScriptedEngine()
    for said in ({"specprefill": True, "specprefill_keep_pct": 0.1}, {"specprefill_keep_pct": 0.1}):
        assert (await call(app(engine), path=path, body=asking(path, **said))).status == 200
    asks = [request.specprefill for request in engine.requests if request.specprefill is not None]
    assert [(ask.keep, ask.forced) for ask in asks] == [(0.1, True), (0.1, False)]


@wires
async def test_who_does_not_ask_for_it_gets_all_of_the_prompt(path: str) -> None:
    engine = ScriptedEngine()
    for said in ({}, {"specprefill": False}, {"specprefill": None}):
        assert (await call(app(engine), path=path, body=asking(path, **said))).status == 200
    assert [request.specprefill for request in engine.requests] == [None] * 3


@wires
async def test_a_share_of_what_is_forbidden_is_refused(path: str) -> None:
    said = {"specprefill": False, "specprefill_keep_pct": 0.2}
    made = await call(app(ScriptedEngine()), path=path, body=asking(path, **said))
    assert made.status == 400 and b"specprefill is false" in made.body


@wires
@pytest.mark.parametrize("share", [0, 1.5, -1, "0.3", 30, True])
async def test_a_share_is_a_number_up_to_one(path: str, share: Any) -> None:
    made = await call(app(ScriptedEngine()), path=path, body=asking(path, specprefill=True, specprefill_keep_pct=share))
    assert made.status == 400 and b"specprefill_keep_pct" in made.body


@wires
async def test_every_receipt_tells_what_came_of_it(path: str) -> None:
    made = await call(app(ScriptedEngine(thinned)), path=path, body=asking(path, specprefill=True))
    assert made.json()["ingot"]["specprefill"] == TOLD | {"computing_s": 0.25}
    streamed = await call(
        app(ScriptedEngine(thinned)), path=path, body=asking(path, specprefill=True) | {"stream": True}
    )
    assert last_line(path, streamed.body)["ingot"]["specprefill"] == TOLD | {"computing_s": 0.25}
    silent = await call(app(ScriptedEngine(thinned)), path=path, body=WIRES[path])
    assert "specprefill" not in silent.json()["ingot"]


async def test_a_receipt_says_why_all_was_computed() -> None:
    for reasons, told in (
        (("below_threshold",), "below_threshold"),
        (("cached", "does_not_pay"), "several"),
    ):
        reports = [SpecPrefillReport("draft", unused=reason) for reason in reasons]  # type: ignore[arg-type]
        engine = ScriptedEngine(lambda request, reports=reports: thinned(request, *reports))
        made = await call(app(engine), path="/v1/completions", body=asking("/v1/completions", specprefill=True))
        assert made.json()["ingot"]["specprefill"] == {"scorer": "draft", "reason": told}


@wires
async def test_a_server_whose_policy_it_is_does_it_for_long_prompts_of_who_says_nothing(path: str) -> None:
    engine = ScriptedEngine(specprefill_from=1)
    for said in ({}, {"specprefill": None}, {"specprefill": False}, {"cache": "exact"}, {"specprefill": True}):
        assert (await call(app(engine), path=path, body=asking(path, **said))).status == 200
    asks = [request.specprefill for request in engine.requests]
    assert [ask and (ask.auto, ask.forced) for ask in asks] == [(True, False), (True, False), None, None, (False, True)]
    short = ScriptedEngine(specprefill_from=10_000)
    assert (await call(app(short), path=path, body=WIRES[path])).status == 200
    assert short.requests[0].specprefill is None


async def test_a_receipt_says_that_the_policy_decided_what_it_kept_and_that_the_answer_is_lossy() -> None:
    told = SpecPrefillReport("draft", 9000, 2250, 0.5, mass=0.98765, auto=True)
    engine = ScriptedEngine(lambda request: thinned(request, told), specprefill_from=1)
    receipt = (await call(app(engine), path="/v1/completions", body=WIRES["/v1/completions"])).json()["ingot"]
    assert receipt["specprefill"] == {
        **{"scorer": "draft", "scored": 9000, "kept": 2250, "scoring_s": 0.5, "computing_s": 0.25},
        **{"share": 0.25, "mass": 0.9877, "auto": True},
    }
    assert (receipt["lossy"], receipt["reproducible"], receipt["varies"]) == (["specprefill"], False, "specprefill")


@pytest.mark.parametrize(("reason", "varies"), [("cached", True), ("does_not_pay", True), ("unsupported", False)])
async def test_what_may_be_thinned_out_another_time_is_not_reproducible(reason: Any, varies: bool) -> None:
    told = SpecPrefillReport("draft", unused=reason, auto=True)
    engine = ScriptedEngine(lambda request: thinned(request, told), specprefill_from=1)
    receipt = (await call(app(engine), path="/v1/completions", body=WIRES["/v1/completions"])).json()["ingot"]
    assert receipt["specprefill"] == {"scorer": "draft", "reason": reason, "auto": True}
    assert receipt["reproducible"] is not varies and "lossy" not in receipt


async def test_a_receipt_says_what_an_earlier_turn_has_left() -> None:
    told = SpecPrefillReport("draft", 400, 90, 0.5, reused=9000)
    engine = ScriptedEngine(lambda request: thinned(request, told))
    made = await call(app(engine), path="/v1/completions", body=asking("/v1/completions", specprefill=True))
    receipt = made.json()["ingot"]["specprefill"]
    assert (receipt["scored"], receipt["kept"], receipt["reused"]) == (400, 90, 9000)


async def test_rules_and_the_newest_turn_are_whole_and_a_long_turn_at_its_ends() -> None:
    engine = ScriptedEngine()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "once " * 700},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And then?"},
    ]
    body = {"messages": messages, "specprefill": True}
    assert (await call(app(engine), body=body)).status == 200
    assert (await call(app(engine), body=body | {"messages": messages[:2]})).status == 200
    for request, newest_is_long in zip(engine.requests, (False, True), strict=True):
        assert request.specprefill is not None
        [whole], [marks], [prompt] = request.specprefill.whole, request.marks, request.prompts
        covered = {place for begin, end in whole for place in range(begin, end)}
        assert set(range(marks[0])) <= covered, "the system's message"
        assert len(prompt) - 1 in covered
        long = range(marks[0], marks[1])
        assert len(covered.intersection(long)) == (TURN_BEGIN + TURN_END if newest_is_long else 0)
        if not newest_is_long:
            assert set(range(marks[2], len(prompt))) <= covered, "the newest turn"


async def test_the_document_has_the_fields_in_it() -> None:
    document = (await call(app(ScriptedEngine()), "GET", "/openapi.json")).json()
    for path in WIRES:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        field = body["options"]["properties"] if path.startswith("/api/") else body
        assert "--specprefill" in json.dumps(field["specprefill"]) and field["specprefill_keep_pct"]
