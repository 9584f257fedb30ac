"""What a chat asks for, whichever protocol it came in: messages, tools, thinking, the form of the answer.

Every chat-like protocol makes its body into an `Ask`; `asked` makes that into what the engine takes: the prompt, how
the answer is to be read, and what it is held to. One place decides about thinking, so that what is rendered, decoded
and parsed cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from ingot.engine.request import AnswerParsing
from ingot.errors import BadRequest, ContextOverflow, Unsupported, nearest
from ingot.protocol.chat.prompts import Ending, rendered
from ingot.protocol.chat.turns import Turn
from ingot.protocol.schema.bounds import TOOL_NAME_CHARS
from ingot.protocol.served import Served
from ingot.text.formats.registry import format_named, thinking_named
from ingot.text.formats.table import Format
from ingot.text.grammar.grammars import ForcedCall as NamedTool
from ingot.text.grammar.grammars import GuidedTool
from ingot.text.grammar.guide import GuidePlan
from ingot.text.parse.events import ToolSchema
from ingot.text.parse.parser import ThinkingStart
from ingot.text.prompt.canonical import ordered_schema
from ingot.text.prompt.prompt import Prompt
from ingot.text.template.witness import TemplateHistory

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: Final[tuple[Effort, ...]] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORT_BUDGETS: Final[Mapping[str, int]] = {"minimal": 256, "low": 1024, "medium": 4096}
"""Tokens of thinking that an effort allows where the model's template does not read one; more effort has no limit."""
SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call the variable that switches thinking on and off."""
EFFORT_VARIABLE: Final = "reasoning_effort"
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


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


OutputFormat = JsonObject | JsonSchema | Regex | Choice | Lark


@dataclass(frozen=True, slots=True)
class Ask:
    """`messages` are dicts as OpenAI's chat has them: role, content, tool_calls, tool_call_id, reasoning_content."""

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True  # False: at most one call
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """`ignored` names what could have no effect on this model, for the receipt."""

    prompt: tuple[int, ...]
    reading: AnswerParsing | None
    guide: GuidePlan | None
    ignored: tuple[str, ...] = ()
    source: Prompt | None = None  # what the prompt was made of, for receipts
    turn: Turn | None = None  # to be given the answer's events, so that the next turn can hold it as it was generated
    may_think: bool = False  # the answer begins with thinking, or may

    @property
    def marks(self) -> tuple[tuple[int, ...], ...]:
        """Where the prompt's messages end, as the engine takes it."""
        return () if self.source is None else (self.source.marks,)

    @property
    def sources(self) -> tuple[Prompt | tuple[int, ...], ...]:
        return (self.prompt if self.source is None else self.source,)


def prepare_ask(served: Served, ask: Ask, *, names: FieldNames = FieldNames()) -> Prepared:  # noqa: B008  (frozen)
    """Renders, tokenizes and compiles, so it may take a while: not for an event loop.

    Raises BadRequest or Unsupported that name the field.
    """
    format = _format(served, ask)
    history = ask.history or served.history
    tools = _ordered(_tools(format, ask, names), history)
    thinking = _with_defaults(served, ask.thinking)
    prompt = _prompt(served, ask, format, tools, thinking, names)
    start = ThinkingStart.after(prompt.text, format.thinking)
    may_think = _may_think(served, format, thinking, start, prompt.text)
    guide = _guide(served, format, tools, ask, thinking, start, may_think, names)
    reading = AnswerParsing(
        format,
        tuple(ToolSchema(tool.name, tool.parameters, tool.strict) for tool in tools),
        start,
        one_call=bool(tools) and not ask.parallel,
        must_call=bool(tools) and ask.choice != "auto",
        past_calls=sum(len(message.get("tool_calls") or ()) for message in ask.messages),
    )
    ignored = _unheeded_thinking(ask.thinking, names, can_think=thinks(served, format))
    turn = Turn(served, prompt)
    return Prepared(prompt.tokens, reading if _reads(reading) else None, guide, ignored, prompt, turn, may_think)


