"""Arguments that are elements within elements follow their schemas, and are read back as they were written."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ingot.errors import Unsupported
from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.events import PastCall, ToolSchema
from ingot.text.tool_formats.format import Elements
from ingot.text.tool_formats.registry import format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.grammar.walks import Walker, allowed, byte_tokenizer
from tests.text.parser.answers import parsed, summary

M3 = format_by_name("minimax-m3")
[PART] = [part for part in M3.forms[0].call if isinstance(part, Elements)]
TOKENIZER = byte_tokenizer(PART.mark, "<tool_call>", "</tool_call>")
NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
PAIR = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, TOKENIZER.vocab_size)
    yield made
    made.close()


def parameters(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False, **more}


def grammar_of(grammars: Grammars, root: dict[str, Any], *, strict: bool = True) -> CompiledGrammar:
    grammar = grammars.tools(M3, [GrammarTool("f", root, strict=strict)], "required", parallel=False)
    assert grammar is not None
    return grammar


def read(text: str, root: dict[str, Any]) -> Any:
    [(said, name, arguments)] = summary(parsed(M3, [text], [ToolSchema("f", root)]))
    assert (said, name) == ("calls", "f"), text
    return arguments


def written(grammar: CompiledGrammar, seed: int) -> str:
    walker = Walker(TOKENIZER, random.Random(seed), soft=60, closers=[PART.mark, "</"])
    return b"".join(map(TOKENIZER.token_bytes, walker.answer(grammar))).decode(errors="replace")


def allows(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.begin()
    for token in TOKENIZER.encode(text, add_special=False):
        mask = matcher.mask()
        if mask is None or token not in allowed(mask, TOKENIZER.vocab_size):
            return False
        matcher.accept(token)
    return matcher.done


@pytest.mark.parametrize(
    "root",
    [
        parameters(PAIR),
        parameters({"type": "array", "items": PAIR, "minItems": 1, "maxItems": 3}),
        parameters({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
        parameters({"anyOf": [{"type": "array", "items": {"enum": ["a", "null", ""]}}, {"type": "null"}]}),
        parameters({"type": ["object", "null"], "properties": {"a": {"const": 1.5}}, "additionalProperties": False}),
        parameters({"anyOf": [PAIR, {"type": "array", "items": PAIR}]}),
        parameters({"anyOf": [PAIR, {"type": "integer"}]}),
        parameters({"type": "object", "additionalProperties": {"type": "integer"}}),
        parameters({"type": "object"}),
        parameters({"enum": [[1], {"a": "b"}, None, 2]}),
        parameters({"type": "array", "maxItems": 0}),
        parameters({"type": ["string", "null"], "maxLength": 4}),
        parameters({"$ref": "#/$defs/node"}, **{"$defs": {"node": NODE}}),
        {"type": "object", "properties": {"a>b": PAIR, "/c": {"type": "string"}}, "required": ["a>b"]},
        {"type": "object", "additionalProperties": {"type": "array", "items": PAIR}},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ],
    ids=lambda root: json.dumps(root)[:60],
)
def test_what_a_strict_schema_allows_is_read_back_as_valid(grammars: Grammars, root: dict[str, Any]) -> None:
    grammar = grammar_of(grammars, root)
    for seed in range(8):
        Draft202012Validator(root).validate(read(written(grammar, seed), root))


@pytest.mark.parametrize(
    ("root", "value"),
    [
        (parameters(PAIR), {"n": 3, "b": False}),
        (parameters({"type": "array", "items": PAIR}), [{"n": 4, "b": True}, {"n": 5, "b": False}]),
        (parameters({"type": "array", "items": PAIR}), []),
        (
            parameters({"$ref": "#/$defs/node"}, **{"$defs": {"node": NODE}}),
            {"name": "a", "left": {"name": "b", "left": None}, "more": [{"name": "", "more": []}]},
        ),
    ],
)
def test_a_grammar_allows_what_the_family_writes(grammars: Grammars, root: dict[str, Any], value: Any) -> None:
    text = render_calls(M3, [PastCall("f", {"v": value})])
    assert allows(grammar_of(grammars, root), text)
    assert read(text, root) == {"v": value}


@pytest.mark.parametrize(
    ("root", "value"),
    [
        (parameters(PAIR), {"n": 2, "b": True}),
        (parameters(PAIR), {"n": 3}),
        (parameters(PAIR), {"n": 3, "b": True, "c": 1}),
        (parameters({"type": "array", "items": PAIR, "maxItems": 1}), [{"n": 4, "b": True}, {"n": 5, "b": False}]),
        (parameters({"type": "array", "items": {"type": "integer"}, "minItems": 1}), []),
    ],
)
def test_a_grammar_forbids_elements_that_the_schema_does(grammars: Grammars, root: dict[str, Any], value: Any) -> None:
    assert not allows(grammar_of(grammars, root), render_calls(M3, [PastCall("f", {"v": value})]))


def test_a_string_or_a_list_may_be_either_and_is_refused_where_the_list_must_be_enforced(grammars: Grammars) -> None:
    root = parameters({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
    grammar = grammar_of(grammars, root, strict=False)
    for value in ("a", ["a"], ["a", "b"]):
        text = render_calls(M3, [PastCall("f", {"v": value})])
        assert allows(grammar, text) and read(text, root) == {"v": value}
    with pytest.raises(Unsupported, match="items"):
        grammar_of(grammars, root)
