"""Whatever a format's grammar allows, its parser reads back as exactly such calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ingot.errors import BadRequest, Unsupported
from ingot.text.grammar.calls import CallChoice, ForcedCall, GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.events import (
    ContentDelta,
    ParsedEvent,
    PastCall,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegan,
    ToolCallEnded,
    ToolSchema,
    call_id_maker,
    merge_events,
)
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.format import Arguments, Elements, Format, TextParameters
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.grammar.walks import Walker, byte_tokenizer

pytestmark = pytest.mark.sampled(5)
CALLING = [table.name for table in FORMATS if table.can_call]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "exact": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "at": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
TOOLS = (
    GrammarTool("get_weather", WEATHER, strict=True),
    GrammarTool("ping", {}),
    GrammarTool("look-up.2", {"type": "object", "properties": {"q": {"type": "string", "maxLength": 20}}}),
)
BY_NAME = {tool.name: tool for tool in TOOLS}


PLAIN = byte_tokenizer()
MARKERS = {marker for name in CALLING for marker in format_by_name(name).markers}
MARKED = byte_tokenizer(
    *sorted({part for marker in MARKERS for part in re.findall(r"\]<\]\w+\[>\[|<[^<>\s=]+>|\[[A-Z_]+\]", marker)})
)


def vocabulary(special: bool) -> Tokenizer:
    """The same bytes, with the formats' markers as text or as special tokens."""
    return MARKED if special else PLAIN


Make = Callable[[bool], Grammars]


@pytest.fixture(scope="module")
def made() -> Iterator[Make]:
    made = {special: Grammars(vocabulary(special), vocabulary(special).vocab_size) for special in (False, True)}
    yield made.__getitem__
    for grammars in made.values():
        grammars.close()


def closers(format: Format) -> list[str]:
    """What ends a text, or a row of calls, that could go on for ever."""
    found = [part for form in format.forms[:1] for part in form.closing if isinstance(part, str)]
    for part in (part for form in format.forms[:1] for part in form.call):
        match part:
            case TextParameters():
                found += [part.frame + part.value_close, part.end]
            case Elements():
                found += [part.mark, part.end]
            case Arguments() if part.notation.escapes == "none":
                found.append(part.notation.quotes[0])
    return found + ([format.channels.ends[0], format.channels.answer] if format.channels else [])


