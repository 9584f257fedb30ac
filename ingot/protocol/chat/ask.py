"""A chat request independent of its protocol: messages, tools, thinking, the format of the answer.

Every chat protocol turns its body into a `ChatInput`; `prepare_chat` turns that into an engine request. Here too are
the wire formats that several protocols share: response formats as OpenAI and vLLM describe them, thinking options, and
custom tools, which take one text and are shown to the model as functions with one string parameter.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from ingot.errors import BadRequest, nearest_name
from ingot.protocol.chat.prompts import PromptEnding
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, Bool, HintField, ListOf, OneOf, Text
from ingot.protocol.schema.model_fields import TokenLimitField
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.grammar.calls import StructuralTag
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.arguments import arguments_as_text

ABOUT_STRICT: Final = "Enforce the schema in every call's arguments."
ABOUT_ROLE: Final = "Whose message it is."
ABOUT_ARGUMENTS: Final = "Its arguments, as JSON text; anything but a JSON object is shown to the model unchanged."
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
REASONING_EFFORTS: Final[tuple[ReasoningEffort, ...]] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ToolDefinition:
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
class ForcedToolChoice:
    """Exactly this function is to be called."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | ForcedToolChoice


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    enabled: bool | None = None  # None: what the server's settings or the template do
    budget: int | None = None  # tokens, after which thinking is closed and the answer goes on
    effort: str | None = None  # one of REASONING_EFFORTS
    fields: Mapping[str, str] = field(default_factory=dict, compare=False)  # of the body, by the option they set

    @property
    def is_set(self) -> bool:
        return self != ThinkingOptions()


OutputGrammar = Callable[..., CompiledGrammar]
"""Compiles the grammar that the answer must match: takes the model's `Grammars`, and the `param` for errors."""


def json_output(schema: Mapping[str, Any] | None) -> OutputGrammar:
    """JSON that matches `schema`; without one, any object."""
    return partial(Grammars.json_schema, schema={"type": "object"} if schema is None else schema)


@dataclass(frozen=True, slots=True)
class ChatInput:
    """`messages` are dicts in OpenAI's format: role, content, tool_calls, tool_call_id, reasoning_content."""

    messages: list[dict[str, Any]]
    tools: tuple[ToolDefinition, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # False: at most one call
    hold_calls: bool | None = None  # calls must match their schemas once they begin; None: the server's setting
    thinking: ThinkingOptions = ThinkingOptions()
    output: OutputGrammar | None = None
    variables: Mapping[str, Any] | None = None  # for the template, allow-listed
    ending: PromptEnding = "opened"
    tool_format: str | None = None  # None: the model's own
    thinking_format: str | None = None
    history: TemplateHistory | None = None  # how past turns are rendered; None: the server's setting
    salt: str = ""  # of the prefix cache, and of the answers remembered for it
    remembers: bool = True  # past answers are in the prompt with the tokens they were generated in


@dataclass(frozen=True, slots=True)
class ChatFieldNames:
    """A protocol's names for the fields that errors name."""

    messages: str = "messages"
    tools: str = "tools"
    choice: str = "tool_choice"
    output: str = "response_format"
    thinking: str = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class TextResponseFormat:
    type: str = requires(OneOf(("text",)), "Plain text.")


@dataclass(frozen=True, slots=True)
class JsonObjectResponseFormat:
    type: str = requires(OneOf(("json_object",)), "Any JSON object.")
    schema: dict[str, Any] | None = accepts(Anything(dict), "A JSON schema for it, as other servers take it here.")

    @property
    def output(self) -> OutputGrammar:
        return json_output(self.schema)


@dataclass(frozen=True, slots=True)
class NamedJsonSchema:
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "What the schema is called.")
    schema: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema; any object where there is none.")
    description: str | None = accepts(Text(), "What it is for; not shown to the model.")
    strict: bool | None = accepts(Bool(), "The answer always matches the schema.")


@dataclass(frozen=True, slots=True)
class JsonSchemaResponseFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    json_schema: NamedJsonSchema = requires(ObjectOf(NamedJsonSchema), "The schema.")

    @property
    def output(self) -> OutputGrammar:
        return json_output(self.json_schema.schema)


GRAMMAR_TEXT: Final = Text(bounds.GRAMMAR_CHARS, least=1)


@dataclass(frozen=True, slots=True)
class TagStructure:
    begin: str = requires(GRAMMAR_TEXT, "The text before the JSON; it starts with a trigger.")
    schema: dict[str, Any] = requires(Anything(dict), "The JSON schema.")
    end: str = requires(GRAMMAR_TEXT, "The text after the JSON.")


@dataclass(frozen=True, slots=True)
class StructuralTagResponseFormat:
    type: str = requires(OneOf(("structural_tag",)), "Free text up to a trigger, and then JSON between tags.")
    structures: tuple[TagStructure, ...] = requires(ListOf(ObjectOf(TagStructure), bounds.TOOLS, least=1), "The tags.")
    triggers: tuple[str, ...] = requires(
        ListOf(GRAMMAR_TEXT, bounds.TOOLS, least=1), "Texts that start a tag wherever they occur."
    )

    @property
    def output(self) -> OutputGrammar:
        tags = tuple(StructuralTag(tag.begin, tag.schema, tag.end) for tag in self.structures)
        return partial(Grammars.structural_tags, tags=tags, triggers=self.triggers)


