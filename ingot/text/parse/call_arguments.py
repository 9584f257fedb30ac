"""The arguments of a call, which are not always the JSON object that they should be.

A model may be cut off amid a call, or write one wrong, and clients send back what they were told: text that is no JSON,
a list, nothing at all. No such call may end a conversation. So arguments are text or an object, as whoever reads them
likes, and whatever is no object is one that holds the text: `{"_unparsed": "..."}`. No function takes an argument of
that name, so nobody can run half a call by mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

UNPARSED: Final = "_unparsed"
DEEPEST: Final = 64
"""Objects that nest deeper are left as text: templates and their filters follow them down."""


def as_object(arguments: Any) -> dict[str, Any]:
    """The arguments as an object. Nothing (null, or an empty text) is one without members."""
    parsed = _parsed(arguments)
    if isinstance(parsed, str):
        return {UNPARSED: parsed}
    return parsed


def as_text(arguments: Any) -> str:
    """The arguments as text: what was written stays as it was written."""
    parsed = _parsed(arguments)
    if isinstance(parsed, str):
        return parsed
    return arguments if parsed and isinstance(arguments, str) else written(parsed)


def is_unparsed(arguments: Any) -> bool:
    """Whether the arguments are no object, so that only the text tells what they are."""
    return isinstance(_parsed(arguments), str)


def arguments_object(text: str, *, complete: bool) -> dict[str, Any]:
    """The arguments that a model wrote, for wires that have no place for text. Nothing is made up to end them."""
    value: dict[str, Any] = json.loads(text or "{}") if complete else {UNPARSED: text}
    return value


def written(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _parsed(arguments: Any) -> dict[str, Any] | str:
    """The object that the arguments are; where they are none, their text."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments
    if value is None:
        return {}
    if not isinstance(value, Mapping) or _is_deep(value):
        return arguments if isinstance(arguments, str) else written(arguments)
    text = value.get(UNPARSED)
    if len(value) == 1 and isinstance(text, str):
        return text if text.strip() else {}
    return dict(value)


def _is_deep(value: Any, level: int = 1) -> bool:
    if level > DEEPEST:
        return isinstance(value, Mapping | list)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(_is_deep(each, level + 1) for each in inner)
