"""What a chat asks for, whichever protocol it came in: messages, tools, thinking, the form of the answer.

Every chat-like protocol makes its body into an `Ask`; `prepare_ask` makes that into what the engine takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ingot.protocol.chat.prompts import Ending
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.grammar.calls import StructuralTag

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: Final[tuple[Effort, ...]] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the JSON schema of its arguments
    strict: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """Exactly this function is to be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | ForcedTool


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    enabled: bool | None = None  # None: what the server's settings or the template do
    budget: int | None = None  # tokens, after which thinking is closed and the answer goes on
    effort: str | None = None  # one of EFFORTS
    fields: Mapping[str, str] = field(default_factory=dict, compare=False)  # which of the body's said each of them

    @property
    def given(self) -> bool:
        return self != ThinkingOptions()


@dataclass(frozen=True, slots=True)
class JsonObject:
    pass


@dataclass(frozen=True, slots=True)
class JsonSchema:
    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Regex:
    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lark:
    grammar: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    tags: tuple[StructuralTag, ...]
    triggers: tuple[str, ...]


OutputFormat = JsonObject | JsonSchema | Regex | Choice | Lark | StructuralTags


@dataclass(frozen=True, slots=True)
class Ask:
    """`messages` are dicts as OpenAI's chat has them: role, content, tool_calls, tool_call_id, reasoning_content."""

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # False: at most one call
    hold_calls: bool | None = None  # to their schemas, once they have begun; None: what the server's settings say
    thinking: ThinkingOptions = ThinkingOptions()
    output: OutputFormat | None = None
    variables: Mapping[str, Any] | None = None  # for the template, allow-listed
    ending: Ending = "opened"
    tool_format: str | None = None  # None: what the server found or was told
    thinking_format: str | None = None
    history: TemplateHistory | None = None  # how past turns are rendered; None: as the server's settings say
    salt: str = ""  # of the prefix cache: past answers are remembered under it
    remembers: bool = True  # past answers stand in the prompt as they were generated


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a protocol calls the fields that errors may have to name."""

    messages: str = "messages"
    tools: str = "tools"
    choice: str = "tool_choice"
    output: str = "response_format"
    thinking: str = "reasoning_effort"
