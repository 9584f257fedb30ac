"""The tools that Anthropic's messages may bring along, and the choice among them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ingot.errors import Unsupported
from ingot.protocol.anthropic.messages import CacheControl, marks
from ingot.protocol.chat.ask import ForcedTool, Tool, ToolChoice
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, BodyReading, Bool, Delegate, Kind, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, requires, tagged
from ingot.protocol.terms import Terms

CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class CustomTool:
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "The tool's name.")
    input_schema: dict[str, Any] = requires(Anything(dict), "The JSON schema of its arguments.")
    type: str | None = accepts(OneOf((CUSTOM,)), "A tool that the client runs.")
    description: str | None = accepts(Text(bounds.TOOL_DESCRIPTION_CHARS), "What it does.")
    input_examples: tuple[dict[str, Any], ...] = accepts(
        ListOf(Anything(dict), bounds.PARTS), "Arguments as they may be; told with the description.", default=()
    )
    strict: bool = accepts(Bool(), "Hold every call's arguments to the schema.", default=False)
    defer_loading: bool = accepts(
        Bool(), "Leave the tool out until a `tool_reference` in a tool's result names it.", default=False
    )
    eager_input_streaming: bool | None = accepts(Bool(), "Arguments are always streamed as they are written.")
    allowed_callers: tuple[str, ...] | None = accepts(
        ListOf(OneOf(("direct",)), most=8, least=1), "Only the model itself calls tools."
    )
    cache_control: CacheControl | None = marks()

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self._described(), self.input_schema, self.strict)

    def _described(self) -> str | None:
        if not self.input_examples:
            return self.description
        examples = [json.dumps(example, ensure_ascii=False) for example in self.input_examples]
        return "\n".join([self.description or "", "Examples of its arguments:", *examples]).lstrip("\n")


@dataclass(frozen=True, slots=True)
class ToolKind(Delegate):
    """A tool of the client's own. Those that Anthropic defines have dated names, of which there are always more."""

    custom: ObjectOf = ObjectOf(CustomTool)

    def parse(self, value: object, path: str, reading: BodyReading) -> CustomTool:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != CUSTOM:
            raise Unsupported(
                f"{path}.type: '{kind[:100]}' is a tool that Anthropic defines, for its own servers or models; here "
                "tools are 'custom' ones, with a name and an input_schema.",
                param=f"{path}.type",
            )
        tool: CustomTool = self.custom.parse(value, path, reading)
        return tool

    def kind(self, terms: Terms) -> Kind:
        return self.custom


TOOLS = ListOf(ToolKind(), most=bounds.TOOLS)


@dataclass(frozen=True, slots=True)
class AnyTool:
    type: str = requires(OneOf(("auto", "any", "none")), "As the model likes, always, or never.")
    disable_parallel_tool_use: bool = accepts(Bool(), "At most one call.", default=False)

    @property
    def choice(self) -> ToolChoice:
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


@dataclass(frozen=True, slots=True)
class OneTool:
    type: str = requires(OneOf(("tool",)), "This tool is to be called.")
    name: str = requires(Text(bounds.TOOL_NAME_CHARS, least=1), "Which one.")
    disable_parallel_tool_use: bool = accepts(Bool(), "At most one call.", default=False)

    @property
    def choice(self) -> ToolChoice:
        return ForcedTool(self.name)


Chosen = AnyTool | OneTool
TOOL_CHOICE = tagged("type", AnyTool, OneTool)


def offered(tools: tuple[CustomTool, ...], loaded: Set[str]) -> tuple[Tool, ...]:
    """The tools that the model is shown; `loaded` are the deferred ones that were named since."""
    return tuple(tool.tool for tool in tools if not tool.defer_loading or tool.name in loaded)
