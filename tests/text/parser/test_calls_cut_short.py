"""Calls that are not written to their end: what is left to write of them, and that none of one leaks as content."""

from __future__ import annotations

import pytest

from ingot.text.parser.calls import unwritten_parts
from ingot.text.parser.events import (
    ContentDelta,
    ParsedEvent,
    PastCall,
    ToolCallBegan,
    ToolCallEnded,
    call_id_maker,
    merge_events,
)
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tool_formats.format import CallForm, Format, Gap, JsonCall, Maybe
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.parser.answers import TOOLS, new_parser, summary

CALLING = [table for table in FORMATS if table.can_call]
WITH_FORMS = [table for table in FORMATS if table.forms]
every_calling_format = pytest.mark.parametrize("format", CALLING, ids=lambda format: format.name)
WEATHER = PastCall("get_weather", {"city": "x"}, "functions.get_weather:0")
QWEN = format_by_name("qwen")


def ends(events: list[ParsedEvent]) -> bool:
    return any(isinstance(event, ToolCallEnded) for event in events)


def spelled(form: CallForm, call: str) -> str:
    """A call in any of the forms that are JSON."""
    plain = {str: lambda part: part, Gap: lambda part: part.written, Maybe: lambda part: part.text}
    before, behind = ("".join(plain[type(part)](part) for part in parts) for parts in (form.opening, form.closing))
    return before + call + behind


def check_missing(format: Format, written: str) -> None:
    """From where the arguments are complete on, what is missing is the rest."""
    parser, complete = new_parser(format), False
    for size, character in enumerate(written, start=1):
        complete = ends(parser.push(character)) or complete
        if complete:
            assert written[:size] + parser.missing == written
    assert complete


@pytest.mark.parametrize("format", WITH_FORMS, ids=lambda format: format.name)
def test_what_is_left_of_a_call_is_known_wherever_it_ends(format: Format) -> None:
    end = format.channels.call_end if format.channels else ""  # a template's, like the end of any message
    check_missing(format, render_calls(format, [WEATHER]).removesuffix(end))


@pytest.mark.parametrize("form", [form for form in QWEN.forms if form.call == (JsonCall(),)])
def test_it_is_known_for_the_form_that_the_model_chose(form: CallForm) -> None:
    check_missing(QWEN, spelled(form, '{"name": "ping", "arguments": {}}'))
    check_missing(QWEN, spelled(form, '{"name": "get_weather", "arguments": {"city": "}"}}'))


def test_white_space_that_was_written_otherwise_is_not_written_again() -> None:
    assert unwritten_parts(("}", Gap("\n"), "</x>"), "") == "}\n</x>"
    assert unwritten_parts(("}", Gap("\n"), "</x>"), "\n}") == "\n</x>"
    assert unwritten_parts(("}", Gap("\n"), "</x>"), "} ") == "</x>"
    assert unwritten_parts(("}", Gap("\n"), "</x>"), "}</") == "x>"


def must_call(format: Format) -> Parser:
    return Parser(format, tools=TOOLS, thinking=ThinkingStart.UNOPENED, ids=call_id_maker(format.ids), must_call=True)


@pytest.mark.sampled(3)
@every_calling_format
def test_a_forced_call_that_is_cut_anywhere_leaves_no_content(format: Format) -> None:
    calls = render_calls(format, [WEATHER, PastCall("ping", {})])
    for size in range(len(calls)):
        parser = must_call(format)
        events = [*parser.push(calls[:size]), *parser.flush(cut=True)]
        assert not any(isinstance(event, ContentDelta) for event in events), calls[:size]
        assert sum(isinstance(event, ToolCallBegan) for event in events) == sum(map(is_end, events))


def is_end(event: ParsedEvent) -> bool:
    return isinstance(event, ToolCallEnded)


@pytest.mark.parametrize("cut", [False, True])
def test_a_marker_that_more_would_have_followed_is_no_content(cut: bool) -> None:
    for text in ("Look. <tool_call>", 'Look. <tool_call>\n{"na', 'Look. <tool_call>\n{"name": "get_weather", "arg'):
        parser = new_parser(QWEN)
        events = [*parser.push(text), *parser.flush(cut=cut)]
        assert "".join(each for _, each in summary(events)).rstrip() == ("Look." if cut else text)


@pytest.mark.parametrize("text", ["1 <", "Look. <tool", '{"na', '```json\n{"name": "pi', "[", "Look."])
def test_what_need_be_no_call_is_kept_where_it_is_cut(text: str) -> None:
    parser = new_parser(QWEN)
    assert "".join(each for _, each in summary([*parser.push(text), *parser.flush(cut=True)])) == text


def test_half_a_header_is_no_content() -> None:
    parser = new_parser(format_by_name("harmony"))
    events = [*parser.push("<|channel|>commentary to=functions.get_w"), *parser.flush(cut=True)]
    assert events == []


@pytest.mark.parametrize("opening", ["", "```json\n", "<tools>\n", "Look.\n"])
def test_an_unmarked_call_is_one_as_far_as_it_goes_only_where_more_would_have_come(opening: str) -> None:
    text = opening + '{"name": "write_file", "arguments": {"path": "x'
    for cut in (False, True):
        for pieces in ([text], text, [text[:20], text[20:]]):
            parser = new_parser(QWEN)
            events = merge_events(
                [*(event for piece in pieces for event in parser.push(piece)), *parser.flush(cut=cut)]
            )
            if cut:
                before = [("says", "Look.")] if opening == "Look.\n" else []
                assert summary(events) == [*before, ("breaks", "write_file", '{"path": "x')]
            else:
                assert summary(events) == [("says", text)]
