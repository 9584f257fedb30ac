"""Claude Code: variables, which its own settings files overrule, so that they come as settings as well."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final

from ingot.agents.agent import TIMEOUT_S, Agent, ClientStart, Endpoint, Paste

FIRST_PROMPT: Final = 20_000
COMPACTS_BEFORE: Final = 13_000
"""Tokens before the end of its window, less an answer, at which it compacts a conversation by itself."""
SIZES: Final = ("OPUS", "SONNET", "HAIKU", "FABLE")
# Each of these would have it ask somebody else, or with another key.
ELSEWHERE: Final = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_GATEWAY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_VERTEX",
)


def variables(endpoint: Endpoint) -> dict[str, str]:
    # It believes that it knows the window of any model whose name begins so, whatever it is told.
    model = "default" if endpoint.model.startswith("claude-") else endpoint.model
    wait = str(TIMEOUT_S * 1000)
    told = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.secret,
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": model for size in SIZES},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
        "API_TIMEOUT_MS": wait,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": wait,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    # It would compact the first prompt already, and again at each turn. So it asks for /compact at the window's end.
    if endpoint.prompt - COMPACTS_BEFORE < FIRST_PROMPT * 3 // 2:
        told["DISABLE_AUTO_COMPACT"] = "1"
    return told


def launch(endpoint: Endpoint, folder: Path) -> ClientStart:
    told = variables(endpoint)
    settings = folder / "settings.json"
    return ClientStart(
        arguments=("--settings", str(settings)),
        environment=told,
        without=ELSEWHERE,
        files={settings: json.dumps({"env": {**dict.fromkeys(ELSEWHERE, ""), **told}}, indent=2)},
    )


def pastes(endpoint: Endpoint) -> tuple[Paste, ...]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables(endpoint).items()]
    return (Paste("your shell", "sh", "\n".join([*exports, "claude"])),)


CLAUDE = Agent(
    "claude",
    "Claude Code",
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    first_prompt=FIRST_PROMPT,
    launch=launch,
    pastes=pastes,
)
