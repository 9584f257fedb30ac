"""The official JavaScript client's responses against a real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.agents import HERE, KEY, NOT_INSTALLED, run, serving
from tests.clients.test_responses_python import SCRIPT

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (HERE / "node_modules" / "openai").is_dir(), reason=NOT_INSTALLED),
]

Ask = Callable[[str], Any]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    folder = tmp_path_factory.mktemp("store")
    with serving(SCRIPT, folder, api_key=KEY) as url:
        yield lambda task: json.loads(run(["node", str(HERE / "responses_client.mjs"), f"{url}/v1", KEY, task], folder))


def test_a_response_is_answered_and_retrieved(ask: Ask) -> None:
    assert ask("whole") == {"text": "Hello, world", "stored": "Hello, world", "status": "completed"}


def test_a_response_is_streamed(ask: Ask) -> None:
    made = ask("stream")
    assert made["text"] == "I thought."
    assert made["kinds"][0] == "response.created" and made["kinds"][-1] == "response.completed"
    assert "response.reasoning_text.delta" in made["kinds"]


def test_the_clients_own_stream_helper_understands_the_stream(ask: Ask) -> None:
    assert ask("helper") == {"text": "I thought."}


def test_a_function_is_called_and_its_output_answered(ask: Ask) -> None:
    made = ask("tools")
    assert (made["city"], made["text"]) == ("Paris", "It is 18 degrees in Paris.")
    assert made["cached"] > 0.9


def test_what_a_response_answered_is_listed(ask: Ask) -> None:
    assert ask("items") == {"items": ["message"]}


def test_a_background_response_is_cancelled(ask: Ask) -> None:
    assert ask("cancel") == {"before": "queued", "after": "cancelled"}


def test_a_refusal_is_the_clients_own_exception(ask: Ask) -> None:
    error = ask("refused")["error"]
    assert (error["name"], error["status"], error["param"]) == ("BadRequestError", 400, "truncation")
