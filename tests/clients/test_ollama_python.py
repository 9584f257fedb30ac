"""Ollama's own Python package against a running server, whose model says what the test wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ingot.engine.engine import Engine
from tests import scripted
from tests.http.running import running
from tests.http.scripted import settings
from tests.http.scripted_encoders import EncodingEngine
from tests.waiting import WAIT_S

ollama = pytest.importorskip("ollama")

MODEL = "scripted"
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
SCRIPT = scripted.said(
    ("weather", "<think>\nI look.\n</think>\n\nOne moment." + scripted.call("weather", city="Rome")),
    ("<tool_response>", "It is sunny."),
    ("a person", '{"name": "Ada"}'),
    otherwise="Hello, world",
)


def weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: Its name.
    """
    return f"Sunny in {city}."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = scripted.start(SCRIPT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Any]:
    with running(engine, settings()) as url:
        yield ollama.Client(host=url, timeout=WAIT_S)


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    engine.check()


def test_a_tool_is_called_and_its_result_answered(client: Any) -> None:
    first = client.chat(MODEL, messages=[QUESTION], tools=[weather])
    assert (first.message.thinking, first.message.content) == ("I look.", "One moment.")
    [call] = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    second = client.chat(MODEL, messages=[QUESTION, first.message, result], tools=[weather])
    assert (second.message.content, second.done_reason) == ("It is sunny.", "stop")
    assert second.prompt_eval_count > first.prompt_eval_count and second.eval_duration > 0


def test_a_stream_adds_up_to_the_whole_answer(client: Any) -> None:
    whole = client.chat(MODEL, messages=[QUESTION], tools=[weather])
    parts = list(client.chat(MODEL, messages=[QUESTION], tools=[weather], stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == whole.message.tool_calls
    assert (parts[-1].eval_count, parts[-1].done_reason) == (whole.eval_count, whole.done_reason)


def test_a_prompt_is_answered_and_cut_where_it_is_asked_for(client: Any) -> None:
    assert client.generate(MODEL, "Hi").response == "Hello, world"
    parts = list(client.generate(MODEL, "Hi", stream=True, options={"num_predict": 5, "seed": 1, "temperature": 0.0}))
    assert ("".join(part.response for part in parts), parts[-1].done_reason) == ("Hello", "length")


def test_the_answer_is_held_to_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    made = client.chat(MODEL, messages=[{"role": "user", "content": "a person"}], format=schema, think=False)
    assert made.message.content == '{"name": "Ada"}'


def test_logprobs_are_given(client: Any) -> None:
    made = client.generate(MODEL, "Hi", logprobs=True, top_logprobs=1, think=False)
    assert "".join(one.token for one in made.logprobs) == "Hello, world"


def test_models_are_listed_shown_and_loaded(client: Any) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.context_length for model in client.ps().models] == [scripted.CARD.context]
    assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]
    assert client.generate(MODEL).done_reason == "load"


def test_refusals_are_the_clients_own_exceptions(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="Served: 'scripted'") as missing:
        client.chat("llama3", messages=[QUESTION])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="Served") as streamed:
        list(client.chat("llama3", messages=[QUESTION], stream=True))
    assert streamed.value.status_code == 404
    for refused in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match="ingot pull"):
            refused("llama3")


def test_texts_become_vectors() -> None:
    with running(EncodingEngine(), settings()) as url:
        client = ollama.Client(host=url, timeout=WAIT_S)
        made = client.embed("toy-embedding", input=["ab", "c"])
        assert [row[0] for row in made.embeddings] == [4, 3]
        assert client.embeddings("toy-embedding", "ab").embedding[0] == 4


@pytest.mark.anyio
async def test_the_asynchronous_client_works_too(engine: Engine) -> None:
    with running(engine, settings()) as url:
        parts = await ollama.AsyncClient(host=url).chat(
            MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert "".join([part.message.content or "" async for part in parts]) == "Hello, world"
