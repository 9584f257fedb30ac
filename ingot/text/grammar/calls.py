"""Grammars of tool calls, from the tables by which they are parsed.

A forced call is written in the family's first form, to the letter. Where the model may also just answer, the answer
is any text in which no form of the family could begin a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.errors import BadRequest, Unsupported
from ingot.text.grammar.argument_rules import ElementRules, NotationRules, TextParameterRules
from ingot.text.grammar.json_schema import SchemaScope
from ingot.text.grammar.lark import (
    EMPTY_RULE,
    JSON_SPACE,
    LarkRules,
    exact_pattern,
    lark_choice,
    lark_optional,
    lark_sequence,
    pattern_anywhere,
    pattern_at_line_start,
    quote_lark_text,
)
from ingot.text.tool_formats.format import (
    JSON,
    Arguments,
    CallForm,
    CallId,
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
    parts_text,
)

MOST_GAP = 4  # characters of white space that may come behind a call: a model that only breaks lines comes to an end

_USUAL_KEYS = ("name", "tool_name", "type", "id", "tool_call_id", "arguments", "parameters")


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """`strict`: its whole schema is enforced, or the schema is refused. Else what can be enforced of it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """This one function must be called, once."""

    name: str


CallChoice = Literal["auto", "required"] | ForcedCall


def call_grammar(
    rules: LarkRules, format: Format, tools: Sequence[GrammarTool], choice: CallChoice, *, parallel: bool
) -> str:
    """The source of the grammar."""
    if isinstance(choice, ForcedCall):
        tools = [tool for tool in tools if tool.name == choice.name]
        parallel = False
    if not tools:
        raise BadRequest(
            f"There is no tool {choice.name!r}." if isinstance(choice, ForcedCall) else "There are no tools."
        )
    if format.channels is not None:
        return _ChannelCallRules(rules, format.channels, tools).source(free=choice == "auto")
    if not format.forms:
        raise Unsupported(f"Tool calls cannot be forced: the format {format.name} has none.")
    try:
        writer = _TaggedCallRules(rules, format, tools, parallel)
    except RecursionError:
        raise Unsupported("The references of a tool's schema go in circles, or too deep.") from None
    return writer.free() if choice == "auto" else writer.forced()


