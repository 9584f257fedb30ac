"""docs/agents.md: every block parses, speaks of flags and addresses that there are, and is what `--print` shows."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.agents import AGENTS, Endpoint
from ingot.cli.launch import launch_parser
from ingot.cli.main import COMMANDS
from ingot.config import SETTINGS, Settings

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENDPOINT = Endpoint(f"http://127.0.0.1:{Settings().port}", None, "default", 65_536)
CLIENTS = (
    *(agent.title for agent in AGENTS.values()),
    *("Cline", "Continue", "Zed", "Open WebUI in Docker", "LiteLLM"),
)
READ: dict[str, Any] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
    "sh": lambda text: shlex.split(text, comments=True),
}


def blocks(text: str) -> list[tuple[str, str]]:
    return [(found[1], found[2]) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_has_blocks_that_parse_and_name_our_address(client: str) -> None:
    found = blocks(SECTIONS[client])
    for language, text in found:
        assert READ[language](text)
    assert any(f":{Settings().port}" in text for _, text in found)


@pytest.mark.parametrize("name", AGENTS)
def test_what_launch_prints_is_what_the_page_says(name: str) -> None:
    agent = AGENTS[name]
    snippets = [(paste.language, paste.text + "\n") for paste in agent.snippets(ENDPOINT)]
    assert blocks(SECTIONS[agent.title]) == snippets
    for paste in agent.snippets(ENDPOINT):
        assert not paste.place.startswith("~") or f"`{paste.place}`" in SECTIONS[agent.title]


def test_addresses_are_the_servers_own() -> None:
    ours = {f"127.0.0.1:{Settings().port}", f"host.docker.internal:{Settings().port}"}
    assert set(re.findall(r"http://([\w.]+:\d+)", PAGE)) == ours


def test_commands_and_flags_of_ours_are_there() -> None:
    flags = {known.flag for known in SETTINGS.values()}
    launching = set(launch_parser().flags)
    commands = [line for _, text in blocks(PAGE) for line in text.splitlines() if line.startswith("ingot ")]
    commands += re.findall(r"`(ingot [^`]+)`", PAGE)
    assert len(commands) > 8
    for command in commands:
        words = shlex.split(command.split(" -- ")[0])
        assert words[1] in COMMANDS
        for word in words:
            if word.startswith("--"):
                assert word in (launching if words[1] == "launch" else flags), command


def test_limits_of_the_context_are_the_same_for_all() -> None:
    zed = json.loads(blocks(SECTIONS["Zed"])[0][1])["language_models"]["openai_compatible"]["ingot"]
    (model,) = zed["available_models"]
    proxied = yaml.safe_load(blocks(SECTIONS["LiteLLM"])[0][1])["model_list"][0]["model_info"]
    continued = yaml.safe_load(blocks(SECTIONS["Continue"])[0][1])["models"][0]["defaultCompletionOptions"]
    cline = yaml.safe_load(blocks(SECTIONS["Cline"])[0][1])
    assert {model["max_tokens"], continued["contextLength"], cline["Context Window Size"]} == {ENDPOINT.context}
    assert {model["max_output_tokens"], continued["maxTokens"], cline["Max Output Tokens"]} == {ENDPOINT.answer}
    assert proxied == {"max_input_tokens": ENDPOINT.prompt, "max_output_tokens": ENDPOINT.answer}


def test_open_webui_has_a_server_that_it_can_reach() -> None:
    (_, serve), (_, run) = blocks(SECTIONS["Open WebUI in Docker"])
    words = shlex.split(serve)
    assert "--host" in words and "INGOT_API_KEY" in serve
    name = words[words.index("--allowed-hosts") + 1]
    assert f"http://{name}:" in run and f"--add-host {name}:host-gateway" in run
