"""A few hundred schemas: what their grammars allow is valid, and what is valid and written plainly they allow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.limits import plain_schema, problem_path
from tests.text.grammar.schemas import Schema, schemas
from tests.text.grammar.walks import Walker, allowed, byte_tokenizer

TOKENIZER = byte_tokenizer()
AWAITED = ("x", "éa", "$1.00", "@", "1", "2")
"""What patterns, formats and multiples wait for, which a walk that wants to end would not find."""


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, TOKENIZER.vocab_size)
    yield made
    made.close()


def check(text: str, schema: Schema) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(text))


@given(schema=schemas(), seed=st.integers(0, 1000))
def test_every_answer_that_a_schemas_grammar_allows_is_valid(grammars: Grammars, schema: Schema, seed: int) -> None:
    try:
        grammar = grammars.json_schema(schema)
    except BadRequest as error:
        assert "no value can satisfy it" in error.message or "oneOf" in error.message, (error.message, schema)
        return
    walker = Walker(TOKENIZER, random.Random(seed), soft=60, closers=AWAITED)
    for _ in range(2):
        check(TOKENIZER.decode(walker.answer(grammar)), schema)


PERSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": -50, "maximum": 1000},
        "name": {"type": "string", "maxLength": 20},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 3]}, "maxItems": 4},
        "inner": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"ok": {"type": "boolean"}}}]},
    },
    "required": ["id", "name"],
    "additionalProperties": False,
}
PRINTABLE = st.text(max_size=20).filter(str.isprintable)
PEOPLE = st.fixed_dictionaries(
    {"id": st.integers(-50, 1000), "name": PRINTABLE},
    optional={
        "score": st.integers(0, 1000).map(lambda thousandths: thousandths / 1000),
        "tags": st.lists(st.sampled_from(["a", "b", None, 3]), max_size=4),
        "inner": st.one_of(st.none(), st.fixed_dictionaries({}, optional={"ok": st.booleans()})),
    },
)


@given(value=PEOPLE)
def test_valid_values_are_allowed_where_their_keys_come_in_order(grammars: Grammars, value: dict[str, Any]) -> None:
    ordered = {key: value[key] for key in PERSON["properties"] if key in value}  # type: ignore[attr-defined]
    matcher = grammars.json_schema(PERSON).begin()
    for token in TOKENIZER.encode(json.dumps(ordered, ensure_ascii=False), add_special=False):
        mask = matcher.mask()
        assert mask is not None and token in allowed(mask, TOKENIZER.vocab_size), ordered
        matcher.accept(token)
    assert matcher.done


NAMES = st.sampled_from(["p", "q", "pq", "x", ""])
LEAF = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["string", "integer", "number", "object", "array", "null", ["string", "null"]]),
        "enum": st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=3), st.none()), min_size=1, max_size=3),
        "const": st.one_of(st.integers(), st.text(max_size=3), st.just([1, {"a": None}])),
        "minimum": st.floats(-1e6, 1e6),
        "exclusiveMaximum": st.floats(-1e6, 1e6),
        "multipleOf": st.sampled_from([1, 3, 0.5, 0.01]),
        "minLength": st.integers(0, 30),
        "pattern": st.sampled_from(["a", "^b*$", "(?=c)", "[", r"\bword\b", r"^\p{L}+$"]),
        "format": st.sampled_from(["date", "ipv6", "hostname", "uri", "regex", "nonsense"]),
        "uniqueItems": st.booleans(),
        "maxItems": st.integers(0, 5),
        "minProperties": st.integers(0, 3),
        "unknownKeyword": st.integers(),
    },
)
# Each keyword rarely, or every schema would hold one that is refused.
TREE = st.builds(
    lambda leaf, more: {**leaf, **more},
    LEAF.map(lambda leaf: dict(list(leaf.items())[:2])),
    st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, LEAF, max_size=3),
            "patternProperties": st.dictionaries(st.sampled_from(["^p", "q$", "^x$"]), LEAF, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), LEAF),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "items": st.one_of(st.booleans(), LEAF),
            "anyOf": st.lists(LEAF, min_size=1, max_size=3),
            "allOf": st.lists(LEAF, min_size=1, max_size=2),
            "oneOf": st.lists(LEAF, min_size=1, max_size=2),
            **dict.fromkeys(("contains", "propertyNames", "not", "if"), LEAF),
        },
    ).map(lambda more: dict(list(more.items())[:2])),
)


@given(schema=TREE, seed=st.integers(0, 1000))
def test_any_schema_at_all_is_enforced_or_refused(grammars: Grammars, schema: Schema, seed: int) -> None:
    """Schemas that no person would write; many are refused."""
    try:
        grammar = grammars.json_schema(schema)
    except BadRequest:
        return
    text = TOKENIZER.decode(Walker(TOKENIZER, random.Random(seed), soft=40, closers=AWAITED).answer(grammar))
    jsonschema.Draft7Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"type": "array", "maxItems": 2.0}, {"type": "array", "maxItems": 2}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
        ({"type": "array", "uniqueItems": True}, {"type": "array", "uniqueItems": True}),
        ({"properties": {"format": {"format": "path"}}}, {"properties": {"format": {}}}),
        ({"const": {"format": "path"}}, {"const": {"format": "path"}}),
    ],
)
def test_what_only_annotates_is_left_out_of_a_schema(schema: dict[str, Any], plain: dict[str, Any]) -> None:
    assert plain_schema(schema) == plain


def test_a_problem_is_found_in_the_schema_by_its_keyword_or_by_the_value_that_it_quotes() -> None:
    item = {"format": "uuid4", "uniqueItems": True}
    schema = {"properties": {"a": {"format": "date"}, "uniqueItems": {"items": item}}}
    assert problem_path(schema, "it uses uniqueItems, which") == "properties.uniqueItems.items.uniqueItems"
    assert problem_path(schema, "the format 'uuid4' is not known") == "properties.uniqueItems.items.format"
    assert problem_path(schema, "something else") is None
