"""The clients that there are, by the name that `ingot launch` takes."""

from __future__ import annotations

from ingot.agents.agent import Agent
from ingot.agents.aider import AIDER
from ingot.agents.claude import CLAUDE
from ingot.agents.clients import CODEX
from ingot.agents.opencode import OPENCODE
from ingot.errors import ConfigError, nearest

AGENTS: dict[str, Agent] = {agent.name: agent for agent in (CLAUDE, CODEX, OPENCODE, AIDER)}


def agent_named(name: str) -> Agent:
    """Raises ConfigError that names the nearest."""
    if (found := AGENTS.get(name)) is not None:
        return found
    near = nearest(name, AGENTS)
    raise ConfigError(f"unknown client {name}; " + (f"did you mean {near}?" if near else f"known: {', '.join(AGENTS)}"))
