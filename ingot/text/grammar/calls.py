"""Grammars of tool calls, from the table by which their parser reads them.

A forced call is written in the family's first form, to the letter. Where the model may also just answer, the answer
is any text that no form of the family could be taken to begin a call in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.errors import BadRequest, Unsupported
from ingot.text.formats.notation import JSON
from ingot.text.formats.table import (
    Arguments,
    CallForm,
    Channels,
    Elements,
    Format,
    Gap,
    JsonCall,
    Maybe,
    Name,
    Ordinal,
    Part,
    TextParameters,
    spell_out,
)
from ingot.text.grammar.elements import ElementWriter
from ingot.text.grammar.lark import NOTHING, Rules, anywhere, at_line_start, exactly, one_of, optional, sequence
from ingot.text.grammar.members import Scope
from ingot.text.grammar.notated import NotatedWriter
from ingot.text.grammar.text_parameters import ParameterWriter

MOST_SPACE = 4
"""Characters of white space that may come behind a call: a model that only breaks lines comes to an end."""

_USUAL_KEYS = ("name", "tool_name", "type", "id", "tool_call_id", "arguments", "parameters")


@dataclass(frozen=True, slots=True)
class GuidedTool:
    """`strict`: its arguments are held to its whole schema, or the schema is refused. Else to what can be held to."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """This one function must be called, once."""

    name: str


CallChoice = Literal["auto", "required"] | ForcedCall


def call_grammar(
    rules: Rules, format: Format, tools: Sequence[GuidedTool], choice: CallChoice, *, parallel: bool, opened: bool
) -> str:
    """The source of the grammar. `opened`: the prompt already ends with the form's opening marker."""
    if isinstance(choice, ForcedCall):
        tools = [tool for tool in tools if tool.name == choice.name]
        parallel = False
    if not tools:
        raise BadRequest(
            f"There is no tool {choice.name!r}." if isinstance(choice, ForcedCall) else "There are no tools."
        )
    if format.channels is not None:
        return _Messages(rules, format.channels, tools).source(free=choice == "auto")
    if not format.forms:
        raise Unsupported(f"Tool calls cannot be forced: the format {format.name} has none.")
    try:
        writer = _Tagged(rules, format, tools, parallel)
    except RecursionError:
        raise Unsupported("The references of a tool's schema go in circles, or too deep.") from None
    return writer.free() if choice == "auto" else writer.forced(opened)


class _Tagged:
    """Calls that markers set apart from the text."""

    def __init__(self, rules: Rules, format: Format, tools: Sequence[GuidedTool], parallel: bool) -> None:
        self._rules, self._format, self._tools = rules, format, tools
        self._form = format.forms[0]
        self._many = parallel
        self.call = rules.rule(one_of([rules.rule(self._one(tool)) for tool in tools]))

    def forced(self, opened: bool) -> str:
        rules, form = self._rules, self._form
        opening = form.opening[1:] if opened and form.opening_in_prompt else form.opening
        first = self._section(opening)
        if not self._many or form.joint is not None:
            return rules.source(sequence([first, self._ending()]))
        another = rules.rule(sequence([self._space(), self._section(form.opening)]))
        return rules.source(sequence([first, f"({another})*", self._ending()]))

    def free(self) -> str:
        """Text, calls, and text again. A form without a marker of its own makes it either text or calls."""
        rules, form = self._rules, self._form
        beginnings = (pattern for form in self._format.forms for pattern in _beginnings(form, self._tools))
        without = list(dict.fromkeys(beginnings))
        text = rules.text(without)
        if form.bare or not form.opening:
            # One literal up to where it can be no text: the lexer takes the longest of the two.
            opening = spell_out(*form.opening)
            first = rules.rule(one_of([self._one(tool, opening) for tool in self._tools]))
            return rules.source(f"{text} | {sequence([first, self._rest(), self._ending()])}")
        marker, rest = form.opening[0], form.opening[1:]
        assert isinstance(marker, str)
        section = rules.rule(sequence([rules.text_until(marker, without), self._section(rest)]))
        if not self._many:
            return rules.source(f"{section} | {text}")
        return rules.source(f"({section})* {optional(text)}")

    def _section(self, opening: tuple[Part, ...]) -> str:
        return sequence([self._rules.literal(spell_out(*opening)), self.call, self._rest()])

    def _rest(self) -> str:
        """Further calls under the same opening, and what closes them."""
        rules, joint = self._rules, self._form.joint
        closing = spell_out(*self._form.closing)
        if joint is None or not self._many:
            return rules.literal(closing)
        if not joint[:1].isspace():
            return sequence([f"({rules.rule(sequence([rules.literal(joint), self.call]))})*", rules.literal(closing)])
        # One and the same space before another call and before the closing, so that it does not decide between them.
        another = rules.rule(sequence([self._space(), rules.literal(joint.lstrip()), self.call]))
        end = [self._space(), rules.literal(closing.lstrip())] if closing else []
        return sequence([f"({another})*", *end])

    def _ending(self) -> str:
        """What may come behind the last call, where nothing tells that it was the last."""
        return NOTHING if not self._many or (self._form.joint is not None and self._form.closing) else self._space()

    def _space(self) -> str:
        return optional(self._rules.terminal(f"/[ \\t\\r\\n]{{1,{MOST_SPACE}}}/"))

    def _one(self, tool: GuidedTool, before: str = "") -> str:
        """A call, and the text before it."""
        pieces = []
        for part in self._form.call:
            match part:
                case Name(numbered=True):
                    pieces += [self._rules.literal(f"{before}functions.{tool.name}:"), "/[0-9]{1,3}/"]
                case Ordinal():
                    pieces += [self._rules.literal(before + part.before), "/[1-9][0-9]{0,2}/"]
                    before = part.after
                    continue
                case JsonCall():
                    head = f'{before}{{"{part.name_key}": {json.dumps(tool.name)}, "{part.arguments_key}": '
                    pieces += [self._rules.literal(head), _json_arguments(self._rules, tool), '"}"']
                case Arguments():
                    pieces.append(self._arguments(part, tool, before))
                case TextParameters():
                    parameters = ParameterWriter(self._rules, part, _scope(tool), self._form.closing).parameters()
                    pieces += [self._rules.literal(before), parameters]
                case Elements():
                    elements = ElementWriter(self._rules, part, _scope(tool)).arguments()
                    pieces += [self._rules.literal(before), elements]
                case _:
                    before += tool.name if isinstance(part, Name) else spell_out(part)
                    continue
            before = ""
        return sequence([*pieces, self._rules.literal(before)])

    def _arguments(self, part: Arguments, tool: GuidedTool, before: str) -> str:
        if part.notation != JSON:
            return NotatedWriter(self._rules, part.notation, _scope(tool)).arguments(before)
        return sequence([self._rules.literal(before), _json_arguments(self._rules, tool)])


