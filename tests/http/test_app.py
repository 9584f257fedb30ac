"""A server of several models, whose engines say what a test wrote down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from ingot.config import ModelEntry, model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.loading.recommend import Recommendation, recommend_models
from ingot.engine.status import Health, StatedFacts
from ingot.errors import ModelError
from ingot.http.app import build_fleet_app
from ingot.http.endpoints.table import fleet_endpoints
from ingot.protocol.operations import OPERATIONS
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, hello, settings
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio
TABLES = {"one": {"path": "a", "aliases": ["gpt-4o"]}, "two": {"path": "b"}}
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


class Garage:
    """`hold` keeps loads waiting; a model in `broken` cannot be loaded, one in `silent` says nothing."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.engines: dict[str, ScriptedEngine] = {}
        self.hold: asyncio.Event | None = None
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.fetching: asyncio.Event | None = None

    def stated(self, entry: ModelEntry) -> StatedFacts | None:
        return None

    async def measure(self, entry: ModelEntry, report: Callable[[float], None]) -> int:
        if self.fetching is not None:
            report(0.5)
            await self.fetching.wait()
        return 1

    def recommended(self) -> list[Recommendation]:
        return recommend_models(20 * 10**9, "metal")

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> Any:
        self.diary.append(f"+{entry.name}")
        told(0.25)
        if self.hold is not None:
            await self.hold.wait()
        if entry.name in self.broken:
            raise ModelError("its files are damaged")
        made = self.engines[entry.name] = ScriptedEngine(None if entry.name in self.silent else hello)
        made.card = replace(made.card, name=entry.name)
        return made

    async def unload(self, engine: Any) -> None:
        self.diary.append(f"-{engine.card.name}")


def made(tables: Any = TABLES, memory: int = 10, **changes: Any) -> tuple[Starlette, Garage]:
    chosen = settings(models=tables, lazy=True, **changes)
    garage = Garage()
    fleet = Fleet(model_entries(chosen), garage, memory)
    return build_fleet_app(fleet, lambda: Health(True, True, "ok", 0.0, 0, 0), chosen), garage


async def post(app: Starlette, path: str, body: Any = None, **given: Any) -> Any:
    return await call(app, "POST", path, body=body, **given)


def states(answer: Call) -> dict[str, str]:
    return {each["id"]: each["state"] for each in json.loads(answer.body)["data"]}


async def test_a_request_loads_the_model_that_it_names_by_any_of_its_names() -> None:
    app, garage = made()
    assert states(await call(app, "GET", "/v1/models")) == {"one": "unloaded", "two": "unloaded"}
    for name, served in (("gpt-4o", "one"), ("two", "two"), ("default", "one")):
        answer = await post(app, "/v1/chat/completions", {"model": name, **ASK})
        assert (answer.status, json.loads(answer.body)["model"]) == (200, served)
    assert garage.diary == ["+one", "+two"]
    assert states(await call(app, "GET", "/v1/models")) == {"one": "loaded", "two": "loaded"}


async def test_a_model_is_added_while_the_server_runs_and_how_far_it_is_fetched_is_shown() -> None:
    app, garage = made()
    garage.fetching = asyncio.Event()
    async with Call(app, "POST", "/v1/models", body={"model": "org/three"}) as adding:
        while states(await call(app, "GET", "/v1/models")).get("org/three") != "loading":
            await asyncio.sleep(0)
        [three] = [
            each for each in json.loads((await call(app, "GET", "/v1/models")).body)["data"] if "/" in each["id"]
        ]
        assert three["progress"] == 0.5
        garage.fetching.set()
        await adding.until(lambda: adding.complete)
    assert json.loads(adding.body)["state"] == "loaded"
    answer = await post(app, "/v1/chat/completions", {"model": "org/three", **ASK})
    assert json.loads(answer.body)["model"] == "org/three"
    again = await post(app, "/v1/models", {"model": "org/three"})
    assert again.status == 400 and b"served already" in again.body


async def test_a_model_that_cannot_be_had_is_not_listed_and_no_file_of_the_server_can_be_named() -> None:
    app, garage = made()
    garage.broken.add("org/bad")
    answer = await post(app, "/v1/models", {"model": "org/bad"})
    assert answer.status == 503 and b"its files are damaged" in answer.body
    for name in ("/etc", "../x", "nothing-known"):
        answer = await post(app, "/v1/models", {"model": name})
        assert answer.status == 400 and b"neither a short name nor a hub id" in answer.body
    assert states(await call(app, "GET", "/v1/models")).keys() == {"one", "two"}


async def test_models_that_there_is_memory_for_are_recommended_by_task() -> None:
    app, _ = made()
    found = json.loads((await call(app, "GET", "/v1/models/recommended")).body)["data"]
    assert {"chat", "vision"} <= {each["task"] for each in found}
    assert all(each["weight_bytes"] < 20 * 10**9 and "/" in each["hub_id"] for each in found)


async def test_every_endpoint_that_comes_later_is_there_when_it_is_asked_for() -> None:
    app, _ = made()
    health = {"health", "live", "ready", "version"}
    assert fleet_endpoints(app.state.service).keys() | health == {
        operation.name for operation in OPERATIONS if operation.kind == "server"
    }


