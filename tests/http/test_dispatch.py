"""A server of models for several things: each request goes to one that does what it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from starlette.applications import Starlette

from ingot.config import ModelEntry, model_entries, single_model_entries
from ingot.engine.fleet import Fleet
from ingot.engine.status import Health, StatedFacts
from ingot.errors import ConfigError
from ingot.http.app import build_fleet_app
from ingot.http.dispatch import ModelSelection
from tests.encoders import offered
from tests.hearing import tone, wav
from tests.http.asgi import call
from tests.http.scripted import ScriptedEngine, settings
from tests.http.scripted_encoders import ScriptedPoolingEngine
from tests.http.scripted_hearing import ScriptedTranscriber
from tests.http.scripted_speaking import ScriptedSpeaker

TABLES = {
    "talk": {"path": "a"},
    "vectors": {"path": "b", "kind": "embedding", "aliases": ["text-embedding-3-small"]},
    "more": {"path": "c", "kind": "embedding"},
    "judge": {"path": "d", "kind": "rerank"},
    "ears": {"path": "e", "kind": "audio", "aliases": ["whisper-1"]},
}
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


class Garage:
    """Engines of the kinds that entries are of."""

    def __init__(self) -> None:
        self.diary: list[str] = []

    def stated(self, entry: ModelEntry) -> StatedFacts | None:
        return None

    async def measure(self, entry: ModelEntry, report: object = None) -> int:
        return 1

    async def load(self, entry: ModelEntry, claim: int, result: Callable[[float], None]) -> Any:
        self.diary.append(f"+{entry.name}")
        if entry.kind in ("embedding", "rerank"):
            return ScriptedPoolingEngine(offered(entry.kind, name=entry.name))  # type: ignore[arg-type]
        if entry.kind == "audio":
            return ScriptedTranscriber(name=entry.name)
        if entry.kind == "speech":
            return ScriptedSpeaker(name=entry.name)
        engine = ScriptedEngine()
        engine.card = replace(engine.card, name=entry.name)
        return engine

    async def unload(self, engine: Any) -> None:
        self.diary.append(f"-{engine.card.name}")


def made(tables: Any = TABLES, memory: int = 10, **changes: Any) -> tuple[Starlette, Garage]:
    chosen = settings(models=tables, lazy=True, **changes)
    return app_of(model_entries(chosen), chosen, memory)


def app_of(entries: tuple[ModelEntry, ...], chosen: Any, memory: int = 10) -> tuple[Starlette, Garage]:
    garage = Garage()
    return build_fleet_app(Fleet(entries, garage, memory), lambda: Health(True, True, "ok", 0.0, 0, 0), chosen), garage


async def post(app: Starlette, path: str, body: Any, **values: Any) -> Any:
    return await call(app, "POST", path, body=body, **values)


async def form(app: Starlette, path: str, fields: dict[str, str]) -> Any:
    parts = [f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    file = (
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + wav(tone(0.1))
        + b"\r\n--b--\r\n"
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    return await post(app, path, "".join(parts).encode() + file, headers=headers)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "loaded"),
    [
        ("/v1/embeddings", {"input": "a", "model": "text-embedding-3-small"}, "vectors"),
        ("/v1/embeddings", {"input": "a", "model": "more"}, "more"),
        ("/v1/embeddings", {"input": "a"}, "vectors"),
        ("/api/embed", {"input": "a", "model": "more:latest"}, "more"),
        ("/api/embeddings", {"prompt": "a", "model": "default"}, "vectors"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "judge"}, "judge"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "model": "judge"}, "judge"),
    ],
)
async def test_a_request_for_numbers_loads_the_encoder_that_it_names(path: str, body: Any, loaded: str) -> None:
    app, garage = made()
    answer = await post(app, path, body)
    assert (answer.status, garage.diary) == (200, [f"+{loaded}"]), answer.body
    if path != "/api/embeddings":
        assert answer.json().get("model", loaded) == loaded


@pytest.mark.anyio
@pytest.mark.parametrize("fields", [{"model": "whisper-1"}, {"model": "ears", "stream": "true"}, {}])
async def test_a_form_names_the_speech_to_text_model(fields: dict[str, str]) -> None:
    app, garage = made()
    answer = await form(app, "/v1/audio/transcriptions", fields)
    assert (answer.status, garage.diary) == (200, ["+ears"]) and b"Hello, you." in answer.body


@pytest.mark.anyio
async def test_a_form_says_how_long_the_model_stays() -> None:
    app, garage = made()
    assert (await form(app, "/v1/audio/transcriptions", {"model": "ears", "ttl": "0"})).status == 200
    async with asyncio.timeout(30):
        while garage.diary != ["+ears", "-ears"]:
            await asyncio.sleep(0.001)


@pytest.mark.anyio
async def test_a_broken_form_is_refused_in_the_words_of_a_model() -> None:
    app, _ = made()
    answer = await post(app, "/v1/audio/transcriptions", b"x", headers={"content-type": "multipart/form-data"})
    assert answer.status == 400 and b"boundary" in answer.body


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body", "result"),
    [
        ("/v1/chat/completions", {"model": "vectors", **ASK}, "makes vectors of texts (/v1/embeddings)"),
        ("/v1/messages", {"model": "judge", **ASK}, "ranks documents (/v1/rerank)"),
        ("/api/chat", {"model": "ears", "messages": ASK["messages"]}, "transcribes speech"),
        ("/v1/embeddings", {"model": "talk", "input": "a"}, "answers conversations"),
        ("/v1/rerank", {"model": "vectors", "query": "a", "documents": ["b"]}, "One that does: 'judge'."),
    ],
)
async def test_a_model_for_something_else_is_a_400_that_says_what_it_is_for(path: str, body: Any, result: str) -> None:
    app, garage = made()
    answer = await post(app, path, body)
    assert answer.status == 400 and result in answer.body.decode() and garage.diary == []


@pytest.mark.anyio
async def test_a_name_of_no_model_is_a_404_that_lists_those_for_the_same() -> None:
    app, _ = made()
    answer = await post(app, "/v1/embeddings", {"model": "nobody", "input": "a"})
    assert answer.status == 404 and b"'vectors', 'text-embedding-3-small', 'more'" in answer.body


@pytest.mark.anyio
async def test_what_no_table_is_for_is_a_404_that_says_so() -> None:
    app, _ = made({"talk": {"path": "a"}})
    answer = await post(app, "/v1/embeddings", {"input": "a"})
    assert answer.status == 404 and b"makes vectors of texts" in answer.body and b"'talk' (chat)" in answer.body


@pytest.mark.anyio
async def test_models_of_all_kinds_are_listed_with_what_they_are_for() -> None:
    app, _ = made()
    await post(app, "/v1/embeddings", {"model": "vectors", "input": "a"})
    await form(app, "/v1/audio/transcriptions", {})
    listed = {each["id"]: each for each in (await call(app, "GET", "/v1/models")).json()["data"]}
    assert {name: (one["kind"], one["state"]) for name, one in listed.items()} == {
        "talk": ("chat", "unloaded"),
        "vectors": ("embedding", "loaded"),
        "more": ("embedding", "unloaded"),
        "judge": ("rerank", "unloaded"),
        "ears": ("audio", "loaded"),
    }
    assert listed["vectors"]["max_model_len"] == 64 and listed["ears"]["input_modalities"] == ["audio"]
    running = (await call(app, "GET", "/api/ps")).json()["models"]
    assert [one["name"] for one in running] == ["vectors", "ears"]
    shown = (await post(app, "/api/show", {"model": "vectors"})).json()
    assert shown["capabilities"] == ["embedding"] and shown["model_info"]["toy.embedding_length"] == 4


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a", "ttl": 0}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "ttl": 0}),
        ("/api/embed", {"input": "a", "keep_alive": 0}),
    ],
)
async def test_a_request_for_numbers_says_how_long_its_encoder_stays(path: str, body: Any) -> None:
    app, garage = made()
    answer = await post(app, path, body)
    assert answer.status == 200 and "ignored" not in json.dumps(answer.json())
    async with asyncio.timeout(30):
        while len(garage.diary) < 2:
            await asyncio.sleep(0.001)
    loaded, gone = garage.diary
    assert gone == loaded.replace("+", "-")


@pytest.mark.anyio
async def test_an_encoder_makes_room_for_a_model_that_chats_and_back() -> None:
    app, garage = made(memory=1)
    for path, body in (
        ("/v1/embeddings", {"model": "vectors", "input": "a"}),
        ("/v1/chat/completions", {"model": "talk", **ASK}),
        ("/v1/embeddings", {"model": "vectors", "input": "a"}),
    ):
        assert (await post(app, path, body)).status == 200
    assert garage.diary == ["+vectors", "-vectors", "+talk", "-talk", "+vectors"]


@pytest.mark.anyio
async def test_who_watches_is_told_of_requests_to_encoders_and_of_answering_models_alone() -> None:
    app, _ = made()
    await post(app, "/v1/embeddings", {"model": "vectors", "input": "a"})
    assert (await call(app, "GET", "/v1/live")).json()["engines"] == []
    for path in ("/metrics", "/v1/loads", "/health", "/v1/requests"):
        assert (await call(app, "GET", path)).status == 200, path


@pytest.mark.anyio
async def test_a_lazy_server_of_one_model_loads_those_alongside_when_they_are_asked_for() -> None:
    chosen = settings(model="org/toy", lazy=True, embedding_model="vectors", alias=("ada=vectors", "gpt=toy"))
    app, garage = app_of(single_model_entries(chosen), chosen)
    listed = (await call(app, "GET", "/v1/models")).json()["data"]
    assert [(one["id"], one["kind"], one["state"]) for one in listed] == [
        ("toy", "chat", "unloaded"),
        ("vectors", "embedding", "unloaded"),
    ]
    for name in ("vectors", "ada", "default"):
        answer = await post(app, "/v1/embeddings", {"input": "a", "model": name})
        assert (answer.status, garage.diary) == (200, ["+vectors"])
    unknown = await post(app, "/v1/embeddings", {"input": "a", "model": "nobody"})
    assert unknown.status == 404 and b"vectors" in unknown.body
    assert (await post(app, "/v1/chat/completions", {**ASK, "model": "gpt"})).status == 200
    assert garage.diary == ["+vectors", "+toy"]


def test_an_alias_of_no_model_is_refused_before_anything_is_loaded() -> None:
    chosen = settings(model="toy", lazy=True, embedding_model="vectors", alias=("ada=vector",))
    with pytest.raises(ConfigError, match="there is no model 'vector'; served: toy, vectors"):
        app_of(single_model_entries(chosen), chosen)


@pytest.mark.anyio
async def test_two_models_of_one_name_are_told_apart_by_kind() -> None:
    chosen = settings(model="a/toy", lazy=True, embedding_model="b/toy")
    app, garage = app_of(single_model_entries(chosen), chosen)
    assert (await post(app, "/v1/embeddings", {"input": "a", "model": "toy"})).status == 200
    assert (await post(app, "/v1/chat/completions", {**ASK, "model": "toy"})).status == 200
    assert garage.diary == ["+toy-embedding", "+toy"]


@pytest.mark.anyio
async def test_voices_are_those_of_the_text_to_speech_model_once_it_is_loaded() -> None:
    app, _ = made({"talk": {"path": "a"}, "mouth": {"path": "f", "kind": "speech"}})
    assert (await call(app, "GET", "/v1/audio/voices")).status == 503
    for name in ("talk", "mouth"):
        assert (await post(app, f"/v1/models/{name}/load", None)).status == 200
    answer = await call(app, "GET", "/v1/audio/voices")
    assert answer.status == 200 and json.loads(answer.body)["data"], answer.body


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ({}, None),
        ({"keep_alive": "5m"}, 300.0),
        ({"keep_alive": "1h30m"}, 5400.0),
        ({"keep_alive": "250ms"}, 0.25),
        ({"keep_alive": 0}, 0.0),
        ({"keep_alive": "0"}, 0.0),
        ({"keep_alive": -1}, inf),
        ({"keep_alive": "-1m"}, inf),
        ({"keep_alive": "soon"}, None),
        ({"keep_alive": True}, None),
        ({"keep_alive": [1]}, None),
        ({"ttl": 60}, 60.0),
        ({"ttl": "60"}, None),
    ],
)
def test_how_long_a_model_is_to_stay(message: dict[str, Any], seconds: float | None) -> None:
    assert ModelSelection.of(json.dumps(message).encode()).unload_after_s == seconds


@pytest.mark.parametrize(
    ("message", "seconds"),
    [({}, None), ({"timeout": 2}, 2.0), ({"timeout": 0}, None), ({"timeout": "soon"}, None), ({"timeout": True}, None)],
)
def test_how_long_a_request_may_take(message: dict[str, Any], seconds: float | None) -> None:
    assert ModelSelection.of(json.dumps(message).encode()).within_s == seconds


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"messages": [{"model": "inner"}], "model": "outer"}', "outer"),
        (b'{"name": "older:latest"}', "older"),
        (b'{"model": 5}', None),
        (b"[]", None),
        (b'{"model": "cut', None),
        (b"\xff", None),
        (b'{"a":' * 100_000, None),
    ],
)
def test_which_model_it_names(raw: bytes, name: str | None) -> None:
    assert ModelSelection.of(raw).model_name == name
