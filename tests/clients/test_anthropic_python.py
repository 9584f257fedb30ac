"""The official Python client of Anthropic's against a running server, whose model says what the test wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ingot.engine.engine import Engine
from tests import scripted
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, failing, settings
from tests.waiting import WAIT_S

anthropic = pytest.importorskip("anthropic")

KEY = "sk-testing"
MODEL = "claude-opus-5"
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
THINKING = "The user wants the weather."
SCRIPT = scripted.said(
    ("weather", f"<think>\n{THINKING}\n</think>\n\nLet me look." + scripted.call("get_weather", city="Rome")),
    ("<tool_response>", "It is sunny."),
    ("Count", "one two three"),
    otherwise="Hello.",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = scripted.start(SCRIPT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Any]:
    with (
        running(engine, settings(api_key=KEY, alias=("claude-*=default",))) as url,
        anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=WAIT_S) as made,
    ):
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    engine.check()


def create(client: Any, **changes: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 400, "messages": [QUESTION], **changes})


def strictly(message: Any) -> None:
    """The client builds its models without looking; here they look."""
    type(message).model_validate(message.model_dump())


def test_a_message_with_thinking_and_a_call_is_answered(client: Any) -> None:
    message = create(client, tools=[TOOL])
    strictly(message)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", THINKING) and thinking.signature
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
    assert (message.stop_reason, message.role, message.id) == ("tool_use", "assistant", message._request_id)
    assert message.model == MODEL, "agents drop thinking that another model is said to have thought"


def test_the_stream_adds_up_to_the_same_message(client: Any) -> None:
    whole = create(client, tools=[TOOL])
    asked = {"model": MODEL, "max_tokens": 400, "messages": [QUESTION], "tools": [TOOL]}
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"text", "thinking", "signature", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_the_result_of_a_call_is_answered_and_the_second_turn_hits_the_cache(client: Any) -> None:
    first = create(client, tools=[TOOL])
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny, 24 °C."}]}
    messages = [QUESTION, first.to_param(), {"role": "user", "content": [result]}]
    second = create(client, tools=[TOOL], messages=messages)
    assert (second.content[0].text, second.stop_reason) == ("It is sunny.", "end_turn")
    usage = second.usage
    prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL]).input_tokens == prompt
    assert usage.cache_read_input_tokens >= first.usage.input_tokens + first.usage.cache_creation_input_tokens
    assert second.model_extra["ingot"]["cache"]["matched_tokens"] == usage.cache_read_input_tokens
    assert "ignored" not in second.model_extra["ingot"]


def test_the_beta_client_works_too(client: Any) -> None:
    message = client.beta.messages.create(
        model=MODEL,
        max_tokens=50,
        messages=[{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
    )
    strictly(message)
    assert message.content[0].text == "Hello."
    assert message.context_management.applied_edits == []


def test_the_tool_runner_goes_on_without_a_thread(client: Any) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=400, tools=[get_weather], messages=[QUESTION])
    assert runner.until_done().content[-1].text == "It is sunny."
    assert asked == ["Rome"]


def test_a_thread_is_refused_by_the_code_that_clients_go_by(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        create(client, extra_body={"thread": {"type": "create"}})
    assert raised.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    with pytest.raises(anthropic.BadRequestError) as raised:
        create(client, extra_body={"inference_geo": "us"})
    assert "details" not in raised.value.body["error"]


@pytest.mark.parametrize(
    ("asked", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "one"),
        ({"stop_sequences": [" three"]}, "stop_sequence", " three", "one two"),
        ({}, "end_turn", None, "one two three"),
    ],
)
def test_why_it_stopped_is_told(client: Any, asked: Any, reason: str, sequence: str | None, text: str) -> None:
    message = create(client, messages=[{"role": "user", "content": "Count"}], **asked)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert message.content[0].text == text


def test_the_answer_is_held_to_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    message = create(
        client,
        messages=[{"role": "user", "content": "Hi"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        thinking={"type": "disabled"},
    )
    import json

    assert json.loads(message.content[0].text) == {"a": 7}


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.type, model.max_input_tokens) == ("scripted", "model", scripted.CARD.context)


def test_each_refusal_is_the_clients_own_exception(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as bad:
        create(client, extra_body={"temperature": 3})
    assert bad.value.type == "invalid_request_error" and bad.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="claude-\\*"):
        create(client, model="gpt-4o")
    with pytest.raises(anthropic.AuthenticationError):
        create(client.with_options(api_key="wrong"))
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        create(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        create(client, messages=[{"role": "user", "content": "x" * scripted.CARD.context}])


def test_an_error_in_mid_stream_is_raised() -> None:
    from ingot.errors import Overloaded

    with (
        running(ScriptedEngine(failing(Overloaded("Out of memory."))), settings()) as url,
        anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="Out of memory"),
        client.messages.stream(model="default", max_tokens=9, messages=[QUESTION]) as stream,
    ):
        list(stream)


@pytest.mark.anyio
async def test_the_asynchronous_client_works_too(engine: Engine) -> None:
    with running(engine, settings()) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
            asked = {"model": "default", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
            async with client.messages.stream(**asked) as stream:
                assert "".join([text async for text in stream.text_stream]) == "Hello."
