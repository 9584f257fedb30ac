"""Calls without markers are calls only when they are whole; whatever else looks like one is the text it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.parser.events import (
    LONGEST_HELD_ARGUMENTS,
    ContentDelta,
    ParsedEvent,
    ToolCallArguments,
    ToolCallBegan,
    ToolCallEnded,
    merge_events,
)
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from tests.text.parser.answers import check_order, cut, new_parser, parsed, summary

DOUBTED = [table for table in FORMATS if any(form.whole for form in table.forms)]
every_doubted_format = pytest.mark.parametrize("format", DOUBTED, ids=lambda format: format.name)
QWEN = format_by_name("qwen")
CALL = '{"name": "write_file", "arguments": {"path": "a.txt", "content": "one\\ntwo"}}'
WRITTEN = [("calls", "write_file", {"path": "a.txt", "content": "one\ntwo"})]

scraps = st.sampled_from(
    [
        *(
            '{"name": "',
            '{"name": "fly", "arguments": {',
            '{"arguments": {"a": ',
            '"parameters": ',
            "```json\n",
            "```\n",
        ),
        *("```", "``", "<tools>\n", "</tools>", "[", "]", "{", "}", '"', ":", ",", "\\", "json", "python", "xml"),
        *("\n", " ", "1", "true", "Hello", "fly", '"}}', "\n```\n", "~", "é"),
    ]
)


def text_of(events: list[ParsedEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


@every_doubted_format
@given(pieces=st.lists(scraps, max_size=25), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_what_calls_no_given_tool_is_unchanged_text(format: Format, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    for way in ([text], text, cut(text, cuts)):
        events = parsed(format, way)
        assert events == ([ContentDelta(text)] if text else [])


@given(
    before=st.sampled_from(["", "Let me see.\n", "```python\nx = 1\n```\n"]),
    broken=st.lists(st.sampled_from([*'{}[]",:\\', "x", "\n", "ping"]), min_size=1, max_size=6).map("".join),
    at=st.integers(0, len(CALL)),
    fenced=st.booleans(),
    data=st.data(),
)
def test_a_call_with_something_amiss_is_whole_or_unchanged_text(
    before: str, broken: str, at: int, fenced: bool, data: st.DataObject
) -> None:
    body = CALL[:at] + broken + CALL[at:]
    text = before + (f"```json\n{body}\n```\nDone." if fenced else f"{body}\nDone.")
    whole = parsed(QWEN, [text])
    check_order(whole)
    if not any(isinstance(event, ToolCallBegan) for event in whole):
        assert text_of(whole) == text
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parsed(QWEN, text) == whole
    assert parsed(QWEN, cut(text, cuts)) == whole


@pytest.mark.parametrize("written", [CALL, f"```json\n{CALL}\n```", f"<tools>\n{CALL}\n</tools>"])
def test_nothing_of_a_call_or_its_fence_is_ever_told_as_content(written: str) -> None:
    parser = new_parser(QWEN)
    events = [event for character in f"Look:\n{written}\n" for event in parser.push(character)]
    events += parser.flush()
    assert text_of(events) == "Look:"
    assert summary(events) == [*(("says", letter) for letter in "Look:"), *WRITTEN]


@pytest.mark.parametrize("opening", ["", "```json\n", "<tools>\n"])
def test_arguments_that_grow_too_long_to_be_held_stream(opening: str) -> None:
    parser = new_parser(QWEN)
    content = "word " * LONGEST_HELD_ARGUMENTS
    text = opening + json.dumps({"name": "write_file", "arguments": {"content": content}})
    events = [event for piece in cut(text, range(0, len(text), 50)) for event in parser.push(piece)]
    fragment = next(event for event in events if isinstance(event, ToolCallArguments))
    assert LONGEST_HELD_ARGUMENTS < len(fragment.fragment) < LONGEST_HELD_ARGUMENTS + 100
    assert sum(isinstance(event, ToolCallArguments) for event in events) > 100
    assert summary(merge_events([*events, *parser.flush()])) == [("calls", "write_file", {"content": content})]


@pytest.mark.parametrize(
    ("length", "told_as"), [(LONGEST_HELD_ARGUMENTS // 2, "says"), (LONGEST_HELD_ARGUMENTS * 2, "breaks")]
)
def test_what_was_held_is_text_and_what_was_told_is_a_broken_call(length: int, told_as: str) -> None:
    text = '{"name": "write_file", "arguments": {"content": "' + "x" * length + '", oops}}'
    whole = parsed(QWEN, [text])
    assert summary(whole)[0][0] == told_as
    for size in (1, 7, 1000):
        assert parsed(QWEN, cut(text, range(0, len(text), size))) == whole


def test_without_tools_it_is_text() -> None:
    for text in (CALL, f"```json\n{CALL}\n```"):
        assert parsed(QWEN, text, tools=()) == [ContentDelta(text)]


@pytest.mark.parametrize(
    "pieces",
    [['{"na', "tion"], ['{"name": "w', "eather"], ["```", "py"], ["```json\n", "[1"], ["[", "1"], ["<tools", " "]],
)
def test_what_can_no_longer_be_a_call_is_let_go_at_once(pieces: list[str]) -> None:
    parser = new_parser(QWEN)
    events_read = [event for piece in pieces for event in parser.push(piece)]
    assert text_of(events_read) == "".join(pieces).rstrip()


def test_a_call_that_was_taken_back_leaves_no_number_behind() -> None:
    broken = '{"name": "ping", "arguments": {"a": oops}}'
    events = parsed(QWEN, [f"{broken}\n{CALL}"])
    check_order(events)
    assert summary(events) == [("says", broken), *WRITTEN]
    assert [event for event in events if isinstance(event, ToolCallEnded)] == [ToolCallEnded(0)]
