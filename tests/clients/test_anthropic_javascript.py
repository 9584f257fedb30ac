"""Anthropic's official JavaScript client against a running server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import Overloaded
from tests import scripted
from tests.clients.agents import HERE, KEY, NOT_INSTALLED, run, serving
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, failing, settings

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (HERE / "node_modules" / "@anthropic-ai" / "sdk").is_dir(), reason=NOT_INSTALLED),
]

SCRIPT = scripted.said(
    ("What is the weather", "<think>\nI look.\n</think>\n\n" + scripted.call("weather", city="Paris")),
    ("18 degrees", "It is 18 degrees in Paris."),
    otherwise="Hello, world",
)
ALIAS = ("claude-*=default",)
Ask = Callable[[str], Any]


def node(url: str, task: str, folder: Path) -> Any:
    return json.loads(run(["node", str(HERE / "anthropic_client.mjs"), url, KEY, task], folder))


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("client")
    with serving(SCRIPT, folder, api_key=KEY, alias=ALIAS) as url:
        yield lambda task: node(url, task, folder)


def test_a_message_is_answered(ask: Ask) -> None:
    assert ask("whole") == {"text": "Hello, world", "stop": "end_turn", "same": True}


def test_a_message_is_streamed_in_order(ask: Ask) -> None:
    assert ask("stream")["kinds"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_clients_own_stream_helper_understands_the_stream(ask: Ask) -> None:
    assert ask("helper") == {"types": ["thinking", "tool_use"], "input": {"city": "Paris"}}


def test_a_tool_is_called_and_its_result_answered_from_the_cache(ask: Ask) -> None:
    made = ask("tools")
    assert (made["city"], made["text"], made["exact"]) == ("Paris", "It is 18 degrees in Paris.", True)
    assert made["cached"] > 0.9


def test_a_refusal_is_the_clients_own_exception(ask: Ask) -> None:
    error = ask("refused")["error"]
    assert (error["name"], error["status"], error["type"]) == ("BadRequestError", 400, "invalid_request_error")


def test_an_error_in_mid_stream_is_thrown(tmp_path: Path) -> None:
    engine = ScriptedEngine(failing(Overloaded("Out of memory.")))
    with running(engine, settings(api_key=KEY, alias=ALIAS)) as url:
        assert "Out of memory" in node(url, "broken", tmp_path)["error"]["message"]