async def test_an_adapters_name_means_the_model_that_it_stands_beside() -> None:
    tables = {"one": {"path": "a"}, "two": {"path": "b", "lora_modules": ["sql=/adapters/sql"]}}
    for name in ("sql", "two:sql"):
        app, garage = made(tables)
        answer = await post(app, "/v1/chat/completions", {"model": name, **ASK})
        assert garage.diary == ["+two"]
        assert answer.status == 404, "the scripted engine has no adapters"


async def test_a_name_that_is_not_in_the_tables_loads_nothing_and_is_told_which_are() -> None:
    app, garage = made()
    answer = await post(app, "/v1/chat/completions", {"model": "org/any", **ASK})
    assert answer.status == 404 and b"'one', 'gpt-4o', 'two'" in answer.body
    assert garage.diary == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_has_its_head_and_signs_of_life_while_its_model_is_loaded(path: str) -> None:
    app, garage = made(keepalive_s=0.01)
    garage.hold = asyncio.Event()
    body = {"model": "one", "stream": True, "max_tokens": 3, "messages": ASK["messages"]}
    if path == "/v1/responses":
        body = {"model": "one", "stream": True, "input": "Hi", "store": False}
    async with Call(app, "POST", path, body=body) as made_call:
        await made_call.until(lambda: b": keep-alive" in made_call.body)
        assert made_call.status == 200 and made_call.headers["content-type"].startswith("text/event-stream")
        [stands] = [
            each for each in json.loads((await call(app, "GET", "/v1/models")).body)["data"] if each["id"] == "one"
        ]
        assert (stands["state"], stands["progress"]) == ("loading", 0.25)
        garage.hold.set()
        await made_call.until(lambda: made_call.complete)
    assert b"Hello" in made_call.body


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", b'data: {"error":{"message":"one could not be loaded: its files are damaged"'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"unavailable"'),
        ("/api/chat", b'{"error":"one could not be loaded: its files are damaged"}\n'),
    ],
)
async def test_a_stream_whose_model_cannot_be_loaded_ends_in_its_protocols_words(path: str, told: bytes) -> None:
    app, garage = made()
    garage.broken.add("one")
    extra = (
        {"input": "Hi", "store": False} if path == "/v1/responses" else {"max_tokens": 3, "messages": ASK["messages"]}
    )
    body = {"model": "one", "stream": True, **extra}
    if path == "/api/chat":
        del body["max_tokens"]
    answer = await post(app, path, body)
    assert answer.status == 200 and told in answer.body


async def test_a_whole_answer_whose_model_cannot_be_loaded_is_a_503_with_the_reason() -> None:
    app, garage = made()
    garage.broken.add("one")
    answer = await post(app, "/v1/chat/completions", {"model": "one", **ASK})
    assert answer.status == 503 and b"its files are damaged" in answer.body and "retry-after" in answer.headers
    other = await post(app, "/v1/chat/completions", {"model": "two", **ASK})
    assert other.status == 200
    [stands] = [each for each in json.loads((await call(app, "GET", "/v1/models")).body)["data"] if each["id"] == "one"]
    assert (stands["state"], stands["failure"]) == ("failed", "its files are damaged")


async def test_ollamas_keep_alive_unloads_after_the_answer_and_a_body_without_messages_only_loads() -> None:
    app, garage = made()
    answer = await post(app, "/api/chat", {"model": "one"})
    assert json.loads(answer.body)["done_reason"] == "load" and garage.diary == ["+one"]
    [running] = json.loads((await call(app, "GET", "/api/ps")).body)["models"]
    assert (running["name"], running["state"]) == ("one", "loaded")
    answer = await post(app, "/api/chat", {"model": "one:latest", "keep_alive": 0, "stream": False})
    assert b"ignored" not in answer.body
    async with asyncio.timeout(30):
        while garage.diary != ["+one", "-one"]:
            await asyncio.sleep(0.001)


async def test_a_time_to_live_is_honoured_and_said_to_be_ignored_where_a_model_stays() -> None:
    app, garage = made()
    await post(app, "/v1/chat/completions", {"model": "one", "ttl": 0, **ASK})
    async with asyncio.timeout(30):
        while garage.diary != ["+one", "-one"]:
            await asyncio.sleep(0.001)


async def test_the_administrator_loads_unloads_and_swaps() -> None:
    app, garage = made(admin_api_key="the-admins-key", api_key="anybodys-key")
    admin, anybody = {"authorization": "Bearer the-admins-key"}, {"authorization": "Bearer anybodys-key"}
    assert (await post(app, "/v1/models/one/load", headers=anybody)).status == 403
    for path, state in (("gpt-4o/load", "loaded"), ("two/swap", "loaded"), ("two/unload", "unloaded")):
        answer = await post(app, f"/v1/models/{path}", headers=admin)
        assert (answer.status, json.loads(answer.body)["state"]) == (200, state)
    assert garage.diary == ["+one", "-one", "+two", "-two"]
    assert (await post(app, "/v1/models/three/load", headers=admin)).status == 404


