"""Official clients put the same answer together whether or not a stream's silences were filled.

The model pauses throughout and the server fills silences after a few milliseconds, so that empty events stand before
the answer, and within its thinking, its text and its call.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import scripted
from tests.clients.agents import HERE, KEY, NOT_INSTALLED
from tests.clients.agents import run as run_program
from tests.http.running import running
from tests.http.scripted import settings
from tests.waiting import WAIT_S

QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = scripted.call("weather", city="Rome")
SCRIPT = scripted.said(
    ("in Rome", f"<think>\nI look.\n</think>\n\nOne moment.{CALL}"),
    ("in Paris", CALL),
    ("weather?", f"<think>\nI look.\n</think>\n\n{CALL}"),
    ("think", "<think>\nHm.\n</think>\n\nI thought."),
    ("<tool_response>", "It is sunny."),
    otherwise="Hello, world",
)
JAVASCRIPT = [
    ("anthropic_client.mjs", "", "helper"),
    ("openai_client.mjs", "/v1", "stream"),
    ("openai_client.mjs", "/v1", "helper"),
    ("responses_client.mjs", "/v1", "helper"),
]


PAUSES_S = itertools.cycle((0.03, 0.0, 0.0, 0.0, 0.0, 0.0))


def slow(width: int) -> None:
    time.sleep(0.05 if width > 1 else next(PAUSES_S))


@pytest.fixture(scope="module")
def filled() -> Iterator[str]:
    engine = scripted.start(SCRIPT, wait=slow)
    with running(
        engine, settings(idle_event_s=0.01, idle_body_s=0.01, alias=("claude-*=default",), api_key=KEY)
    ) as url:
        yield url
    engine.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    engine = scripted.start(SCRIPT)
    with running(engine, settings(alias=("claude-*=default",), api_key=KEY)) as url:
        yield url
    engine.close()


def test_anthropics_client_gets_the_same_message(filled: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=filled, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        tool = {"name": "weather", "input_schema": PARAMETERS}
        asked = {"model": "claude-opus-5", "max_tokens": 400, "messages": [QUESTION], "tools": [tool]}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            pieces = [event.delta for event in stream if event.type == "content_block_delta"]
            final = stream.get_final_message()
    assert any(piece.type == "thinking_delta" and not piece.thinking for piece in pieces)
    told = [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content]
    assert told == [block.model_dump(exclude={"id"}) for block in whole.content]
    assert [block["type"] for block in told] == ["thinking", "text", "tool_use"]


def test_every_client_reads_a_whole_answer_behind_white_space(filled: str) -> None:
    anthropic, ollama, openai = (pytest.importorskip(name) for name in ("anthropic", "ollama", "openai"))
    said = [{"role": "user", "content": "Hi"}]
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}) as plain_client:
        raw = plain_client.post(f"{filled}/v1/chat/completions", json={"messages": said})
    assert raw.content.startswith(b" ")
    with openai.OpenAI(base_url=f"{filled}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        assert (
            client.chat.completions.create(model="default", messages=said).choices[0].message.content == "Hello, world"
        )
        assert client.responses.create(model="default", input="Hi").output_text == "Hello, world"
    with anthropic.Anthropic(base_url=filled, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        told = client.messages.create(model="claude-opus-5", max_tokens=400, messages=said)
        assert told.content[0].text == "Hello, world"
    client = ollama.Client(host=filled, headers={"authorization": f"Bearer {KEY}"}, timeout=WAIT_S)
    assert client.chat("default", messages=said).message.content == "Hello, world"


def test_a_block_that_was_begun_for_another_stays_empty_and_changes_no_later_prompt(filled: str) -> None:
    """The model could have thought, and calls a tool at once."""
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=filled, api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        tool = {"name": "weather", "input_schema": PARAMETERS}
        question = {"role": "user", "content": "And in Paris?"}
        asked = {"model": "claude-opus-5", "max_tokens": 400, "tools": [tool]}
        with client.messages.stream(**asked, messages=[question]) as stream:
            first = stream.get_final_message()
        empty, call = first.content
        assert (empty.type, empty.thinking, call.type) == ("thinking", "", "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
        second = client.messages.create(
            **asked, messages=[question, first.to_param(), {"role": "user", "content": [result]}]
        )
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens + first.usage.output_tokens - 1


def openai_client(url: str) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S)


def test_openais_chat_helper_gets_the_same_message(filled: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    with openai_client(filled) as client:
        asked = {"model": "default", "messages": [QUESTION], "tools": [tool]}
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            final = stream.get_final_completion().choices[0]
    assert sum(chunk.choices[0].delta.content == "" for chunk in chunks) > 1, "the first has the role"
    assert (final.message.content, final.finish_reason) == (whole.message.content, "tool_calls")
    assert final.message.model_extra["reasoning_content"] == whole.message.model_extra["reasoning_content"]
    assert [call.function.arguments for call in final.message.tool_calls or ()] == ['{"city": "Rome"}']


def test_openais_completions_add_up_to_the_same_text(filled: str) -> None:
    with openai_client(filled) as client:
        asked = {"model": "default", "prompt": f"{scripted.OPEN}user\nHi{scripted.CLOSE}\n{scripted.ANSWER}"}
        whole = client.completions.create(**asked, max_tokens=20).choices[0].text
        texts = [chunk.choices[0].text for chunk in client.completions.create(**asked, max_tokens=20, stream=True)]
    assert "" in texts[:-1]
    assert "".join(texts) == whole == "Hello, world"


def test_openais_responses_helper_gets_the_same_response(filled: str) -> None:
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    with openai_client(filled) as client:
        asked = {"model": "default", "input": [QUESTION], "tools": [tool]}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert kinds.count("response.in_progress") > 1
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert (final.output_text, final.output[-1].arguments) == (whole.output_text, whole.output[-1].arguments)


def test_ollamas_client_gets_the_same_lines_and_some_without_a_word(filled: str) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=filled, timeout=WAIT_S, headers={"authorization": f"Bearer {KEY}"})
    tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}
    parts = [part.message for part in client.chat("default", messages=[QUESTION], tools=[tool], stream=True)]
    assert any(not (part.content or part.thinking or part.tool_calls) for part in parts[:-1])
    assert "".join(part.content or "" for part in parts) == "One moment."
    assert "".join(part.thinking or "" for part in parts) == "I look."
    assert [call.function.name for part in parts for call in part.tool_calls or ()] == ["weather"]
    texts = [part.response for part in client.generate("default", "Hi", stream=True)]
    assert "" in texts[:-1] and "".join(texts) == "Hello, world"


@pytest.mark.clients
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not (HERE / "node_modules" / "openai").is_dir(), reason=NOT_INSTALLED)
@pytest.mark.parametrize(("program", "path", "task"), JAVASCRIPT)
def test_javascript_clients_get_the_same(
    program: str, path: str, task: str, filled: str, plain: str, tmp_path: Path
) -> None:
    def told(url: str) -> Any:
        return json.loads(run_program(["node", str(HERE / program), url + path, KEY, task], tmp_path))

    assert told(filled) == told(plain)
