"""Arguments as elements in elements, read as what the tool's schema says they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.parser.events import ToolSchema
from ingot.text.parser.tagged_arguments import DEEPEST_ELEMENT, LONGEST_ELEMENT_NAME, LONGEST_UNOPENED_ELEMENT
from ingot.text.tool_formats.registry import format_by_name
from tests.text.parser.answers import check_order, cut, parsed, summary

M3 = format_by_name("minimax-m3")
MARK = "]<]minimax[>["
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "of": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
}
PAIR = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": {"type": "boolean"}}
EITHER = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object"}]}


def element(name: str, *inside: str) -> str:
    return f"{MARK}<{name}>{''.join(inside)}{MARK}</{name}>"


def call(*elements: str) -> str:
    return f'{MARK}<tool_call>\n{MARK}<invoke name="f">{"".join(elements)}{MARK}</invoke>\n{MARK}</tool_call>'


def item(*inside: str) -> str:
    return element("item", *inside)


@pytest.mark.parametrize(
    ("schema", "inside", "value"),
    [
        (NODE, element("name", "1") + element("of", item(element("name", "2"))), {"name": "1", "of": [{"name": "2"}]}),
        (NODE, element("other", "1") + element("of", ""), {"other": 1, "of": []}),
        (PAIR, item("1") + item("2") + item("true"), ["1", 2, True]),
        (PAIR, element("x", "1") + element("y", "2"), ["1", 2]),
        (EITHER, item("1"), ["1"]),
        (EITHER, element("a", "1"), {"a": 1}),
        (EITHER, "", []),
        ({"type": "object", "additionalProperties": {"type": "string"}}, element("a", "1"), {"a": "1"}),
        ({"type": "object"}, element("item", "1"), {"item": 1}),
        ({"type": "object"}, "\n", {}),
        ({"type": ["integer", "null"]}, "", None),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "", ""),
        ({"type": "integer"}, item("1"), [1]),
        ({"type": "string"}, item("1"), item("1")),
        ({"type": ["string", "null"]}, "", ""),
        ({"type": ["string", "array"]}, " a", " a"),
        ({"type": ["string", "array"]}, item("a"), ["a"]),
        ({}, item(element("a", "b")) + item("null"), [{"a": "b"}, None]),
        ({}, "", ""),
    ],
)
def test_a_value_is_what_its_schema_says(schema: dict[str, Any], inside: str, value: Any) -> None:
    tool = ToolSchema("f", {"type": "object", "properties": {"v": schema}, "$defs": {"node": NODE}})
    assert summary(parsed(M3, [call(element("v", inside))], [tool])) == [("calls", "f", {"v": value})]


def test_elements_are_told_as_they_come() -> None:
    text = call(element("v", item("one"), item(element("a", "so"))))
    assert summary(parsed(M3, [text[: text.index("so") + 1]])) == [("breaks", "f", '{"v": ["one", {"a": "s')]


def test_only_so_many_elements_stand_within_one_another() -> None:
    inside = "x"
    for _ in range(DEEPEST_ELEMENT):
        inside = item(inside)
    assert summary(parsed(M3, [call(element("v", inside))]))[0][0] == "calls"
    [(said, *_), _] = summary(parsed(M3, [call(element("v", item(inside)))]))
    assert said == "breaks"


@pytest.mark.parametrize(
    "bad",
    [
        element("n" * 2 * LONGEST_ELEMENT_NAME, ""),
        f"{MARK}{'x' * (LONGEST_UNOPENED_ELEMENT + 1)}{MARK}</v>",
        element("", "x"),
    ],
)
def test_what_makes_no_element_is_text(bad: str) -> None:
    story = summary(parsed(M3, [call(element("a", "1"), bad)]))
    assert story[0] == ("breaks", "f", '{"a": 1')
    assert story[1][0] == "says" and story[1][1].startswith(bad)


TAGS = st.sampled_from(["a", "b", "item", "/a", "", "invoke"])
PIECES = st.one_of(
    TAGS.map(lambda name: f"{MARK}<{name}>"),
    TAGS.map(lambda name: f"{MARK}</{name}>"),
    st.sampled_from(
        [MARK, "\n", "x", "1", '{"k": "', '"}', "[", "<", f"{MARK}</tool_call>", f'{MARK}<invoke name="f">']
    ),
)


@given(pieces=st.lists(PIECES, max_size=20), places=st.lists(st.integers(0, 300), max_size=12))
def test_whatever_elements_are_made_of_is_read_the_same_in_any_pieces(pieces: list[str], places: list[int]) -> None:
    kinds = {"a": {"type": "string"}, "b": {"type": "array"}}
    tools = [ToolSchema("f", {"type": "object", "properties": kinds})]
    text = f'{MARK}<tool_call>{MARK}<invoke name="f">' + "".join(pieces)
    whole = parsed(M3, [text], tools)
    check_order(whole)
    summary(whole)
    assert parsed(M3, cut(text, places), tools) == whole == parsed(M3, text, tools)
