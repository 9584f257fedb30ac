"""The same door with the real engine behind it, over a tiny model of random weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Request
from tests import engines, tiny
from tests.http.running import connect, post, running
from tests.http.scripted import settings
from tests.waiting import WAIT_S

GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {"prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = engines.start("llama", limits=EngineLimits(max_sequences=4, max_queue=4))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx.Client]:
    with running(engine, settings()) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    engine.check()


def complete(client: httpx.Client, **body: Any) -> Any:
    made = client.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 8, **GREEDY, **body})
    assert made.status_code == 200, made.text
    return made.json()


def result(made: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in made.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def until_idle(engine: Engine) -> None:
    idle = threading.Event()
    for _ in range(2000):
        if not engine.status():
            return
        idle.wait(0.005)
    raise AssertionError("the engine still works for someone who has left")


@contextmanager
def blocked(engine: Engine) -> Iterator[None]:
    """The engine thread computes nothing meanwhile, so that nobody's answer comes to its end."""
    go_on = threading.Event()
    engines.post(engine, lambda: go_on.wait(WAIT_S) and None)
    try:
        yield
    finally:
        go_on.set()


def test_streamed_and_whole_answers_are_the_same(client: httpx.Client) -> None:
    whole = complete(client, prompt=[[5, 6], [9]], n=2)
    body = {"prompt": [[5, 6], [9]], "n": 2, "max_tokens": 8, **GREEDY, "stream": True}
    chunks = result(client.post("/v1/completions", json=body))
    for choice in whole["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 32
    assert whole["ingot"]["timing"]["decode_s"] >= 0


def test_echo_with_logprobs_scores_prompt_and_answer(client: httpx.Client) -> None:
    made = complete(client, echo=True, logprobs=2)["choices"][0]
    logprobs = made["logprobs"]
    assert {len(blocked) for blocked in logprobs.values()} == {11}
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    spans = [*logprobs["text_offset"], len(made["text"])]
    assert spans == sorted(spans) and spans[0] == 0
    chosen, best = logprobs["token_logprobs"][-1], max(logprobs["top_logprobs"][-1].values())
    assert chosen == pytest.approx(best, abs=1e-5)


def test_a_prompt_can_be_scored_without_going_on(client: httpx.Client) -> None:
    made = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert len(made["choices"][0]["logprobs"]["tokens"]) == 3
    assert made["usage"]["completion_tokens"] == 0
    bare = complete(client, echo=True, max_tokens=0)
    assert bare["choices"][0]["text"] == made["choices"][0]["text"]


def test_the_best_of_several_is_the_likeliest_per_token(client: httpx.Client) -> None:
    sampled = {"temperature": 1.0, "seed": 11, "logprobs": 0}
    every = complete(client, n=4, **sampled)["choices"]
    best = complete(client, n=1, best_of=4, **sampled)["choices"]

    def mean(choice: Any) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])

    assert len(best) == 1
    assert best[0]["text"] == max(every, key=mean)["text"]


def test_the_same_seed_gives_the_same_text(client: httpx.Client) -> None:
    first, again, other = (complete(client, temperature=1.0, seed=seed)["choices"][0]["text"] for seed in (-3, -3, 4))
    assert first == again != other


def test_a_bias_rules_the_choice(client: httpx.Client, engine: Engine) -> None:
    made = complete(client, logit_bias={"40": 100}, max_tokens=3)
    assert made["choices"][0]["text"] == engine.tokenizer.decode([40, 40, 40], skip_special=False)


def test_a_prompt_over_the_context_names_both_numbers(client: httpx.Client, engine: Engine) -> None:
    made = client.post("/v1/completions", json={"prompt": [1] * (engine.card.context + 5)})
    assert (made.status_code, made.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert made.json()["error"]["param"] == "prompt"
    assert str(engine.card.context) in made.json()["error"]["message"]


def test_tokens_outside_the_vocabulary_are_refused(client: httpx.Client) -> None:
    made = client.post("/v1/completions", json={"prompt": [tiny.VOCAB]})
    assert (made.status_code, made.json()["error"]["param"]) == (400, "prompt.0")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_closed_socket_ends_the_work(client: httpx.Client, engine: Engine, stream: bool) -> None:
    connection = connect(str(client.base_url))
    connection.sendall(post("/v1/completions", LONG | {"stream": stream}))
    for _ in range(2000):
        if engine.status():
            break
        threading.Event().wait(0.005)
    connection.close()
    until_idle(engine)


def test_a_running_request_is_listed_and_can_be_cancelled(client: httpx.Client, engine: Engine) -> None:
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        next(line for line in lines if line)
        listed = client.get("/v1/requests").json()["data"]
        assert [one["id"] for one in listed] == [request_id]
        assert listed[0]["phase"] in ("queued", "prefill", "decode")
        assert listed[0]["prompt_tokens"] == 3
        assert client.delete(f"/v1/requests/{request_id}").json() == {"id": request_id, "cancelled": True}
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
    until_idle(engine)
    assert client.delete(f"/v1/requests/{request_id}").status_code == 404


def test_a_request_ends_at_its_deadline(client: httpx.Client) -> None:
    made = client.post("/v1/completions", json=LONG | {"timeout": 0.05})
    assert (made.status_code, made.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_full_queue_says_when_to_come_back(client: httpx.Client, engine: Engine) -> None:
    # Not all that there is room for, as whoever left a moment ago may still be on the way out.
    with blocked(engine):
        others = engine.generate(Request("six", ((1, 2, 3),), n=6, max_tokens=4))
        made = client.post("/v1/completions", json=LONG | {"n": 5})
    assert isinstance([event for batch in others for event in batch][-1], Ended)
    assert made.status_code == 429, made.text[:600]
    assert made.json()["error"]["code"] == "overloaded"
    assert int(made.headers["retry-after"]) >= 1


def test_more_answers_than_ever_fit_are_refused_with_the_number_that_does(client: httpx.Client) -> None:
    made = client.post("/v1/completions", json=LONG | {"n": 9})
    error = made.json()["error"]
    assert (made.status_code, error["param"]) == (400, "n") and "at most 8" in error["message"]


def test_a_chat_is_answered(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **GREEDY}
    made = client.post("/v1/chat/completions", json=body).json()
    assert made["usage"]["completion_tokens"] == 4
    chunks = result(client.post("/v1/chat/completions", json=body | {"stream": True}))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == made["choices"][0]["message"]["content"]


def test_the_engine_is_alive_and_ready(client: httpx.Client) -> None:
    assert client.get("/health/live").json()["ok"] is True
    assert client.get("/health/ready").status_code == 200
