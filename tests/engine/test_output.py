"""A read answer is the same however its text is cut, and stop strings watch its content alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.answer_text import AnswerText
from ingot.engine.output import Writer
from ingot.engine.request import (
    AnswerEvent,
    AnswerParsing,
    CallArguments,
    CallBegan,
    CallEnded,
    Request,
    Stop,
    TextDelta,
    ThinkingDelta,
)
from ingot.engine.sequence import Sequence
from ingot.text.parse.events import ToolSchema
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.registry import format_named
from tests.engines import tiny_tokenizer

QWEN = format_named("qwen")
TOOLS = (ToolSchema("look", {"type": "object", "properties": {"at": {"type": "string"}}}),)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the END of it"}}\n</tool_call>'
TEXT = f"<think>\nIs this the END?\n</think>\n\nI will look. {CALL}"


def read(pieces: list[str], reading: AnswerParsing, stop: Stop | None = None) -> tuple[AnswerText, list[AnswerEvent]]:
    answer = AnswerText(0, reading, stop or Stop())
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += answer.push(piece)
        if answer.done or answer.stopped_by is not None:
            return answer, events
    return answer, events + answer.flush(cut=False)


def told(events: list[AnswerEvent]) -> dict[str, str]:
    """The texts of an answer's parts, put together."""
    found = {"thinking": "", "text": "", "calls": ""}
    for event in events:
        match event:
            case ThinkingDelta():
                found["thinking"] += event.text
            case TextDelta():
                found["text"] += event.text
            case CallBegan():
                found["calls"] += event.name
            case CallArguments():
                found["calls"] += event.fragment
    return found


@given(st.sets(st.integers(1, len(TEXT) - 1)))
def test_however_the_text_is_cut_the_parts_are_the_same(cuts: set[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in itertools.pairwise(places)]
    answer, events = read(pieces, AnswerParsing(QWEN, TOOLS))
    assert told(events) == {
        "thinking": "Is this the END?",
        "text": "I will look.",
        "calls": 'look{"at": "the END of it"}',
    }
    assert answer.called and not answer.done
    assert [event.complete for event in events if isinstance(event, CallEnded)] == [True]


@given(st.sets(st.integers(1, len(TEXT) - 1)))
def test_neither_thinking_nor_arguments_hold_a_stop_string(cuts: set[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in itertools.pairwise(places)]
    answer, events = read(pieces, AnswerParsing(QWEN, TOOLS), Stop(strings=("END",)))
    assert answer.stopped_by is None
    assert "END" in told(events)["thinking"] and "END" in told(events)["calls"]


@given(st.integers(1, 40))
def test_a_stop_string_in_the_content_ends_the_answer_and_does_not_leak(size: int) -> None:
    text = "<think>so</think>One END two"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer, events = read(pieces, AnswerParsing(QWEN, TOOLS), Stop(strings=("END",)))
    assert answer.stopped_by == "END"
    assert told(events) == {"thinking": "so", "text": "One ", "calls": ""}


def test_text_held_back_for_a_stop_string_comes_before_the_call_that_follows_it() -> None:
    _answer, events = read(["It is E", CALL], AnswerParsing(QWEN, TOOLS), Stop(strings=("END",)))
    assert [type(event) for event in events[:3]] == [TextDelta, TextDelta, CallBegan]
    assert told(events)["text"] == "It is E"


def test_an_answer_of_one_call_is_done_with_it() -> None:
    answer, events = read([CALL, CALL], AnswerParsing(QWEN, TOOLS, one_call=True))
    assert answer.done and told(events)["calls"].count("look") == 1


def test_without_tools_a_call_is_text() -> None:
    _, events = read([CALL], AnswerParsing(QWEN))
    assert told(events) == {"thinking": "", "text": CALL, "calls": ""}


def test_an_answer_that_begins_within_thinking_says_so_until_it_is_closed() -> None:
    answer = AnswerText(0, AnswerParsing(QWEN, thinking=ThinkingStart.OPENED), Stop())
    assert answer.thinking
    answer.push("hm</think>\n\nyes")
    assert not answer.thinking


def test_of_several_answers_only_the_first_looks_through_the_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, looked = tiny_tokenizer(), 0

    def counted(token: int) -> str:
        nonlocal looked
        looked += 1
        return Tokenizer.token_text(tokenizer, token)

    monkeypatch.setattr(tokenizer, "token_text", counted)
    request = Request("one", ((1,),), n=8, reading=AnswerParsing(QWEN))
    for index in range(request.n):
        Writer(Sequence(request, index, index, (1,), limit=1, seed=0), tokenizer)
    assert looked == len(tokenizer.special_ids) > 0


def test_calls_that_were_read_out_of_thinking_are_counted() -> None:
    reading = AnswerParsing(QWEN, TOOLS, ThinkingStart.OPENED)
    for text, count in ((f"Hm.\n{CALL}\n{CALL}\n</think>\n", 2), (f"Hm.\n{CALL}", 1), (f"Hm.\n</think>\n{CALL}", 0)):
        for pieces in ([text], list(text)):
            answer, events = read(pieces, reading)
            assert answer.in_thinking == count
            assert sum(isinstance(event, CallBegan) for event in events) == max(1, count)
