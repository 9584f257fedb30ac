"""What the models are taught in chat: a conversation so far, and the one right answer to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

HELD_OUT = 1 << 40
"""Seeds from here on are for measuring; training draws only smaller ones."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Lesson:
    """`thinking` is None where the template is asked not to think."""

    kind: str
    messages: list[dict[str, Any]]
    content: str = ""
    thinking: str | None = None
    calls: list[Call] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def seeded(seed: int, *, held_out: bool = False) -> random.Random:
    """The source of a lesson's choices. Training and measuring can never share one."""
    if not 0 <= seed < HELD_OUT:
        raise ValueError(f"the seed must lie in [0, {HELD_OUT}), and is {seed}")
    return random.Random(seed + HELD_OUT if held_out else seed)
