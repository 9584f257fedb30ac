from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingot.errors import BadRequest, UnknownField, Unsupported
from ingot.protocol.schema.fields import BodyReading, Bool, Int, ListOf, OneOf, Text
from ingot.protocol.schema.objects import (
    Is,
    IsSet,
    Never,
    Not,
    ObjectOf,
    accepts,
    edit_distance,
    find_misspelt_name,
    refuses,
    requires,
    tagged,
    text_or,
)
from ingot.protocol.terms import Terms

TERMS = Terms(models=("m",), vocab=10, timeout_s=1.0)
STRICT = Terms(models=("m",), vocab=10, timeout_s=1.0, strict=True)


@dataclass(frozen=True)
class Inner:
    kind: str = requires(OneOf(("inner",)), "The kind.")
    flag: bool = accepts(Bool(), "A flag.", default=False)


@dataclass(frozen=True)
class Outer:
    name: str = requires(Text(), "A name.")
    count: int = accepts(Int((1, 9)), "A count.", default=1)
    inners: tuple[Inner, ...] = accepts(
        ListOf(tagged("kind", Inner, refused={"outer": "is not possible."}), most=3),
        "More.",
        default=(),
    )
    store: None = refuses("is not supported.", False)


OUTER = ObjectOf(Outer)


def read(value: Any, terms: Terms = TERMS) -> tuple[Outer, list[str]]:
    reading = BodyReading(terms)
    return OUTER.parse(value, "", reading), reading.ignored


def test_a_record_becomes_its_dataclass_with_defaults() -> None:
    assert read({"name": "x"}) == (Outer(name="x"), [])


def test_null_is_the_same_as_nothing_where_a_field_is_optional() -> None:
    assert read({"name": "x", "count": None, "inners": None, "store": None}) == (Outer(name="x"), [])


@pytest.mark.parametrize("body", [{}, {"name": None}])
def test_a_required_field_must_be_there(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as raised:
        read(body)
    assert raised.value.param == "name"


def test_an_unknown_field_is_noted_once_for_a_whole_list() -> None:
    inners = [{"kind": "inner", "zebra": 1}, {"kind": "inner", "zebra": 2}]
    _, ignored = read({"name": "x", "quux": 0, "inners": inners})
    assert sorted(ignored) == ["inners.*.zebra", "quux"]


@pytest.mark.parametrize(
    ("body", "param", "meant"),
    [
        ({"name": "x", "cuont": 1}, "cuont", "count"),
        ({"name": "x", "inners": [{"kind": "inner", "flags": 1}]}, "inners.0.flags", "flag"),
        ({"name": "x", "stores": True}, "stores", "store"),
    ],
)
def test_a_near_miss_is_refused_with_the_right_name(body: dict[str, Any], param: str, meant: str) -> None:
    with pytest.raises(UnknownField, match=f"did you mean '{meant}'") as raised:
        read(body)
    assert raised.value.param == param


def test_a_strict_reading_refuses_every_unknown_field() -> None:
    with pytest.raises(UnknownField, match="quux"):
        read({"name": "x", "quux": 1}, STRICT)


def test_what_cannot_be_honoured_is_refused_by_name_unless_it_asks_for_nothing() -> None:
    assert read({"name": "x", "store": False})[0].store is None
    with pytest.raises(Unsupported, match="store is not supported"):
        read({"name": "x", "store": True})
    with pytest.raises(Unsupported, match=r"inners\.0\.kind: 'outer' is not possible"):
        read({"name": "x", "inners": [{"kind": "outer"}]})


def test_a_tag_that_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadRequest, match='expected "inner"'):
        read({"name": "x", "inners": [{"kind": "odd"}]})


@pytest.mark.parametrize("body", [[], "x", None, 3])
def test_only_an_object_is_a_record(body: Any) -> None:
    with pytest.raises(BadRequest, match="expected an object"):
        read(body)


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"name": "x"}, True),
        ({"name": "x", "count": None, "store": False, "quux": 1}, True),
        ({"name": "x", "store": True}, False),
        ({"count": 1}, False),
        ({"name": "x", "inners": [{"kind": "outer"}]}, False),
    ],
)
def test_the_schema_says_the_same(body: dict[str, Any], valid: bool) -> None:
    assert jsonschema_rs.is_valid(OUTER.schema(TERMS), body) == valid
    assert not jsonschema_rs.is_valid(OUTER.schema(STRICT), {"name": "x", "quux": 1})


