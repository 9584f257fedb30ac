"""Streams that have nothing to say for a while: what goes out meanwhile, and that the answer is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.engine.request import Ended, Event, Failed, SequenceEnded, TextDelta, Timing, Usage
from ingot.errors import Unavailable
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, failing, settings

pytestmark = pytest.mark.anyio

Chunk = dict[str, Any]
SAID = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
STREAMS: dict[str, Chunk] = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/messages": {**SAID, "model": "org/toy", "max_tokens": 9},
    "/v1/responses": {"input": "hi", "stream": True},
    "/api/chat": {**SAID, "model": "org/toy"},
    "/api/generate": {"model": "org/toy", "prompt": "hi"},
}
END: list[Event] = [SequenceEnded(0, "stop", None, 1), Ended(Usage(9, 1), Timing(0.1, 0.2, 0.3))]
each = pytest.mark.parametrize("path", STREAMS)


def chunks(body: bytes) -> list[Chunk]:
    """What a client parses: neither comments nor the names of events, nor pings."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [chunk for chunk in found if chunk.get("type") != "ping"]


def synthesized(chunk: Chunk) -> str:
    """The text in a chunk of any protocol."""
    choice = (chunk.get("choices") or [{}])[0]
    found = (
        choice.get("delta", {}).get("content"),
        choice.get("text"),
        chunk.get("message", {}).get("content") if "done" in chunk else None,
        chunk.get("response") if "done" in chunk else None,
        chunk.get("delta", {}).get("text") if chunk.get("type") == "content_block_delta" else None,
        chunk.get("delta") if chunk.get("type") == "response.output_text.delta" else None,
    )
    return next((text for text in found if text), "")


async def result(path: str, ready: Callable[[list[Chunk]], bool], **changes: Any) -> list[Chunk]:
    """The chunks of an answer whose first word comes when the stream so far is `ready`."""
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(**changes)), path=path, body=STREAMS[path]) as made:
        await made.until(lambda: bool(engine.streams) and ready(chunks(made.body)))
        engine.streams[0].put([TextDelta(0, "x")], END)
        await made.done()
    assert made.complete
    return chunks(made.body)


@each
async def test_a_silence_is_filled_with_events_that_say_nothing(path: str) -> None:
    plain = await result(path, lambda so_far: True)
    filled = await result(path, lambda so_far: len(so_far) >= len(plain) + 3, idle_event_s=0.01)
    assert "".join(map(synthesized, filled)) == "".join(map(synthesized, plain)) == "x"
    kinds = [sorted(chunk) for chunk in plain]
    assert all(sorted(chunk) in kinds for chunk in filled), "they are of the kinds that the protocol has anyway"


@each
async def test_a_stream_that_is_only_short_of_time_has_no_more_events_than_it_needs(path: str) -> None:
    plain = await result(path, lambda so_far: True)
    again = await result(path, lambda so_far: True, keepalive_s=0.01, idle_event_s=3600.0)
    assert len(again) == len(plain)


WHOLE = {path: {**body, "stream": False} for path, body in STREAMS.items()}


@each
async def test_white_space_holds_a_whole_answer_open(path: str) -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(idle_body_s=0.01)), path=path, body=WHOLE[path]) as made:
        await made.until(lambda: made.body.startswith(b"   "))
        engine.streams[0].put([TextDelta(0, "x")], END)
        await made.done()
    assert (made.status, made.headers["content-type"]) == (200, "application/json")
    assert made.headers["x-request-id"] == engine.requests[0].id and "content-length" not in made.headers
    blocked, plain = made.json(), await whole(path)
    assert plain.keys() == blocked.keys()
    assert made.body.strip()[:1] == b"{" and "x" in made.body.decode()


@each
async def test_an_error_of_an_answer_that_has_begun_is_told_in_its_body(path: str) -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(idle_body_s=0.01)), path=path, body=WHOLE[path]) as made:
        await made.until(lambda: made.body.startswith(b" "))
        engine.streams[0].put([Failed(Unavailable("The engine stopped."))])
        await made.done()
    assert (made.status, made.complete) == (200, True)
    error = made.json()["error"]
    assert (error if isinstance(error, str) else error["message"]) == "The engine stopped."
    if path == "/v1/messages":
        assert made.json()["type"] == "error"
    if path == "/v1/responses":
        assert made.json()["status"] == "failed"


@each
async def test_an_answer_that_comes_in_time_has_its_length_and_an_error_its_status(path: str) -> None:
    assert (
        "content-length" in (await call(build_app(ScriptedEngine(), settings()), path=path, body=WHOLE[path])).headers
    )
    failed = ScriptedEngine(failing(Unavailable("The engine stopped.")))
    assert (await call(build_app(failed, settings()), path=path, body=WHOLE[path])).status == 503


async def test_a_server_that_stops_ends_a_held_answer_in_words() -> None:
    engine = ScriptedEngine(None)
    app = build_app(engine, settings(idle_body_s=0.01))
    async with Call(app, body=WHOLE["/v1/chat/completions"]) as made:
        await made.until(lambda: made.body.startswith(b" "))
        app.state.service.shared_state.live.abandon_all(Unavailable("The server is shutting down."))
        await made.done()
    assert made.json()["error"]["message"] == "The server is shutting down."
    assert engine.streams[0].closed.is_set()


async def whole(path: str) -> Chunk:
    made: Chunk = (await call(build_app(ScriptedEngine(), settings()), path=path, body=WHOLE[path])).json()
    return made


async def test_the_events_of_a_response_are_numbered_without_a_gap() -> None:
    filled = await result("/v1/responses", lambda so_far: len(so_far) >= 5, idle_event_s=0.01)
    assert [event["sequence_number"] for event in filled] == list(range(len(filled)))
    assert [event["type"] for event in filled[:4]] == ["response.created", *["response.in_progress"] * 3]


async def test_a_stored_response_that_is_told_along_is_filled_too(tmp_path: Path) -> None:
    """One that goes on without its client is told through a queue of its own."""
    engine = ScriptedEngine(None)
    body = {**STREAMS["/v1/responses"], "background": True}
    app = build_app(engine, settings(idle_event_s=0.01, responses_store=str(tmp_path / "store")))
    async with Call(app, path="/v1/responses", body=body) as made:
        await made.until(lambda: bool(engine.streams) and len(chunks(made.body)) >= 6)
        engine.streams[0].put([TextDelta(0, "x")], END)
        await made.done()
    assert [event["sequence_number"] for event in chunks(made.body)] == list(range(len(chunks(made.body))))
    assert chunks(made.body)[-1]["type"] == "response.completed"
