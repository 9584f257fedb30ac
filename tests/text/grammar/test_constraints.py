"""Calls that are not written as JSON follow their schemas, strict or not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ingot.errors import BadRequest
from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.parser.events import PastCall, ToolCallArguments, ToolSchema, call_id_maker, merge_events
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.grammar.test_calls import closers, vocabulary, written
from tests.text.grammar.walks import Walker

Make = Callable[[bool], Grammars]
# One of each way of writing: with a line around values, with tags around keys, with types said, no tags at all, and
# tags at any depth.
OWN_NOTATION = ["qwen3-coder", "glm", "deepseek-v3.2", "gemma4", "minimax-m3"]


@pytest.fixture(scope="module")
def made() -> Iterator[Make]:
    known = {special: Grammars(vocabulary(special), vocabulary(special).vocab_size) for special in (False, True)}
    yield known.__getitem__
    for grammars in known.values():
        grammars.close()


def tool(value: Any, *, strict: bool) -> GrammarTool:
    schema = {"type": "object", "properties": {"v": value}, "required": ["v"], "additionalProperties": False, **DEFS}
    return GrammarTool("f", schema, strict=strict)


_TREE = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}
DEFS = {
    "$defs": {
        "word": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "count": {"type": "integer", "minimum": 3},
        "tree": {
            "type": "object",
            "properties": {"left": _TREE, "right": _TREE},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "null"}]},
        "growing": {
            "type": "object",
            "properties": {"a": {"allOf": [{"$ref": "#/$defs/growing"}, {"properties": {"a": {"type": "object"}}}]}},
        },
    }
}
VALUES: list[Any] = [
    {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "string", "pattern": "[0-9]"},
    {"type": "string", "pattern": "^(yes|no)$|^maybe"},
    {"type": "string", "minLength": 3},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "pattern": "^[ab]*$", "minLength": 3},
    {"allOf": [{"$ref": "#/$defs/word"}], "description": "A word."},
    {"$ref": "#/$defs/word", "maxLength": 3},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}, {"pattern": "^x"}]},
    {"allOf": [{"$ref": "#/$defs/count"}, {"maximum": 5}]},
    {"type": ["array", "null"], "items": {"type": "integer"}},
    {"type": ["string", "null"], "pattern": "^[a-z]{2,4}$"},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 6}, {"type": "null"}]},
    {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
    {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 40}, {"type": "null"}]},
    {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/word"}}, {"type": "null"}]},
    {"anyOf": [{"enum": ["one", "two"]}, {"type": "null"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"$ref": "#/$defs/word"}},
    {
        "type": "object",
        "properties": {"w": {"allOf": [{"$ref": "#/$defs/word"}]}, "n": {"type": ["integer", "null"], "minimum": 2}},
        "required": ["w", "n"],
        "additionalProperties": False,
    },
]


def arguments(made: Make, name: str, special: bool, one: GrammarTool, count: int = 2) -> Iterator[Any]:
    """Of random calls that the grammar allows."""
    format, tokenizer = format_by_name(name), vocabulary(special)
    grammar = made(special).tools(format, [one], "required", parallel=False)
    assert grammar is not None
    walker = Walker(tokenizer, random.Random(name), soft=30, closers=closers(format))
    for _ in range(count):
        yield read(format, one, written(format, tokenizer, walker.answer(grammar)))


def read(format: Format, one: GrammarTool, text: str) -> Any:
    tools = [ToolSchema(one.name, one.parameters)]
    parser = Parser(format, tools=tools, thinking=ThinkingStart.UNOPENED, ids=call_id_maker(format.ids))
    events = merge_events([*parser.push(text), *parser.flush()])
    return json.loads("".join(event.fragment for event in events if isinstance(event, ToolCallArguments)))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("value", VALUES, ids=json.dumps)
@pytest.mark.parametrize("strict", [False, True], ids=["lax", "strict"])
@pytest.mark.parametrize("name", OWN_NOTATION)
def test_a_forced_call_keeps_to_what_the_schema_says(made: Make, name: str, strict: bool, value: Any) -> None:
    one = tool(value, strict=strict)
    for special in (False, True):
        for found in arguments(made, name, special, one):
            Draft202012Validator(dict(one.parameters)).validate(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strict", [False, True], ids=["lax", "strict"])
@pytest.mark.parametrize("name", OWN_NOTATION)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "string", "minLength": 2, "maxLength": 5}},
        {"type": "object", "required": ["k"], "additionalProperties": {"type": "boolean"}},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
        {"properties": {"a": {"type": "integer"}}, "allOf": [{"required": ["a"]}]},
    ],
    ids=json.dumps,
)
def test_so_do_the_arguments_as_a_whole(made: Make, name: str, strict: bool, schema: dict[str, Any]) -> None:
    one = GrammarTool("f", schema, strict=strict)
    for special in (False, True):
        for found in arguments(made, name, special, one):
            Draft202012Validator(schema).validate(found)


@pytest.mark.parametrize("name", OWN_NOTATION)
@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"type": "string", "pattern": "^[a-z ]+$"}, "so it goes"),
        ({"type": "string", "pattern": "a.c/d"}, "x abc/d y"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "some\ntext"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ({"type": ["array", "null"], "items": {"type": "string"}}, ["a", "b"]),
        ({"type": ["array", "null"], "items": {"type": "string"}}, None),
        ({"$ref": "#/$defs/tree"}, {"left": {"left": None, "right": None}, "right": None}),
    ],
    ids=json.dumps,
)
def test_a_value_that_the_schema_allows_can_be_written(made: Make, name: str, value: Any, good: Any) -> None:
    follow(made, name, value, good)


@pytest.mark.parametrize(
    "name", [name for name in OWN_NOTATION if name != "minimax-m3"]
)  # whose tags would repeat them
def test_so_can_members_that_the_schema_does_not_name(made: Make, name: str) -> None:
    follow(made, name, {"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1, "b": 2})


def follow(made: Make, name: str, value: Any, good: Any) -> None:
    format, tokenizer, one = format_by_name(name), vocabulary(False), tool(value, strict=True)
    text = render_calls(format, [PastCall("f", {"v": good})])
    matcher = made(False).tools(format, [one], "required", parallel=False).begin()  # type: ignore[union-attr]
    for token in tokenizer.encode(text, add_special=False):
        matcher.accept(token)
    assert matcher.done
    assert read(format, one, text) == {"v": good}


@pytest.mark.parametrize("name", OWN_NOTATION)
@pytest.mark.parametrize("pattern", ["(?=a)b", r"\bword\b", "(a)\\1", "a^b", "[a", "x{", "a*?"])
def test_a_pattern_that_cannot_be_enforced_is_refused_in_a_strict_schema_alone(
    made: Make, name: str, pattern: str
) -> None:
    value = {"type": "string", "pattern": pattern}
    with pytest.raises(BadRequest, match="pattern"):
        made(False).tools(format_by_name(name), [tool(value, strict=True)], "required", parallel=False)
    assert made(False).tools(format_by_name(name), [tool(value, strict=False)], "required", parallel=False) is not None


@pytest.mark.parametrize("name", OWN_NOTATION)
def test_statements_that_exclude_each_other_are_refused_in_a_strict_schema(made: Make, name: str) -> None:
    value = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    with pytest.raises(BadRequest, match="type"):
        made(False).tools(format_by_name(name), [tool(value, strict=True)], "required", parallel=False)


@pytest.mark.parametrize("name", OWN_NOTATION)
@pytest.mark.parametrize("strict", [False, True], ids=["lax", "strict"])
@pytest.mark.parametrize(
    "value",
    [
        {"enum": []},
        {"type": "integer", "enum": ["a"]},
        {"enum": 5},
        {"type": [{}]},
        {"type": 5},
        {"allOf": 5},
        {"anyOf": 5},
        {"anyOf": [5, None]},
        {"allOf": [{"minimum": "a"}, {"minimum": 3}]},
        {"allOf": [{"properties": []}, {"properties": {}}]},
        {"type": "object", "properties": [1], "required": 5},
        {"type": "string", "pattern": 5},
        {"$ref": "#/nowhere"},
        {"$ref": "#/$defs/circle"},
        {"$ref": "#/$defs/growing"},
        {"$defs": {"a": {"allOf": [{"$ref": "#/properties/v"}]}}, "allOf": [{"$ref": "#/properties/v"}]},
        False,
    ],
    ids=json.dumps,
)
def test_a_schema_that_makes_no_sense_is_refused_or_left_out_and_never_an_accident(
    made: Make, name: str, strict: bool, value: Any
) -> None:
    try:
        made(False).tools(format_by_name(name), [tool(value, strict=strict)], "required", parallel=False)
    except BadRequest as refused:
        assert refused.message
