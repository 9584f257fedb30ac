"""From a chat request to the engine's inputs: the prompt, the tools that the model is shown, how the answer is parsed,
and the grammar that it must match.

`prepare_chat` raises BadRequest, Unsupported and ContextOverflow; it may take a while and is not for an event loop.
Whether a model thinks is decided here alone, from the request, the settings and the chat template, so that rendering,
decoding and parsing agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ingot.engine.request import AnswerParsing
from ingot.errors import BadRequest, ContextOverflow, Unsupported
from ingot.media.items import MediaItem
from ingot.protocol.chat.answers import ConversationTurn
from ingot.protocol.chat.ask import (
    ChatFieldNames,
    ChatInput,
    ForcedToolChoice,
    ThinkingOptions,
    ToolDefinition,
    unknown_tool_error,
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
    """One prompt, and how its answer is generated and parsed."""

    prompt: tuple[int, ...]
    reading: AnswerParsing | None = None
    grammar: CompiledGrammar | None = None
    ignored: tuple[str, ...] = ()  # fields without effect on this model, for the receipt
    source: Prompt | None = None  # None for a prompt that is not a conversation
    turn: ConversationTurn | None = None
    may_think: bool = False  # the answer begins with thinking, or may

    @property
    def marks(self) -> tuple[tuple[int, ...], ...]:
        """Where the prompt's messages end, for the engine."""
        return () if self.source is None else (self.source.marks,)

    @property
    def media(self) -> tuple[tuple[MediaItem, ...], ...]:
        """The prompt's images and videos, for the engine."""
        return () if self.source is None or not self.source.media else (self.source.media,)

    @property
    def sources(self) -> tuple[Prompt | tuple[int, ...], ...]:
        return (self.prompt if self.source is None else self.source,)


def prepare_chat(served: ServedModel, ask: ChatInput, *, names: ChatFieldNames = ChatFieldNames()) -> PreparedChat:  # noqa: B008  (frozen)
    """Renders, tokenizes and compiles: not for an event loop. Errors name the field."""
    ask, format = switch_thinking(served, ask), _answer_format(served, ask)
    tools = shown_tools(format, ask, ask.history or served.history, names)
    thinking = resolve_thinking(served, ask.thinking)
    prompt = _render_prompt(served, ask, format, tools, thinking, names)
    if format.thinking is not None:
        format = replace(format, thinking=format.thinking.ending(prompt.text))
    start = ThinkingStart.after(prompt.text, format.thinking)
    thinks = may_think(served, format, thinking, start, prompt.text)
    grammar, unenforced = compile_answer_grammar(served, format, tools, ask, thinking, start, thinks, names)
    parsing = AnswerParsing(
        format,
        tuple(ToolSchema(tool.name, tool.parameters, tool.strict) for tool in tools),
        start,
        one_call=bool(tools) and not ask.parallel,
        must_call=bool(tools) and ask.choice != "auto",
        past_calls=sum(len(message.get("tool_calls") or ()) for message in ask.messages),
    )
    ignored = ignored_thinking_fields(ask.thinking, names, can_think=model_thinks(served, format))
    ignored += tuple(f"{names.tools}.{name}.parameters" for name in unenforced)
    needs_parsing = tools or format.thinking or format.channels or format.strips
    turn = ConversationTurn(served, prompt)
    return PreparedChat(prompt.tokens, parsing if needs_parsing else None, grammar, ignored, prompt, turn, thinks)


def render_chat_prompt(served: ServedModel, ask: ChatInput, *, add_special: bool) -> Prompt:
    """The prompt alone, as `prepare_chat` renders it; `add_special` adds the tokenizer's own special tokens."""
    names = ChatFieldNames()
    ask, format = switch_thinking(served, ask), _answer_format(served, ask)
    tools = shown_tools(format, ask, ask.history or served.history, names)
    thinking = resolve_thinking(served, ask.thinking)
    return _render_prompt(served, ask, format, tools, thinking, names, add_special=add_special)


def _render_prompt(
    served: ServedModel,
    ask: ChatInput,
    format: Format,
    tools: tuple[ToolDefinition, ...],
    thinking: ThinkingOptions,
    names: ChatFieldNames,
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


def _answer_format(served: ServedModel, ask: ChatInput) -> Format:
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
    ask: ChatInput,
    thinking: ThinkingOptions,
    start: ThinkingStart,
    may_think: bool,
    names: ChatFieldNames,
) -> tuple[CompiledGrammar | None, tuple[str, ...]]:
    """The answer's grammar, and the tools whose schemas should be enforced but cannot be."""
    output = None if ask.output is None else ask.output(served.grammars, param=names.output)
    callable_tools = [GrammarTool(tool.name, tool.parameters, tool.strict) for tool in tools]
    calls: CompiledGrammar | None = None
    if tools:
        choice = ForcedCall(ask.choice.name) if isinstance(ask.choice, ForcedToolChoice) else ask.choice
        assert choice != "none"
        if output is not None and choice == "auto":
            choice = "required"  # where the answer must match a grammar, so must the call that may come instead
        calls = served.grammars.tools(format, callable_tools, choice, parallel=ask.parallel, param=names.tools)
    budget = thinking_budget(served, thinking) if model_thinks(served, format) else None
    begun: CompiledGrammar | None = None
    unenforced: tuple[str, ...] = ()
    enforces_calls = served.holds_tool_calls if ask.hold_calls is None else ask.hold_calls
    if tools and calls is None and output is None and enforces_calls:
        begun, unenforced = served.grammars.begun_calls(format, callable_tools, start, parallel=ask.parallel)
    if calls is None and output is None and budget is None:
        return begun, unenforced
    if output is None or ask.choice != "auto":  # a forced call leaves no room for anything else
        output, calls = calls or output, None
    grammar = served.grammars.answer(
        output, format, start, calls=calls, begun=begun, budget=budget, may_think=may_think
    )
    return grammar, unenforced