def asked_prompt(
    served: Served,
    ask: Ask,
    *,
    names: FieldNames = FieldNames(),  # noqa: B008  (frozen)
    add_special: bool = False,
) -> Prompt:
    """The prompt alone, the one that `asked` gives; `add_special` adds what the tokenizer puts around a bare text."""
    format = _format(served, ask)
    tools = _ordered(_tools(format, ask, names), ask.history or served.history)
    return _prompt(served, ask, format, tools, _with_defaults(served, ask.thinking), names, add_special=add_special)


def _prompt(
    served: Served,
    ask: Ask,
    format: Format,
    tools: tuple[Tool, ...],
    thinking: ThinkingOptions,
    names: FieldNames,
    *,
    add_special: bool = False,
) -> Prompt:
    try:
        return rendered(
            served,
            ask.messages,
            tools=[tool.as_dict() for tool in tools],
            ending=ask.ending,
            extra=_variables(served, ask, thinking),
            appended=lambda text: _closed_thinking(served, format, thinking, ask, text),
            add_special=add_special,
            history=ask.history or served.history,
            format=format,
            salt=ask.salt,
            remembers=ask.remembers,
        )
    except ContextOverflow as error:
        error.param = names.messages
        raise


def thinks(served: Served, format: Format) -> bool:
    """Whether the model is known to think: its template writes the tags, or its answers have channels."""
    if format.channels is not None:
        return True
    template = served.tokenizer.template
    tags = format.thinking
    return template is not None and tags is not None and (tags.open in template.source or tags.close in template.source)


def _reads(reading: AnswerParsing) -> bool:
    format = reading.format
    return bool(reading.tools or format.thinking or format.channels or format.strips)


def _format(served: Served, ask: Ask) -> Format:
    format = served.format
    if ask.tool_format is not None:
        format = replace(format_named(ask.tool_format, param="tool_format"), thinking=format.thinking)
    if ask.thinking_format is not None:
        format = replace(format, thinking=thinking_named(ask.thinking_format, param="thinking_format"))
    return format


# Tools


def _tools(format: Format, ask: Ask, names: FieldNames) -> tuple[Tool, ...]:
    """The tools that the model is shown and may call."""
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
        if len(tool.name) > TOOL_NAME_CHARS or not _TOOL_NAME.fullmatch(tool.name):
            raise BadRequest(
                f"{where}: a tool's name has 1 to {TOOL_NAME_CHARS} letters, digits, dots, dashes or underscores.",
                param=where,
            )
        if tool.name in seen:
            raise BadRequest(f"{where}: there are two tools of the name '{tool.name}'.", param=where)
        if tool.parameters.get("type", "object") != "object":
            raise BadRequest(f"{where}: the parameters of a tool are an object.", param=where)
        seen.add(tool.name)


# Thinking


def _unheeded_thinking(asked: ThinkingOptions, names: FieldNames, *, can_think: bool) -> tuple[str, ...]:
    """The fields that could have no effect: on a model that does not think, or against `none`, which settles it."""
    if asked.given and not can_think:
        return tuple(dict.fromkeys(asked.fields.values())) or (names.thinking,)
    if asked.effort == "none" and asked.enabled and "enabled" in asked.fields:
        return (asked.fields["enabled"],)
    return ()


def _with_defaults(served: Served, thinking: ThinkingOptions) -> ThinkingOptions:
    """What the request says, filled in with what the server's settings say."""
    if thinking.effort == "none":
        thinking = replace(thinking, enabled=False)
    elif thinking.enabled is None and (thinking.effort is not None or thinking.budget):
        thinking = replace(thinking, enabled=True)
    if thinking.budget == 0:
        thinking = replace(thinking, enabled=False)
    if thinking.enabled is None:
        thinking = replace(thinking, enabled=served.thinking)
    if thinking.budget is None and thinking.effort is None:
        thinking = replace(thinking, budget=served.thinking_budget)
    return thinking


