"""opencode: one more layer of its configuration, in a variable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.agents.agent import TIMEOUT_S, Agent, ClientStart, Endpoint, Paste


def config(endpoint: Endpoint) -> dict[str, Any]:
    wait = TIMEOUT_S * 1000
    limits = {"context": endpoint.context, "output": endpoint.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ingot",
        "options": {"baseURL": endpoint.api, "apiKey": endpoint.secret, "timeout": wait, "chunkTimeout": wait},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limits}},
    }
    name = f"ingot/{endpoint.model}"
    return {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {"ingot": provider},
    }


def launch(endpoint: Endpoint, folder: Path) -> ClientStart:
    return ClientStart(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config(endpoint))})


def pastes(endpoint: Endpoint) -> tuple[Paste, ...]:
    return (Paste("~/.config/opencode/opencode.json", "json", json.dumps(config(endpoint), indent=2)),)


OPENCODE = Agent(
    "opencode",
    "opencode",
    program="opencode",
    install="npm install -g opencode-ai",
    first_prompt=7_000,
    launch=launch,
    pastes=pastes,
)
