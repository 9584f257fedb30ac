"""The official Python client's responses against a real server, with its own types as judges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent

from tests import scripted
from tests.clients.agents import KEY, serving

LOOK = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Applies a patch."}
PARIS = scripted.call("weather", city="Paris")
SCRIPT = scripted.said(
    ("weather", f"<think>\nI look.\n</think>\n\nOne moment.\n{PARIS}"),
    ("18 degrees", "It is 18 degrees in Paris."),
    ("patch it", scripted.call("patch", input='*** Begin\n+"ü"\n')),
    ("applied", "Done."),
    ("think", "<think>\nHm, well.\n</think>\n\nI thought."),
    ("long", "word " * 2000),
    ("person", '{"name": "Ada", "age": 36}'),
    otherwise="Hello, world",
)
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)
STREAM_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        serving(SCRIPT, tmp_path_factory.mktemp("store"), api_key=KEY) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as made,
    ):
        yield made


def create(client: openai.OpenAI, input: Any = "Hi", **given: Any) -> Response:
    made: Response = client.responses.create(model="default", input=input, **given)
    return Response.model_validate(made.model_dump(exclude_unset=True, by_alias=True))


def streamed(client: openai.OpenAI, input: Any = "Hi", **given: Any) -> list[Any]:
    """The events of a stream, held against the client's types."""
    with client.responses.create(model="default", input=input, stream=True, **given) as stream:
        told = list(stream)
    for event in told:
        STREAM_EVENT.validate_python(event.model_dump(exclude_unset=True, by_alias=True))
    return told


def test_a_response_is_answered(client: openai.OpenAI) -> None:
    made = create(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert made.output_text == "Hello, world"
    assert (made.status, made.metadata, made.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert made.usage is not None and made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_a_response_is_streamed(client: openai.OpenAI) -> None:
    told = streamed(client)
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == "Hello, world"
    assert told[-1].response.output_text == "Hello, world"


def test_the_clients_own_stream_helper_understands_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="default", input="think") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "I thought."
    assert "response.reasoning_text.delta" in kinds and kinds[-1] == "response.completed"


def test_a_function_is_called_and_its_output_answered(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    first = create(client, asked, tools=[LOOK], store=False, include=["reasoning.encrypted_content"])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[2]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"}
    assert first.output[0].encrypted_content  # type: ignore[union-attr]
    said = [item.model_dump(exclude_unset=True) for item in first.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = create(client, [*asked, *said, output], tools=[LOOK], store=False)
    assert second.output_text == "It is 18 degrees in Paris."
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0.9 * first.usage.input_tokens


def test_a_stored_conversation_goes_on_by_its_last_id(client: openai.OpenAI) -> None:
    first = create(client, "What is the weather?", tools=[LOOK])
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = create(client, [output], tools=[LOOK], previous_response_id=first.id)
    assert second.output_text == "It is 18 degrees in Paris."
    listed = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert listed == ["message", "reasoning", "message", "function_call", "function_call_output"]


def test_items_of_every_kind_are_listed_as_the_client_knows_them(client: openai.OpenAI) -> None:
    asked: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Yes."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "applied"},
    ]
    made = create(client, asked, tools=[LOOK, PATCH])
    items = list(client.responses.input_items.list(made.id, order="asc"))
    assert [item.type for item in items] == [one.get("type", "message") for one in asked]
    for item in items:
        ITEM.validate_python(item.model_dump(exclude_unset=True, by_alias=True))


def test_a_custom_tool_takes_text(client: openai.OpenAI) -> None:
    told = streamed(client, "patch it", tools=[PATCH])
    text = "".join(event.delta for event in told if event.type == "response.custom_tool_call_input.delta")
    call = told[-1].response.output[0]
    assert call.type == "custom_tool_call" and call.input == text == '*** Begin\n+"ü"\n'
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "applied"}
    done = create(client, [output], tools=[PATCH], previous_response_id=told[-1].response.id)
    assert done.output_text == "Done."


def test_thinking_is_told_as_a_summary_where_one_is_asked_for(client: openai.OpenAI) -> None:
    told = streamed(client, "think", reasoning={"summary": "auto"})
    deltas = [event.delta for event in told if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == told[-1].response.output[0].summary[0].text == "Hm, well."
    usage = told[-1].response.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_logprobs_come_with_the_text(client: openai.OpenAI) -> None:
    made = create(client, include=["message.output_text.logprobs"], top_logprobs=2)
    part = made.output[0].content[0]  # type: ignore[union-attr, index]
    assert part.logprobs is not None  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == "Hello, world"  # type: ignore[union-attr]
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)  # type: ignore[union-attr]


def test_an_answer_at_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    made = create(client, max_output_tokens=16, input="long")
    assert made.status == "incomplete"
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_an_answer_is_held_to_a_schema_and_parsed(client: openai.OpenAI) -> None:
    made = client.responses.parse(model="default", input="a person", text_format=Person)
    assert made.output_parsed == Person(name="Ada", age=36)


def test_a_stored_response_is_retrieved_and_deleted(client: openai.OpenAI) -> None:
    made = create(client)
    assert client.responses.retrieve(made.id).output_text == "Hello, world"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_tokens_are_counted_as_they_are_then_taken(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "input": "What is the weather?", "instructions": "Be brief.", "tools": [LOOK]}
    counted = client.responses.input_tokens.count(**asked)
    made = client.responses.create(**asked)
    assert made.usage is not None and counted.input_tokens == made.usage.input_tokens


def test_a_background_response_is_waited_for_or_cancelled(client: openai.OpenAI) -> None:
    made = create(client, background=True)
    assert made.status == "queued"
    while (made := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        pass
    assert (made.status, made.output_text) == ("completed", "Hello, world")
    running = create(client, "long", background=True)
    assert client.responses.cancel(running.id).status == "cancelled"
    assert client.responses.retrieve(running.id).status == "cancelled"


def test_a_background_stream_is_resumed(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="default", input="Hi", background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "Hello, world"
    with client.responses.stream(response_id=first.response.id) as again:
        assert again.get_final_response().output_text == "Hello, world"


def test_each_refusal_is_the_clients_own_exception(client: openai.OpenAI) -> None:
    for refused in ({"conversation": "c"}, {"truncation": "auto"}, {"tools": [{"type": "file_search"}]}):
        with pytest.raises(openai.BadRequestError) as raised:
            create(client, **refused)
        assert raised.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, previous_response_id="resp_0")
    assert raised.value.code == "previous_response_not_found"


@pytest.mark.anyio
async def test_the_asynchronous_client_works_too(client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY) as other:
        made = await other.responses.create(model="default", input="Hi", stream=True)
        told = [event async for event in made]
    assert told[-1].type == "response.completed"
