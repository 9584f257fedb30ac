"""aider: flags, variables of its own (a project's .env would overrule others), and a file about the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ingot.agents.agent import TIMEOUT_S, Agent, ClientStart, Endpoint, Paste

METADATA: Final = ".aider.model.metadata.json"


def name_of(endpoint: Endpoint) -> str:
    """As litellm wants it: the protocol first."""
    return f"openai/{endpoint.model}"


def metadata(endpoint: Endpoint) -> dict[str, Any]:
    return {
        name_of(endpoint): {
            "max_input_tokens": endpoint.prompt,
            "max_output_tokens": endpoint.answer,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }


def launch(endpoint: Endpoint, folder: Path) -> ClientStart:
    known, name = folder / METADATA, name_of(endpoint)
    return ClientStart(
        arguments=(
            *("--model", name),
            *("--weak-model", name),
            *("--model-metadata-file", str(known)),
            *("--timeout", str(TIMEOUT_S)),
            "--no-show-model-warnings",
        ),
        environment={"AIDER_OPENAI_API_BASE": endpoint.api, "AIDER_OPENAI_API_KEY": endpoint.secret},
        files={known: json.dumps(metadata(endpoint))},
    )


def pastes(endpoint: Endpoint) -> tuple[Paste, ...]:
    told = {
        "model": name_of(endpoint),
        "weak-model": name_of(endpoint),
        "openai-api-base": endpoint.api,
        "openai-api-key": endpoint.secret,
        "timeout": TIMEOUT_S,
        "show-model-warnings": False,
    }
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in told.items()]
    return (
        Paste("~/.aider.conf.yml", "yaml", "\n".join(lines)),
        Paste(f"~/{METADATA}", "json", json.dumps(metadata(endpoint), indent=2)),
    )


AIDER = Agent(
    "aider",
    "aider",
    program="aider",
    install="python -m pip install aider-install && aider-install",
    first_prompt=1_000,
    launch=launch,
    pastes=pastes,
)
