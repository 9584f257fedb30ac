"""`/v1/responses` over HTTP: streams, what is stored, what goes on without a client, and what is stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.applications import Starlette

from ingot.engine.request import CallArguments, CallEnded, TextDelta
from ingot.errors import ContextOverflow, DeadlineExceeded, Overloaded, Unavailable
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, failing, hello, settings
from tests.http.test_response_store import response
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio

ASK = {"input": "Hi"}
STREAM = ASK | {"stream": True}
PATH = "/v1/responses"
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def app(engine: ScriptedEngine, tmp_path: Path) -> Starlette:
    return build_app(engine, settings(responses_store=str(tmp_path / "responses.db")))  # type: ignore[arg-type]


async def ask(app: Starlette, **body: Any) -> Any:
    made = await call(app, path=PATH, body={**ASK, **body})
    assert made.status == 200, made.body
    return made.json()


async def get(app: Starlette, path: str, method: str = "GET", **given: Any) -> Call:
    return await call(app, method, f"{PATH}/{path}", **given)


def events(body: bytes, first: int = 0) -> list[dict[str, Any]]:
    """The events of a stream, each named as its type, known to OpenAI's client, and numbered."""
    assert not body or body.endswith(b"\n\n")
    told = []
    for frame in body.split(b"\n\n")[:-1]:
        if frame.startswith(b":"):
            continue
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == f"event: {event['type']}".encode()
        STREAM_EVENT.validate_python(event)
        told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(first, first + len(told)))
    return told


async def queried(app: Starlette, path: str, query: str) -> Call:
    return await get(app, f"{path}?{query}")


async def test_a_response_is_answered_whole(app: Starlette, engine: ScriptedEngine) -> None:
    made = await call(app, path=PATH, body=ASK)
    body = Response.model_validate(made.json())
    assert body.output_text == "Hello, world" and body.status == "completed"
    assert body.id == made.headers["x-request-id"] == engine.requests[0].id
    assert body.id.startswith("resp_")
    assert engine.streams[0].closed.is_set()


async def test_a_response_is_streamed_as_named_events_to_its_end(app: Starlette, engine: ScriptedEngine) -> None:
    made = await call(app, path=PATH, body=STREAM)
    told = events(made.body)
    assert told[0]["type"] == "response.created" and told[-1]["type"] == "response.completed"
    assert b"[DONE]" not in made.body
    text = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
    assert text == told[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world"
    assert engine.streams[0].closed.is_set()


async def test_whole_and_streamed_are_the_same_response(app: Starlette) -> None:
    whole = await ask(app)
    streamed = events((await call(app, path=PATH, body=STREAM)).body)[-1]["response"]
    for changing in ("id", "created_at", "completed_at", "ingot"):
        whole.pop(changing), streamed.pop(changing)
    whole["output"][0].pop("id"), streamed["output"][0].pop("id")
    assert whole == streamed


async def test_a_stored_response_is_retrieved_and_deleted(app: Starlette) -> None:
    made = await ask(app)
    assert (await get(app, made["id"])).json() == made
    deleted = await get(app, made["id"], "DELETE")
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    assert (await get(app, made["id"])).status == (await get(app, made["id"], "DELETE")).status == 404


async def test_a_streamed_response_is_stored_before_its_end_is_told(app: Starlette) -> None:
    last = events((await call(app, path=PATH, body=STREAM)).body)[-1]["response"]
    assert (await get(app, last["id"])).json() == last


async def test_a_response_that_is_not_to_be_stored_is_not(app: Starlette) -> None:
    made = await ask(app, store=False)
    assert made["store"] is False
    assert (await get(app, made["id"])).status == 404
    refused = await call(app, path=PATH, body=ASK | {"previous_response_id": made["id"]})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_conversation_goes_on_from_a_stored_response(app: Starlette, engine: ScriptedEngine) -> None:
    first = await ask(app, input="One")
    second = await ask(app, input="Two", previous_response_id=first["id"])
    third = await ask(app, input="Three", previous_response_id=second["id"])
    prompt = bytes(engine.requests[-1].prompts[0]).decode()
    places = [prompt.index(word) for word in ("One", "Two", "Three")]
    assert places == sorted(places) and prompt.count("Hello, world") == 2
    await get(app, first["id"], "DELETE")
    again = await ask(app, input="Four", previous_response_id=third["id"])
    assert again["previous_response_id"] == third["id"]
    assert "One" in bytes(engine.requests[-1].prompts[0]).decode()


async def test_what_a_response_answered_is_listed_in_pages(app: Starlette) -> None:
    first = await ask(app, input="One")
    second = await ask(app, input="Two", previous_response_id=first["id"])
    whole = (await queried(app, f"{second['id']}/input_items", "order=asc")).json()
    assert [item["role"] for item in whole["data"]] == ["user", "assistant", "user"]
    assert (whole["first_id"], whole["has_more"]) == (whole["data"][0]["id"], False)
    ids = [item["id"] for item in whole["data"]]
    page = (await queried(app, f"{second['id']}/input_items", "limit=1")).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[2]], True)
    rest = (await queried(app, f"{second['id']}/input_items", f"limit=2&after={ids[2]}")).json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([ids[1], ids[0]], False)
    for wrong in ("limit=0", "limit=x", "order=up"):
        assert (await queried(app, f"{second['id']}/input_items", wrong)).status == 400