class _Messages:
    """Calls that are messages of their own."""

    def __init__(self, rules: Rules, channels: Channels, tools: Sequence[GuidedTool]) -> None:
        self._rules, self._channels = rules, channels
        self._call = _Tagged(rules, Format("", forms=(CallForm(channels.call),)), tools, parallel=False).call

    def source(self, *, free: bool) -> str:
        """A call, or where the model is `free` any messages and then a call or the answer."""
        rules, channels = self._rules, self._channels
        if not free:
            return rules.source(self._call)
        markers = (channels.start, *channels.begins, *channels.ends, *(channels.bodies if channels.unended else ()))
        without = [anywhere(exactly(marker)) for marker in markers]
        on = one_of([rules.literal(header) for header in channels.asides])
        ended = rules.text_until(f"{channels.ends[0]}{channels.start}{channels.role}", without)
        aside = rules.rule(sequence([on, ended]))
        answer = sequence([rules.literal(channels.answer), optional(rules.text(without))])
        return rules.source(f"({aside})* ({self._call} | {answer})")


def _json_arguments(rules: Rules, tool: GuidedTool) -> str:
    return rules.rule(rules.json({"type": "object", **tool.parameters}, lenient=not tool.strict))


def _scope(tool: GuidedTool) -> Scope:
    return Scope(tool.parameters, tool.strict)


def _beginnings(form: CallForm, tools: Sequence[GuidedTool]) -> Iterator[str]:
    """Patterns for texts up to what could be the beginning of a call: a marker or, without, enough to tell."""
    if form.opening_in_prompt:
        yield _spelled((*form.opening[1:], *form.call), tools)
    if form.bare:
        yield at_line_start(_spelled((*form.opening, *form.call), tools))
        if form.leading(opened=False) is not None:
            yield at_line_start(_spelled(form.call, tools))
        return
    if form.opening and isinstance(form.opening[0], str):
        yield anywhere(exactly(form.opening[0]))
    leading = form.leading(opened=False)
    if leading is not None and form.unopened != "never":
        yield at_line_start(exactly(leading)) if form.unopened == "line" else anywhere(exactly(leading))


def _spelled(parts: Iterable[Part], tools: Sequence[GuidedTool]) -> str:
    """A pattern for a call without a marker, up to where it can be nothing else."""
    pieces = []
    for part in parts:
        match part:
            case str():
                pieces.append(exactly(part))
            case Gap():
                pieces.append(r"[ \t\r\n]*")
            case Maybe():
                pieces.append(f"({exactly(part.text)})?")
            case Name():
                pieces.append("(" + "|".join(exactly(tool.name) for tool in tools) + ")")
            case JsonCall():
                # A key may also be written with escapes, so one that has any is taken for one of these.
                usual = dict.fromkeys((*_USUAL_KEYS, part.name_key, part.arguments_key))
                return "".join(pieces) + r"\{[ \t\r\n]*\"(" + "|".join(map(exactly, usual)) + r"|[^\"]*\\)"
            case Arguments():
                return "".join(pieces) + exactly(part.notation.opens)
    return "".join(pieces)