EFFORT_BUDGETS: Final[Mapping[str, int]] = {"minimal": 256, "low": 1024, "medium": 4096}
"""Thinking tokens by effort, where the model's template does not read an effort; more effort has no limit."""
EFFORT_VARIABLE: Final = "reasoning_effort"


def model_thinks(served: ServedModel, format: Format) -> bool:
    """Whether the model is known to think: its template writes the tags, or its answers have channels."""
    if format.channels is not None:
        return True
    template = served.tokenizer.template
    tags = format.thinking
    return template is not None and tags is not None and (tags.open in template.source or tags.close in template.source)


def switch_thinking(served: ServedModel, ask: ChatInput) -> ChatInput:
    """A template variable that switches thinking counts as the field, where the template has no such variable."""
    variables, known = ask.variables or {}, served.terms.template_variables
    unread = {name: variables[name] for name in THINKING_SWITCHES if name in variables and name not in known}
    if not unread:
        return ask
    rest, thinking = {name: value for name, value in variables.items() if name not in unread}, ask.thinking
    if thinking.enabled is None and thinking.effort is None:
        [(name, enabled), *_] = unread.items()
        fields = {**thinking.fields, "enabled": f"chat_template_kwargs.{name}"}
        thinking = replace(thinking, enabled=enabled, fields=fields)
    return replace(ask, variables=rest or None, thinking=thinking)


def resolve_thinking(served: ServedModel, thinking: ThinkingOptions) -> ThinkingOptions:
    """The request's options, with the server's settings as defaults."""
    enabled, budget, effort = thinking.enabled, thinking.budget, thinking.effort
    if effort == "none" or budget == 0:
        enabled = False
    elif enabled is None:
        enabled = True if effort is not None or budget else served.thinking
    if budget is None and effort is None:
        budget = served.thinking_budget
    return replace(thinking, enabled=enabled, budget=budget)


def thinking_template_variables(served: ServedModel, ask: ChatInput, thinking: ThinkingOptions) -> dict[str, Any]:
    """For the template. The request's variables come first, then its thinking options, then the settings."""
    known = served.terms.template_variables
    switches: dict[str, Any] = {}
    if thinking.enabled is not None:
        switches |= {name: thinking.enabled for name in THINKING_SWITCHES if name in known}
    if thinking.effort not in (None, "none") and EFFORT_VARIABLE in known:
        # Templates know the three levels that models were trained with.
        levels = {"minimal": "low", "xhigh": "high", "max": "high"}
        switches[EFFORT_VARIABLE] = levels.get(str(thinking.effort), thinking.effort)
    requested = switches if ask.thinking.is_set else {}
    return switches | dict(served.variables) | requested | dict(ask.variables or {})


def close_thinking(served: ServedModel, format: Format, thinking: ThinkingOptions, ask: ChatInput, text: str) -> str:
    """The end of the prompt that makes a model answer without thinking, where its template has no switch."""
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


def ignored_thinking_fields(options: ThinkingOptions, names: ChatFieldNames, *, can_think: bool) -> tuple[str, ...]:
    """The fields without effect: on a model that does not think, or overridden by the effort `none`."""
    if options.is_set and not can_think:
        return tuple(dict.fromkeys(options.fields.values())) or (names.thinking,)
    if options.effort == "none" and options.enabled and "enabled" in options.fields:
        return (options.fields["enabled"],)
    return ()


TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


def shown_tools(
    format: Format, ask: ChatInput, history: TemplateHistory, names: ChatFieldNames
) -> tuple[ToolDefinition, ...]:
    """The tools that the model is shown and may call. Errors name the field."""
    known = _check_tools(ask.tools, names)
    if isinstance(ask.choice, ForcedToolChoice) and ask.choice.name not in known:
        raise unknown_tool_error(names.choice, ask.choice.name, known)
    if ask.choice == "required" and not ask.tools:
        raise BadRequest(f"{names.choice} requires a call, but there are no {names.tools}.", param=names.choice)
    if not ask.tools or ask.choice == "none":
        return ()
    if not format.can_call:
        raise Unsupported(f"{names.tools}: the format '{format.name}' has no tool calls.", param=names.tools)
    if history == "official":
        return ask.tools
    # Parameters in the order in which the prompt shows them, which is the only one that a grammar allows.
    return tuple(replace(tool, parameters=ordered_schema(tool.parameters)) for tool in ask.tools)


def _check_tools(tools: tuple[ToolDefinition, ...], names: ChatFieldNames) -> dict[str, ToolDefinition]:
    """The tools by name."""
    known: dict[str, ToolDefinition] = {}
    for at, tool in enumerate(tools):
        where = f"{names.tools}.{at}"
        if len(tool.name) > TOOL_NAME_CHARS or not TOOL_NAME.fullmatch(tool.name):
            raise BadRequest(
                f"{where}: a tool's name has 1 to {TOOL_NAME_CHARS} letters, digits, dots, dashes or underscores.",
                param=where,
            )
        if tool.name in known:
            raise BadRequest(f"{where}: there are two tools named '{tool.name}'.", param=where)
        if tool.parameters.get("type", "object") != "object":
            raise BadRequest(f"{where}: the parameters of a tool are an object.", param=where)
        known[tool.name] = tool
    return known
