"""Values in every notation become the JSON that they mean, in any pieces."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.parser.arguments import ANY_TYPE, STRING_TYPE, JsonTypes
from ingot.text.parser.values import DEEPEST_VALUE, JsonTranscriber, TextValue, escape_json_text
from ingot.text.tool_formats.format import JSON, PYTHON, Notation, unescaped_notation
from tests.text.parser.answers import cut

GEMMA = unescaped_notation('<|"|>')
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def read(transcriber: JsonTranscriber, pieces: list[str]) -> tuple[str, str]:
    """What was written, and what was left unread."""
    unread, written = "", ""
    for piece in pieces:
        unread += piece
        unread = unread[transcriber.feed(unread, 0) :]
        written += transcriber.take()
    return written, unread


def arguments(notation: Notation, text: str) -> Any:
    transcriber = JsonTranscriber.of_arguments(notation)
    whole = read(transcriber, [text])
    assert read(JsonTranscriber.of_arguments(notation), list(text)) == whole
    assert transcriber.progress == "done" and whole[1] == ""
    return json.loads(whole[0])


def fails(notation: Notation, text: str) -> bool:
    ends = set()
    for pieces in ([text], list(text)):
        transcriber = JsonTranscriber.of_arguments(notation)
        read(transcriber, pieces)
        ends.add(transcriber.progress)
    assert len(ends) == 1
    return ends == {"failed"}


@given(OBJECTS, st.booleans(), st.sampled_from([None, 2]), st.lists(st.integers(0, 200)))
def test_json_is_written_as_it_stands(value: Any, ascii: bool, indent: int | None, places: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    transcriber = JsonTranscriber.of_arguments(JSON)
    assert read(transcriber, cut(text + " rest", places)) == (text, " rest")
    assert transcriber.progress == "done"


@given(st.text(alphabet='{}[]":,\\ntrue1-.eE u"\n'), st.lists(st.integers(0, 50)))
def test_what_is_taken_for_json_is_json_and_the_rest_is_not(text: str, places: list[int]) -> None:
    text = "{" + text
    transcriber = JsonTranscriber.of_arguments(JSON)
    written, unread = read(transcriber, cut(text, places))
    taken = text[: len(text) - len(unread)]
    if transcriber.progress == "done":
        assert json.loads(written) == json.loads(taken, strict=False)
    elif transcriber.progress == "failed":
        with pytest.raises(ValueError):
            json.loads(text, strict=False)


@given(VALUES)
def test_what_python_writes_is_read_as_python_means_it(value: Any) -> None:
    transcriber = JsonTranscriber.of_value(PYTHON)
    written, unread = read(transcriber, [repr(value) + ","])
    assert transcriber.progress == "done" and unread == ","
    assert json.loads(written) == value


@given(st.text(alphabet="abx0189'\"\\nNuU{}\n é", max_size=12), st.sampled_from(["'", '"', '"""', "'''"]))
def test_a_python_string_means_what_python_says(text: str, quote: str) -> None:
    literal = quote + text + quote
    transcriber = JsonTranscriber.of_value(PYTHON)
    written, unread = read(transcriber, [literal, ","])
    try:
        meant = ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return
    if isinstance(meant, str) and transcriber.progress == "done" and unread == ",":
        assert json.loads(written) == meant
    else:  # two strings side by side are one in Python
        assert "''" in literal or '""' in literal or "' '" in literal or '" "' in literal or "\\N" in literal


def test_keys_may_be_bare_or_quoted_where_the_notation_says_so() -> None:
    assert arguments(PYTHON, """(a-b = 1, 'c d'=2, "e"={"f": 3})""") == {"a-b": 1, "c d": 2, "e": {"f": 3}}
    assert arguments(GEMMA, '{a:1,<|"|>b c<|"|>:{d:2}}') == {"a": 1, "b c": {"d": 2}}
    assert fails(JSON, "{a: 1}")
    assert fails(PYTHON, "(a={b: 1})")


