"""Text of a parameter becomes JSON of the type that is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.parse.text_values import TextValue
from ingot.text.parser.arguments import ANY, STRING, JsonTypes


def fragments(text: list[str], kinds: JsonTypes, frame: str = "") -> list[str]:
    written: list[str] = []
    value = TextValue(kinds, frame, written.append)
    for piece in text:
        value.write(piece)
    value.close()
    return written


def value_of(text: str, *kinds: str, frame: str = "") -> Any:
    allowed: JsonTypes = frozenset(kinds)  # type: ignore[arg-type]
    whole = "".join(fragments([text], allowed, frame))
    assert "".join(fragments(list(text), allowed, frame)) == whole
    return json.loads(whole)


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", ["integer"], 5),
        (" 5\n", ["integer"], 5),
        ("5.0", ["integer"], 5),
        ("5.5", ["integer"], "5.5"),
        ("-12345678901234567890", ["integer"], -12345678901234567890),
        ("five", ["integer"], "five"),
        ("05", ["integer"], "05"),
        ("", ["integer"], ""),
        ("5", ["number"], 5),
        ("5.0", ["number"], 5.0),
        ("1e3", ["number"], 1000.0),
        ("NaN", ["number"], "NaN"),
        ("true", ["boolean"], True),
        ("False", ["boolean"], False),
        ("yes", ["boolean"], "yes"),
        ("1", ["boolean"], "1"),
        ("null", ["null"], None),
        ("None", ["null"], None),
        ("[1, [2]]", ["array"], [1, [2]]),
        ("['a', \"b\", True]", ["array"], ["a", "b", True]),
        ('{"a": {"b": null}}', ["object"], {"a": {"b": None}}),
        ("{'a': 1}", ["object"], {"a": 1}),
        ('{"a": 1}', ["array"], '{"a": 1}'),
        ('{"a": 1', ["object"], '{"a": 1'),
        ('{"a": 1} and', ["object"], '{"a": 1} and'),
        ('["\\u00e9"]', ["array"], ["é"]),
        ('"quoted"', ["string"], '"quoted"'),
        ("  as\n it \t is ", ["string"], "  as\n it \t is "),
        ("5", ["string"], "5"),
        ("null", ["string"], "null"),
        ("null", ["string", "null"], None),
        ("None", ["string", "null"], "None"),
        ("nullable", ["string", "null"], "nullable"),
        ("5", ["string", "integer"], 5),
        ("5 apples", ["string", "integer"], "5 apples"),
        ("[x]", ["string", "array"], "[x]"),
        ("[1]", ["string", "null"], "[1]"),
        ("true", list(ANY), True),
        ("True", list(ANY), "True"),
        ('"quoted"', list(ANY), '"quoted"'),
    ],
)
def test_text_is_converted_where_it_can_be_and_kept_where_not(text: str, kinds: list[str], value: Any) -> None:
    found = value_of(text, *kinds)
    assert (found, type(found)) == (value, type(value))


@given(st.text())
def test_a_string_is_kept_exactly(text: str) -> None:
    assert value_of(text, "string") == text
    assert value_of(f"\n{text}\n", "string", frame="\n") == text
    assert value_of(f"\n{text}\n", "integer", "null", "string", frame="\n") in (text, *_parsed(text))


def _parsed(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError:
        return []


@given(st.text(alphabet="12.5e-tfnulrase[]{}\"':, \\\n", max_size=12))
def test_the_pieces_do_not_matter(text: str) -> None:
    for kinds in (ANY, ANY - STRING, frozenset({"integer"}), frozenset({"string", "null"})):
        whole = "".join(fragments([text], kinds, "\n"))
        assert "".join(fragments(list(text), kinds, "\n")) == whole
        json.loads(whole)


def test_only_one_line_break_on_each_side_is_the_frame() -> None:
    assert value_of("\n\na\n\n", "string", frame="\n") == "\na\n"
    assert value_of("a", "string", frame="\n") == "a"
    assert value_of("\n", "string", frame="\n") == ""
    assert value_of("\n\n", "string", frame="\n") == ""


def test_a_string_streams_and_other_types_wait_until_they_are_certain() -> None:
    assert fragments(list("abc"), STRING) == ['"', "a", "b", "c", '"']
    assert fragments(list("123"), frozenset({"integer"})) == ["123"]
    assert fragments(["nu", "ts", " a"], frozenset({"string", "null"})) == ['"nuts', " a", '"']
