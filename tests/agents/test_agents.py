"""How each client is configured for a server."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot import agents
from ingot.agents import AGENTS, CLIENT_TIMEOUT_S, Endpoint
from ingot.config import Settings

HERE = Path("folder")
SMALL = Endpoint("http://127.0.0.1:8000", "a-key", "org/model", 32_768)
LARGE = Endpoint("http://127.0.0.1:8000", None, "org/model", 262_144)


def test_a_prompt_and_an_answer_fit_the_context_together() -> None:
    for endpoint in (SMALL, LARGE):
        assert endpoint.prompt + endpoint.answer == endpoint.context
    assert (SMALL.answer, LARGE.answer) == (8192, 32_000)


def test_clients_wait_as_long_as_the_server_works_by_default() -> None:
    assert Settings().request_timeout_s == CLIENT_TIMEOUT_S


def test_claude_code_compacts_by_itself_where_its_first_prompt_leaves_room_for_that() -> None:
    assert agents.claude_variables(SMALL)["DISABLE_AUTO_COMPACT"] == "1"
    assert "DISABLE_AUTO_COMPACT" not in agents.claude_variables(LARGE)


def test_claude_code_is_not_given_a_name_whose_window_it_believes_to_know() -> None:
    config = agents.claude_variables(Endpoint("http://x", None, "claude-like", 32_768))
    assert {value for name, value in config.items() if name.endswith("MODEL")} == {"default"}


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=40)


@given(names)
def test_codex_reads_from_flags_what_a_file_would_say(model: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", "key", model, 32_768)
    words = agents.launch_codex(endpoint, HERE).arguments
    flags = tomllib.loads("\n".join(words[1::2]))
    assert set(words[::2]) == {"-c"}
    file = tomllib.loads(agents.codex_snippets(endpoint)[0].text)
    assert flags == file | {"model_catalog_json": str(HERE / agents.CODEX_CATALOGUE)}
    assert flags["model"] == model and flags["model_context_window"] == 32_768


@given(names)
def test_opencode_is_told_the_same_by_a_variable_as_by_a_file(model: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", None, model, 32_768)
    config = json.loads(agents.launch_opencode(endpoint, HERE).environment["OPENCODE_CONFIG_CONTENT"])
    assert config == json.loads(agents.opencode_snippets(endpoint)[0].text)
    assert config["provider"]["ingot"]["models"][model]["limit"] == {"context": 32_768, "output": 8192}


@pytest.mark.parametrize("name", AGENTS)
def test_files_lie_in_the_folder_that_is_given(name: str) -> None:
    assert {path.parent for path in AGENTS[name].launch(SMALL, HERE).files} <= {HERE}


def test_a_context_that_leaves_little_room_is_warned_of() -> None:
    assert "--context" in (AGENTS["claude"].warning(SMALL) or "")
    assert AGENTS["claude"].warning(LARGE) is None and AGENTS["aider"].warning(SMALL) is None
