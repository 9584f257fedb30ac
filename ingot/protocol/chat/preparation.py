"""From what a chat asks to what the engine takes: the prompt, the tools that the model is shown, how the answer is
parsed, and the grammar that it is held to.

`prepare_ask` raises BadRequest, Unsupported and ContextOverflow; it may take a while and is not for an event loop.
Whether a model thinks (what a request, the settings and the chat template come to) is decided here alone, so that what
is rendered, decoded and parsed cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ingot.engine.request import AnswerParsing
from ingot.errors import BadRequest, ContextOverflow, Unsupported, nearest_name
from ingot.media.items import MediaItem
from ingot.protocol.chat.answers import ConversationTurn
from ingot.protocol.chat.ask import (
    AskedOutput,
    AskFieldNames,
    ChatAsk,
    ChoiceFormat,
    ForcedToolChoice,
    JsonObjectOutput,
    JsonSchemaOutput,
    LarkFormat,
    RegexFormat,
    StructuralTagsOutput,
    ThinkingOptions,
    ToolDefinition,
)
from ingot.protocol.chat.prompts import render_messages
from ingot.protocol.schema.bounds import TOOL_NAME_CHARS
from ingot.protocol.schema.model_fields import THINKING_SWITCHES
from ingot.protocol.served import ServedModel
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.grammar.calls import ForcedCall, GrammarTool
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.events import ToolSchema
from ingot.text.parser.parser import ThinkingStart
from ingot.text.prompt.assembly import Prompt
from ingot.text.prompt.canonical import ordered_schema
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import format_by_name, thinking_by_name


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """`ignored` names what could have no effect on this model, for the receipt."""

    prompt: tuple[int, ...]
    reading: AnswerParsing | None
    guide: CompiledGrammar | None
    ignored: tuple[str, ...] = ()
    source: Prompt | None = None  # what the prompt was made of, for receipts
    turn: ConversationTurn | None = (
        None  # to be given the answer's events, so that the next turn can hold it as it was generated
    )
    may_think: bool = False  # the answer begins with thinking, or may

    @property
    def marks(self) -> tuple[tuple[int, ...], ...]:
        """Where the prompt's messages end, as the engine takes it."""
        return () if self.source is None else (self.source.marks,)

    @property
    def media(self) -> tuple[tuple[MediaItem, ...], ...]:
        """The prompt's pictures and clips, as the engine takes them."""
        return () if self.source is None or not self.source.media else (self.source.media,)

    @property
    def sources(self) -> tuple[Prompt | tuple[int, ...], ...]:
        return (self.prompt if self.source is None else self.source,)


def prepare_ask(served: ServedModel, ask: ChatAsk, *, names: AskFieldNames = AskFieldNames()) -> PreparedChat:  # noqa: B008  (frozen)
    """Renders, tokenizes and compiles, so it may take a while: not for an event loop.

    Raises BadRequest or Unsupported that name the field.
    """
    ask, format = switch_thinking(served, ask), _answer_format(served, ask)
    tools = shown_tools(format, ask, ask.history or served.history, names)
    thinking = settle_thinking(served, ask.thinking)
    prompt = _render_prompt(served, ask, format, tools, thinking, names)
    if format.thinking is not None:
        format = replace(format, thinking=format.thinking.ending(prompt.text))
    start = ThinkingStart.after(prompt.text, format.thinking)
    thoughtful = may_think(served, format, thinking, start, prompt.text)
    guide, unheld = compile_answer_grammar(served, format, tools, ask, thinking, start, thoughtful, names)
    reading = AnswerParsing(
        format,
        tuple(ToolSchema(tool.name, tool.parameters, tool.strict) for tool in tools),
        start,
        one_call=bool(tools) and not ask.parallel,
        must_call=bool(tools) and ask.choice != "auto",
        past_calls=sum(len(message.get("tool_calls") or ()) for message in ask.messages),
    )
    ignored = ignored_thinking_fields(ask.thinking, names, can_think=model_thinks(served, format))
    ignored += tuple(f"{names.tools}.{name}.parameters" for name in unheld)
    turn = ConversationTurn(served, prompt)
    return PreparedChat(
        prompt.tokens, reading if _needs_parsing(reading) else None, guide, ignored, prompt, turn, thoughtful
    )


def render_asked_prompt(
    served: ServedModel,
    ask: ChatAsk,
    *,
    names: AskFieldNames = AskFieldNames(),  # noqa: B008  (frozen)
    add_special: bool = False,
) -> Prompt:
    """The prompt alone, as `prepare_ask` makes it; `add_special` adds what the tokenizer puts around a bare text."""
    ask, format = switch_thinking(served, ask), _answer_format(served, ask)
    tools = shown_tools(format, ask, ask.history or served.history, names)
    return _render_prompt(
        served, ask, format, tools, settle_thinking(served, ask.thinking), names, add_special=add_special
    )


