"""The server calls MCP tools itself, where a response asks for it, and goes on with what came of them."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

pytest.importorskip("mcp", reason="the MCP SDK is not installed: it is the extra `mcp`")

from tests import scripted
from tests.clients.agents import serving
from tests.mcp import HERE

MCP: Any = {"type": "mcp", "server_label": "tools", "require_approval": "never"}
ASK: Any = {"type": "function", "name": "ask", "parameters": {"type": "object"}, "strict": False}
WEATHER = scripted.call("tools__weather", city="Paris")
SCRIPT = scripted.said(
    ("both", f"{WEATHER}\n{scripted.call('tools__broken')}"),
    ("mixed", f"{WEATHER}\n{scripted.call('ask')}"),
    ("slow", scripted.call("tools__slow")),
    ("18 degrees", "It is 18 degrees."),
    ("blocked", "One of them failed."),
    ("did not allow", "Then not."),
    ("weather", f"<think>\nI look.\n</think>\n\n{WEATHER}"),
    ("No more calls", "I may not."),
    otherwise="Hello",
)
STREAM_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("mcp")
    command = {
        "command": sys.executable,
        "args": [str(HERE / "tool_server.py")],
        "env": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        "tools": ["weather", "broken", "slow"],
    }
    config: Path = folder / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"tools": command}}))
    with (
        serving(SCRIPT, folder, mcp_config=config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as made,
    ):
        yield made


def create(client: openai.OpenAI, input: Any, **given: Any) -> Response:
    made = client.responses.create(model="default", input=input, **given)
    return Response.model_validate(made.model_dump(exclude_unset=True, by_alias=True))


def kinds(made: Response) -> list[str]:
    return [item.type for item in made.output]


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    made = create(client, "the weather?", tools=[MCP])
    assert kinds(made) == ["mcp_list_tools", "reasoning", "mcp_call", "message"]
    assert made.output_text == "It is 18 degrees."
    call: Any = made.output[2]
    assert (call.server_label, call.name, call.output, call.error) == ("tools", "weather", "18 degrees in Paris", None)
    assert [tool.name for tool in made.output[0].tools] == ["weather", "broken", "slow"]  # type: ignore[union-attr]
    assert made.usage is not None
    cached = made.usage.input_tokens_details.cached_tokens
    assert cached > 0.4 * made.usage.input_tokens, "the second round begins like the first"


def test_a_call_is_told_while_it_is_made(client: openai.OpenAI) -> None:
    with client.responses.create(model="default", input="the weather?", tools=[MCP], stream=True) as stream:
        events = list(stream)
    for event in events:
        STREAM_EVENT.validate_python(event.model_dump(exclude_unset=True, by_alias=True))
    seen = [event.type.removeprefix("response.") for event in events]
    order = [
        "mcp_list_tools.completed",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_text.delta",
        "completed",
    ]
    assert [seen.index(one) for one in order] == sorted(seen.index(one) for one in order)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_tool_that_fails_is_the_models_to_read(client: openai.OpenAI) -> None:
    made = create(client, "both", tools=[MCP])
    assert made.output_text == "One of them failed."
    statuses = [item.status for item in made.output if item.type == "mcp_call"]
    assert statuses == ["completed", "failed"]


def test_a_call_of_the_clients_own_is_left_to_the_client(client: openai.OpenAI) -> None:
    first = create(client, "mixed", tools=[MCP, ASK])
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "function_call"]
    call: Any = first.output[2]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "go on, 18 degrees"}
    second = create(client, [output], tools=[MCP, ASK], previous_response_id=first.id)
    assert second.output_text == "It is 18 degrees."


def test_connected_servers_are_listed(client: openai.OpenAI) -> None:
    listed = client.get("/mcp", cast_to=dict[str, Any])
    assert [server["server_label"] for server in listed["data"]] == ["tools"]
    assert [tool["name"] for tool in listed["data"][0]["tools"]] == ["weather", "broken", "slow"]


def test_a_call_is_made_once_it_was_approved(client: openai.OpenAI) -> None:
    asking = MCP | {"require_approval": "always"}
    first = create(client, "the weather?", tools=[asking])
    assert kinds(first) == ["mcp_list_tools", "reasoning", "mcp_approval_request"]
    request: Any = first.output[2]
    assert (request.server_label, request.name) == ("tools", "weather")
    assert json.loads(request.arguments) == {"city": "Paris"}
    decision = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    second = create(client, [decision], tools=[asking], previous_response_id=first.id)
    assert kinds(second) == ["mcp_list_tools", "mcp_call", "message"]
    call: Any = second.output[1]
    assert (call.output, call.approval_request_id) == ("18 degrees in Paris", request.id)
    assert second.output_text == "It is 18 degrees."
    third = create(client, "thanks", tools=[asking], previous_response_id=second.id)
    assert kinds(third) == ["mcp_list_tools", "message"], "what was made is not made again"


def test_the_model_learns_of_a_call_that_was_not_allowed(client: openai.OpenAI) -> None:
    asking = MCP | {"require_approval": "always"}
    request: Any = create(client, "the weather?", tools=[asking]).output[-1]
    asked = {"type": "message", "role": "user", "content": "the weather?"}
    decision = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": False, "reason": "No."}
    made = create(client, [asked, request.model_dump(), decision], tools=[asking])
    assert kinds(made) == ["mcp_list_tools", "message"]
    assert made.output_text == "Then not."
    with pytest.raises(openai.BadRequestError, match="asks for an approval"):
        create(client, [asked, decision], tools=[asking])
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        create(client, [asked, request.model_dump(), decision | {"approve": True}])


def test_so_many_calls_are_made_and_no_more(client: openai.OpenAI) -> None:
    made = create(client, "both", tools=[MCP], max_tool_calls=1)
    calls: Any = [item for item in made.output if item.type == "mcp_call"]
    assert calls[0].output == "18 degrees in Paris"
    assert "No more calls" in calls[1].error.content
    assert made.output_text == "I may not."


def test_nothing_is_called_that_was_not_asked_for(client: openai.OpenAI) -> None:
    assert "mcp_call" not in kinds(create(client, "the weather?"))
    assert "mcp_call" not in kinds(create(client, "the weather?", tools=[MCP], tool_choice="none"))
    only = create(client, "Hi", tools=[MCP | {"allowed_tools": ["weather"]}])
    assert [tool.name for tool in only.output[0].tools] == ["weather"]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="connected: 'tools'"):
        create(client, "Hi", tools=[MCP | {"server_label": "other"}])


def test_a_response_is_cancelled_while_a_tool_works(client: openai.OpenAI) -> None:
    made = create(client, "slow", tools=[MCP], background=True)
    working = threading.Event()
    while not working.is_set():
        found = client.responses.retrieve(made.id)
        if any(item.type == "mcp_call" and item.arguments for item in found.output):
            working.set()
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"


def test_a_forced_call_is_forced_once_and_then_answered(client: openai.OpenAI) -> None:
    weather: Any = {"type": "mcp", "server_label": "tools", "name": "weather"}
    for choice in ("required", weather):
        made = create(client, "the weather?", tools=[MCP], tool_choice=choice, max_output_tokens=400)
        assert kinds(made).count("mcp_call") == 1
        assert made.output_text == "It is 18 degrees."
