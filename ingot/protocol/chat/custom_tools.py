"""Custom tools, which take a text: shown to the model as functions of one text, and told as what they are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from ingot.protocol.chat.ask import Tool
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import OneOf, Text
from ingot.protocol.schema.objects import requires

CUSTOM_PARAMETER: Final = "input"


@dataclass(frozen=True, slots=True)
class TextInput:
    type: str = requires(OneOf(("text",)), "Any text.")


@dataclass(frozen=True, slots=True)
class InputGrammar:
    syntax: str = requires(
        OneOf(("regex", "lark")),
        "How the grammar is written. The text is held to a regular expression; of a Lark grammar the model is told, "
        "and the receipt says that its text is not held to it.",
    )
    definition: str = requires(Text(bounds.GRAMMAR_CHARS, least=1), "The grammar of the whole text.")


def custom_tool(name: str, description: str | None, syntax: str | None = None, definition: str = "") -> Tool:
    """The function that stands for it: held to a regular expression, and told of a Lark grammar."""
    text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif syntax == "lark":
        told = f"The input follows this Lark grammar:\n{definition}"
        description = f"{description}\n\n{told}" if description else told
    parameters = {
        "type": "object",
        "properties": {CUSTOM_PARAMETER: text},
        "required": [CUSTOM_PARAMETER],
        "additionalProperties": False,
    }
    return Tool(name, description, parameters, strict=syntax == "regex")


def custom_arguments(text: str) -> str:
    """What a custom tool was called with, as the arguments of the function that stands for it."""
    return json.dumps({CUSTOM_PARAMETER: text}, ensure_ascii=False)


class TextArgument:
    """The one text in a custom tool's arguments, `{"input": "…"}`, given out as it comes in."""

    _OPENING: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_PARAMETER}"\s*:\s*"')
    _PLAIN: Final = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
    _HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # the first half of a character, the second to come

    def __init__(self) -> None:
        self._raw = ""
        self._at: int | None = None

    def push(self, fragment: str) -> str:
        self._raw += fragment
        if self._at is None:
            opened = self._OPENING.match(self._raw)
            if opened is None:
                return ""
            self._at = opened.end()
        found = self._PLAIN.match(self._raw, self._at)
        piece = self._HALF.sub("", found[0]) if found else ""
        self._at += len(piece)
        text: str = json.loads(f'"{piece}"', strict=False)
        return text

    def rest(self) -> str:
        """What is left to give out at the end: all of it where the arguments did not begin as expected."""
        if self._at is not None:
            return ""
        try:
            value = json.loads(self._raw, strict=False)
        except (ValueError, RecursionError):
            return self._raw
        text = value.get(CUSTOM_PARAMETER) if isinstance(value, dict) else None
        return text if isinstance(text, str) else self._raw
