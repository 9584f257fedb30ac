"""Streams and whole answers, through the application, with an engine that says what the test wrote."""

from __future__ import annotations

import asyncio

import pytest

from ingot.engine.request import Ended, SequenceEnded, TextDelta, Timing, Usage
from ingot.errors import ContextOverflow, DeadlineExceeded, Overloaded, Unavailable
from ingot.http.streaming import SSE_KEEP_ALIVE
from tests.http.asgi import Call, call, events
from tests.http.scripted import ScriptedEngine, build_app, expire_once_open, failing, settings
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio

ASK = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = ASK | {"stream": True}
END = [SequenceEnded(0, "stop", None, 1), Ended(Usage(1, 1), Timing())]


async def test_a_whole_answer_has_the_requests_one_id_everywhere() -> None:
    engine = ScriptedEngine()
    made = await call(build_app(engine, settings()), body=ASK)
    assert made.status == 200
    assert made.headers["x-request-id"] == made.json()["id"] == engine.requests[0].id
    assert made.json()["id"].startswith("chatcmpl-")
    assert made.json()["choices"][0]["message"]["content"] == "Hello, world"


@pytest.mark.parametrize(("stated", "most"), [({}, 5), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 2}, 2)])
async def test_the_settings_limit_of_an_answer_holds_unless_a_request_states_one(
    stated: dict[str, int], most: int
) -> None:
    engine = ScriptedEngine()
    for path in ("/v1/chat/completions", "/api/chat"):
        body = ASK | (stated if path.startswith("/v1") else {"options": {"num_predict": most} if stated else {}})
        assert (await call(build_app(engine, settings(max_tokens=5)), path=path, body=body)).status == 200
    assert [request.max_tokens for request in engine.requests] == [most, most]


async def test_a_clients_own_request_id_is_not_taken_over() -> None:
    made = await call(build_app(ScriptedEngine(), settings()), body=ASK, headers={"x-request-id": "mine"})
    assert made.headers["x-request-id"] != "mine"


async def test_a_stream_is_role_text_finish_and_done() -> None:
    made = await call(build_app(ScriptedEngine(), settings()), body=STREAM)
    assert made.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(made.body)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert chunks[-1]["ingot"]["timing"] == {"queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.3}
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_one_chunk_of_its_own_where_it_was_asked_for() -> None:
    made = await call(
        build_app(ScriptedEngine(), settings()), body=STREAM | {"stream_options": {"include_usage": True}}
    )
    *chunks, last, _ = events(made.body)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert "ingot" in last and "ingot" not in chunks[-1]


async def test_unknown_fields_are_named_in_the_last_chunk() -> None:
    made = await call(build_app(ScriptedEngine(), settings()), body=STREAM | {"quux": 1})
    chunks = events(made.body)
    assert chunks[-2]["ingot"]["ignored"] == ["quux"]


async def test_a_batch_of_events_is_one_write() -> None:
    engine = ScriptedEngine(lambda request: [[TextDelta(0, "a"), TextDelta(0, "b"), *END]])
    made = await call(build_app(engine, settings()), body=STREAM)
    assert len(made.writes) == 2  # the role, and everything else


async def test_headers_and_keep_alive_come_before_the_first_token() -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(keepalive_s=0.01)), body=STREAM) as made:
        await made.until(lambda: made.body.count(SSE_KEEP_ALIVE) >= 3)
        engine.streams[0].put([TextDelta(0, "x")], END)
        await made.done()
    assert made.complete
    assert [chunk for chunk in events(made.body) if chunk == "[DONE]"] == ["[DONE]"]


async def test_a_stream_that_speaks_needs_no_keep_alive() -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(keepalive_s=30.0)), body=STREAM) as made:
        await made.until(lambda: bool(engine.streams))
        for _ in range(20):
            engine.streams[0].put([TextDelta(0, "x")])
        engine.streams[0].put(END)
        await made.done()
    assert SSE_KEEP_ALIVE not in made.body


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "streamed"])
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(body: dict[str, object]) -> None:
    engine = ScriptedEngine(None)
    app = build_app(engine, settings())
    async with Call(app, body=body) as made:
        await asyncio.to_thread(engine.opened.wait, WAIT_S)
        assert len(app.state.service.shared_state.live) == 1
        made.leave()
        await made.done()
    assert engine.streams[0].closed.is_set()
    assert engine.running == {}
    assert len(app.state.service.shared_state.live) == 0
    assert not made.complete


async def test_a_client_that_leaves_in_mid_stream_ends_its_request() -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings()), body=STREAM) as made:
        await asyncio.to_thread(engine.opened.wait, WAIT_S)
        engine.streams[0].put([TextDelta(0, "x")])
        await made.until(lambda: b'"x"' in made.body)
        made.leave()
        await made.done()
    assert engine.streams[0].closed.is_set()


async def test_a_client_that_leaves_while_its_prompt_is_read_never_reaches_the_engine() -> None:
    engine = ScriptedEngine(None)
    app = build_app(engine, settings())
    made = Call(app, body=STREAM)
    made.leave()
    async with made:
        await made.done()
    assert engine.running == {}
    assert len(app.state.service.shared_state.live) == 0