def test_strings_between_markers_hold_anything_but_the_marker() -> None:
    assert arguments(GEMMA, '{a:<|"|>"\\n}<|"<|"|>}') == {"a": '"\\n}<|"'}


def test_raw_line_breaks_in_strings_are_escaped() -> None:
    assert arguments(JSON, '{"a": "1\n2\t3\x00"}') == {"a": "1\n2\t3\x00"}


@pytest.mark.parametrize("text", ['{"a": [1, 2],}', '{"a": [1, 2 , ] , }', '{"a": [1,2,\n],\n}'])
def test_a_comma_before_a_closing_bracket_is_left_out(text: str) -> None:
    assert arguments(JSON, text) == {"a": [1, 2]}
    assert arguments(PYTHON, text.replace('{"a":', "(a=").replace("}", ")")) == {"a": [1, 2]}


def test_parentheses_may_stand_for_braces_where_the_notation_says_so() -> None:
    assert arguments(GEMMA, "(a=1, b='(x)', c=New York, d={e:[f]})") == {
        "a": 1,
        "b": "(x)",
        "c": "New York",
        "d": {"e": ["f"]},
    }
    assert fails(GEMMA, "(a=1}")
    assert fails(JSON, '("a": 1)')


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"a" 1}',
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": +1 }',
        '{"a": NaN }',
        '{"a": True }',
        '{"a": tru }',
        '{"a": "\\x41"}',
        '{"a": "\\u12g4"}',
        '{"a": 1,,}',
        '{"a": [,]}',
        "{,}",
        '{"a": [1}',
        "{'a': 1}",
        '{"a": 1]',
        '{"a": %s }' % ("1" * 5000),
    ],
)
def test_what_is_not_json_fails(text: str) -> None:
    assert fails(JSON, text)


def test_half_a_word_is_given_back() -> None:
    transcriber = JsonTranscriber.of_arguments(JSON)
    written, unread = read(transcriber, ['{"a": tr', "oops}"])
    assert (written, transcriber.unwritten + unread) == ('{"a": ', "troops}")


def test_nesting_has_an_end() -> None:
    assert fails(JSON, '{"a": ' + "[" * DEEPEST_VALUE)
    inner = DEEPEST_VALUE - 1
    assert arguments(JSON, '{"a": ' + "[" * inner + "]" * inner + "}")


@given(st.text(alphabet=st.characters()))
def test_escaped_text_can_always_be_sent_and_read(text: str) -> None:
    assert json.loads(f'"{escape_json_text(text)}"') == text
    escape_json_text(text).encode()


def test_a_lone_surrogate_is_escaped() -> None:
    assert escape_json_text("a\ud800é") == "a\\ud800\\u00e9"
    assert arguments(PYTHON, "(a='\\ud800')") == {"a": "\ud800"}


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
        ("true", list(ANY_TYPE), True),
        ("True", list(ANY_TYPE), "True"),
        ('"quoted"', list(ANY_TYPE), '"quoted"'),
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
    for kinds in (ANY_TYPE, ANY_TYPE - STRING_TYPE, frozenset({"integer"}), frozenset({"string", "null"})):
        whole = "".join(fragments([text], kinds, "\n"))
        assert "".join(fragments(list(text), kinds, "\n")) == whole
        json.loads(whole)


def test_only_one_line_break_on_each_side_is_the_frame() -> None:
    assert value_of("\n\na\n\n", "string", frame="\n") == "\na\n"
    assert value_of("a", "string", frame="\n") == "a"
    assert value_of("\n", "string", frame="\n") == ""
    assert value_of("\n\n", "string", frame="\n") == ""


def test_a_string_streams_and_other_types_wait_until_they_are_certain() -> None:
    assert fragments(list("abc"), STRING_TYPE) == ['"', "a", "b", "c", '"']
    assert fragments(list("123"), frozenset({"integer"})) == ["123"]
    assert fragments(["nu", "ts", " a"], frozenset({"string", "null"})) == ['"nuts', " a", '"']
