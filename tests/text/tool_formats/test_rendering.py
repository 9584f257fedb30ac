"""What is written for a past call is read back as that call, by every format."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ingot.text.parser.events import PastCall, ToolCallBegan, ToolSchema
from ingot.text.tool_formats.format import Arguments, Elements, Format, TextParameters
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.parser.answers import check_order, cut, parsed, summary

CALLING = [known for known in FORMATS if known.can_call]
MARKERS = sorted({marker for known in CALLING for marker in known.markers})
SCRAPS = ["\n", "```", *"\"'\\ {}[](),:=\n\x00\u2028é🜁"]

HOSTILE = st.lists(st.sampled_from(MARKERS + SCRAPS) | st.text(max_size=5), max_size=8).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | HOSTILE
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3), max_leaves=6
)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True).filter(lambda name: name != "all")
KEYS = st.from_regex(r"[\w.\- ]{1,20}", fullmatch=True)
CALLS = st.lists(st.builds(PastCall, NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3)


def kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def schema_of(value: Any) -> dict[str, Any]:
    match value:
        case dict():
            return {"type": "object", "properties": {key: schema_of(each) for key, each in value.items()}}
        case list():
            return {"type": "array", "prefixItems": [schema_of(each) for each in value]}
    return {"type": kind(value)}


def tools_for(calls: list[PastCall]) -> list[ToolSchema]:
    """Tools whose schemas ask for just the types that the calls have."""
    properties: dict[str, dict[str, Any]] = {}
    for call in calls:
        known = properties.setdefault(call.name, {})
        for key, value in call.arguments.items():
            assume(known.setdefault(key, schema_of(value)) == schema_of(value))
    return [ToolSchema(name, {"type": "object", "properties": known}) for name, known in properties.items()]


def holds(format: Format, calls: list[PastCall]) -> bool:
    """Whether the format can write these arguments at all: some escape nothing."""
    form = format.forms[0] if format.forms else None
    for part in form.call if form else ():
        if isinstance(part, TextParameters):
            ends = [part.key_open, part.end, *(end for end in form.closing if isinstance(end, str))]
            early = re.compile(rf"{re.escape(part.value_close)}\s*(?:{'|'.join(map(re.escape, ends))})")
            return not any(early.search(text_of(value)) for call in calls for value in call.arguments.values())
        if isinstance(part, Arguments) and part.notation.escapes == "none":
            # Strings are written as they are, at any depth.
            written = json.dumps([call.arguments for call in calls], ensure_ascii=False)
            return json.dumps(part.notation.quotes[0], ensure_ascii=False)[1:-1] not in written
        if isinstance(part, Elements):
            return part.mark not in json.dumps([call.arguments for call in calls], ensure_ascii=False)
    return True


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", CALLING, ids=lambda format: format.name)
@settings(max_examples=10)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 400), max_size=20))
def test_a_written_call_is_read_back(format: Format, calls: list[PastCall], cuts: list[int]) -> None:
    assume(holds(format, calls))
    text = render_calls(format, calls)
    events = parsed(format, cut(text, cuts), tools_for(calls))
    check_order(events)
    # As JSON, since True == 1 == 1.0 in Python.
    assert json.dumps(summary(events)) == json.dumps([("calls", call.name, call.arguments) for call in calls])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", CALLING, ids=lambda format: format.name)
def test_kilobytes_of_hostile_text_are_read_back(format: Format) -> None:
    scraps = "".join(MARKERS + SCRAPS)
    text = (scraps * (20_000 // len(scraps) + 1))[:20_000]
    for part in format.forms[0].call if format.forms else ():
        if isinstance(part, Arguments) and part.notation.escapes == "none":
            text = text.replace(part.notation.quotes[0], "")
        if isinstance(part, TextParameters):
            text = text.replace(part.value_close, part.value_close + "x")
        if isinstance(part, Elements):
            text = text.replace(part.closing("content"), "")
    calls = [PastCall("write_file", {"content": text, "path": "a"})]
    written = render_calls(format, calls)
    pieces = cut(written, range(0, len(written), 7))
    assert summary(parsed(format, pieces)) == [("calls", "write_file", {"content": text, "path": "a"})]


def test_no_calls_are_no_text() -> None:
    assert render_calls(format_by_name("hermes"), []) == ""


def test_a_format_without_calls_refuses_them() -> None:
    with pytest.raises(ValueError, match="plain"):
        render_calls(format_by_name("plain"), [PastCall("ping", {})])


def test_kimi_writes_an_id_of_its_own_style_again_and_replaces_a_foreign_one() -> None:
    calls = [PastCall("ping", {}, "functions.ping:7"), PastCall("ping", {}, "call_abc")]
    written = render_calls(format_by_name("kimi-k2"), calls)
    assert "functions.ping:7<|tool_call_argument_begin|>" in written
    assert "functions.ping:1<|tool_call_argument_begin|>" in written
    ids = [event.id for event in parsed(format_by_name("kimi-k2"), [written]) if isinstance(event, ToolCallBegan)]
    assert ids == ["functions.ping:7", "functions.ping:1"]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call>'),
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>"),
        ("llama", '{"name": "f", "parameters": {"k": "v"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"k": "v"}}]'),
        ("mistral-args", '[TOOL_CALLS]f[ARGS]{"k": "v"}'),
        (
            "deepseek-v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"k": "v"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek-v3.1",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"k": "v"}'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"k": "v"}}]'),
        ("glm", "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"),
        (
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
        ),
        (
            "minimax-m3",
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<k>v]<]minimax[>[</k>'
            "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        ),
        ("gemma4", '<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>'),
        ("function-gemma", "<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>"),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"k": "v"}<|call|>'),
        ("functionary", '<|recipient|>f\n<|content|>{"k": "v"}'),
        ("xlam", '[{"name": "f", "arguments": {"k": "v"}}]'),
        (
            "seed-oss",
            "<seed:tool_call>\n<function=f>\n<parameter=k>v</parameter>\n</function>\n</seed:tool_call>",
        ),
        ("lfm2", '<|tool_call_start|>[f(k="v")]<|tool_call_end|>'),
        ("pythonic", '[f(k="v")]'),
    ],
)
def test_a_call_is_written_as_the_family_writes_it(name: str, written: str) -> None:
    assert render_calls(format_by_name(name), [PastCall("f", {"k": "v"})]) == written
