"""Each kind reads exactly the values that its JSON Schema allows."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingot.errors import BadRequest, IngotError, ModelNotFound, Unsupported
from ingot.protocol.schema.bounds import UNKNOWN_FIELDS
from ingot.protocol.schema.fields import (
    BodyReading,
    Bool,
    Either,
    FieldKind,
    Int,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Refused,
    Text,
    Timeout,
)
from ingot.protocol.schema.model_fields import (
    LogitBiasesField,
    ModelNameField,
    TemplateVariablesField,
    TokenIdsField,
    numeral_pattern,
)
from ingot.protocol.terms import Terms

TERMS = Terms(models=("org/toy", "default"), vocab=300, timeout_s=60.0, template_variables=("mood",))

KINDS: dict[str, FieldKind] = {
    "int": Int((-3, 7)),
    "number": Number((-2.0, 2.0)),
    "timeout": Timeout(0.5),
    "bool": Bool(),
    "text": Text(),
    "short text": Text(4, least=1),
    "one of": OneOf(("a", "b")),
    "refused": Refused("is refused.", (False, [], "")),
    "list": ListOf(Int((0, 3)), most=3, least=1),
    "map": MapOf(Text(3), most=2, key_chars=2),
    "either": Either((Text(3), ListOf(Text(3), most=2), Int((0, 5)))),
    "model": ModelNameField(),
    "tokens": TokenIdsField(most=4),
    "biases": LogitBiasesField((-1.0, 1.0), most=2),
    "template": TemplateVariablesField(),
}

numbers = st.one_of(
    st.integers(-10, 310), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.floats(-3, 8)
)
keys = st.one_of(st.sampled_from(["mood", "1", "299", "300", "01", "-1", ""]), st.text(max_size=3))
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.text(max_size=5), st.sampled_from(["a", "b", "org/toy", "default"])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)


def accepted(kind: FieldKind, value: Any, terms: Terms = TERMS) -> bool:
    try:
        kind.parse(value, "field", BodyReading(terms))
    except IngotError as error:
        assert error.status in (400, 404)
        assert error.param is not None
        assert error.message.endswith(".") and len(error.message) < 500
        return False
    return True


@pytest.mark.parametrize("name", KINDS)
@given(value=values)
@example(value=5.0)
@example(value=True)
@example(value=2**70)
@example(value=[1, 2.0])
@example(value={"mood": "happy"})
def test_a_kind_and_its_schema_agree_on_every_value(name: str, value: Any) -> None:
    kind = KINDS[name]
    assert accepted(kind, value) == jsonschema_rs.is_valid(kind.schema(TERMS), value)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Int((1, 128)), 129, "field: expected an integer from 1 to 128, got 129."),
        (Int((1, 128)), True, "field: expected an integer from 1 to 128, got true."),
        (Number((0.0, 2.0)), "hot", 'field: expected a number from 0 to 2, got "hot".'),
        (Number((0.0, 2.0)), float("nan"), "field: expected a number from 0 to 2, got nan."),
        (Number((0.0, 2.0)), 10**400, "field: expected a number from 0 to 2, got a very large number."),
        (Text(3), "x" * 99, "field: expected a string of 0 to 3 characters, got a string of 99 characters."),
        (OneOf(("a", "b")), None, 'field: expected "a" or "b", got null.'),
        (ListOf(Bool(), most=2), [True] * 3, "field: expected a list of 0 to 2 items, got a list of 3 items."),
    ],
)
def test_a_refusal_states_what_is_allowed(kind: FieldKind, value: Any, words: str) -> None:
    with pytest.raises(BadRequest) as raised:
        kind.parse(value, "field", BodyReading(TERMS))
    assert (raised.value.message, raised.value.param) == (words, "field")


def test_the_path_of_a_refusal_leads_to_the_value() -> None:
    with pytest.raises(BadRequest) as raised:
        ListOf(ListOf(Int((0, 1)), most=9), most=9).parse([[0], [1, 5]], "a", BodyReading(TERMS))
    assert raised.value.param == "a.1.1"


def test_a_model_that_is_not_served_is_a_404_that_lists_what_is() -> None:
    with pytest.raises(ModelNotFound, match="'org/toy', 'default'"):
        ModelNameField().parse("gpt-4", "model", BodyReading(TERMS))


def test_a_known_value_that_cannot_be_honoured_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="'flex' is not offered"):
        OneOf(("auto",), {"flex": "is not offered."}).parse("flex", "service_tier", BodyReading(TERMS))


@given(st.integers(0, 200_000), st.integers(0, 300_000))
def test_the_pattern_of_numerals_ends_exactly_at_its_bound(most: int, tried: int) -> None:
    pattern = re.compile(numeral_pattern(most))
    for number in (tried, most, most + 1, most - 1):
        assert (pattern.search(str(number)) is not None) == (0 <= number <= most)
    assert pattern.search(f"0{most}") is None


def test_schemas_are_plain_json() -> None:
    for kind in KINDS.values():
        json.dumps(kind.schema(TERMS))


def test_the_number_of_unknown_fields_is_bounded() -> None:
    reading = BodyReading(TERMS)
    for count in range(UNKNOWN_FIELDS):
        reading.ignore(f"x{count}")
    with pytest.raises(BadRequest, match="more than"):
        reading.ignore("one too many")
