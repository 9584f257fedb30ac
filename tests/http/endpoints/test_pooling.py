"""Embeddings and reranking through the application, with an engine that counts instead of computing."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import Overloaded, Unavailable
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings
from tests.http.scripted_encoders import EncodingEngine

pytestmark = pytest.mark.anyio

EMBED = {"input": ["ab", "c"]}
RERANK = {"query": "q", "documents": ["a", "bb"]}


async def ask(path: str, body: Any, engine: ScriptedEngine | None = None, **changes: Any) -> Call:
    return await call(build_app(engine or EncodingEngine(), settings(**changes)), "POST", path, body=body)  # type: ignore[arg-type]


async def test_texts_become_vectors() -> None:
    engine = EncodingEngine()
    made = await ask("/v1/embeddings", EMBED, engine)
    assert (made.status, made.headers["content-type"]) == (200, "application/json")
    assert [one["embedding"][0] for one in made.json()["data"]] == [4, 3]
    assert engine.encodings[0].id == made.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_at_both_addresses(path: str) -> None:
    made = (await ask(path, RERANK)).json()
    assert [result["index"] for result in made["results"]] == [1, 0]
    assert made["meta"]["api_version"]["version"] == path[2]


@pytest.mark.parametrize(
    ("path", "body", "flag"),
    [("/v1/embeddings", EMBED, "--embedding-model"), ("/v1/rerank", RERANK, "--rerank-model")],
)
async def test_without_the_model_a_404_says_how_to_get_one(path: str, body: Any, flag: str) -> None:
    made = await ask(path, body, ScriptedEngine())
    assert (made.status, made.json()["error"]["code"]) == (404, "model_not_found")
    assert flag in made.json()["error"]["message"]


async def test_an_input_too_long_is_a_400_with_both_numbers() -> None:
    made = await ask("/v1/embeddings", {"input": "x" * 100})
    assert (made.status, made.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least 100 tokens" in made.json()["error"]["message"] and "64 at most" in made.json()["error"]["message"]


async def test_a_full_queue_says_when_to_come_back() -> None:
    engine = EncodingEngine()
    engine.refusal = Overloaded("Full.", retry_after=7)
    made = await ask("/v1/rerank", RERANK, engine)
    assert (made.status, made.headers["retry-after"]) == (429, "7")


async def test_a_client_that_leaves_ends_the_work() -> None:
    engine = EncodingEngine()
    engine.held = True
    async with Call(build_app(engine, settings()), "POST", "/v1/embeddings", body=EMBED) as made:  # type: ignore[arg-type]
        for _ in range(1000):
            if engine.encodings:
                break
            await pytest.importorskip("anyio").sleep(0.005)
        made.leave()
        await made.done()
    assert engine.left.is_set() and made.status == 0


async def test_a_server_that_stops_ends_the_work_with_a_reason() -> None:
    engine = EncodingEngine()
    engine.held = True
    app = build_app(engine, settings())  # type: ignore[arg-type]
    async with Call(app, "POST", "/v1/embeddings", body=EMBED) as made:
        for _ in range(1000):
            if engine.encodings:
                break
            await pytest.importorskip("anyio").sleep(0.005)
        app.state.service.shared_state.live.abandon_all(Unavailable("The server is shutting down."))
        await made.done()
    assert made.status == 503


async def test_all_models_are_listed_and_each_can_be_asked_for() -> None:
    app = build_app(EncodingEngine(), settings())  # type: ignore[arg-type]
    listed = (await call(app, "GET", "/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["org/toy", "toy-embedding", "toy-rerank"]
    assert (await call(app, "GET", "/v1/models/toy-rerank")).json()["max_model_len"] == 64
    unknown = (await call(app, "GET", "/v1/models/other")).json()["error"]["message"]
    assert "'toy-embedding'" in unknown


async def test_a_chat_does_not_take_the_embedding_models_name() -> None:
    body = {"model": "toy-embedding", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await ask("/v1/chat/completions", body)).status == 404


async def test_the_document_states_the_encoders_bounds() -> None:
    app = build_app(EncodingEngine(), settings())  # type: ignore[arg-type]
    paths = (await call(app, "GET", "/openapi.json")).json()["paths"]
    body = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert body["dimensions"]["maximum"] == 4 and "toy-embedding" in body["model"]["enum"]
