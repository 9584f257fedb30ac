"""A checkpoint's response template is a table like any other: it parses answers, renders calls and makes grammars."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.parser.events import PastCall
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.registry import find_format
from ingot.text.tool_formats.rendering import render_calls
from ingot.text.tool_formats.response_template import UnsupportedResponseTemplate, compile_response_template
from tests.text.grammar.walks import Walker, byte_tokenizer
from tests.text.parser.answers import TOOLS, cut, parsed, summary
from tests.text.tool_formats.wire import ARGUMENTS, OSLO, PARIS, PING, calls, says, thinks


def spec(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"start_anchor": "<|assistant|>", "fields": {"tool_calls": {"repeats": True, **calls}, **fields}}


def function(name: str = "{name}", arguments: str = "{content}") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tags(open: str, close: str, pattern: str, close_pattern: bool = False) -> dict[str, Any]:
    arguments = {"tag_pattern": pattern}
    ends = {"close_pattern" if close_pattern else "close": close}
    return {"open_pattern": open, **ends, "content": "xml-inline", "content_args": arguments, "transform": function()}


THINK = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
ENDING = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)|$", "content": "text"}
HEADER = r"(?:<\|message\|>)?[^<]*"
_BLOCK = {"close": "<|over|>", "repeats": True, "join": ""}

OBJECT = spec(
    {
        "open": "<call>",
        "close": "</call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    thinking=THINK,
    content=ENDING,
)
KEYS = spec(
    {
        "open_pattern": r"\s*<call>",
        "close": "</call>",
        "content": "json",
        "transform": function("{content.fn}", "{content.args}"),
    }
)
LIST = spec(
    {
        "open": "<|ACT|>",
        "close": "<|DONE|>",
        "repeats": False,
        "content": "json",
        "transform_each": True,
        "transform": function("{tool}", "{given}"),
    },
    content={"open": "<|SAY|>", "close": "<|SAID|>"},
    thinking={"open": "<|HM|>", "close": "<|HMM|>"},
)
NAMED = spec(
    {
        "open_pattern": r"<\|to\|>(?P<name>\w+).*?<\|body\|>",
        "close": "<|call|>",
        "content": "json",
        "transform": function(),
    },
    reasoning_content={"open": "<|on|>thought<|body|>", "close": "<|end|>"},
    content={"open": "<|on|>answer<|body|>", "close": ["<|end|>", "<|return|>"]},
)
DIALECT = spec(
    {
        "open_pattern": r"<\|tool>call:(?P<name>\w+)",
        "close_pattern": r"<tool\|>\s*",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
        "transform": function(),
    }
)
ASSIGNED = spec(
    tags(
        r"<tool>\s*<fn=(?P<name>[^>\n]+)>",
        r"</tool>\s*",
        r"<arg=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</arg>",
        close_pattern=True,
    ),
    thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
)
PAIRS = spec(
    tags(r"<do>(?P<name>[^\n<]+)\s*", "</do>", r"<k>(?P<key>.*?)</k>\s*<v>(?P<value>.*?)</v>"),
)
ATTRIBUTES = spec(
    tags(
        r'<x:run\b[^>]*?\bname="(?P<name>[^"]+)">',
        "</x:run>|$",
        r'<x:arg\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</x:arg>',
        close_pattern=True,
    )
)
BLOCKS = spec(
    {
        "open_pattern": HEADER + r"<\|tool\|>",
        "close": "<|over|>",
        "content": "json",
        "transform": function("{content.name}", "{content.args}"),
    },
    thinking={"open_pattern": HEADER + r"<\|thought\|>", **_BLOCK},
    content={"open_pattern": HEADER + r"<\|text\|>", **_BLOCK},
)
_CALL = f'<call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</call>'
_BLOCK_CALL = f'<|tool|>{{"name": "get_weather", "args": {ARGUMENTS}}}<|over|>'

CASES = [
    (OBJECT, f"<think>Hm.</think>\nOk.\n{_CALL}\n{_CALL}", [thinks("Hm."), says("Ok."), PARIS, PARIS]),
    (OBJECT, "Just <call> it.", [says("Just <call> it.")]),
    (KEYS, f'<call>{{"fn": "get_weather", "args": {ARGUMENTS}}}</call>', [PARIS]),
    (KEYS, f'Ok. <call>{{"args": {ARGUMENTS}, "fn": "get_weather"}}</call>', [says("Ok."), PARIS]),
    (LIST, "<|HM|>Hm.<|HMM|><|SAY|>Yes.<|SAID|>", [thinks("Hm."), says("Yes.")]),
    (
        LIST,
        f'<|ACT|>[{{"tool": "get_weather", "given": {ARGUMENTS}}}, {{"id": 1, "tool": "ping", "given": {{}}}}]<|DONE|>',
        [PARIS, PING],
    ),
    (
        NAMED,
        f"<|on|>thought<|body|>Hm.<|end|><|assistant|><|to|>get_weather as json<|body|>{ARGUMENTS}<|call|>",
        [thinks("Hm."), PARIS],
    ),
    (NAMED, "<|on|>answer<|body|>Yes.<|return|>", [says("Yes.")]),
    (DIALECT, "<|tool>call:get_weather{city:<q>Oslo<q>,days:3}<tool|>", [OSLO]),
    (
        ASSIGNED,
        "<tool>\n<fn=get_weather>\n<arg=city>\nOslo\n</arg>\n<arg=days>\n3\n</arg>\n</fn>\n</tool>\n<tool><fn=ping></tool>",
        [OSLO, PING],
    ),
    (PAIRS, "<do>get_weather\n<k>city</k>\n<v>Oslo</v><k>days</k><v>3</v></do><do>ping</do>", [OSLO, PING]),
    (
        ATTRIBUTES,
        'So. <x:run name="write_file"><x:arg name="content"> a\n</x:arg></x:run>',
        [says("So."), calls("write_file", content=" a\n")],
    ),
    (
        BLOCKS,
        f"<|thought|>Hm.<|over|><|message|><|text|>Ok.<|over|><|message|>get_weather{_BLOCK_CALL}",
        [thinks("Hm."), says("Ok."), PARIS],
    ),
]
SPECS = [OBJECT, KEYS, LIST, NAMED, DIALECT, ASSIGNED, PAIRS, ATTRIBUTES, BLOCKS]


@pytest.mark.parametrize(("template", "text", "means"), CASES)
def test_an_answer_is_read_by_it_whole_and_by_character(
    template: dict[str, Any], text: str, means: list[tuple[Any, ...]]
) -> None:
    format = compile_response_template(template)
    whole = parsed(format, [text])
    assert summary(whole) == means
    assert parsed(format, text) == whole


@given(case=st.sampled_from(CASES), data=st.data())
def test_and_in_any_pieces(case: tuple[dict[str, Any], str, Any], data: st.DataObject) -> None:
    template, text, _ = case
    cuts = data.draw(st.lists(st.integers(0, len(text))))
    assert parsed(compile_response_template(template), cut(text, cuts)) == parsed(
        compile_response_template(template), [text]
    )


@pytest.mark.parametrize("template", SPECS)
def test_past_calls_are_written_by_it_as_it_reads_them(template: dict[str, Any]) -> None:
    past = [PastCall("get_weather", {"city": 'a "b"\nc', "days": 3, "tags": ["x"]}), PastCall("ping", {})]
    story = summary(
        parsed(compile_response_template(template), render_calls(compile_response_template(template), past))
    )
    assert story == [("calls", call.name, call.arguments) for call in past]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    parts = Grammars(byte_tokenizer(), byte_tokenizer().vocab_size)
    yield parts
    parts.close()


@pytest.mark.parametrize("template", SPECS)
def test_forced_calls_are_held_to_it(grammars: Grammars, template: dict[str, Any]) -> None:
    format, tokenizer = compile_response_template(template), byte_tokenizer()
    tools = [GrammarTool(tool.name, tool.parameters) for tool in TOOLS[1:]]
    plan = grammars.tools(format, tools, "required", parallel=False)
    assert plan is not None
    ends = ("</arg>\n", "</v>", "</x:arg>", "<q>", *(text for text in format.markers if text.startswith("</")))
    written = Walker(tokenizer, random.Random(4), soft=20, closers=ends).answer(plan)
    story = summary(parsed(format, [tokenizer.decode(written, skip_special=False)]))
    assert [kind for kind, *_ in story] == ["calls"], story


def test_it_tells_the_format_of_a_family_that_is_not_known() -> None:
    found = find_format("{{ messages }}", "llama", PAIRS)
    assert (found.source, found.format, found.guessed) == ("response_template", compile_response_template(PAIRS), False)


def test_a_familys_own_table_is_used_where_it_reads_what_the_response_template_says() -> None:
    tagged = {"open": "<tool_call>", "close": "</tool_call>", "content": "json"}
    known = find_format("<tool_call> <|im_start|>", "qwen3", spec(tagged))
    assert (known.source, known.format.name) == ("template", "qwen")
    other = find_format(
        "<tool_call> <|im_start|>", "qwen3", spec(tagged | {"transform": function("{content.f}", "{content.a}")})
    )
    assert other.source == "response_template"


def test_its_tags_of_thinking_count_where_the_template_shows_none() -> None:
    thoughts = {"start_anchor": "A:", "fields": {"thinking": {"open": "<hm>", "close": "</hm>"}}}
    found = find_format("[TOOL_CALLS]", "mistral", thoughts).format
    assert found.name == "mistral" and found.thinking is not None and found.thinking.open == "<hm>"
    shown = find_format("[TOOL_CALLS] [THINK]", "mistral", thoughts).format.thinking
    assert shown is not None and shown.open == "[THINK]"


def test_an_answer_begins_within_thinking_where_it_says_so() -> None:
    thinking = compile_response_template(ASSIGNED).thinking
    assert thinking is not None and thinking.implied
    assert ThinkingStart.after("<|assistant|>", thinking) is ThinkingStart.OPENED
    assert ThinkingStart.after("<|assistant|><think>\n\n</think>\n", thinking) is ThinkingStart.UNOPENED


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ([], "no fields"),
        ({"version": 2, "fields": {}}, "version"),
        (
            spec({"open": "<a>", "close": "</a>", "content": "kv-lines", "transform": function("{content.name}")}),
            "kv-lines",
        ),
        (spec({"open": "<a>", "close": "</a>", "content": "json", "transform": function("f")}), "where"),
        (spec(tags(r"(?P<name>\w+)\(", r"\)", r"(?P<key>\w+)=(?P<value>.*?),")), "no beginning"),
        (spec(tags(r"<a>{2}(?P<name>\w+)", "</a>", "")), "counts"),
        (spec(tags(r"(?:ab)+(?P<name>\w+)", "</a>", "")), "repeats a text"),
        (spec({"open_pattern": "(", "close": "</a>"}), "no regular expression"),
        (spec({"open": [], "close": 5, "content": "json"}), "malformed"),
        (spec({"open": "<a>", "close": "</a>", "content": "json"}, thinking={"open": "<t>"}), "no end"),
    ],
)
def test_what_no_table_can_say_is_refused_in_words(template: Any, said: str) -> None:
    with pytest.raises(UnsupportedResponseTemplate, match=said):
        compile_response_template(template)
    found = find_format("{{ messages }}", "unheard_of", template)
    assert found.source == "guess" and said in found.unused