async def test_a_model_that_was_loaded_is_told_of_before_anybody_used_it() -> None:
    app, _ = made()
    loaded = (await post(app, "/v1/models/one/load")).json()
    assert loaded["max_model_len"] == 4096 and loaded["created"] > 0
    assert "max_model_len" not in (await call(app, "GET", "/v1/models/two")).json()


async def test_a_key_sees_and_loads_the_models_that_it_is_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[guest]\nkey = "the-guests-key"\nmodels = ["two"]\n')
    app, garage = made(api_key_file=keys)
    guest = {"authorization": "Bearer the-guests-key"}
    assert states(await call(app, "GET", "/v1/models", headers=guest)) == {"two": "unloaded"}
    answer = await post(app, "/v1/chat/completions", {"model": "one", **ASK}, headers=guest)
    assert answer.status == 403 and garage.diary == []


async def test_looking_at_models_loads_none() -> None:
    app, garage = made()
    for path in ("/metrics", "/v1/loads", "/health", "/v1/requests", "/api/tags", "/api/ps", "/openapi.json"):
        assert (await call(app, "GET", path)).status == 200, path
    assert (await call(app, "GET", "/v1/cache")).status == 503
    assert garage.diary == []


async def test_metrics_describe_each_figure_once_with_the_samples_of_all_models() -> None:
    app, _ = made()
    for name in TABLES:
        await post(app, f"/v1/models/{name}/load")
    told = (await call(app, "GET", "/metrics")).body.decode()
    assert told.count("# TYPE vllm:num_requests_running gauge") == 1
    for name in TABLES:
        assert f'vllm:num_requests_running{{model_name="{name}"' in told
    assert len(json.loads((await call(app, "GET", "/v1/loads")).body)["loads"]) == 2


async def test_the_page_about_the_engine_sees_all_loaded_models_and_keeps_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, garage = made()
    looked = [await call(app, "GET", path) for path in ("/v1/live", "/v1/cache/tree")]
    assert [one.status for one in looked] == [200, 200] and garage.diary == []
    assert (looked[0].json()["engines"], looked[1].json()["data"]) == ([], [])
    for name in ("one", "two"):
        assert (await post(app, "/v1/chat/completions", {"model": name, **ASK})).status == 200
    monkeypatch.setattr(app.state.service.fleet, "lease", None)  # who only looks takes none
    told = (await call(app, "GET", "/v1/live")).json()
    assert [one["model"] for one in told["engines"]] == ["one", "two"]
    assert len(told["past"]) == 2
    branches = (await call(app, "GET", "/v1/cache/tree")).json()["data"]
    assert [branch["parent"] for branch in branches] == [None, 0, None, 2]


async def test_a_client_that_leaves_while_its_model_is_loaded_holds_no_lease() -> None:
    app, garage = made()
    garage.hold = asyncio.Event()
    async with Call(app, body={"model": "one", **ASK}) as waiting:
        async with asyncio.timeout(30):
            while not garage.diary:
                await asyncio.sleep(0.001)
        waiting.leave()
        await asyncio.wait([waiting.task], timeout=WAIT_S)
    garage.hold.set()
    answer = await post(app, "/v1/models/one/unload")
    assert json.loads(answer.body)["state"] == "unloaded" and garage.diary == ["+one", "-one"]


async def test_a_client_that_leaves_while_its_model_waits_for_room_unloads_nothing() -> None:
    app, garage = made(memory=1)
    garage.silent.add("one")
    async with Call(app, body={"model": "one", "stream": True, **ASK}) as running:
        await running.until(lambda: "one" in garage.engines and bool(garage.engines["one"].running))
        for stream in (True, False):
            async with Call(app, body={"model": "two", "stream": stream, **ASK}) as waiting:
                async with asyncio.timeout(30):
                    while not app.state.service.health().queued:
                        await asyncio.sleep(0.001)
                waiting.leave()
                await asyncio.wait([waiting.task], timeout=WAIT_S)
            assert not app.state.service.health().queued
        running.leave()
        await running.done()
    answer = await post(app, "/v1/models/one/load")
    assert json.loads(answer.body)["state"] == "loaded" and garage.diary == ["+one"]


async def test_a_request_waits_for_room_no_longer_than_it_says_that_it_may_take() -> None:
    app, garage = made(memory=1)
    garage.silent.add("one")
    async with Call(app, body={"model": "one", "stream": True, **ASK}) as running:
        await running.until(lambda: "one" in garage.engines and bool(garage.engines["one"].running))
        answer = await post(app, "/v1/chat/completions", {"model": "two", "timeout": 0.05, **ASK})
        assert answer.status == 504 and b"two could not be used within the 0.05 s" in answer.body
    assert garage.diary == ["+one"]


async def test_a_body_that_is_no_json_is_refused_in_the_words_of_a_model() -> None:
    app, _ = made()
    answer = await post(app, "/v1/chat/completions", b"{nonsense")
    assert answer.status == 400 and b"not valid JSON" in answer.body
