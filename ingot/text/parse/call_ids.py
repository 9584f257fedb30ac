"""Ids of tool calls, in the style that each family's templates expect to see again."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Protocol

from ingot.text.tool_formats.format import IdStyle

_ALPHABET = string.ascii_letters + string.digits


class IdMaker(Protocol):
    def __call__(self, name: str, index: int) -> str:
        """The id of the `index`-th call of an answer, which calls `name`."""


def random_text(size: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(size))


def id_maker(style: IdStyle, *, past_calls: int = 0, random: Callable[[int], str] = random_text) -> IdMaker:
    """Ids in a style. Kimi numbers the calls of a whole conversation, so it asks how many there were before."""
    if style == "kimi":
        return lambda name, index: f"functions.{name}:{past_calls + index}"
    if style == "mistral":
        return lambda name, index: random(9)
    return lambda name, index: "call_" + random(24)