@dataclass(frozen=True)
class Pair:
    kind: str = requires(OneOf(("left", "right")), "The kind.")


def test_records_are_told_apart_by_what_their_own_fields_may_hold() -> None:
    kind = tagged("kind", Inner, Pair)
    assert list(kind.records) == ["inner", "left", "right"]
    parsed = [kind.parse({"kind": name}, "", BodyReading(TERMS)) for name in kind.records]
    assert parsed == [Inner("inner"), Pair("left"), Pair("right")]


def test_what_is_said_is_a_text_or_parts() -> None:
    result = text_or(tagged("kind", Inner), least=1)
    assert result.parse("Hi", "", BodyReading(TERMS)) == "Hi"
    assert result.parse([{"kind": "inner"}], "", BodyReading(TERMS)) == (Inner("inner"),)
    with pytest.raises(BadRequest):
        result.parse([], "", BodyReading(TERMS))


objects = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, 2, "", "x", [], {}]), max_size=3
)
conditions = st.recursive(
    st.one_of(
        st.builds(IsSet, st.sampled_from("abc")), st.builds(Is, st.sampled_from("abc"), st.sampled_from([True, 0]))
    ),
    lambda inner: st.builds(Not, inner),
    max_leaves=3,
)
rules = st.lists(conditions, min_size=1, max_size=3).map(lambda made: Never(tuple(made), "No.", param="a"))


@given(rules, objects)
@example(Never((Is("a", 0),), "No.", param="a"), {"a": False})
@example(Never((Is("a", True),), "No.", param="a"), {"a": 1})
def test_a_rule_and_its_schema_agree_on_every_object(rule: Never, value: dict[str, Any]) -> None:
    try:
        rule.check(value)
        accepted = True
    except BadRequest as error:
        assert (error.message, error.param) == ("No.", "a")
        accepted = False
    assert accepted == jsonschema_rs.is_valid(rule.schema(), value)


def test_a_rule_needs_all_its_conditions() -> None:
    rule = Never((IsSet("a"), Not(Is("b", True))), "a needs b.", param="a")
    rule.check({"a": 1, "b": True})
    rule.check({"b": False})
    with pytest.raises(BadRequest, match="a needs b"):
        rule.check({"a": 1})


NAMES = ("model", "messages", "temperature", "top_p", "top_k", "max_tokens", "n", "seed", "repetition_penalty")
WORDS = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("tempreture", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("mesages", "messages"),
        ("tpo_p", "top_p"),
        ("repetition_penality", "repetition_penalty"),
    ],
)
def test_a_slip_or_two_are_recognised(name: str, meant: str) -> None:
    assert find_misspelt_name(name, NAMES) == meant


@pytest.mark.parametrize("name", ["max_new_tokens", "repeat_penalty", "sed", "k", "tokens", "max_tokens_total", ""])
def test_names_that_are_merely_alike_are_not(name: str) -> None:
    assert find_misspelt_name(name, NAMES) is None


@given(WORDS, WORDS)
def test_the_distance_is_the_same_both_ways_and_none_only_between_equals(one: str, other: str) -> None:
    assert edit_distance(one, other, most=9) == edit_distance(other, one, most=9)
    assert (edit_distance(one, other, most=9) == 0) == (one == other)


@given(WORDS, WORDS, WORDS)
def test_the_distance_counts_every_slip(one: str, between: str, other: str) -> None:
    assert edit_distance(one + between, one + "d" + between, most=9) == 1
    assert edit_distance(f"{one}de{other}", f"{one}ed{other}", most=9) == 1
    assert edit_distance(f"{one}d{other}", f"{one}e{other}", most=9) == 1
    assert edit_distance(one + "ddd", one, most=2) is None
