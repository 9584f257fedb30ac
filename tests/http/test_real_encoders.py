"""The real server and engine, with tiny encoders of random weights beside a tiny model that generates."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine, PoolingEngine
from ingot.engine.loading.pooling_and_speech import load_pooling_model
from ingot.engine.loop import engine_loop
from ingot.models.files.locate import ModelFolder
from tests import engines
from tests.encoders import write_encoder, write_sentence_files
from tests.http.running import connect, post, running
from tests.http.scripted import settings

TEXTS = ["cat", "the dog is in the rain", "moon", "what is the sun"]
POOLING = {"pooling_mode_mean_tokens": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    embedding = write_encoder(tmp_path_factory.mktemp("embedding"), "bert", hidden_size=64, num_hidden_layers=6)
    write_sentence_files(embedding, POOLING)
    rerank = write_encoder(tmp_path_factory.mktemp("rerank"), "modernbert", head=True, local_attention=8)
    loop, limits = engine_loop(), EngineLimits(max_sequences=4, max_queue=4)
    loop.start()
    made = engines.start("llama", limits=limits, loop=loop)
    folders = {"embedding": ModelFolder(embedding, "tiny-vectors", "x"), "rerank": ModelFolder(rerank, "rank", "x")}
    made.alongside = [  # type: ignore[attr-defined]
        PoolingEngine(partial(load_pooling_model, task, folder, Settings(), 1 << 30), limits, loop)  # type: ignore[arg-type]
        for task, folder in folders.items()
    ]
    yield made
    loop.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx.Client]:
    with running(engine, settings()) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    engine.check()


def embed(client: httpx.Client, input: Any, **fields: Any) -> Any:
    made = client.post("/v1/embeddings", json={"input": input, **fields})
    assert made.status_code == 200, made.text
    return made.json()


def vectors(made: Any) -> list[list[float]]:
    return [one["embedding"] for one in made["data"]]


def statuses(engine: Any) -> list[Any]:
    return [status for each in (engine, *engine.alongside) for status in each.status()]


def until(happened: Any) -> None:
    pause = threading.Event()
    for _ in range(4000):
        if happened():
            return
        pause.wait(0.005)
    raise AssertionError("it never happened")


def test_each_text_gets_the_vector_that_it_gets_alone(client: httpx.Client) -> None:
    together = vectors(embed(client, TEXTS))
    for text, vector in zip(TEXTS, together, strict=True):
        assert len(vector) == 64 and sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
        assert vectors(embed(client, text))[0] == pytest.approx(vector, abs=1e-5)


def test_a_text_and_its_tokens_give_the_same_vector(client: httpx.Client) -> None:
    assert vectors(embed(client, [[2, 4, 3]])) == [pytest.approx(vectors(embed(client, "cat"))[0], abs=1e-6)]


def test_base64_and_floats_are_the_same_numbers(client: httpx.Client) -> None:
    packed = base64.b64decode(vectors(embed(client, "cat", encoding_format="base64"))[0])
    assert struct.unpack("<64f", packed) == pytest.approx(vectors(embed(client, "cat"))[0], abs=1e-6)


def test_documents_get_the_same_scores_together_and_alone(client: httpx.Client) -> None:
    made = client.post("/v1/rerank", json={"query": "who is in the rain", "documents": TEXTS}).json()
    scores = {result["index"]: result["relevance_score"] for result in made["results"]}
    ranked = [result["relevance_score"] for result in made["results"]]
    assert ranked == sorted(ranked, reverse=True) and set(scores) == set(range(4))
    for at, text in enumerate(TEXTS):
        alone = client.post("/v2/rerank", json={"query": "who is in the rain", "documents": [text]}).json()
        assert alone["results"][0]["relevance_score"] == pytest.approx(scores[at], abs=1e-5)


def test_a_stream_goes_on_while_a_library_is_embedded(client: httpx.Client, engine: Engine) -> None:
    library = ["the dog is in the rain on the moon " * 6] * 400
    reply: list[int] = []
    done = threading.Event()

    def work() -> None:
        try:
            reply.append(len(embed(client, library)["data"]))
        finally:
            done.set()

    body = {"prompt": [1, 2, 3], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: len(statuses(engine)) == 2)
        during = 0
        for _ in lines:
            if done.is_set():
                break
            during += 1
    thread.join()
    assert reply == [400] and during > 10


def test_requests_are_listed_while_they_run_and_a_closed_socket_ends_them(client: httpx.Client, engine: Engine) -> None:
    connection = connect(str(client.base_url))
    connection.sendall(post("/v1/embeddings", {"input": ["the dog is in the rain on the moon " * 6] * 2000}))
    listed: list[Any] = []
    until(lambda: listed.extend(client.get("/v1/requests").json()["data"]) or listed)
    assert listed[0]["prompt_tokens"] > 10_000 and listed[0]["completion_tokens"] == 0
    connection.close()
    until(lambda: not statuses(engine))


def test_a_deadline_ends_an_encoding(client: httpx.Client) -> None:
    body = {"input": ["the dog is in the rain on the moon " * 6] * 2000, "timeout": 0.05}
    made = client.post("/v1/embeddings", json=body)
    assert (made.status_code, made.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_many_clients_at_once_each_get_their_own(client: httpx.Client) -> None:
    expected = vectors(embed(client, TEXTS))
    wrong: list[str] = []

    def work(at: int) -> None:
        for _ in range(5):
            made = client.post("/v1/embeddings", json={"input": TEXTS[at]})
            if made.status_code == 200 and vectors(made.json())[0] != pytest.approx(expected[at], abs=1e-5):
                wrong.append(json.dumps(made.json())[:200])

    threads = [threading.Thread(target=work, args=(number % 4,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