async def test_an_error_before_the_stream_has_its_own_status_and_says_when_to_come_back() -> None:
    engine = ScriptedEngine()
    engine.refusal = Overloaded("The queue is full.", retry_after=2.2)
    made = await call(build_app(engine, settings()), body=STREAM)
    assert (made.status, made.headers["retry-after"]) == (429, "3")
    assert made.json()["error"] == {
        "message": "The queue is full.",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }


async def test_a_prompt_over_the_context_is_a_400_that_names_both_numbers() -> None:
    engine = ScriptedEngine()
    engine.refusal = ContextOverflow(needed=5000, limit=4096)
    made = await call(build_app(engine, settings()), body=ASK)
    assert made.status == 400
    assert made.json()["error"]["code"] == "context_length_exceeded"
    assert "5000" in made.json()["error"]["message"] and "4096" in made.json()["error"]["message"]


async def test_an_error_in_mid_stream_is_the_streams_last_event() -> None:
    engine = ScriptedEngine(failing(DeadlineExceeded("Too late.")))
    made = await call(build_app(engine, settings()), body=STREAM)
    *chunks, last = events(made.body)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello"
    assert last == {
        "error": {"message": "Too late.", "type": "timeout_error", "param": None, "code": "deadline_exceeded"}
    }
    assert made.complete


async def test_an_error_of_a_whole_answer_has_its_own_status() -> None:
    engine = ScriptedEngine(failing(DeadlineExceeded("Too late.")))
    made = await call(build_app(engine, settings()), body=ASK)
    assert (made.status, made.json()["error"]["message"]) == (504, "Too late.")


async def test_a_stream_that_stops_without_a_terminal_event_is_an_error() -> None:
    class Cut:
        async def __aiter__(self):
            yield [TextDelta(0, "x")]

        def close(self, heard: object = None, cause: object = None) -> None: ...

    async def cut(request: object) -> Cut:
        return Cut()

    engine = ScriptedEngine()
    engine.open = cut  # type: ignore[assignment, method-assign]
    app = build_app(engine, settings())
    assert (await call(app, body=ASK)).status == 503
    assert events((await call(app, body=STREAM)).body)[-1]["error"]["code"] == "unavailable"


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "streamed"])
async def test_what_nobody_foresaw_is_a_500_that_says_nothing_but_the_id(
    body: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine()
    engine.refusal = RuntimeError("the secret path /etc/shadow")
    made = await call(build_app(engine, settings()), body=body)
    assert made.status == 500
    assert b"shadow" not in made.body
    assert made.headers["x-request-id"] in made.json()["error"]["message"]
    assert "shadow" in caplog.text


async def test_what_breaks_a_stream_is_told_in_the_stream() -> None:
    engine = ScriptedEngine(lambda request: [[TextDelta(0, "x")], [TextDelta(0, object())]])  # type: ignore[arg-type]
    made = await call(build_app(engine, settings()), body=STREAM)
    assert events(made.body)[-1]["error"]["code"] == "internal_error"
    assert engine.streams[0].closed.is_set()


async def test_a_request_that_outlives_its_deadline_is_ended_by_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(None)
    expire_once_open(engine, monkeypatch)
    made = await call(build_app(engine, settings()), body=ASK)
    assert (made.status, made.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert engine.streams[0].closed.is_set()


async def test_a_server_that_stops_ends_what_runs_in_words() -> None:
    engine = ScriptedEngine(None)
    app = build_app(engine, settings())
    async with Call(app, body=STREAM) as streamed, Call(app, body=ASK) as whole:
        await streamed.until(lambda: bool(streamed.status))
        await asyncio.to_thread(engine.opened.wait, WAIT_S)
        while len(engine.streams) < 2:
            await asyncio.sleep(0)
        app.state.service.shared_state.live.abandon_all(Unavailable("The server is shutting down.", retry_after=5))
        await streamed.done()
        await whole.done()
    assert events(streamed.body)[-1]["error"]["message"] == "The server is shutting down."
    assert (whole.status, whole.headers["retry-after"]) == (503, "5")
    assert all(stream.closed.is_set() for stream in engine.streams)


async def test_cancelling_by_id_reaches_the_stream() -> None:
    engine = ScriptedEngine(None)
    app = build_app(engine, settings())
    async with Call(app, body=STREAM) as made:
        await asyncio.to_thread(engine.opened.wait, WAIT_S)
        request_id = engine.streams[0].request.id
        listed = (await call(app, "GET", "/v1/requests")).json()["data"]
        assert [(one["id"], one["phase"]) for one in listed] == [(request_id, "prefill")]
        cancelled = await call(app, "DELETE", f"/v1/requests/{request_id}")
        assert cancelled.json() == {"id": request_id, "cancelled": True}
        await made.done()
    assert events(made.body)[-1]["error"]["code"] == "cancelled"
    assert (await call(app, "DELETE", f"/v1/requests/{request_id}")).status == 404


async def test_the_deadline_of_a_request_is_the_shorter_of_its_own_and_the_servers() -> None:
    engine = ScriptedEngine()
    app = build_app(engine, settings(request_timeout_s=100.0))
    await call(app, body=ASK)
    await call(app, body=ASK | {"timeout": 2})
    spans = [request.deadline - request.arrived for request in engine.requests]
    assert spans == pytest.approx([100.0, 2.0], abs=0.5)
    refused = await call(app, body=ASK | {"timeout": 101})
    assert refused.status == 400 and "100" in refused.json()["error"]["message"]