RESPONSE_FORMATS_REFUSED = {
    "regex": "is not supported: send structured_outputs.regex.",
    "grammar": "is not supported: send structured_outputs.grammar, in Lark's notation.",
    "ebnf": "is not supported: send structured_outputs.grammar, in Lark's notation.",
}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    json: dict[str, Any] | None = accepts(Anything(dict), "A JSON schema.")
    regex: str | None = accepts(GRAMMAR_TEXT, "A regular expression.")
    choice: tuple[str, ...] | None = accepts(
        ListOf(GRAMMAR_TEXT, bounds.GRAMMAR_CHOICES, least=1), "One of these texts."
    )
    grammar: str | None = accepts(GRAMMAR_TEXT, "A grammar in Lark's notation.")
    json_object: bool | None = accepts(Bool(), "Any JSON object.")
    structural_tag: None = refuses("is not supported: send response_format of this type.")

    @property
    def outputs(self) -> list[OutputGrammar]:
        outputs: list[OutputGrammar | None] = [
            None if self.json is None else json_output(self.json),
            None if self.regex is None else partial(Grammars.regex, pattern=self.regex),
            None if self.choice is None else partial(Grammars.choice, options=self.choice),
            None if self.grammar is None else partial(Grammars.lark, source=self.grammar),
            json_output(None) if self.json_object else None,
        ]
        return [output for output in outputs if output is not None]


@dataclass(frozen=True, slots=True)
class ReasoningBody:
    """OpenRouter's `reasoning`."""

    effort: str | None = accepts(OneOf(REASONING_EFFORTS), "How much to think; `none` answers at once.")
    max_tokens: int | None = accepts(TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    enabled: bool | None = accepts(Bool(), "Switches thinking on or off.")
    exclude: bool = accepts(Bool(), "Think, but leave the thinking out of the answer.", default=False)
    summary: None = accepts(HintField("auto", "detailed"), "The thinking is always given in full.")


@dataclass(frozen=True, slots=True)
class ThinkingFieldBody:
    """DeepSeek's, Z.ai's and Moonshot's `thinking`."""

    type: str = requires(
        OneOf(("enabled", "disabled", "auto", "adaptive")), "Whether to think, or the model's default."
    )
    budget_tokens: int | None = accepts(TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    clear_thinking: None = accepts(HintField(), "`template_history` decides about past thinking.")

    @property
    def enabled(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


REASONING_FIELD, THINKING_FIELD = ObjectOf(ReasoningBody), ObjectOf(ThinkingFieldBody)


def thinking_options(**sources: Mapping[str, Any]) -> ThinkingOptions:
    """`sources` has, for each option, the values of the fields that set it. Raises BadRequest where two differ."""
    options: dict[str, Any] = {}
    fields: dict[str, str] = {}
    for option, by_field in sources.items():
        values = {name: value for name, value in by_field.items() if value is not None}
        if len(set(values.values())) > 1:
            first, second, *_ = values
            raise BadRequest(f"{first} and {second} set the same option, and differ: send one.", param=second)
        if values:
            fields[option], options[option] = next(iter(values.items()))
    return ThinkingOptions(**options, fields=fields)


def tool_call_dict(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A past call, as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_as_text(arguments)}}


def unknown_tool_error(field: str, name: str, tools: Iterable[str]) -> BadRequest:
    near = nearest_name(name, tools)
    hint = f" Did you mean '{near}'?" if near else ""
    return BadRequest(f"{field} names '{name[:100]}', which is not a tool.{hint}", param=field)


CUSTOM_INPUT_PARAMETER: Final = "input"


@dataclass(frozen=True, slots=True)
class CustomTextInput:
    type: str = requires(OneOf(("text",)), "Any text.")


@dataclass(frozen=True, slots=True)
class CustomInputGrammar:
    syntax: str = requires(
        OneOf(("regex", "lark")),
        "The grammar's notation. A regular expression is enforced; a Lark grammar is only described to the model, "
        "and the receipt names it.",
    )
    definition: str = requires(GRAMMAR_TEXT, "The grammar of the whole text.")


def custom_tool_as_function(
    name: str, description: str | None, grammar: CustomInputGrammar | None = None
) -> ToolDefinition:
    """The function that represents it: a regular expression is enforced, a Lark grammar described."""
    text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    is_regex = grammar is not None and grammar.syntax == "regex"
    if grammar is not None and is_regex:
        text["pattern"] = f"^(?:{grammar.definition})$"
    elif grammar is not None:
        rule = f"The input follows this Lark grammar:\n{grammar.definition}"
        description = f"{description}\n\n{rule}" if description else rule
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT_PARAMETER: text},
        "required": [CUSTOM_INPUT_PARAMETER],
        "additionalProperties": False,
    }
    return ToolDefinition(name, description, parameters, strict=is_regex)


def custom_input_as_arguments(text: str) -> str:
    """A custom tool's input, as the arguments of the function that represents it."""
    return json.dumps({CUSTOM_INPUT_PARAMETER: text}, ensure_ascii=False)


class CustomInputDecoder:
    """Decodes the one text in a custom tool's arguments, `{"input": "…"}`, while it is generated."""

    _OPENING: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT_PARAMETER}"\s*:\s*"')
    _PLAIN: Final = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
    _HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # a high surrogate whose low one is still to come

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

    def finish(self) -> str:
        """The remaining text at the end: all of it where the arguments did not begin as expected."""
        if self._at is not None:
            return ""
        try:
            value = json.loads(self._raw, strict=False)
        except (ValueError, RecursionError):
            return self._raw
        text = value.get(CUSTOM_INPUT_PARAMETER) if isinstance(value, dict) else None
        return text if isinstance(text, str) else self._raw
