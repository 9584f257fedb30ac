"""Past calls, rendered as their model family writes them: for prompts whose chat template does not support tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.text.parser.arguments import json_type_of
from ingot.text.parser.events import PastCall
from ingot.text.parser.values import is_bare_key
from ingot.text.tool_formats.format import (
    Arguments,
    CallForm,
    Channels,
    Elements,
    Format,
    JsonCall,
    KeyClose,
    Name,
    Notation,
    Ordinal,
    Part,
    TextParameters,
    parts_text,
)


def render_calls(format: Format, calls: Sequence[PastCall]) -> str:
    """What the parser reads back as these calls.

    Families that escape nothing cannot hold every text: where a value holds the very sequence that would end it,
    it is written as it stands, as their own templates do. Raises ValueError for a format that has no calls.
    """
    if not calls:
        return ""
    if format.channels is not None:
        return _render_messages(format.channels, calls)
    if not format.forms:
        raise ValueError(f"the format {format.name} has no tool calls")
    form = format.forms[0]
    written = ["".join(_render_part(part, call, index) for part in form.call) for index, call in enumerate(calls)]
    if form.joint is None:
        return "\n".join(_enclose_calls(form, one) for one in written)
    return _enclose_calls(form, form.joint.join(written))


def _enclose_calls(form: CallForm, calls: str) -> str:
    return parts_text(*form.opening) + calls + parts_text(*form.closing)


def _render_part(part: Part, call: PastCall, index: int) -> str:
    match part:
        case Name():
            return _numbered_name(call, index) if part.numbered else call.name
        case Arguments():
            return _render_object(part.notation, call.arguments, outermost=True)
        case Ordinal():
            return f"{part.before}{index + 1}{part.after}"
        case JsonCall():
            return _render_json({part.name_key: call.name, part.arguments_key: call.arguments})
        case TextParameters():
            return _render_parameters(part, call.arguments)
        case Elements():
            return _render_elements(part, call.arguments) + part.end
    return parts_text(part)


def _numbered_name(call: PastCall, index: int) -> str:
    numbered = call.id is not None and re.fullmatch(rf"(?:functions\.)?{re.escape(call.name)}:[0-9]+", call.id)
    return call.id if numbered and call.id is not None else f"functions.{call.name}:{index}"


def _render_messages(channels: Channels, calls: Sequence[PastCall]) -> str:
    bodies = ["".join(_render_part(part, call, index) for part in channels.call) for index, call in enumerate(calls)]
    return f"{channels.start}{channels.role}".join(body + channels.call_end for body in bodies)


def _render_parameters(part: TextParameters, arguments: Mapping[str, Any]) -> str:
    written = []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else _render_json(value)
        opening = f"\n{part.value_open}" if part.value_open else ""
        close = _key_close(part, value)
        framed = f"{part.frame}{text}{part.frame}"
        written.append(f"{part.key_open}{part.write_key(key)}{close.text}{opening}{framed}{part.value_close}\n")
    return "".join(written) + part.end


def _key_close(part: TextParameters, value: Any) -> KeyClose:
    unfit = "json" if isinstance(value, str) else "text"
    fit = [close for close in part.key_closes if close.written and close.value != unfit]
    return next((close for close in fit if json_type_of(value) in close.kinds), fit[0])


def _render_elements(part: Elements, value: Any) -> str:
    """What stands between a value's tags."""
    match value:
        case str():
            return value
        case Mapping() if all(map(part.can_name, value)):
            members = list(value.items())
        case list() | tuple():
            members = [(part.item, item) for item in value]
        case _:
            return _render_json(value)
    return "".join(f"{part.opening(name)}{_render_elements(part, each)}{part.closing(name)}" for name, each in members)


def _render_value(notation: Notation, value: Any) -> str:
    match value:
        case str():
            return _render_string(notation, value)
        case Mapping():
            return _render_object(notation, value, outermost=False)
        case list() | tuple():
            return "[" + _notation_comma(notation).join(_render_value(notation, item) for item in value) + "]"
    return _render_json(value)


def _render_object(notation: Notation, members: Mapping[str, Any], *, outermost: bool) -> str:
    if not outermost:
        opens, assigns, closes = "{", ":", "}"
    else:
        opens, assigns, closes = notation.opens, notation.assigns, notation.closes
    bare = notation.bare_keys == "always" or (outermost and notation.bare_keys == "outermost")
    space = " " if notation.escapes == "json" else ""
    written = [
        (key if bare and is_bare_key(key) else _render_string(notation, key))
        + f"{assigns}{space}{_render_value(notation, each)}"
        for key, each in members.items()
    ]
    return opens + _notation_comma(notation).join(written) + closes


def _notation_comma(notation: Notation) -> str:
    return "," if notation.escapes == "none" else ", "


def _render_string(notation: Notation, text: str) -> str:
    if notation.escapes == "none":
        return f"{notation.quotes[0]}{text}{notation.quotes[0]}"
    return _render_json(text)  # Python reads JSON's escapes as JSON does


def _render_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
