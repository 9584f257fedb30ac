"""Anthropic's paths through the application: framing, signs of life, headers, and errors in its shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.engine.request import Ended, SequenceEnded, TextDelta, Timing, Usage
from ingot.errors import Overloaded
from tests.http.asgi import Call, call
from tests.http.scripted import CONTEXT, ScriptedEngine, build_app, failing, settings

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
ASK = {"model": "default", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
STREAM = ASK | {"stream": True}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
END = [SequenceEnded(0, "stop", None, 1), Ended(Usage(3, 1), Timing())]


def events(body: bytes) -> list[Any]:
    """The data of a stream's events; asserts that each is named as it is in its data, and nothing else is there."""
    assert body.endswith(b"\n\n")
    found = []
    for frame in body[:-2].split(b"\n\n"):
        name, data = frame.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {found[-1]['type']}"
    return found


async def ask(body: Any = ASK, engine: ScriptedEngine | None = None, path: str = PATH, **given: Any) -> Call:
    changes = given.pop("settings", {})
    return await call(build_app(engine or ScriptedEngine(), settings(**changes)), path=path, body=body, **given)  # type: ignore[arg-type]


async def test_a_whole_answer_has_the_requests_one_id_everywhere() -> None:
    engine = ScriptedEngine()
    made = await ask(engine=engine, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"})
    assert made.json()["content"] == [{"type": "text", "text": "Hello, world"}]
    assert made.json()["id"] == made.headers["request-id"] == made.headers["x-request-id"] == engine.requests[0].id
    assert made.json()["id"].startswith("msg_")


async def test_a_streamed_answer_is_named_events_and_nothing_else() -> None:
    made = await ask(STREAM)
    assert made.headers["content-type"].startswith("text/event-stream")
    told = events(made.body)
    assert "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta") == "Hello, world"
    assert (told[0]["type"], told[-1]["type"]) == ("message_start", "message_stop")


async def test_a_silence_is_filled_with_pings() -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(keepalive_s=0.01)), path=PATH, body=STREAM) as made:
        await made.until(lambda: made.body.count(PING) >= 3)
        engine.streams[0].put([TextDelta(0, "x")], END)
        await made.done()
    assert events(made.body)[-1]["type"] == "message_stop"


async def test_a_stream_that_breaks_ends_in_an_error_event() -> None:
    made = await ask(STREAM, ScriptedEngine(failing(Overloaded("Out of memory."))))
    last = events(made.body)[-1]
    assert last == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "Out of memory."},
        "request_id": made.headers["request-id"],
    }


@pytest.mark.parametrize(
    ("given", "status", "kind"),
    [
        ({"body": ASK | {"max_tokens": "x"}}, 400, "invalid_request_error"),
        ({"body": b"{"}, 400, "invalid_request_error"),
        ({"body": ASK, "settings": {"api_key": "secrets!"}}, 401, "authentication_error"),
        ({"body": ASK, "headers": {"host": "evil.example"}}, 403, "permission_error"),
        ({"body": ASK | {"model": "x"}}, 404, "not_found_error"),
        ({"body": ASK, "path": "/v1/messages/batches"}, 404, "not_found_error"),
        ({"body": None, "method": "GET"}, 405, "invalid_request_error"),
        ({"body": ASK, "settings": {"max_body_bytes": 10}}, 413, "request_too_large"),
        ({"body": ASK, "headers": {"content-type": "text/plain"}}, 415, "invalid_request_error"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
async def test_every_layers_errors_have_the_protocols_shape(given: dict[str, Any], status: int, kind: str) -> None:
    made = await ask(**given)
    body = made.json()
    assert (made.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == made.headers["request-id"]


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_know() -> None:
    made = await ask(ASK | {"messages": [{"role": "user", "content": "x" * CONTEXT}]})
    assert made.status == 400
    assert made.json()["error"]["message"].startswith("prompt is too long: ")


async def test_a_full_queue_says_when_to_come_back() -> None:
    engine = ScriptedEngine()
    engine.refusal = Overloaded("Full.", retry_after=7)
    made = await ask(engine=engine)
    assert (made.status, made.headers["retry-after"]) == (429, "7")


async def test_tokens_are_counted_as_the_same_request_would_take() -> None:
    engine = ScriptedEngine()
    counted = await ask({"messages": ASK["messages"]}, engine, path="/v1/messages/count_tokens")
    await ask(engine=engine)
    assert counted.json() == {"input_tokens": len(engine.requests[0].prompts[0])}


async def test_agents_that_look_whether_anyone_is_there_find_someone() -> None:
    made = await ask(None, method="HEAD", path="/", settings={"api_key": "secrets!"})
    assert made.status == 200


async def test_a_key_in_either_header_is_enough() -> None:
    for headers in ({"x-api-key": "secrets!"}, {"authorization": "Bearer secrets!"}):
        assert (await ask(settings={"api_key": "secrets!"}, headers=headers)).status == 200
