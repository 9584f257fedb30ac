"""The official Python client against the real server on a socket, with an engine that says what the test wrote."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ingot.engine.request import TextDelta
from ingot.errors import Overloaded
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, failing, settings
from tests.waiting import WAIT_S

KEY = "sk-testing"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with (
        running(engine, settings(api_key=KEY)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S) as made,
    ):
        yield made


def test_a_chat_is_answered(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(
        model="default", messages=[USER], temperature=0.5, seed=7, stop=["END"], max_completion_tokens=50
    )
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.id == answer._request_id == engine.requests[0].id


def test_a_chat_is_streamed_with_its_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="org/toy", messages=[USER], stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "Hello, world"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_the_clients_own_stream_helper_understands_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="default", messages=[USER], logprobs=True, top_logprobs=1) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == "Hello, world"
    assert [entry.token for entry in final.choices[0].logprobs.content] == ["Hello", ", ", "world"]  # type: ignore[union-attr]


def test_a_text_is_completed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["aHello, ", "bHello, "]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 6]
    streamed = client.completions.create(model="default", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Hello, world"


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/toy"]
    assert client.models.retrieve("org/toy").id == "org/toy"


def test_an_error_in_mid_stream_is_raised(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = failing(Overloaded("Out of memory."))
    stream = client.chat.completions.create(model="default", messages=[USER], stream=True)
    said = []
    with pytest.raises(openai.APIError, match="Out of memory") as raised:
        for chunk in stream:
            said.append(chunk.choices[0].delta.content or "")
    assert "".join(said) == "Hello"
    assert raised.value.code == "overloaded"


def test_each_refusal_is_the_clients_own_exception(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="default", messages=[USER], temperature=3)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError, match="org/toy"):
        client.chat.completions.create(model="gpt-4o", messages=[USER])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine.refusal = Overloaded("Full.", retry_after=1)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="default", messages=[USER])


def test_the_client_comes_back_after_the_time_it_was_told(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    refused = engine.open

    async def once(request):  # type: ignore[no-untyped-def]
        engine.open = refused  # type: ignore[method-assign]
        raise Overloaded("Full.", retry_after=0.1)

    engine.open = once  # type: ignore[method-assign]
    answer = client.with_options(max_retries=1).chat.completions.create(model="default", messages=[USER])
    assert answer.choices[0].message.content == "Hello, world"


def test_closing_the_stream_ends_the_request(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda request: [[TextDelta(0, "Hello")]]
    stream = client.chat.completions.create(model="default", messages=[USER], stream=True)
    next(iter(stream))
    stream.close()
    assert engine.streams[0].closed.wait(WAIT_S)


async def talk(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        stream = await client.chat.completions.create(model="default", messages=[USER], stream=True)  # type: ignore[list-item]
        return [chunk.choices[0].delta.content or "" async for chunk in stream]


@pytest.mark.anyio
async def test_the_asynchronous_client_works_too(engine: ScriptedEngine) -> None:
    with running(engine, settings()) as url:
        assert "".join(await talk(url)) == "Hello, world"