def written(format: Format, tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text as the engine would hand it to the parser."""
    detokenizer = tokenizer.detokenizer(tokenizer.special_within(format.markers))
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def parsed(format: Format, text: str) -> list[ParsedEvent]:
    tools = [ToolSchema(tool.name, tool.parameters) for tool in TOOLS]
    parser = Parser(format, tools=tools, thinking=ThinkingStart.UNOPENED, ids=call_id_maker(format.ids))
    return merge_events([*parser.push(text), *parser.flush()])


def calls(events: list[ParsedEvent]) -> list[tuple[str, Any]]:
    """The calls; each must be complete, and its arguments valid where its tool is strict."""
    found: list[tuple[str, Any]] = []
    for event in events:
        match event:
            case ToolCallBegan():
                found.append((event.name, ""))
            case ToolCallArguments():
                found[-1] = (found[-1][0], json.loads(event.fragment))
            case ToolCallEnded():
                assert event.complete
    for name, arguments in found:
        assert isinstance(arguments, dict)
        Draft202012Validator(dict(BY_NAME[name].parameters)).validate(arguments)
    return found


def complete_calls(events: list[ParsedEvent]) -> list[tuple[str, Any]]:
    """The same, where the answer may have been cut off."""
    names = {event.index: event.name for event in events if isinstance(event, ToolCallBegan)}
    fragments = {event.index: event.fragment for event in events if isinstance(event, ToolCallArguments)}
    ended = [event.index for event in events if isinstance(event, ToolCallEnded) and event.complete]
    return [(names[index], json.loads(fragments[index])) for index in ended]


def content_text(events: list[ParsedEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta | ReasoningDelta))


def answers(made: Make, name: str, special: bool, choice: CallChoice, *, parallel: bool, count: int) -> Iterator[str]:
    format, tokenizer = format_by_name(name), vocabulary(special)
    grammar: CompiledGrammar | None = made(special).tools(format, TOOLS, choice, parallel=parallel)
    assert grammar is not None
    walker = Walker(tokenizer, random.Random(name), soft=45, closers=closers(format))
    for _ in range(count):
        yield written(format, tokenizer, walker.answer(grammar))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", CALLING)
def test_required_calls_parse_back_as_calls_of_valid_arguments_and_nothing_else(
    made: Make, name: str, special: bool
) -> None:
    for text in answers(made, name, special, "required", parallel=True, count=6):
        events = parsed(format_by_name(name), text)
        assert calls(events) and not content_text(events), text


@pytest.mark.parametrize("name", CALLING)
def test_without_parallel_calls_there_is_exactly_one(made: Make, name: str) -> None:
    for text in answers(made, name, False, "required", parallel=False, count=3):
        assert len(calls(parsed(format_by_name(name), text))) == 1


@pytest.mark.parametrize("name", CALLING)
def test_a_named_function_is_the_one_that_is_called(made: Make, name: str) -> None:
    for text in answers(made, name, False, ForcedCall("get_weather"), parallel=True, count=3):
        [(called, _)] = calls(parsed(format_by_name(name), text))
        assert called == "get_weather"


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", CALLING)
def test_with_strict_tools_a_free_answer_is_text_or_calls_of_valid_arguments(
    made: Make, name: str, special: bool
) -> None:
    for text in answers(made, name, special, "auto", parallel=True, count=5):
        calls(parsed(format_by_name(name), text))


@pytest.mark.parametrize("name", CALLING)
def test_a_free_answer_may_call_and_may_not(made: Make, name: str) -> None:
    """Both of what the format writes itself: a call, and a text that is none."""
    format, tokenizer = format_by_name(name), vocabulary(True)
    grammars: Grammars = made(True)
    forced = grammars.tools(format, TOOLS, ForcedCall("get_weather"), parallel=False)
    free = grammars.tools(format, TOOLS, "auto", parallel=True)
    assert forced is not None and free is not None
    call = Walker(tokenizer, random.Random(5), soft=30, closers=closers(format)).answer(forced)
    opening = format.channels.answer if format.channels else ""
    text = tokenizer.encode(opening + 'It is {"warm"} in [Paris], <b>really</b>.\n{"a": [1]}', add_special=False)
    for tokens in (call, text):
        matcher = free.begin()
        for token in tokens:
            matcher.accept(token)


@pytest.mark.parametrize("name", CALLING)
def test_any_other_form_of_a_call_is_out_of_reach_of_a_free_answer(made: Make, name: str) -> None:
    """Else the model could call around a strict schema."""
    from tests.text.tool_formats.cases import CASES

    format, tokenizer = format_by_name(name), vocabulary(False)
    grammar = made(False).tools(format, TOOLS, "auto", parallel=True)
    for case in CASES:
        if case.format != name:
            continue
        matcher = grammar.begin()
        accepted: list[int] = []
        for token in tokenizer.encode(case.text, add_special=False):
            mask = matcher.mask()
            if not mask[token >> 5] >> (token & 31) & 1:
                break
            matcher.accept(token)
            accepted.append(token)
        for name, arguments in complete_calls(parsed(format, written(format, tokenizer, accepted))):
            Draft202012Validator(dict(BY_NAME[name].parameters)).validate(arguments)


def test_a_letter_is_not_begun_as_an_escape_that_could_only_end_as_a_control_character(made: Make) -> None:
    tokenizer = vocabulary(False)

    def goes(schema: dict[str, Any], text: str) -> bool:
        tool = GrammarTool("note", {"type": "object", "properties": {"t": schema}})
        matcher = made(False).tools(format_by_name("hermes"), [tool], "required", parallel=False).begin()
        for token in tokenizer.encode('<tool_call>\n{"name": "note", "arguments": ' + text, add_special=False):
            mask = matcher.mask()
            if mask is not None and not mask[token >> 5] >> (token & 31) & 1:
                return False
            matcher.accept(token)
        return True

    assert goes({"type": "string"}, '{"t": "ü\\n\\""}') and not goes({"type": "string"}, r'{"t": "\u')
    assert goes({"enum": ["\x1b[0m"]}, r'{"t": "\u001b[0m"}')


def test_nothing_is_constrained_where_no_tool_is_strict(made: Make) -> None:
    lax = [GrammarTool("ping", {})]
    assert made(False).tools(format_by_name("hermes"), lax, "auto", parallel=True) is None


def test_a_function_that_is_not_there_cannot_be_called(made: Make) -> None:
    with pytest.raises(BadRequest, match="fly"):
        made(False).tools(format_by_name("hermes"), TOOLS, ForcedCall("fly"), parallel=False)


def test_a_format_without_calls_cannot_be_forced_to_one(made: Make) -> None:
    with pytest.raises(Unsupported):
        made(False).tools(format_by_name("plain"), TOOLS, "required", parallel=False)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "gemma4", "lfm2", "harmony", "minimax-m3"])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ],
)
def test_a_strict_schema_that_cannot_be_enforced_is_refused_and_another_is_enforced_as_far_as_it_can_be(
    made: Make, name: str, schema: dict[str, Any], named: str
) -> None:
    grammars: Grammars = made(False)
    with pytest.raises(BadRequest, match=named):
        grammars.tools(format_by_name(name), [GrammarTool("f", schema, strict=True)], "required", parallel=False)
    assert grammars.tools(format_by_name(name), [GrammarTool("f", schema)], "required", parallel=False) is not None


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "minimax-m2", "deepseek-v3.2", "seed-oss", "minimax-m3"])
def test_text_parameters_keep_any_text_but_their_closing_tag(made: Make, name: str) -> None:
    """The random answers hold angle brackets, quotes, newlines and half tags, and come back as they were written."""
    format, tokenizer = format_by_name(name), vocabulary(False)
    tool = GrammarTool("note", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    grammar = made(False).tools(format, [tool], "required", parallel=False)
    value = ' <b> "quoted" </para \n\n{"a": 1}</parame & é☃ '
    text = render_calls(format, [PastCall("note", {"text": value})])
    matcher = grammar.begin()
    for token in tokenizer.encode(text, add_special=False):
        matcher.accept(token)
    assert matcher.done
    parser = Parser(
        format,
        tools=[ToolSchema("note", tool.parameters)],
        thinking=ThinkingStart.UNOPENED,
        ids=call_id_maker(format.ids),
    )
    events = merge_events([*parser.push(text), *parser.flush()])
    [fragment] = [event.fragment for event in events if isinstance(event, ToolCallArguments)]
    assert json.loads(fragment) == {"text": value}


@pytest.mark.parametrize("name", ["gemma4", "lfm2", "kimi-k3", "pythonic", "function-gemma"])
def test_parameters_may_have_any_name_where_keys_are_bare_or_escaped(made: Make, name: str) -> None:
    format, tokenizer = format_by_name(name), vocabulary(False)
    arguments = {"größe": 3, "a b": 1, "3d": 2, "x-y.z": 4, "&amp": 5} | ({'R&D"': 6} if name == "kimi-k3" else {})
    schema = {"properties": {key: {"type": "integer"} for key in arguments}, "required": [*arguments]}
    tool = GrammarTool("note", {"type": "object", "additionalProperties": False, **schema}, strict=True)
    text = render_calls(format, [PastCall("note", arguments)])
    matcher = made(False).tools(format, [tool], "required", parallel=False).begin()
    for token in tokenizer.encode(text, add_special=False):
        matcher.accept(token)
    assert matcher.done
    parser = Parser(
        format,
        tools=[ToolSchema("note", tool.parameters)],
        thinking=ThinkingStart.UNOPENED,
        ids=call_id_maker(format.ids),
    )
    events = [*(event for character in text for event in parser.push(character)), *parser.flush()]
    assert complete_calls(merge_events(events)) == [("note", arguments)]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_what_is_wrong_with_a_strict_tool_names_it_and_the_place_in_its_schema(made: Make, name: str) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [GrammarTool("fine", {}), GrammarTool("odd", odd, strict=True)]
    with pytest.raises(BadRequest, match=r"tool 'odd', at properties\.a\.uniqueItems"):
        made(False).tools(format_by_name(name), tools, "required", parallel=False)
    lax = [GrammarTool("odd", odd)]
    assert made(False).tools(format_by_name(name), lax, "required", parallel=False) is not None


def test_formats_that_only_annotate_are_taken_from_strict_tools(made: Make) -> None:
    secret = {"type": "object", "properties": {"key": {"type": "string", "format": "password"}}}
    for name in ("hermes", "qwen3-coder"):
        assert made(False).tools(format_by_name(name), [GrammarTool("f", secret, strict=True)], "auto", parallel=True)