def _render_prompt(
    served: ServedModel,
    ask: ChatAsk,
    format: Format,
    tools: tuple[ToolDefinition, ...],
    thinking: ThinkingOptions,
    names: AskFieldNames,
    *,
    add_special: bool = False,
) -> Prompt:
    try:
        return render_messages(
            served,
            ask.messages,
            tools=[tool.as_dict() for tool in tools],
            ending=ask.ending,
            extra=thinking_template_variables(served, ask, thinking),
            appended=lambda text: close_thinking(served, format, thinking, ask, text),
            add_special=add_special,
            history=ask.history or served.history,
            format=format,
            salt=ask.salt,
            remembers=ask.remembers,
        )
    except ContextOverflow as error:
        error.param = names.messages
        raise


def _needs_parsing(reading: AnswerParsing) -> bool:
    format = reading.format
    return bool(reading.tools or format.thinking or format.channels or format.strips)


def _answer_format(served: ServedModel, ask: ChatAsk) -> Format:
    format = served.format
    if ask.tool_format is not None:
        format = replace(format_by_name(ask.tool_format, param="tool_format"), thinking=format.thinking)
    if ask.thinking_format is not None:
        format = replace(format, thinking=thinking_by_name(ask.thinking_format, param="thinking_format"))
    return format


def compile_answer_grammar(
    served: ServedModel,
    format: Format,
    tools: tuple[ToolDefinition, ...],
    ask: ChatAsk,
    thinking: ThinkingOptions,
    start: ThinkingStart,
    may_think: bool,
    names: AskFieldNames,
) -> tuple[CompiledGrammar | None, tuple[str, ...]]:
    """The plan, and the tools whose schemas calls are not held to though they would be."""
    output = _output_grammar(served, ask.output, names)
    calls = _tool_call_grammar(served, format, tools, ask, names)
    budget = thinking_budget(served, thinking) if model_thinks(served, format) else None
    begun: CompiledGrammar | None = None
    unheld: tuple[str, ...] = ()
    if (
        tools
        and calls is None
        and output is None
        and (served.holds_tool_calls if ask.hold_calls is None else ask.hold_calls)
    ):
        begun, unheld = served.grammars.begun_calls(format, _guided_tools(tools), start, parallel=ask.parallel)
    if calls is None and output is None and budget is None:
        return begun, unheld
    if output is None or ask.choice != "auto":  # a forced call leaves no room for anything else
        output, calls = calls or output, None
    plan = served.grammars.answer(output, format, start, calls=calls, begun=begun, budget=budget, may_think=may_think)
    return plan, unheld


def _output_grammar(served: ServedModel, output: AskedOutput | None, names: AskFieldNames) -> CompiledGrammar | None:
    grammars, param = served.grammars, names.output
    match output:
        case None:
            return None
        case JsonObjectOutput():
            return grammars.json_object()
        case JsonSchemaOutput():
            return grammars.json_schema(output.schema, param=param)
        case RegexFormat():
            return grammars.regex(output.pattern, param=param)
        case ChoiceFormat():
            return grammars.choice(output.options, param=param)
        case LarkFormat():
            return grammars.lark(output.grammar, param=param)
        case StructuralTagsOutput():
            return grammars.structural_tags(output.tags, output.triggers, param=param)


def _tool_call_grammar(
    served: ServedModel, format: Format, tools: tuple[ToolDefinition, ...], ask: ChatAsk, names: AskFieldNames
) -> CompiledGrammar | None:
    if not tools:
        return None
    choice = ForcedCall(ask.choice.name) if isinstance(ask.choice, ForcedToolChoice) else ask.choice
    assert choice != "none"
    if ask.output is not None and choice == "auto":
        choice = "required"  # where the answer is held to something, so is the call that may come instead
    return served.grammars.tools(format, _guided_tools(tools), choice, parallel=ask.parallel, param=names.tools)


def _guided_tools(tools: tuple[ToolDefinition, ...]) -> list[GrammarTool]:
    return [GrammarTool(tool.name, tool.parameters, tool.strict) for tool in tools]


EFFORT_BUDGETS: Final[Mapping[str, int]] = {"minimal": 256, "low": 1024, "medium": 4096}
"""Tokens of thinking that an effort allows where the model's template does not read one; more effort has no limit."""
EFFORT_VARIABLE: Final = "reasoning_effort"


def model_thinks(served: ServedModel, format: Format) -> bool:
    """Whether the model is known to think: its template writes the tags, or its answers have channels."""
    if format.channels is not None:
        return True
    template = served.tokenizer.template
    tags = format.thinking
    return template is not None and tags is not None and (tags.open in template.source or tags.close in template.source)


def switch_thinking(served: ServedModel, ask: ChatAsk) -> ChatAsk:
    """A variable that switches thinking, where the template reads none of that name, says what the field would."""
    given = ask.variables or {}
    unread = {
        name: given[name] for name in THINKING_SWITCHES if name in given and name not in served.terms.template_variables
    }
    if not unread:
        return ask
    rest, thinking = {name: value for name, value in given.items() if name not in unread}, ask.thinking
    if thinking.enabled is None and thinking.effort is None:
        [(name, enabled), *_] = unread.items()
        fields = {**thinking.fields, "enabled": f"chat_template_kwargs.{name}"}
        thinking = replace(thinking, enabled=enabled, fields=fields)
    return replace(ask, variables=rest or None, thinking=thinking)


