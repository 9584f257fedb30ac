"""The same request through chat, responses, messages and Ollama gives the same text, thinking, calls, usage and end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.engine import loop_guard
from ingot.engine.engine import Engine
from tests import scripted
from tests.http.running import running
from tests.http.scripted import settings

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCRIPT = scripted.said(
    ("weather", "<think>\nI look.\n</think>\n\nOne moment." + scripted.call("weather", city="Zürich", days=2)),
    ("twice", scripted.call("weather", city="Rome") + "\n" + scripted.call("weather", city="Paris")),
    ("think", "<think>\nHm, hm.\n</think>\n\nYes."),
    ("loop", "<think>\nI think.\n</think>\n\n" + "the sea, " * 100),
    otherwise="Hello, wörld 👋.",
)


@dataclass(frozen=True)
class Told:
    """An answer, whatever the protocol that told it."""

    text: str
    thinking: str
    calls: tuple[tuple[str, str], ...]
    end: str
    prompt: int
    generated: int
    loops: Any = None  # as the receipt tells them


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = scripted.start(SCRIPT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    store: Path = tmp_path_factory.mktemp("store") / "responses.db"
    with running(engine, settings(responses_store=str(store))) as url, httpx.Client(base_url=url, timeout=60) as made:
        yield made


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    made = client.post(path, json=body)
    assert made.status_code == 200, made.text
    return made.json()


def arguments(value: Any) -> str:
    """As one text, whether the protocol tells them as an object or, as it may be no object yet, as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = {"_unparsed": value}
    return json.dumps(value, sort_keys=True)


def chat(client: httpx.Client, words: str, tools: bool, limit: int) -> Told:
    function = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": limit, "temperature": 0}
    made = post(client, "/v1/chat/completions", body | ({"tools": [function]} if tools else {}))
    [choice], usage = made["choices"], made["usage"]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls", [])]
    return Told(
        message["content"] or "",
        message.get("reasoning_content", ""),
        tuple((one["name"], arguments(one["arguments"])) for one in calls),
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        made["ingot"].get("loops"),
    )


def responses(client: httpx.Client, words: str, tools: bool, limit: int) -> Told:
    function = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    body = {"input": words, "max_output_tokens": limit, "temperature": 0, "store": False}
    made = post(client, "/v1/responses", body | ({"tools": [function]} if tools else {}))
    items, usage = made["output"], made["usage"]
    calls = [item for item in items if item["type"] == "function_call"]
    cut = made["status"] == "incomplete"
    return Told(
        "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item.get("content") or []),
        tuple((one["name"], arguments(one["arguments"])) for one in calls),
        "length" if cut else "tool_calls" if calls else "stop",
        usage["input_tokens"],
        usage["output_tokens"],
        made["ingot"].get("loops"),
    )