async def test_a_stored_response_is_given_whole_or_not_at_all(app: Starlette) -> None:
    made = await ask(app)
    assert (await queried(app, made["id"], "include[]=reasoning.encrypted_content&stream=false")).status == 200
    refused = await queried(app, made["id"], "stream=true")
    assert (refused.status, refused.json()["error"]["param"]) == (400, "stream")


async def test_tokens_are_counted_without_an_engine(app: Starlette, engine: ScriptedEngine) -> None:
    made = await call(app, path=f"{PATH}/input_tokens", body=ASK | {"colour": "red"})
    counted = made.json()
    assert engine.requests == []
    assert (counted["object"], counted["ingot"]) == ("response.input_tokens", {"ignored": ["colour"]})
    assert counted["input_tokens"] == (await ask(app))["usage"]["input_tokens"]


async def test_a_refusal_of_the_engine_is_an_error_of_its_own_status(app: Starlette, engine: ScriptedEngine) -> None:
    engine.refusal = Overloaded("Full.", retry_after=2)
    for body in (ASK, STREAM, ASK | {"background": True}):
        made = await call(app, path=PATH, body=body)
        assert (made.status, made.headers["retry-after"]) == (429, "2")
    engine.refusal = ContextOverflow(needed=5000, limit=4096)
    made = await call(app, path=PATH, body=STREAM)
    assert (made.status, made.json()["error"]["param"]) == (400, "input")


