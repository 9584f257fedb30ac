"""The tools of a request as the model is shown them, once what cannot be honoured was refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ingot.errors import BadRequest, Unsupported, nearest
from ingot.protocol.chat.ask import Ask, FieldNames, ForcedTool, Tool
from ingot.protocol.schema.bounds import TOOL_NAME_CHARS
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.prompt.canonical import ordered_schema
from ingot.text.tool_formats.format import Format

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


def shown_tools(format: Format, ask: Ask, history: TemplateHistory, names: FieldNames) -> tuple[Tool, ...]:
    """The tools that the model is shown and may call. Raises BadRequest or Unsupported that name the field."""
    return _ordered(_callable(format, ask, names), history)


def _callable(format: Format, ask: Ask, names: FieldNames) -> tuple[Tool, ...]:
    _check_names(ask.tools, names)
    if isinstance(ask.choice, ForcedTool) and ask.choice.name not in {tool.name for tool in ask.tools}:
        meant = nearest(ask.choice.name, [tool.name for tool in ask.tools])
        hint = f" Did you mean '{meant}'?" if meant else ""
        raise BadRequest(f"{names.choice} names '{ask.choice.name[:100]}', which is no tool.{hint}", param=names.choice)
    if ask.choice == "required" and not ask.tools:
        raise BadRequest(f"{names.choice} asks for a call, but there are no {names.tools}.", param=names.choice)
    if not ask.tools or ask.choice == "none":
        return ()
    if not format.can_call:
        raise Unsupported(f"{names.tools}: the format '{format.name}' has no tool calls.", param=names.tools)
    return ask.tools


def _ordered(tools: tuple[Tool, ...], history: TemplateHistory) -> tuple[Tool, ...]:
    """With arguments in the order in which the prompt shows them, since a grammar lets none come out of turn."""
    if history == "official":
        return tools
    return tuple(replace(tool, parameters=ordered_schema(tool.parameters)) for tool in tools)


def _check_names(tools: Sequence[Tool], names: FieldNames) -> None:
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        where = f"{names.tools}.{at}"
        if len(tool.name) > TOOL_NAME_CHARS or not TOOL_NAME.fullmatch(tool.name):
            raise BadRequest(
                f"{where}: a tool's name has 1 to {TOOL_NAME_CHARS} letters, digits, dots, dashes or underscores.",
                param=where,
            )
        if tool.name in seen:
            raise BadRequest(f"{where}: there are two tools of the name '{tool.name}'.", param=where)
        if tool.parameters.get("type", "object") != "object":
            raise BadRequest(f"{where}: the parameters of a tool are an object.", param=where)
        seen.add(tool.name)
