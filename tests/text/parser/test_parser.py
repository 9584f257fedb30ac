"""What the machine promises for every format, beyond the single answers in `formats`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.text.parser.events import (
    ContentDelta,
    PastCall,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegan,
    ToolCallEnded,
    merge_events,
)
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from ingot.text.tool_formats.rendering import render_calls
from ingot.text.tool_formats.shapes import THINK
from tests.text.parser.answers import TOOLS, check_order, cut, new_parser, parsed, summary
from tests.text.work import work

CALLING = [table for table in FORMATS if table.can_call]
TAGGED = [table for table in FORMATS if table.thinking is not None]
MARKED = [table for table in TAGGED if table.can_call and not table.forms[0].bare]
PARIS = PastCall("get_weather", {"city": "Paris", "days": 3, "tags": ["a", "b"], "where": {"x": None}})
FILE = PastCall("write_file", {"path": "a.txt", "content": 'one\n"two" <three> \\ four'})

LONG = 6_000  # characters: enough that what grows faster than the text outweighs all else

every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
every_calling_format = pytest.mark.parametrize("format", CALLING, ids=lambda format: format.name)
every_tagged_format = pytest.mark.parametrize("format", TAGGED, ids=lambda format: format.name)
every_marked_format = pytest.mark.parametrize("format", MARKED, ids=lambda format: format.name)


def called(*calls: PastCall) -> list[tuple[str, str, dict[str, object]]]:
    return [("calls", call.name, dict(call.arguments)) for call in calls]


def joined(format: Format, before: str, calls: str) -> str:
    """Text and calls, as the format sets them apart."""
    if (channels := format.channels) is None:
        return f"{before}\n{calls}"
    return f"{channels.answer}{before}{channels.ends[0]}{channels.start}{channels.role}{calls}"


@every_calling_format
def test_text_may_stand_before_and_after_several_calls(format: Format) -> None:
    text = joined(format, "Let me see.", render_calls(format, [PARIS, FILE])) + "\nDone."
    events = parsed(format, [text])
    check_order(events)
    story = summary(events)
    assert story[:-1] == [("says", "Let me see."), *called(PARIS, FILE)]
    assert story[-1][0] == "says" and story[-1][1].strip() == "Done."


@every_calling_format
def test_without_tools_a_call_is_text(format: Format) -> None:
    text = render_calls(format, [FILE])
    events = parsed(format, [text], tools=())
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    assert len(events) == 1
    assert content == text if format.channels is None and not format.strips else content in text


@every_tagged_format
def test_a_call_inside_a_thinking_part_that_is_closed_is_no_call(format: Format) -> None:
    assert format.thinking is not None
    call = render_calls(format, [PARIS]) if format.can_call else "none"
    for before in ("I could ", "I could:\n", ""):
        text = f"{format.thinking.open}\n{before}{call}\n{format.thinking.close}\n\nNo."
        for pieces in ([text], text):
            assert summary(parsed(format, pieces)) == [("thinks", f"{before}{call}".strip()), ("says", "No.")]


@every_marked_format
def test_a_call_that_begins_a_line_of_a_thinking_part_that_is_never_closed_is_a_call(format: Format) -> None:
    call = render_calls(format, [PARIS, FILE])
    for before in ([], [("thinks", "I must look.")]):
        text = "".join(f"{thought}\n" for _, thought in before) + call
        for size in (1, 3, len(text)):
            events = parsed(format, cut(text, range(0, len(text), size)), thinking=ThinkingStart.OPENED)
            check_order(events)
            assert summary(events) == [*before, *called(PARIS, FILE)]


@every_marked_format
def test_so_is_one_in_a_thinking_part_that_is_closed_with_nothing_behind_it(format: Format) -> None:
    assert format.thinking is not None
    call = render_calls(format, [PARIS, FILE])
    text = f"I must look.\n{call}\n{format.thinking.close}\n\n"
    for size in (1, 3, len(text)):
        pieces = cut(text, range(0, len(text), size))
        events = parsed(format, pieces, thinking=ThinkingStart.OPENED)
        check_order(events)
        assert summary(events) == [("thinks", "I must look."), *called(PARIS, FILE)]
        assert all(event.in_thinking for event in events if isinstance(event, ToolCallBegan))
        parser = new_parser(format, thinking=ThinkingStart.OPENED)
        cut_off = [event for piece in pieces for event in parser.push(piece)] + parser.flush(cut=True)
        assert summary(merge_events(cut_off)) == [("thinks", f"I must look.\n{call}")]


@every_marked_format
def test_within_a_line_or_of_another_tool_or_cut_off_it_stays_thinking(format: Format) -> None:
    whole = render_calls(format, [PARIS])
    quoted = "\n".join(f"> {line}" for line in whole.splitlines())
    for text in (quoted, render_calls(format, [PastCall("fly", {"to": "ping"})]), whole[: len(whole) // 2]):
        for pieces in ([text], text):
            assert summary(parsed(format, pieces, thinking=ThinkingStart.OPENED)) == [("thinks", text)]


@every_marked_format
def test_thinking_goes_on_behind_a_call_within_it(format: Format) -> None:
    call = render_calls(format, [PARIS])
    text = f"One.\n{call}\nTwo.\n{call}\nThree."
    for pieces in ([text], text):
        story = summary(parsed(format, pieces, thinking=ThinkingStart.OPENED))
        assert [each for each in story if each[0] == "calls"] == called(PARIS, PARIS)
        assert [each[1].strip() for each in story if each[0] == "thinks"] == ["One.", "Two.", "Three."]


def test_a_call_around_a_strict_schema_is_none_within_thinking() -> None:
    format, strict = format_by_name("hermes"), [replace(tool, strict=True) for tool in TOOLS]
    call = render_calls(format, [PARIS])
    assert summary(parsed(format, [call], strict, ThinkingStart.OPENED)) == [("thinks", call)]


@every_marked_format
def test_thinking_is_not_held_for_a_marker_that_no_tools_name_follows(format: Format) -> None:
    assert format.thinking is not None
    marker = next(literal for literal in format.forms[0].literals() if literal)
    parser = new_parser(format, thinking=ThinkingStart.OPENED)
    musing = f"{marker} is what it says, " + "and so on and on, " * 40
    events = merge_events([*parser.push(musing), *parser.push("more")])
    assert events == [ReasoningDelta(musing + "more")]


@pytest.mark.sampled(3)
@every_format
@settings(max_examples=25)
@given(text=st.text(alphabet="ab \n\t.,é"))
def test_text_without_markers_is_delivered_exactly(format: Format, text: str) -> None:
    for pieces in ([text], text):
        events = parsed(format, pieces)
        assert events == ([ContentDelta(text)] if text else [])


@every_format
def test_text_is_delivered_as_it_comes(format: Format) -> None:
    parser = new_parser(format)
    first = parser.push("Hello")
    assert first in ([ContentDelta("Hello")], [])  # where the prompt may end with a marker, it could be a name
    assert merge_events(first + parser.push(" there")) == [ContentDelta("Hello there")]
    assert parser.push(", you") == [ContentDelta(", you")]


@pytest.mark.sampled(3)
@every_calling_format
def test_a_call_cut_off_anywhere_ends_with_a_beginning_of_its_arguments(format: Format) -> None:
    text = render_calls(format, [FILE])
    whole = "".join(event.fragment for event in parsed(format, [text]) if isinstance(event, ToolCallArguments))
    for size in range(len(text)):
        events = parsed(format, [text[:size]])
        check_order(events)
        fragments = "".join(event.fragment for event in events if isinstance(event, ToolCallArguments))
        if any(isinstance(event, ToolCallBegan) for event in events):
            assert whole.startswith(fragments)
            assert format.channels is not None or not any(isinstance(event, ContentDelta) for event in events)
        elif size and format.channels is None:
            assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == text[:size]


@every_calling_format
def test_arguments_stream_while_they_are_written(format: Format) -> None:
    text = render_calls(format, [PastCall("write_file", {"content": "word " * 200})])
    parser = new_parser(format)
    events = [event for piece in cut(text, range(0, len(text), 5)) for event in parser.push(piece)]
    fragments = [event for event in events if isinstance(event, ToolCallArguments)]
    assert len(fragments) > 190
    assert sum(isinstance(event, ToolCallBegan) for event in events) == 1


@every_calling_format
def test_a_name_is_announced_before_the_arguments_are_complete(format: Format) -> None:
    text = render_calls(format, [FILE])
    parser = new_parser(format)
    began = next(index for index, piece in enumerate(text) if any(map(_begins, parser.push(piece))))
    assert began < len(text) - len(json.dumps(FILE.arguments["content"]))


def _begins(event: object) -> bool:
    return isinstance(event, ToolCallBegan)


def soup(format: Format) -> st.SearchStrategy[str]:
    """Markers, names, pieces of values and of markers, in any order."""
    scraps = ['{"name": "ping", "arguments": {', '"parameters": ', '""', *'"{}[]():,=\\<>']
    words = ["ping", "get_weather", "city", "true", "None", "12", "Hello", " ", "\n", "function", "all\n"]
    markers = sorted(format.markers | {"<think>", "</think>"})
    halves = [marker[: len(marker) // 2] for marker in markers] + [marker[len(marker) // 2 :] for marker in markers]
    calls = [render_calls(format, [PARIS]), render_calls(format, [PastCall("ping", {})])] if format.can_call else []
    return st.lists(st.sampled_from(scraps + words + markers + markers + halves + calls), max_size=20).map("".join)


@pytest.mark.sampled(3)
@every_format
@given(data=st.data())
def test_any_soup_of_markers_gives_the_same_events_in_any_pieces(format: Format, data: st.DataObject) -> None:
    text = data.draw(soup(format))
    thinking = data.draw(st.sampled_from(ThinkingStart))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    whole = parsed(format, [text], thinking=thinking)
    check_order(whole)
    summary(whole)  # every complete call's arguments are valid JSON
    assert parsed(format, text, thinking=thinking) == whole
    assert parsed(format, cut(text, cuts), thinking=thinking) == whole


def reading(format: Format, text: str, thinking: ThinkingStart) -> int:
    parser = new_parser(format, thinking=thinking)
    pieces = cut(text, range(0, len(text), 20))

    def read() -> None:
        for piece in pieces:
            parser.push(piece)
        parser.flush()

    return work(read)


def grows_linearly(format: Format, text: str, thinking: ThinkingStart = ThinkingStart.UNOPENED) -> bool:
    """Whether eight times the text takes about eight times the work. What is quadratic would take 64 times."""
    return reading(format, text, thinking) < 12 * reading(format, text[: len(text) // 8], thinking)


@pytest.mark.sampled(11)
@every_calling_format
def test_a_long_argument_streams_in_linear_time(format: Format) -> None:
    written = 'x = "1" # <two>\n' * (LONG // 16)
    assert grows_linearly(format, render_calls(format, [PastCall("write_file", {"content": written})]))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"a": "'),
        ("hermes", '<tool_call>{"arguments": {"a": '),
        ("hermes", "<tool_call>\n   "),
        ("hermes", "</think>"),
        ("hermes", "\n "),
        ("hermes", "\n{"),
        ("hermes", "```"),
        ("hermes", "\n```json\n"),
        ("hermes", '\n```json\n{"name": "'),
        ("hermes", '\n{"name": "ping", "arguments": {'),
        ("hermes", '\n{"name": "ping", "arguments": {"a": oops}}'),
        ("hermes", "\n<tools>["),
        ("hermes", "\n[{"),
        ("llama", "{"),
        ("llama", '\n{"name": '),
        ("llama", '{"name": "ping", "parameters": {'),
        ("qwen3-coder", "<function=ping><parameter=a>"),
        ("qwen3-coder", "</parameter>\n"),
        ("qwen3-coder", "<parameter="),
        ("glm", "<tool_call>ping"),
        ("gemma4", '<|"|'),
        ("gemma4", "<|tool_call>call:ping{a:"),
        ("harmony", "<|channel|>"),
        ("harmony", "<|start|><|message|>"),
        ("xlam", "```\n"),
        ("xlam", "[["),
        ("pythonic", "[ping(a='"),
        ("functionary", "<|recipient|>"),
    ],
)
def test_a_hostile_text_costs_linear_time(name: str, unit: str) -> None:
    assert grows_linearly(format_by_name(name), unit * (LONG // len(unit)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("hermes", '\n<tool_call>{"name": "ping", "arguments": {"a": "'),
        ("hermes", '\n<tool_call>{"name": "ping", "arguments": {'),
        ("hermes", "\n<tool_call>"),
        ("qwen3-coder", "\n<function=ping>\n<parameter=a>"),
        ("glm", "\n<tool_call>ping\n<arg_key>"),
    ],
)
def test_hostile_thinking_costs_linear_time(name: str, unit: str) -> None:
    assert grows_linearly(format_by_name(name), unit * (LONG // len(unit)), ThinkingStart.OPENED)


@pytest.mark.parametrize("opening", ["[", '{"a":', "[1,"])
def test_deep_nesting_breaks_a_call_and_not_the_server(opening: str) -> None:
    text = '<tool_call>{"name": "ping", "arguments": {"a": ' + opening * 5_000
    events = parsed(format_by_name("hermes"), [text])
    check_order(events)
    assert summary(events)[0][0] == "breaks"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("llama", ['{"answ', 'er"', ": {"]),
        ("llama", ['{"name"', ': "Ada', '"', ', "age": 3']),
        ("llama", ["{", " x"]),
        ("xlam", ["[", "1,"]),
        ("xlam", ["```", "p", "ython"]),
        ("pythonic", ["[", "link", "]"]),
        ("hermes", ["<tool_call>", " Hello"]),
        ("glm", ["<tool_call>", "two", " words"]),
    ],
)
def test_what_can_no_longer_be_a_call_is_let_go_at_once(name: str, pieces: list[str]) -> None:
    parser = new_parser(format_by_name(name))
    content = [event for piece in pieces for event in parser.push(piece)]
    assert merge_events(content) == [ContentDelta("".join(pieces))]


def test_white_space_between_two_texts_with_a_call_between_them_is_kept_once() -> None:
    call = render_calls(format_by_name("hermes"), [PastCall("ping", {})])
    events = parsed(format_by_name("hermes"), [f"One.\n\n{call}\n\n\nTwo.{call}\n Three.{call}Four."])
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "One.\n\nTwo.\n Three.Four."


def test_ids_follow_the_familys_style() -> None:
    def first_id(name: str, text: str) -> str:
        return next(event.id for event in parsed(format_by_name(name), [text]) if isinstance(event, ToolCallBegan))

    assert first_id("hermes", '<tool_call>{"name": "ping"}</tool_call>') == "call_" + "0" * 24
    assert first_id("mistral", "[TOOL_CALLS]ping{}") == "0" * 9
    assert first_id("mistral-args", "[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}") == "abcdefghi"
    kimi = "<|tool_call_begin|>functions.ping:4<|tool_call_argument_begin|>{}"
    assert first_id("kimi-k2", kimi) == "functions.ping:4"
    assert first_id("kimi-k2", kimi.replace(":4", "")) == "functions.ping:0"


def test_an_id_that_the_model_repeats_is_replaced() -> None:
    call = "[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}"
    check_order(parsed(format_by_name("mistral-args"), [call + call]))


def test_nothing_can_be_pushed_after_the_end() -> None:
    parser = new_parser(format_by_name("hermes"))
    assert parser.push("") == []
    assert parser.push("Hi <") == [ContentDelta("Hi")]
    assert parser.flush() == [ContentDelta(" <")]
    assert parser.flush() == []
    with pytest.raises(ValueError, match="ended"):
        parser.push("more")


def test_a_rendered_prompt_tells_where_the_answer_begins() -> None:
    assert ThinkingStart.after("<|im_start|>assistant\n<think>\n", THINK) is ThinkingStart.OPENED
    assert ThinkingStart.after("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK) is ThinkingStart.UNOPENED
    assert ThinkingStart.after("<|im_start|>assistant\n<think>\n", None) is ThinkingStart.UNOPENED


def test_merging_joins_neighbours_of_one_kind_and_one_call() -> None:
    pieces = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        ContentDelta("c"),
        ToolCallBegan(0, "i", "f"),
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, "}"),
        ToolCallEnded(0),
        ContentDelta("d"),
    ]
    assert merge_events(pieces) == [
        ReasoningDelta("ab"),
        ContentDelta("c"),
        ToolCallBegan(0, "i", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallEnded(0),
        ContentDelta("d"),
    ]
    assert merge_events(merge_events(pieces)) == merge_events(pieces)


def test_parsers_of_one_format_share_nothing() -> None:
    first, second = new_parser(format_by_name("hermes"), TOOLS), new_parser(format_by_name("hermes"), TOOLS)
    first.push("<tool_call>")
    assert second.push("Hi") == [ContentDelta("Hi")]