def messages(client: httpx.Client, words: str, tools: bool, limit: int) -> Told:
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": limit, "temperature": 0}
    made = post(client, "/v1/messages", body | ({"tools": [tool]} if tools else {}))
    blocks, usage = made["content"], made["usage"]
    return Told(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        tuple((block["name"], arguments(block["input"])) for block in blocks if block["type"] == "tool_use"),
        {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[made["stop_reason"]],
        usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
        made["ingot"].get("loops"),
    )


def ollama(client: httpx.Client, words: str, tools: bool, limit: int) -> Told:
    function = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": words}], "stream": False}
    options = {"options": {"num_predict": limit, "temperature": 0}}
    made = post(client, "/api/chat", body | options | ({"tools": [function]} if tools else {}))
    message = made["message"]
    calls = tuple(
        (one["function"]["name"], arguments(one["function"]["arguments"])) for one in message.get("tool_calls", [])
    )
    return Told(
        message["content"],
        message.get("thinking", ""),
        calls,
        "tool_calls" if calls and made["done_reason"] == "stop" else made["done_reason"],
        made["prompt_eval_count"],
        made["eval_count"],
        made["ingot"].get("loops"),
    )


@pytest.mark.parametrize(
    ("words", "tools", "limit"),
    [
        ("Please think.", True, 100),
        ("How is the weather?", True, 96),
        ("Call it twice.", True, 130),
    ],
)
def test_every_protocol_tells_the_same(client: httpx.Client, words: str, tools: bool, limit: int) -> None:
    first = chat(client, words, tools, limit)
    for protocol in (responses, messages, ollama):
        assert protocol(client, words, tools, limit) == first


def test_every_protocol_tells_of_an_answer_that_was_ended_in_a_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is not complete: clients take other reasons for an answer's own end."""
    monkeypatch.setattr(loop_guard, "LOOP_TOKENS", 64)
    monkeypatch.setattr(loop_guard, "STRUCTURE_TOKENS", 128)
    cut = chat(client, "Please loop.", True, 400)
    assert (cut.end, cut.generated, cut.loops) == ("length", 192, [{"index": 0, "period": 9, "count": 18}])
    for protocol in (responses, messages, ollama):
        assert protocol(client, "Please loop.", True, 400) == cut
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Please loop."}], "temperature": 0}
    [choice] = post(client, "/v1/chat/completions", body)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition_detected")
    stream = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    last = json.loads(stream.split("data: ")[-2])
    assert last["choices"][0]["stop_reason"] == "repetition_detected" and last["ingot"]["loops"] == cut.loops
    whole = post(client, "/v1/chat/completions", body | {"loop_guard": False})
    assert whole["choices"][0]["finish_reason"] == "stop" and "stop_reason" not in whole["choices"][0]
    assert whole["usage"]["completion_tokens"] > 900 and "loops" not in whole["ingot"]


def test_a_call_that_was_cut_off_is_told_as_far_as_it_came(client: httpx.Client) -> None:
    reply = chat(client, "How is the weather?", True, 96)
    [(name, text)] = reply.calls
    assert (name, reply.end) == ("weather", "length")
    assert '{"city": "Zürich", "days": 2}'.startswith(json.loads(text)["_unparsed"])


def test_a_conversation_goes_on_after_a_call_that_was_cut_off(client: httpx.Client) -> None:
    """Sent back as it was told, the answer stands in the prompt in the tokens that it was generated in."""
    function = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    query = {"role": "user", "content": "How is the weather?"}
    body = {"messages": [query], "tools": [function], "max_tokens": 96, "temperature": 0}
    answer = post(client, "/v1/chat/completions", body)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "Arguments are no JSON."}
    made = post(client, "/v1/chat/completions", body | {"messages": [query, answer, result]})
    assert made["ingot"]["prompt"]["recalled"] == 1

    options = {"options": {"num_predict": 96, "temperature": 0}, "stream": False, "tools": [function]}
    said = post(client, "/api/chat", {"messages": [query]} | options)["message"]
    result = {"role": "tool", "tool_name": "weather", "content": "Arguments are no JSON."}
    made = post(client, "/api/chat", {"messages": [query, said, result]} | options)
    assert made["ingot"]["prompt"]["recalled"] == 1

    tool = {"name": "weather", "input_schema": SCHEMA}
    settled = {"max_tokens": 96, "temperature": 0, "tools": [tool]}
    content = post(client, "/v1/messages", {"messages": [query]} | settled)["content"]
    called = next(block["id"] for block in content if block["type"] == "tool_use")
    results = [{"type": "tool_result", "tool_use_id": called, "content": "Arguments are no JSON."}]
    turns = [query, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert post(client, "/v1/messages", {"messages": turns} | settled)["ingot"]["prompt"]["recalled"] == 1

    shown = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    fixed = {"max_output_tokens": 96, "temperature": 0, "tools": [shown], "store": False}
    items = post(client, "/v1/responses", {"input": [query]} | fixed)["output"]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "Arguments are no JSON."}
    assert post(client, "/v1/responses", {"input": [query, *items, output]} | fixed)["ingot"]["prompt"]["recalled"] == 1
