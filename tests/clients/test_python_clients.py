"""Other projects' Python clients, unmodified: calls in between, streams and schemas, over every protocol they speak."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import scripted
from tests.clients.agents import HERE, KEY, PYTHON, needs_python_clients, run, serving

pytestmark = [pytest.mark.clients, needs_python_clients]

SCRIPT = scripted.said(
    ("What is the weather", "<think>\nI look.\n</think>\n\n" + scripted.call("weather", city="Paris")),
    ("18 degrees", "It is 18 degrees in Paris."),
    ("a person", '{"name": "Ada", "age": 36}'),
    otherwise="Hello, world",
)
ANSWER = "It is 18 degrees in Paris."
Ask = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(SCRIPT, folder, api_key=KEY) as url:
        yield url


@pytest.fixture(scope="module")
def ask(url: str, folder: Path) -> Ask:
    @cache
    def all_of(client: str) -> Any:
        """Every task of a client at once: some take seconds to be imported."""
        script = HERE / "python" / f"{client}_client.py"
        return json.loads(run([str(PYTHON), str(script), url, KEY], folder, timeout=300).splitlines()[-1])

    def ask(client: str, task: str) -> Any:
        made = all_of(client)[task]
        assert "failed" not in made, made["failed"]
        return made

    return ask


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_litellm_calls_a_tool_and_hits_the_cache(ask: Ask, protocol: str) -> None:
    made = ask("litellm", protocol)
    assert (made["finish"], made["city"], made["text"]) == ("tool_calls", "Paris", ANSWER)
    assert made["cached"] > 0.9


@pytest.mark.parametrize("task", ["stream", "stream_messages"])
def test_litellm_streams(ask: Ask, task: str) -> None:
    assert ask("litellm", task) == {"text": "Hello, world"}


def test_litellm_speaks_responses(ask: Ask) -> None:
    assert ask("litellm", "responses") == {"city": "Paris", "text": ANSWER, "last": "response.completed"}


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_langchain_calls_a_tool_and_hits_the_cache(ask: Ask, protocol: str) -> None:
    made = ask("langchain", protocol)
    assert (made["city"], made["text"]) == ("Paris", ANSWER)
    assert made["cached"] > 0.9


@pytest.mark.parametrize("task", ["stream", "stream_responses", "stream_messages"])
def test_langchain_streams(ask: Ask, task: str) -> None:
    made = ask("langchain", task)
    assert made["text"] == "Hello, world" and made["pieces"] > 5


@pytest.mark.parametrize("task", ["schema", "schema_responses"])
def test_langchain_holds_an_answer_to_a_schema(ask: Ask, task: str) -> None:
    assert ask("langchain", task) == {"name": "Ada", "age": 36}


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_pydantic_ai_calls_a_tool_and_hits_the_cache(ask: Ask, protocol: str) -> None:
    made = ask("pydantic_ai", protocol)
    assert (made["cities"], made["text"]) == (["Paris"], ANSWER)
    assert made["cached"] > 0.4, "half of what goes in is the first turn, which nothing went before"


@pytest.mark.parametrize("task", ["schema", "schema_responses"])
def test_pydantic_ai_holds_an_answer_to_a_schema(ask: Ask, task: str) -> None:
    assert ask("pydantic_ai", task) == {"name": "Ada", "age": 36}


LLM_MODELS = """
- model_id: ingot
  model_name: default
  api_base: {url}/v1
  api_key_name: ingot
  supports_tools: true
  supports_schema: true
"""
LLM_TOOL = "def weather(city: str) -> str:\n    'The weather of a city.'\n    return f'18 degrees in {city}'\n"


def test_llm_answers_streams_calls_and_keeps_to_a_schema(url: str, folder: Path) -> None:
    (folder / "llm").mkdir()
    (folder / "llm" / "extra-openai-models.yaml").write_text(LLM_MODELS.format(url=url))
    (folder / "llm" / "keys.json").write_text(json.dumps({"ingot": KEY}))

    def llm(*words: str) -> str:
        command = [str(PYTHON.parent / "llm"), "-m", "ingot", *words]
        return run(command, folder, {"LLM_USER_PATH": str(folder / "llm")}).strip()

    assert llm("Hi") == llm("--no-stream", "Hi") == "Hello, world"
    assert llm("--functions", LLM_TOOL, "What is the weather?") == ANSWER
    assert json.loads(llm("--schema", "name, age int", "a person")) == {"name": "Ada", "age": 36}
