"""Codex: its configuration as flags, and a catalogue that knows the model, without which it goes by guesses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ingot.agents.agent import TIMEOUT_S, Agent, ClientStart, Endpoint, Paste

CATALOGUE: Final = "ingot-models.json"
KEY: Final = "INGOT_API_KEY"
LONGEST_RESULT: Final = 10_000
# Codex has instructions of its own for models that it knows, and takes a model into its catalogue only with some.
INSTRUCTIONS: Final = """\
You are a coding agent in the terminal of the user's machine, run by the Codex CLI. Work on the task until it is done, \
with the tools that you are given, and then say in a few words what you did.

- Look before you change anything: read the files that matter, and search with `rg` where it is there.
- Follow the instructions of AGENTS.md files, for the folders that they are in.
- Change files with `apply_patch`. Keep to the style of what is there, and change nothing that the task does not need.
- Check what you did where you can: run the tests, or the program.
- Do not commit, push, or undo what others did, unless you are asked to.
- If a command fails, read why before you try another. If you cannot go on, say what is in the way.\
"""


def config(endpoint: Endpoint, catalogue: str) -> dict[str, Any]:
    provider = {
        "name": "ingot",
        "base_url": endpoint.api,
        "wire_api": "responses",
        "stream_idle_timeout_ms": TIMEOUT_S * 1000,
    }
    return {
        "model": endpoint.model,
        "model_provider": "ingot",
        "model_context_window": endpoint.context,
        "model_auto_compact_token_limit": endpoint.prompt,
        "model_catalog_json": catalogue,
        "model_providers": {"ingot": provider | ({"env_key": KEY} if endpoint.key else {})},
    }


def catalogue(endpoint: Endpoint) -> dict[str, Any]:
    known = {
        "slug": endpoint.model,
        "display_name": endpoint.model,
        "context_window": endpoint.context,
        "effective_context_window_percent": 100,
        "base_instructions": INSTRUCTIONS,
        "shell_type": "unified_exec",
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": min(LONGEST_RESULT, endpoint.context // 8)},
        "supported_reasoning_levels": [],
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "support_verbosity": False,
        "supported_in_api": True,
        "visibility": "list",
        "priority": 0,
    }
    return {"models": [known]}


def launch(endpoint: Endpoint, folder: Path) -> ClientStart:
    known = folder / CATALOGUE
    flags = [f"{name}={_toml(value)}" for name, value in _flat(config(endpoint, str(known)))]
    return ClientStart(
        arguments=tuple(word for flag in flags for word in ("-c", flag)),
        environment={KEY: endpoint.key} if endpoint.key else {},
        files={known: json.dumps(catalogue(endpoint))},
    )


def pastes(endpoint: Endpoint) -> tuple[Paste, ...]:
    told = config(endpoint, CATALOGUE)
    provider = told.pop("model_providers")["ingot"]
    lines = [
        *(f"{name} = {_toml(value)}" for name, value in told.items()),
        "",
        "[model_providers.ingot]",
        *(f"{name} = {_toml(value)}" for name, value in provider.items()),
    ]
    exported = (Paste("your shell", "sh", f"export {KEY}={shlex.quote(endpoint.key)}"),) if endpoint.key else ()
    return (
        Paste("~/.codex/config.toml", "toml", "\n".join(lines)),
        Paste(f"~/.codex/{CATALOGUE}", "json", json.dumps(catalogue(endpoint), indent=2)),
        *exported,
    )


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield path + name, value


def _toml(value: str | int) -> str:
    """A text or a number. What JSON writes of either, TOML reads."""
    return json.dumps(value, ensure_ascii=False)


CODEX = Agent(
    "codex",
    "Codex",
    program="codex",
    install="npm install -g @openai/codex",
    first_prompt=5_000,
    launch=launch,
    pastes=pastes,
)