def lazy_calls_grammar(rules: LarkRules, format: Format, tools: Sequence[GrammarTool], *, parallel: bool) -> str:
    """The source of the grammar of calls that the model begins itself, from their markers on, in any form."""
    if format.channels is not None:
        return _ChannelCallRules(rules, format.channels, tools).from_recipient()
    try:
        return _LooseCallRules(rules, tools, parallel).source(format)
    except RecursionError:
        raise Unsupported("The references of a tool's schema go in circles, or too deep.") from None


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """JSON by a schema, between two texts."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def structural_tags_grammar(rules: LarkRules, tags: Sequence[StructuralTag], triggers: Sequence[str]) -> str:
    """The source of the grammar of free text in which a trigger begins one of its tags."""
    shortest = [one for one in triggers if not any(one != other and one.startswith(other) for other in triggers)]
    without = [pattern_anywhere(exact_pattern(trigger)) for trigger in dict.fromkeys(shortest)]
    sections = []
    for trigger in dict.fromkeys(shortest):
        behind = [
            lark_sequence([rules.literal(tag.begin[len(trigger) :]), rules.json(tag.schema), rules.literal(tag.end)])
            for tag in tags
            if tag.begin.startswith(trigger)
        ]
        if behind:
            sections.append(rules.rule(lark_sequence([rules.text_until(trigger, without), lark_choice(behind)])))
    return rules.source(f"({lark_choice(sections)})* {lark_optional(rules.text(without))}")


class _TaggedCallRules:
    """Calls that markers set apart from the text."""

    def __init__(self, rules: LarkRules, format: Format, tools: Sequence[GrammarTool], parallel: bool) -> None:
        self._rules, self._format, self._tools = rules, format, tools
        self._form = format.forms[0]
        self._many = parallel
        self.call = rules.rule(lark_choice([rules.rule(self._one(tool)) for tool in tools]))

    def forced(self) -> str:
        rules, form = self._rules, self._form
        first = self._section(form.opening)
        if not self._many or form.joint is not None:
            return rules.source(lark_sequence([first, self._ending()]))
        another = rules.rule(lark_sequence([self._space(), self._section(form.opening)]))
        return rules.source(lark_sequence([first, f"({another})*", self._ending()]))

    def free(self) -> str:
        """Text, calls, and text again. A form without a marker of its own makes it either text or calls."""
        rules, form = self._rules, self._form
        beginnings = (pattern for form in self._format.forms for pattern in _call_beginning_patterns(form, self._tools))
        without = list(dict.fromkeys(beginnings))
        text = rules.text(without)
        if form.bare or not form.opening:
            # One literal up to where it can be no text: the lexer takes the longest of the two.
            opening = parts_text(*form.opening)
            first = rules.rule(lark_choice([self._one(tool, opening) for tool in self._tools]))
            return rules.source(f"{text} | {lark_sequence([first, self._further_calls(), self._ending()])}")
        marker, *behind = form.opening
        assert isinstance(marker, str)
        section = rules.rule(lark_sequence([rules.text_until(marker, without), self._section(tuple(behind))]))
        if not self._many:
            return rules.source(f"{section} | {text}")
        return rules.source(f"({section})* {lark_optional(text)}")

    def _section(self, opening: tuple[Part, ...]) -> str:
        return lark_sequence([self._rules.literal(parts_text(*opening)), self.call, self._further_calls()])

    def _further_calls(self) -> str:
        """Further calls under the same opening, and what closes them."""
        rules, joint = self._rules, self._form.joint
        closing = parts_text(*self._form.closing)
        if joint is None or not self._many:
            return rules.literal(closing)
        if not joint[:1].isspace():
            return lark_sequence(
                [f"({rules.rule(lark_sequence([rules.literal(joint), self.call]))})*", rules.literal(closing)]
            )
        # One and the same space before another call and before the closing, so that it does not decide between them.
        another = rules.rule(lark_sequence([self._space(), rules.literal(joint.lstrip()), self.call]))
        end = [self._space(), rules.literal(closing.lstrip())] if closing else []
        return lark_sequence([f"({another})*", *end])

    def _ending(self) -> str:
        """What may come after the last call, where nothing marks it as the last."""
        return EMPTY_RULE if not self._many or (self._form.joint is not None and self._form.closing) else self._space()

    def _space(self) -> str:
        return lark_optional(self._rules.terminal(f"/[ \\t\\r\\n]{{1,{MOST_GAP}}}/"))

    def _one(self, tool: GrammarTool, before: str = "") -> str:
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
                    pieces += [self._rules.literal(head), _json_argument_rules(self._rules, tool), '"}"']
                case Arguments() | TextParameters() | Elements():
                    pieces.append(_argument_rules(self._rules, part, tool, self._form, before))
                case _:
                    before += tool.name if isinstance(part, Name) else parts_text(part)
                    continue
            before = ""
        return lark_sequence([*pieces, self._rules.literal(before)])


class _LooseCallRules:
    """Calls as a model writes them by itself: in any form of its family, with white space wherever it may be."""

    def __init__(self, rules: LarkRules, tools: Sequence[GrammarTool], parallel: bool) -> None:
        self._rules, self._tools, self._many = rules, tools, parallel
        self._space = lark_optional(rules.terminal(f"/{JSON_SPACE}/"))

    def source(self, format: Format) -> str:
        forms = [(form, form.opening) for form in format.forms]
        forms += [(form, form.opening[1:]) for form in format.forms if form.opening_in_prompt]
        sections = [self._section(form, opening) for form, opening in forms if opening]
        sections += [self._call(form) for form in format.forms if not form.opening or form.leading(opened=False)]
        return self._rules.source(lark_choice(list(dict.fromkeys(sections))))

    def _section(self, form: CallForm, opening: tuple[Part, ...]) -> str:
        call, closing = self._call(form), self._plain((Gap(), *form.closing))
        if not form.closing:  # what follows is text, or begins a call of its own
            return lark_sequence([self._plain(opening), call])
        joint = (form.joint or "").strip()
        between = (Gap(), joint, Gap()) if joint else (Gap(),)
        another = self._rules.rule(lark_sequence([self._plain(between), call]))
        more = f"({another})*" if self._many and form.joint is not None else EMPTY_RULE
        return lark_sequence([self._plain(opening), call, more, closing])

    def _call(self, form: CallForm) -> str:
        return self._rules.rule(lark_choice([self._rules.rule(self._one(form, tool)) for tool in self._tools]))

    def _one(self, form: CallForm, tool: GrammarTool) -> str:
        rules = self._rules
        pieces = []
        for part in form.call:
            match part:
                case Name():
                    numbered = [
                        lark_optional(quote_lark_text("functions.")),
                        quote_lark_text(f"{tool.name}:"),
                        "/[0-9]{1,3}/",
                    ]
                    pieces.append(lark_sequence(numbered) if part.numbered else rules.literal(tool.name))
                case Ordinal():
                    number = [rules.literal(part.before), "/[1-9][0-9]{0,2}/", rules.literal(part.after)]
                    pieces.append(lark_optional(lark_sequence(number)))
                case CallId():
                    id = rules.terminal(r"/[A-Za-z0-9_\-]{1,64}/")
                    pieces.append(lark_optional(lark_sequence([rules.literal(part.marker), id])))
                case JsonCall():
                    keys = lark_choice([quote_lark_text(f'"{key}"') for key in ("arguments", "parameters")])
                    head = (
                        quote_lark_text(text) for text in ("{", f'"{part.name_key}"', ":", json.dumps(tool.name), ",")
                    )
                    inside = [
                        *head,
                        keys,
                        quote_lark_text(":"),
                        _json_argument_rules(rules, tool),
                        quote_lark_text("}"),
                    ]
                    pieces.append(f" {self._space} ".join(inside))
                case Arguments() | TextParameters() | Elements():
                    pieces.append(_argument_rules(rules, part, tool, form))
                case _:
                    pieces.append(self._plain((part,)))
        return lark_sequence(pieces)

    def _plain(self, parts: Sequence[Part]) -> str:
        """Parts that do not depend on the call. One space where several may be: which of them it is would be open."""
        pieces: list[str] = []
        for part in parts:
            match part:
                case Gap():
                    pieces += [] if pieces[-1:] == [self._space] else [self._space]
                case Maybe():
                    pieces.append(lark_optional(self._rules.literal(part.text)))
                case _:
                    pieces.append(self._rules.literal(parts_text(part)))
        return lark_sequence(pieces)


class _ChannelCallRules:
    """Calls that are messages of their own."""

    def __init__(self, rules: LarkRules, channels: Channels, tools: Sequence[GrammarTool]) -> None:
        self._rules, self._channels, self._tools = rules, channels, tools
        self._call = _TaggedCallRules(rules, Format("", forms=(CallForm(channels.call),)), tools, parallel=False).call

    def source(self, *, free: bool) -> str:
        """A call, or where the model is `free` any messages and then a call or the answer."""
        rules, channels = self._rules, self._channels
        if not free:
            return rules.source(self._call)
        markers = (channels.start, *channels.begins, *channels.ends, *(channels.bodies if channels.unended else ()))
        without = [pattern_anywhere(exact_pattern(marker)) for marker in markers]
        on = lark_choice([rules.literal(header) for header in channels.asides])
        ended = rules.text_until(f"{channels.ends[0]}{channels.start}{channels.role}", without)
        aside = rules.rule(lark_sequence([on, ended]))
        answer = lark_sequence([rules.literal(channels.answer), lark_optional(rules.text(without))])
        return rules.source(f"({aside})* ({self._call} | {answer})")

    def from_recipient(self) -> str:
        """A call from its recipient on, in any of the headers that models write."""
        rules, channels = self._rules, self._channels
        before, _, behind, _ = channels.call
        assert isinstance(before, str) and isinstance(behind, str)
        channel, [body] = before.partition(channels.recipient)[0].rstrip(), channels.bodies
        headers = (behind, body, channel + behind, channel + body)
        header = rules.rule(lark_choice([rules.literal(text) for text in dict.fromkeys(headers)]))
        calls = [
            lark_sequence([quote_lark_text(tool.name), header, _json_argument_rules(rules, tool)])
            for tool in self._tools
        ]
        return rules.source(lark_sequence([rules.literal(channels.recipient), lark_choice(calls)]))


def _argument_rules(
    rules: LarkRules, part: Arguments | TextParameters | Elements, tool: GrammarTool, form: CallForm, before: str = ""
) -> str:
    """A tool's arguments in the form's own notation, and the text before them."""
    scope = SchemaScope(tool.parameters, tool.strict)
    match part:
        case TextParameters():
            written = TextParameterRules(rules, part, scope, form.closing).parameters()
        case Elements():
            written = ElementRules(rules, part, scope).arguments()
        case Arguments(notation=notation) if notation != JSON:
            return NotationRules(rules, notation, scope).arguments(before)
        case _:
            written = _json_argument_rules(rules, tool)
    return lark_sequence([rules.literal(before), written])


def _json_argument_rules(rules: LarkRules, tool: GrammarTool) -> str:
    return rules.rule(rules.json({"type": "object", **tool.parameters}, lenient=not tool.strict))


def _call_beginning_patterns(form: CallForm, tools: Sequence[GrammarTool]) -> Iterator[str]:
    """Patterns for texts up to what could begin a call: a marker or, without one, enough of the call."""
    if form.opening_in_prompt:
        yield _unmarked_call_pattern((*form.opening[1:], *form.call), tools)
    if form.bare:
        yield pattern_at_line_start(_unmarked_call_pattern((*form.opening, *form.call), tools))
        if form.leading(opened=False) is not None:
            yield pattern_at_line_start(_unmarked_call_pattern(form.call, tools))
        return
    if form.opening and isinstance(form.opening[0], str):
        yield pattern_anywhere(exact_pattern(form.opening[0]))
    leading = form.leading(opened=False)
    if form.repeats and not form.closing:
        # Right behind a call, where every text begins.
        yield from (pattern_anywhere(exact_pattern(marker)) for marker in form.name_markers)
        if leading is not None:
            yield r"[ \t\r\n]*" + _unmarked_call_pattern(form.call, tools)
    if leading is not None and form.unopened != "never":
        # Within a line, too: behind a word or a sentence it begins a call as well.
        yield pattern_anywhere(exact_pattern(leading))


def _unmarked_call_pattern(parts: Iterable[Part], tools: Sequence[GrammarTool]) -> str:
    """A pattern for a call without a marker, up to where it can be nothing else."""
    pieces = []
    for part in parts:
        match part:
            case str():
                pieces.append(exact_pattern(part))
            case Gap():
                pieces.append(r"[ \t\r\n]*")
            case Maybe():
                pieces.append(f"({exact_pattern(part.text)})?")
            case Name():
                pieces.append("(" + "|".join(exact_pattern(tool.name) for tool in tools) + ")")
            case JsonCall():
                # A key may also be written with escapes, so any key that has some counts as one of these.
                usual = dict.fromkeys((*_USUAL_KEYS, part.name_key, part.arguments_key))
                return "".join(pieces) + r"\{[ \t\r\n]*\"(" + "|".join(map(exact_pattern, usual)) + r"|[^\"]*\\)"
            case Arguments():
                return "".join(pieces) + exact_pattern(part.notation.opens)
    return "".join(pieces)
