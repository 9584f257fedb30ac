"""Closing tags that were forgotten: parallel calls stay apart, and texts about calls stay whole."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.parser.events import ContentDelta, ParsedEvent, PastCall, ToolCallBegan, merge_events
from ingot.text.tool_formats.format import Elements, Format, TextParameters
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.parser.answers import TOOLS, check_order, cut, new_parser, parsed, summary
from tests.text.parser.test_parser import grows_linearly

PARIS = PastCall("get_weather", {"city": "Paris"})
OSLO = PastCall("get_weather", {"city": "Oslo", "days": 3})
PING = PastCall("ping", {})


def arguments_part(format: Format) -> TextParameters | Elements | None:
    parts = format.forms[0].call if format.forms else ()
    return next((part for part in parts if isinstance(part, TextParameters | Elements)), None)


TAGGED = [table for table in FORMATS if arguments_part(table) is not None]
every_tagged_format = pytest.mark.parametrize("format", TAGGED, ids=lambda format: format.name)


def closers(format: Format) -> list[str]:
    """What closes the first value, its call, and the form."""
    part = arguments_part(format)
    assert part is not None
    value_close = part.value_close if isinstance(part, TextParameters) else part.closing("city")
    return [value_close, part.end, *(each for each in format.forms[0].closing if isinstance(each, str))]


def without(text: str, forgotten: tuple[str, ...]) -> str:
    """Each of the markers is missing once, with the line break before it."""
    for marker in forgotten:
        text = text.replace(f"\n{marker}", "", 1) if f"\n{marker}" in text else text.replace(marker, "", 1)
    return text


def however_it_is_cut(format: Format, text: str) -> list[ParsedEvent]:
    whole = parsed(format, [text])
    check_order(whole)
    for size in (1, 2, 7, 40):
        assert parsed(format, cut(text, range(0, len(text), size))) == whole
    return whole


def called(*calls: PastCall) -> list[tuple[object, ...]]:
    return [("calls", call.name, dict(call.arguments)) for call in calls]


@every_tagged_format
def test_a_forgotten_closer_leaves_parallel_calls_apart(format: Format) -> None:
    text = render_calls(format, [PARIS, OSLO, PING])
    tags = closers(format)
    for size in range(1, len(tags) + 1):
        for forgotten in itertools.combinations(tags, size):
            events = however_it_is_cut(format, without(text, forgotten))
            assert summary(events) == called(PARIS, OSLO, PING), forgotten


@every_tagged_format
def test_a_forgotten_closer_of_the_last_call_is_no_harm_either(format: Format) -> None:
    tags = closers(format)
    for forgotten in ((tags[0],), tuple(tags[:1] + tags[2:])):
        assert summary(however_it_is_cut(format, without(render_calls(format, [PARIS]), forgotten))) == called(PARIS)


@every_tagged_format
def test_a_text_about_calls_is_one_value_of_a_call_that_is_well_formed(format: Format) -> None:
    example = render_calls(format, [PARIS, OSLO])
    for content in (
        example,
        f"So:\n\n{example}\n\nOr:\n{example}\nThat is all.\n",
        f"{example}, {closers(format)[1]}.",
    ):
        for arguments in ({"content": content, "path": "a.md"}, {"path": "a.md", "content": content}):
            file = PastCall("write_file", arguments)
            events = however_it_is_cut(format, "Look.\n" + render_calls(format, [file, PING]))
            assert summary(events) == [("says", "Look."), *called(file, PING)]


@every_tagged_format
def test_a_text_about_calls_that_a_limit_cuts_off_is_half_a_call_and_no_other(format: Format) -> None:
    content = f"So:\n{render_calls(format, [PING, PARIS])}\nand more"
    text = render_calls(format, [PastCall("write_file", {"path": "a.md", "content": content})])
    cut_off = text[: text.index("and more")]
    for pieces in ([cut_off], cut_off):
        parser = new_parser(format)
        events = merge_events([*(event for piece in pieces for event in parser.push(piece)), *parser.flush(cut=True)])
        assert [(kind, name) for kind, name, *_ in summary(events)] == [("breaks", "write_file")]


@every_tagged_format
def test_the_values_of_a_strict_tool_are_taken_as_a_grammar_writes_them(format: Format) -> None:
    """A grammar keeps the closing tag of a value out of its text, and nothing else."""
    part = arguments_part(format)
    strict = [replace(tool, strict=True) for tool in TOOLS]
    example = render_calls(format, [PARIS])
    content = example[: example.index("Paris")]
    if isinstance(part, TextParameters) and part.close_optional:
        content = content.replace("city", "other")
    file = PastCall("write_file", {"path": "a", "content": content})
    assert summary(parsed(format, [render_calls(format, [file])], strict)) == called(file)


@pytest.mark.sampled(3)
@every_tagged_format
@given(data=st.data())
def test_no_complete_call_holds_the_markers_of_another(format: Format, data: st.DataObject) -> None:
    text = render_calls(format, [PARIS, OSLO, PastCall("write_file", {"path": "a", "content": "x\ny"}), PING])
    tags = closers(format)
    for _ in range(data.draw(st.integers(1, 4))):
        marker = data.draw(st.sampled_from(tags))
        before, *rest = text.split(marker)
        if rest:
            offset = data.draw(st.integers(0, len(rest) - 1))
            text = marker.join([before, *rest[:offset]]) + marker.join(rest[offset:])
    whole = parsed(format, [text])
    check_order(whole)
    assert parsed(format, text) == whole
    assert parsed(format, cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8)))) == whole
    part = arguments_part(format)
    heads = ['<invoke name="', "<function", "<tool_call", "<|open|>call", *tags[1:]]
    assert part is not None
    for kind, *_, arguments in summary(whole):
        if kind == "calls":
            assert not any(head in str(value) for value in arguments.values() for head in heads), text


BROKEN = {
    "minimax-m2": '<invoke name="get_weather">\n<parameter name="city>Paris</parameter>\n</invoke>',
    "deepseek-v3.2": '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city>Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>",
    "seed-oss": "<function=get_weather>\n<parameter=city>Paris</parameter> and more\n</function>",
    "qwen3-coder": "<function=get_weather>\n<parameter=city Paris</parameter>\n</function>",
    "glm": "get_weather\n<arg_key>city</arg_key>Paris</arg_value>\n</tool_call>",
    "muse": '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>!</atem:invoke>',
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("line", ["\n", ""])
def test_behind_a_malformed_call_the_next_one_is_read(name: str, line: str) -> None:
    format = format_by_name(name)
    opening, closing = ("<tool_call>", "</tool_call>") if name in ("glm", "qwen3-coder") else ("", "")
    whole = render_calls(format, [PARIS, PING])
    if not opening:
        opening = whole[: whole.index("\n")]
        text = f"{opening}{line}{BROKEN[name]}{line}{whole[len(opening) + 1 :]}"
    else:
        text = f"{opening}{line}{BROKEN[name]}{line}{whole}"
    story = summary(however_it_is_cut(format, text))
    assert [each for each in story if each[0] == "calls"] == called(PARIS, PING), story
    assert [each[1] for each in story if each[0] == "breaks"] == ["get_weather"]
    assert closing == "" or story[0][0] == "breaks"


def test_a_string_in_json_that_is_never_closed_ends_with_its_value() -> None:
    format = format_by_name("qwen3-coder")
    broken = '<tool_call>\n<function=get_weather>\n<parameter=tags>\n["a\n</parameter>\n</function>\n</tool_call>\n'
    events = however_it_is_cut(format, broken + render_calls(format, [PING]))
    assert summary(events) == [("calls", "get_weather", {"tags": '["a'}), *called(PING)]


def test_a_value_that_cannot_be_text_is_told_at_once() -> None:
    format = format_by_name("minimax-m2")
    text = (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="days">3\n</invoke>\n<invoke name="ping">\n'
    )
    parser = new_parser(format)
    events = [event for piece in text + "</invoke>" + "\n" * 400 for event in parser.push(piece)]
    assert summary(merge_events(events)) == [("calls", "get_weather", {"days": 3}), *called(PING)]


def test_prose_that_names_a_marker_is_text_like_any_other() -> None:
    format = format_by_name("minimax-m2")
    content = (
        'Write <invoke name="ping"> and </invoke>, <parameter name="x"> and </parameter>; see <minimax:tool_call>.'
    )
    file = PastCall("write_file", {"content": content})
    assert summary(however_it_is_cut(format, render_calls(format, [file, PING]))) == called(file, PING)


def test_text_streams_up_to_the_first_marker() -> None:
    format = format_by_name("glm")
    parser = new_parser(format)
    text = f"<tool_call>write_file\n<arg_key>content</arg_key>\n<arg_value>one two {render_calls(format, [PARIS])}"
    events = merge_events(parser.push(text))
    assert [type(event) for event in events][:1] == [ToolCallBegan]
    assert events[1].fragment == '{"content": "one two '  # type: ignore[union-attr]
    assert not any(isinstance(event, ContentDelta) for event in events)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("minimax-m2", '<invoke name="ping"><parameter name="a">'),
        ("minimax-m2", '<invoke name="ping"></invoke>'),
        ("minimax-m2", '</parameter><invoke name="ping">'),
        ("minimax-m3", ']<]minimax[>[<invoke name="ping">]<]minimax[>[<a>'),
        ("glm", "<tool_call>ping<arg_key>a</arg_key><arg_value>"),
        ("glm", "</tool_call>"),
        ("qwen3-coder", '<tool_call><function=get_weather><parameter=tags>["</parameter></function>'),
    ],
)
def test_hostile_values_cost_linear_time(name: str, unit: str) -> None:
    format = format_by_name(name)
    call = render_calls(format, [PARIS])
    assert grows_linearly(format, call[: call.index("Paris")] + unit * (6_000 // len(unit)))
