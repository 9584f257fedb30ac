"""What a chat asks for, whichever protocol it came in: messages, tools, thinking, the form of the answer.

Every chat-like protocol makes its body into a `ChatAsk`; `prepare_ask` makes that into what the engine takes. Here too
are the wire forms that several protocols share: response formats as OpenAI and vLLM describe them, thinking options,
and custom tools, which take a text and are shown to the model as functions of one text.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ingot.errors import BadRequest
from ingot.protocol.chat.prompts import PromptEnding
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Anything, Bool, HintField, ListOf, OneOf, Text
from ingot.protocol.schema.model_fields import TokenLimitField
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.grammar.calls import StructuralTag

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
    effort: str | None = None  # one of EFFORTS
    fields: Mapping[str, str] = field(default_factory=dict, compare=False)  # which of the body's said each of them

    @property
    def given(self) -> bool:
        return self != ThinkingOptions()


@dataclass(frozen=True, slots=True)
class JsonObjectOutput:
    pass


@dataclass(frozen=True, slots=True)
class JsonSchemaOutput:
    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class RegexFormat:
    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LarkFormat:
    grammar: str


@dataclass(frozen=True, slots=True)
class StructuralTagsOutput:
    tags: tuple[StructuralTag, ...]
    triggers: tuple[str, ...]


AskedOutput = JsonObjectOutput | JsonSchemaOutput | RegexFormat | ChoiceFormat | LarkFormat | StructuralTagsOutput


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """`messages` are dicts as OpenAI's chat has them: role, content, tool_calls, tool_call_id, reasoning_content."""

    messages: list[dict[str, Any]]
    tools: tuple[ToolDefinition, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # False: at most one call
    hold_calls: bool | None = None  # to their schemas, once they have begun; None: what the server's settings say
    thinking: ThinkingOptions = ThinkingOptions()
    output: AskedOutput | None = None
    variables: Mapping[str, Any] | None = None  # for the template, allow-listed
    ending: PromptEnding = "opened"
    tool_format: str | None = None  # None: what the server found or was told
    thinking_format: str | None = None
    history: TemplateHistory | None = None  # how past turns are rendered; None: as the server's settings say
    salt: str = ""  # of the prefix cache: past answers are remembered under it
    remembers: bool = True  # past answers stand in the prompt as they were generated


@dataclass(frozen=True, slots=True)
class AskFieldNames:
    """What a protocol calls the fields that errors may have to name."""

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
    def output(self) -> AskedOutput:
        return JsonObjectOutput() if self.schema is None else JsonSchemaOutput(self.schema)


@dataclass(frozen=True, slots=True)
class NamedJsonSchema:
    name: str = requires(Text(bounds.NAME_CHARS, least=1), "What the schema is called.")
    schema: dict[str, Any] | None = accepts(Anything(dict), "The JSON schema; any object where there is none.")
    description: str | None = accepts(Text(), "What it is for; the model is not told.")
    strict: bool | None = accepts(Bool(), "The answer is always held to the schema.")


@dataclass(frozen=True, slots=True)
class JsonSchemaResponseFormat:
    type: str = requires(OneOf(("json_schema",)), "JSON by a schema.")
    json_schema: NamedJsonSchema = requires(ObjectOf(NamedJsonSchema), "The schema.")

    @property
    def output(self) -> AskedOutput:
        schema = self.json_schema.schema
        return JsonObjectOutput() if schema is None else JsonSchemaOutput(schema)


@dataclass(frozen=True, slots=True)
class TagStructure:
    begin: str = requires(Text(bounds.GRAMMAR_CHARS, least=1), "The text before the JSON; a trigger begins it.")
    schema: dict[str, Any] = requires(Anything(dict), "The JSON schema.")
    end: str = requires(Text(bounds.GRAMMAR_CHARS, least=1), "The text behind the JSON.")


@dataclass(frozen=True, slots=True)
class StructuralTagResponseFormat:
    type: str = requires(OneOf(("structural_tag",)), "Text that is free up to a trigger, and then JSON between tags.")
    structures: tuple[TagStructure, ...] = requires(ListOf(ObjectOf(TagStructure), bounds.TOOLS, least=1), "The tags.")
    triggers: tuple[str, ...] = requires(
        ListOf(Text(bounds.GRAMMAR_CHARS, least=1), bounds.TOOLS, least=1), "Texts that begin tags wherever they stand."
    )

    @property
    def output(self) -> AskedOutput:
        tags = (StructuralTag(one.begin, one.schema, one.end) for one in self.structures)
        return StructuralTagsOutput(tuple(tags), self.triggers)


RESPONSE_FORMATS_REFUSED = {
    "regex": "is not known here: send structured_outputs.regex.",
    "grammar": "is not known here: send structured_outputs.grammar, in Lark's notation.",
    "ebnf": "is not known here: send structured_outputs.grammar, in Lark's notation.",
}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    json: dict[str, Any] | None = accepts(Anything(dict), "A JSON schema.")
    regex: str | None = accepts(Text(bounds.GRAMMAR_CHARS, least=1), "A regular expression.")
    choice: tuple[str, ...] | None = accepts(
        ListOf(Text(bounds.GRAMMAR_CHARS, least=1), bounds.GRAMMAR_CHOICES, least=1), "One of these texts."
    )
    grammar: str | None = accepts(Text(bounds.GRAMMAR_CHARS, least=1), "A grammar in Lark's notation.")
    json_object: bool | None = accepts(Bool(), "Any JSON object.")
    structural_tag: None = refuses("is not known here: send response_format of this type.")

    @property
    def outputs(self) -> list[AskedOutput]:
        found: list[AskedOutput] = []
        if self.json is not None:
            found.append(JsonSchemaOutput(self.json))
        if self.regex is not None:
            found.append(RegexFormat(self.regex))
        if self.choice is not None:
            found.append(ChoiceFormat(self.choice))
        if self.grammar is not None:
            found.append(LarkFormat(self.grammar))
        return [*found, JsonObjectOutput()] if self.json_object else found


@dataclass(frozen=True, slots=True)
class ReasoningBody:
    """As OpenRouter has it."""

    effort: str | None = accepts(OneOf(REASONING_EFFORTS), "How much to think; `none` answers at once.")
    max_tokens: int | None = accepts(TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    enabled: bool | None = accepts(Bool(), "Switches thinking on or off.")
    exclude: bool = accepts(Bool(), "Think, but leave the thinking out of the answer.", default=False)
    summary: None = accepts(HintField("auto", "detailed"), "The thinking is always told whole.")


@dataclass(frozen=True, slots=True)
class ThinkingFieldBody:
    """As DeepSeek, Z.ai and Moonshot have it."""

    type: str = requires(OneOf(("enabled", "disabled", "auto", "adaptive")), "Whether to think, or as the model does.")
    budget_tokens: int | None = accepts(TokenLimitField(bounds.THINKING_BUDGET), "Most tokens of thinking.")
    clear_thinking: None = accepts(HintField(), "`template_history` says what becomes of past thinking.")

    @property
    def enabled(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


REASONING_FIELD, THINKING_FIELD = ObjectOf(ReasoningBody), ObjectOf(ThinkingFieldBody)


def thinking_options(**said: Mapping[str, Any]) -> ThinkingOptions:
    """`said` holds, for each thing to be asked, what each field says of it. Raises BadRequest where two differ."""
    found = {what: {name: value for name, value in by.items() if value is not None} for what, by in said.items()}
    for by in found.values():
        if len(set(by.values())) > 1:
            first, second, *_ = by
            raise BadRequest(
                f"{first} and {second} say the same thing in two ways, and differ: send one.", param=second
            )
    fields = {what: next(iter(by)) for what, by in found.items() if by}
    return ThinkingOptions(**{what: by[fields[what]] for what, by in found.items() if by}, fields=fields)


CUSTOM_INPUT_PARAMETER: Final = "input"


@dataclass(frozen=True, slots=True)
class CustomTextInput:
    type: str = requires(OneOf(("text",)), "Any text.")


@dataclass(frozen=True, slots=True)
class CustomInputGrammar:
    syntax: str = requires(
        OneOf(("regex", "lark")),
        "How the grammar is written. The text is held to a regular expression; of a Lark grammar the model is told, "
        "and the receipt says that its text is not held to it.",
    )
    definition: str = requires(Text(bounds.GRAMMAR_CHARS, least=1), "The grammar of the whole text.")


def custom_tool_as_function(
    name: str, description: str | None, syntax: str | None = None, definition: str = ""
) -> ToolDefinition:
    """The function that stands for it: held to a regular expression, and told of a Lark grammar."""
    text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    elif syntax == "lark":
        told = f"The input follows this Lark grammar:\n{definition}"
        description = f"{description}\n\n{told}" if description else told
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT_PARAMETER: text},
        "required": [CUSTOM_INPUT_PARAMETER],
        "additionalProperties": False,
    }
    return ToolDefinition(name, description, parameters, strict=syntax == "regex")


def custom_input_as_arguments(text: str) -> str:
    """What a custom tool was called with, as the arguments of the function that stands for it."""
    return json.dumps({CUSTOM_INPUT_PARAMETER: text}, ensure_ascii=False)


class CustomInputDecoder:
    """The one text in a custom tool's arguments, `{"input": "…"}`, given out as it comes in."""

    _OPENING: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT_PARAMETER}"\s*:\s*"')
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
        text = value.get(CUSTOM_INPUT_PARAMETER) if isinstance(value, dict) else None
        return text if isinstance(text, str) else self._raw
