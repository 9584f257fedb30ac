"""The end of a call that was not written: an answer that may have one call ends with its arguments."""

from __future__ import annotations

from collections.abc import Iterable

from ingot.text.tool_formats.format import Part, plain

_SPACE = " \t\r\n"


def left_to_write(parts: Iterable[Part], written: str) -> str:
    """The rest of these parts, as we write them, behind what is `written` of them: with any white space between."""
    left = "".join(plain(part) or "" for part in parts)
    for character in written:
        if character not in _SPACE:
            left = left.lstrip(_SPACE).removeprefix(character)
    return left.lstrip(_SPACE) if written[-1:] in tuple(_SPACE) else left
