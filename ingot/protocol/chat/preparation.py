"""What the engine takes, made of what was asked: the prompt, how the answer is to be read, and what it is held to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ingot.engine.request import AnswerParsing
from ingot.errors import ContextOverflow
from ingot.media.items import MediaItem
from ingot.protocol.chat.ask import Ask, FieldNames, ThinkingOptions, Tool
from ingot.protocol.chat.guides import answer_guide
from ingot.protocol.chat.prompts import rendered
from ingot.protocol.chat.thinking import (
    closed_thinking,
    may_think,
    settled,
    switched,
    template_variables,
    thinks,
    unheeded,
)
from ingot.protocol.chat.tools import shown_tools
from ingot.protocol.chat.turns import Turn
from ingot.protocol.served import Served
from ingot.text.grammar.matcher import GuidePlan
from ingot.text.parse.events import ToolSchema
from ingot.text.parser.parser import ThinkingStart
from ingot.text.prompt.prompt import Prompt
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import format_named, thinking_named


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
    def media(self) -> tuple[tuple[MediaItem, ...], ...]:
        """The prompt's pictures and clips, as the engine takes them."""
        return () if self.source is None or not self.source.media else (self.source.media,)

    @property
    def sources(self) -> tuple[Prompt | tuple[int, ...], ...]:
        return (self.prompt if self.source is None else self.source,)


def prepare_ask(served: Served, ask: Ask, *, names: FieldNames = FieldNames()) -> Prepared:  # noqa: B008  (frozen)
    """Renders, tokenizes and compiles, so it may take a while: not for an event loop.

    Raises BadRequest or Unsupported that name the field.
    """
    ask, format = switched(served, ask), _format(served, ask)
    tools = shown_tools(format, ask, ask.history or served.history, names)
    thinking = settled(served, ask.thinking)
    prompt = _prompt(served, ask, format, tools, thinking, names)
    if format.thinking is not None:
        format = replace(format, thinking=format.thinking.ending(prompt.text))
    start = ThinkingStart.after(prompt.text, format.thinking)
    thoughtful = may_think(served, format, thinking, start, prompt.text)
    guide, unheld = answer_guide(served, format, tools, ask, thinking, start, thoughtful, names)
    reading = AnswerParsing(
        format,
        tuple(ToolSchema(tool.name, tool.parameters, tool.strict) for tool in tools),
        start,
        one_call=bool(tools) and not ask.parallel,
        must_call=bool(tools) and ask.choice != "auto",
        past_calls=sum(len(message.get("tool_calls") or ()) for message in ask.messages),
    )
    ignored = unheeded(ask.thinking, names, can_think=thinks(served, format))
    ignored += tuple(f"{names.tools}.{name}.parameters" for name in unheld)
    turn = Turn(served, prompt)
    return Prepared(prompt.tokens, reading if _reads(reading) else None, guide, ignored, prompt, turn, thoughtful)


def asked_prompt(
    served: Served,
    ask: Ask,
    *,
    names: FieldNames = FieldNames(),  # noqa: B008  (frozen)
    add_special: bool = False,
) -> Prompt:
    """The prompt alone, as `prepare_ask` makes it; `add_special` adds what the tokenizer puts around a bare text."""
    ask, format = switched(served, ask), _format(served, ask)
    tools = shown_tools(format, ask, ask.history or served.history, names)
    return _prompt(served, ask, format, tools, settled(served, ask.thinking), names, add_special=add_special)


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
            extra=template_variables(served, ask, thinking),
            appended=lambda text: closed_thinking(served, format, thinking, ask, text),
            add_special=add_special,
            history=ask.history or served.history,
            format=format,
            salt=ask.salt,
            remembers=ask.remembers,
        )
    except ContextOverflow as error:
        error.param = names.messages
        raise


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