async def test_a_failure_in_mid_stream_is_told_and_stored(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = failing(DeadlineExceeded("Too late."))
    told = events((await call(app, path=PATH, body=STREAM)).body)
    last = told[-1]
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "Too late.")
    assert last["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert (await get(app, last["response"]["id"])).json()["status"] == "failed"
    whole = await call(app, path=PATH, body=ASK)
    assert (whole.status, whole.json()["error"]["message"]) == (504, "Too late.")


async def test_what_nobody_foresaw_ends_the_stream_in_words(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = lambda request: [[TextDelta(0, "x")], [CallEnded(0, 0, True), CallArguments(0, 0, "of no call")]]
    made = await call(app, path=PATH, body=STREAM)
    last = json.loads(made.body.rstrip().rpartition(b"data: ")[2])
    assert last["type"] == "response.failed"
    assert engine.streams[0].closed.is_set()


async def test_a_client_that_leaves_ends_its_response(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = lambda request: [[TextDelta(0, "Hello")]]
    async with Call(app, path=PATH, body=STREAM) as made:
        await made.until(lambda: b"Hello" in made.body)
        response_id = engine.requests[0].id
        assert (await get(app, response_id)).json()["status"] == "in_progress"
        made.leave()
        await made.done()
    assert engine.streams[0].closed.is_set()
    assert (await get(app, response_id)).status == 404


async def test_a_running_response_is_cancelled_by_its_id(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = lambda request: [[TextDelta(0, "Hello")]]
    async with Call(app, path=PATH, body=STREAM) as made:
        await made.until(lambda: b"Hello" in made.body)
        response_id = engine.requests[0].id
        cancelled = await get(app, f"{response_id}/cancel", "POST")
        assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
        await made.done()
    last = events(made.body)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    again = await get(app, f"{response_id}/cancel", "POST")
    assert again.json()["status"] == "cancelled"
    Response.model_validate(again.json())


async def test_a_response_that_has_ended_cannot_be_cancelled(app: Starlette) -> None:
    made = await ask(app)
    refused = await get(app, f"{made['id']}/cancel", "POST")
    assert refused.status == 400 and "completed" in refused.json()["error"]["message"]
    assert (await get(app, "resp_0/cancel", "POST")).status == 404


async def ended(app: Starlette, response_id: str) -> Any:
    async with asyncio.timeout(10):
        while (found := (await get(app, response_id)).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.001)
    return found


async def test_a_background_response_goes_on_without_a_client(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = None
    made = await ask(app, background=True)
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    engine.streams[0].put([TextDelta(0, "Hel")])
    async with asyncio.timeout(10):
        while not (await get(app, made["id"])).json()["output"]:
            await asyncio.sleep(0.001)
    items = (await get(app, f"{made['id']}/input_items")).json()["data"]
    assert [item["role"] for item in items] == ["user"]
    engine.streams[0].put(*hello(engine.requests[0], ["lo"]))
    done = await ended(app, made["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    assert engine.streams[0].closed.is_set()


async def test_a_background_stream_outlives_its_reader(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = None
    async with Call(app, path=PATH, body=STREAM | {"background": True}) as made:
        await asyncio.to_thread(engine.opened.wait, WAIT_S)
        engine.streams[0].put([TextDelta(0, "Hel")])
        await made.until(lambda: b"Hel" in made.body)
        made.leave()
        await made.done()
    assert not engine.streams[0].closed.is_set()
    engine.streams[0].put(*hello(engine.requests[0], ["lo"]))
    assert (await ended(app, engine.requests[0].id))["output"][0]["content"][0]["text"] == "Hello"


async def test_a_background_stream_is_told_to_its_end(app: Starlette) -> None:
    told = events((await call(app, path=PATH, body=STREAM | {"background": True})).body)
    assert [event["type"] for event in told[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert told[-1]["type"] == "response.completed"


async def test_a_background_stream_goes_on_where_a_client_lost_it(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = None
    async with Call(app, path=PATH, body=STREAM | {"background": True}) as made:
        await asyncio.to_thread(engine.opened.wait, WAIT_S)
        engine.streams[0].put([TextDelta(0, "Hel")])
        await made.until(lambda: b"Hel" in made.body)
        made.leave()
        await made.done()
    seen = events(made.body)
    async with Call(app, "GET", f"{PATH}/{engine.requests[0].id}?stream=true&starting_after=4") as again:
        await again.until(lambda: b"Hel" in again.body)
        engine.streams[0].put(*hello(engine.requests[0], ["lo"]))
        await again.done()
    rest = events(again.body, first=5)
    assert rest[: len(seen) - 5] == seen[5:]
    assert rest[-1]["type"] == "response.completed"
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
    late = await queried(app, engine.requests[0].id, "stream=true")
    assert events(late.body) == [*seen[:5], *rest], "also once it has ended"
    none = await queried(app, engine.requests[0].id, f"stream=true&starting_after={rest[-1]['sequence_number']}")
    assert (none.status, none.body) == (200, b"")


async def test_who_leaves_a_resumed_stream_ends_nothing(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = None
    made = await ask(app, background=True)
    async with Call(app, "GET", f"{PATH}/{made['id']}?stream=true") as reading:
        await reading.until(lambda: b"in_progress" in reading.body)
        reading.leave()
        await reading.done()
    engine.streams[0].put(*hello(engine.requests[0]))
    assert (await ended(app, made["id"]))["status"] == "completed"


async def test_what_has_no_events_to_resume_says_so(app: Starlette) -> None:
    attended = await ask(app)
    told = await get(app, f"{attended['id']}?stream=true")
    assert (told.status, "background" in told.json()["error"]["message"]) == (400, True)
    app.state.service.shared_state.response_store.keep("", response("resp_1", background=True), [])
    told = await get(app, "resp_1?stream=true")
    assert (told.status, "no longer stored" in told.json()["error"]["message"]) == (400, True)
    assert (await get(app, "resp_2?stream=true")).status == 404
    assert (await get(app, f"{attended['id']}?starting_after=3")).status == 400
    alone = await ask(app, background=True)
    await ended(app, alone["id"])
    await get(app, alone["id"], "DELETE")
    assert (await get(app, f"{alone['id']}?stream=true")).status == 404


async def test_a_background_response_is_cancelled_or_deleted(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = None
    made = await ask(app, background=True)
    cancelled = await get(app, f"{made['id']}/cancel", "POST")
    assert cancelled.json()["status"] == "cancelled"
    assert (await get(app, made["id"])).json()["status"] == "cancelled"
    second = await ask(app, background=True)
    assert (await get(app, second["id"], "DELETE")).json()["deleted"] is True
    assert engine.streams[1].closed.is_set()


async def test_a_background_response_of_a_server_that_stops_is_failed(app: Starlette, engine: ScriptedEngine) -> None:
    engine.script = None
    abandoned = await ask(app, background=True)
    app.state.service.shared_state.live.abandon_all(Unavailable("The server is shutting down."))
    assert (await ended(app, abandoned["id"]))["error"]["message"] == "The server is shutting down."


async def test_a_background_response_of_a_server_that_was_killed_is_failed(app: Starlette) -> None:
    app.state.service.shared_state.response_store.keep(
        "", response("resp_1", status="in_progress", background=True), []
    )
    lost = (await get(app, "resp_1")).json()
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
    assert (await get(app, "resp_1/cancel", "POST")).status == 400


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Starlette]:
    keys = tmp_path / "keys"
    keys.write_text("alpha-key\nbeta-key\n")
    path = str(tmp_path / "responses.db")
    yield build_app(ScriptedEngine(), settings(api_key_file=keys, responses_store=path))  # type: ignore[arg-type]


async def test_each_key_has_its_own_responses(keyed: Starlette) -> None:
    alpha, beta = {"x-api-key": "alpha-key"}, {"x-api-key": "beta-key"}
    made = (await call(keyed, path=PATH, body=ASK, headers=alpha)).json()
    assert (await get(keyed, made["id"], headers=alpha)).status == 200
    for path, method in [("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")]:
        assert (await get(keyed, made["id"] + path, method, headers=beta)).status == 404
    going_on = ASK | {"previous_response_id": made["id"]}
    assert (await call(keyed, path=PATH, body=going_on, headers=beta)).status == 400
    assert (await call(keyed, path=PATH, body=going_on, headers=alpha)).status == 200


async def test_a_store_that_cannot_be_used_is_said_before_any_work_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    engine = ScriptedEngine()
    app = build_app(engine, settings(responses_store=str(tmp_path / "file" / "responses.db")))  # type: ignore[arg-type]
    made = await call(app, path=PATH, body=ASK)
    assert (made.status, engine.requests) == (503, [])
    assert str(tmp_path) not in made.body.decode()
    assert (await ask(app, store=False))["status"] == "completed"


async def test_a_server_without_a_store_answers_and_keeps_nothing() -> None:
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    made = await ask(app)
    assert made["store"] is False
    assert (await get(app, made["id"])).status == 404
    refused = await call(app, path=PATH, body=ASK | {"store": True})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "store")