def _variables(served: Served, ask: Ask, thinking: ThinkingOptions) -> dict[str, Any]:
    """For the template: what the request sets by name, then what it says of thinking, then what the settings say."""
    switched = _thinking_variables(served, thinking)
    asked_for = switched if ask.thinking.given else {}
    return switched | dict(served.variables) | asked_for | dict(ask.variables or {})


def _thinking_variables(served: Served, thinking: ThinkingOptions) -> dict[str, Any]:
    """Variables of the template that switch thinking."""
    read = served.terms.template_variables
    found: dict[str, Any] = {}
    if thinking.enabled is not None:
        found |= {name: thinking.enabled for name in SWITCHES if name in read}
    if thinking.effort not in (None, "none") and EFFORT_VARIABLE in read:
        # Templates know the three levels that models were trained with.
        found[EFFORT_VARIABLE] = {"minimal": "low", "xhigh": "high", "max": "high"}.get(
            str(thinking.effort), thinking.effort
        )
    return found


def _closed_thinking(served: Served, format: Format, thinking: ThinkingOptions, ask: Ask, text: str) -> str:
    """What a prompt needs at its end so that a model whose template has no switch answers without thinking."""
    tags = format.thinking
    if thinking.enabled is not False or tags is None or ask.ending != "opened":
        return ""
    if ThinkingStart.after(text, tags) is ThinkingStart.OPENED:
        return f"\n{tags.close}\n\n" if not text.endswith("\n") else f"{tags.close}\n\n"
    switched = any(name in served.terms.template_variables for name in SWITCHES)
    closed = text.rstrip().endswith(tags.close)
    return "" if switched or closed or not thinks(served, format) else f"{tags.open}\n\n{tags.close}\n\n"


def _may_think(served: Served, format: Format, thinking: ThinkingOptions, start: ThinkingStart, prompt: str) -> bool:
    if start is ThinkingStart.OPENED:
        return True
    closed = format.thinking is not None and prompt.rstrip().endswith(format.thinking.close)
    return thinking.enabled is not False and not closed and thinks(served, format)


def _budget(served: Served, thinking: ThinkingOptions) -> int | None:
    if thinking.budget is not None or EFFORT_VARIABLE in served.terms.template_variables:
        return thinking.budget
    return EFFORT_BUDGETS.get(thinking.effort or "")


# What the answer is held to


def _guide(
    served: Served,
    format: Format,
    tools: tuple[Tool, ...],
    ask: Ask,
    thinking: ThinkingOptions,
    start: ThinkingStart,
    may_think: bool,
    names: FieldNames,
) -> GuidePlan | None:
    output = _output_guide(served, ask.output, names)
    calls = _calls_guide(served, format, tools, ask, names)
    budget = _budget(served, thinking) if thinks(served, format) else None
    if calls is None and output is None and budget is None:
        return None
    if output is None or ask.choice != "auto":  # a forced call leaves no room for anything else
        output, calls = calls or output, None
    return served.grammars.answer(output, format, start, calls=calls, budget=budget, may_think=may_think)


def _output_guide(served: Served, output: OutputFormat | None, names: FieldNames) -> GuidePlan | None:
    grammars, param = served.grammars, names.output
    match output:
        case None:
            return None
        case JsonObject():
            return grammars.json_object()
        case JsonSchema():
            return grammars.json_schema(output.schema, param=param)
        case Regex():
            return grammars.regex(output.pattern, param=param)
        case Choice():
            return grammars.choice(output.options, param=param)
        case Lark():
            return grammars.lark(output.grammar, param=param)


def _calls_guide(
    served: Served, format: Format, tools: tuple[Tool, ...], ask: Ask, names: FieldNames
) -> GuidePlan | None:
    if not tools:
        return None
    guided = [GuidedTool(tool.name, tool.parameters, tool.strict) for tool in tools]
    choice = NamedTool(ask.choice.name) if isinstance(ask.choice, ForcedTool) else ask.choice
    assert choice != "none"
    if ask.output is not None and choice == "auto":
        choice = "required"  # where the answer is held to something, so is the call that may come instead
    return served.grammars.tools(format, guided, choice, parallel=ask.parallel, param=names.tools)
