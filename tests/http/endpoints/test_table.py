"""Ollama's paths through the application: lines, errors in its shape, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.engine.request import SequenceEnded, TextDelta
from ingot.errors import Overloaded
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, failing, settings
from tests.http.scripted_encoders import EncodingEngine

pytestmark = pytest.mark.anyio

ASK = {"model": "org/toy", "messages": [{"role": "user", "content": "Hi"}]}


def lines(made: Call) -> list[Any]:
    assert made.headers["content-type"] == "application/x-ndjson"
    assert made.body.endswith(b"\n")
    return [json.loads(line) for line in made.body.splitlines()]


async def ask(path: str, body: Any = None, engine: ScriptedEngine | None = None, **given: Any) -> Call:
    changes = given.pop("settings", {})
    app = build_app(engine or ScriptedEngine(), settings(**changes))  # type: ignore[arg-type]
    return await call(app, given.pop("method", "POST"), path, body=body, **given)


async def test_a_chat_is_streamed_line_by_line_unless_it_is_asked_otherwise() -> None:
    told = lines(await ask("/api/chat", ASK))
    assert [line["message"]["content"] for line in told] == ["Hello", ", ", "world", ""]
    assert told[-1]["done_reason"] == "stop" and told[-1]["eval_count"] == 3
    whole = await ask("/api/chat", ASK | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"] == {"role": "assistant", "content": "Hello, world"}


async def test_a_prompt_is_answered() -> None:
    told = lines(await ask("/api/generate", {"model": "org/toy", "prompt": "Hi", "options": {"num_predict": 2}}))
    assert ("".join(line["response"] for line in told), told[-1]["done_reason"]) == ("Hello, ", "length")


async def test_nothing_to_answer_needs_no_engine() -> None:
    engine = ScriptedEngine()
    made = await ask("/api/generate", {"model": "org/toy"}, engine)
    assert (made.json()["done"], made.json()["done_reason"], engine.requests) == (True, "load", [])


async def test_a_stream_has_no_comments_as_every_line_is_a_chunk() -> None:
    engine = ScriptedEngine(None)
    async with Call(build_app(engine, settings(keepalive_s=0.01)), path="/api/chat", body=ASK) as made:
        await made.until(lambda: bool(engine.streams))
        engine.streams[0].put([TextDelta(0, "x"), SequenceEnded(0, "stop", None, 1)])
        await made.until(lambda: bool(made.body))
        assert len(lines(made)) == 1


async def test_a_stream_that_breaks_ends_in_an_error() -> None:
    made = await ask("/api/chat", ASK, ScriptedEngine(failing(Overloaded("Out of memory."))))
    assert lines(made)[-1] == {"error": "Out of memory."}


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/api/pull", "POST"),
        ("/api/push", "POST"),
        ("/api/create", "POST"),
        ("/api/copy", "POST"),
        ("/api/delete", "DELETE"),
        ("/api/blobs/sha256:1", "POST"),
    ],
)
async def test_what_would_change_the_models_is_refused_by_name(path: str, method: str) -> None:
    made = await ask(path, {"model": "x"}, method=method)
    assert made.status == 400
    assert path in made.json()["error"] and "ingot pull" in made.json()["error"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"path": "/api/chat", "body": ASK | {"model": "x"}}, 404),
        ({"path": "/api/chat", "body": ASK | {"format": "xml"}}, 400),
        ({"path": "/api/chat", "body": ASK, "settings": {"api_key": "secrets!"}}, 401),
        ({"path": "/api/nothing", "body": ASK}, 404),
        ({"path": "/api/chat", "method": "GET"}, 405),
    ],
)
async def test_every_layers_errors_have_the_protocols_shape(given: dict[str, Any], status: int) -> None:
    made = await ask(**given)
    assert made.status == status
    assert list(made.json()) == ["error"] and isinstance(made.json()["error"], str)


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
async def test_all_models_are_listed(path: str) -> None:
    made = await ask(path, engine=EncodingEngine(), method="GET")
    assert [model["name"] for model in made.json()["models"]] == ["org/toy", "toy-embedding", "toy-rerank"]


async def test_models_are_said_to_be_quantised_as_their_files_are() -> None:
    listed = (await ask("/api/tags", method="GET")).json()["models"]
    assert [model["details"]["quantization_level"] for model in listed] == ["Q4_K_M"]
    shown = (await ask("/api/show", {"model": "org/toy"})).json()
    assert shown["details"]["quantization_level"] == shown["model_info"]["general.file_type"] == "Q4_K_M"


async def test_a_version_is_told_that_clients_talk_to() -> None:
    made = await ask("/api/version", method="GET")
    assert tuple(map(int, made.json()["version"].split("."))) >= (0, 6, 4)


async def test_texts_become_vectors() -> None:
    made = await ask("/api/embed", {"model": "toy-embedding", "input": ["ab", "c"]}, EncodingEngine())
    assert [row[0] for row in made.json()["embeddings"]] == [4, 3]
    assert (made.json()["prompt_eval_count"], made.json()["total_duration"]) == (7, 300_000_000)
    old = await ask("/api/embeddings", {"model": "toy-embedding:latest", "prompt": "ab"}, EncodingEngine())
    assert old.json()["embedding"][0] == 4


async def test_vectors_are_cut_and_long_inputs_too_unless_that_is_refused() -> None:
    body = {"model": "default", "input": "x" * 100, "dimensions": 2, "options": {"num_ctx": 4096}}
    made = (await ask("/api/embed", body, EncodingEngine())).json()
    assert len(made["embeddings"][0]) == 2
    assert made["ingot"].items() >= {"truncated": 1, "ignored": ["options.num_ctx"]}.items()
    refused = await ask("/api/embed", body | {"truncate": False}, EncodingEngine())
    assert refused.status == 400 and "64 at most" in refused.json()["error"]


async def test_without_an_embedding_model_a_404_says_how_to_get_one() -> None:
    made = await ask("/api/embed", {"model": "default", "input": "x"})
    assert made.status == 404 and "--embedding-model" in made.json()["error"]