def settle_thinking(served: ServedModel, thinking: ThinkingOptions) -> ThinkingOptions:
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


def thinking_template_variables(served: ServedModel, ask: ChatAsk, thinking: ThinkingOptions) -> dict[str, Any]:
    """For the template: what the request sets by name, then what it says of thinking, then what the settings say."""
    switched = _switch_variables(served, thinking)
    asked_for = switched if ask.thinking.given else {}
    return switched | dict(served.variables) | asked_for | dict(ask.variables or {})


def _switch_variables(served: ServedModel, thinking: ThinkingOptions) -> dict[str, Any]:
    """Variables of the template that switch thinking."""
    read = served.terms.template_variables
    found: dict[str, Any] = {}
    if thinking.enabled is not None:
        found |= {name: thinking.enabled for name in THINKING_SWITCHES if name in read}
    if thinking.effort not in (None, "none") and EFFORT_VARIABLE in read:
        # Templates know the three levels that models were trained with.
        found[EFFORT_VARIABLE] = {"minimal": "low", "xhigh": "high", "max": "high"}.get(
            str(thinking.effort), thinking.effort
        )
    return found


def close_thinking(served: ServedModel, format: Format, thinking: ThinkingOptions, ask: ChatAsk, text: str) -> str:
    """What a prompt needs at its end so that a model whose template has no switch answers without thinking."""
    tags = format.thinking
    if thinking.enabled is not False or tags is None or ask.ending != "opened":
        return ""
    tags = tags.ending(text)
    if ThinkingStart.after(text, tags) is ThinkingStart.OPENED:
        return f"\n{tags.close}\n\n" if not text.endswith("\n") else f"{tags.close}\n\n"
    switched = any(name in served.terms.template_variables for name in THINKING_SWITCHES)
    closed = text.rstrip().endswith(tags.close)
    return "" if switched or closed or not model_thinks(served, format) else f"{tags.open}\n\n{tags.close}\n\n"


def may_think(
    served: ServedModel, format: Format, thinking: ThinkingOptions, start: ThinkingStart, prompt: str
) -> bool:
    if start is ThinkingStart.OPENED:
        return True
    closed = format.thinking is not None and prompt.rstrip().endswith(format.thinking.close)
    return thinking.enabled is not False and not closed and model_thinks(served, format)


def thinking_budget(served: ServedModel, thinking: ThinkingOptions) -> int | None:
    if thinking.budget is not None or EFFORT_VARIABLE in served.terms.template_variables:
        return thinking.budget
    return EFFORT_BUDGETS.get(thinking.effort or "")


def ignored_thinking_fields(asked: ThinkingOptions, names: AskFieldNames, *, can_think: bool) -> tuple[str, ...]:
    """The fields that could have no effect: on a model that does not think, or against `none`, which settles it."""
    if asked.given and not can_think:
        return tuple(dict.fromkeys(asked.fields.values())) or (names.thinking,)
    if asked.effort == "none" and asked.enabled and "enabled" in asked.fields:
        return (asked.fields["enabled"],)
    return ()


TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


def shown_tools(
    format: Format, ask: ChatAsk, history: TemplateHistory, names: AskFieldNames
) -> tuple[ToolDefinition, ...]:
    """The tools that the model is shown and may call. Raises BadRequest or Unsupported that name the field."""
    return _order_tool_schemas(_callable_tools(format, ask, names), history)


def _callable_tools(format: Format, ask: ChatAsk, names: AskFieldNames) -> tuple[ToolDefinition, ...]:
    _check_tool_names(ask.tools, names)
    if isinstance(ask.choice, ForcedToolChoice) and ask.choice.name not in {tool.name for tool in ask.tools}:
        meant = nearest_name(ask.choice.name, [tool.name for tool in ask.tools])
        hint = f" Did you mean '{meant}'?" if meant else ""
        raise BadRequest(f"{names.choice} names '{ask.choice.name[:100]}', which is no tool.{hint}", param=names.choice)
    if ask.choice == "required" and not ask.tools:
        raise BadRequest(f"{names.choice} asks for a call, but there are no {names.tools}.", param=names.choice)
    if not ask.tools or ask.choice == "none":
        return ()
    if not format.can_call:
        raise Unsupported(f"{names.tools}: the format '{format.name}' has no tool calls.", param=names.tools)
    return ask.tools


def _order_tool_schemas(tools: tuple[ToolDefinition, ...], history: TemplateHistory) -> tuple[ToolDefinition, ...]:
    """With arguments in the order in which the prompt shows them, since a grammar lets none come out of turn."""
    if history == "official":
        return tools
    return tuple(replace(tool, parameters=ordered_schema(tool.parameters)) for tool in tools)


def _check_tool_names(tools: Sequence[ToolDefinition], names: AskFieldNames) -> None:
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
