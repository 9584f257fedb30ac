"""Events on their way to readers, of whom some are gone."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.output import ActiveRequest, AnswerParser, Outbox, SequenceOutput
from ingot.engine.request import (
    AnswerEvent,
    AnswerParsing,
    CallArguments,
    CallBegan,
    CallEnded,
    Failed,
    Request,
    Stop,
    TextDelta,
    ThinkingDelta,
)
from ingot.engine.sequence import TokenSequence
from ingot.engine.streams import EventBatch
from ingot.errors import Cancelled, IngotError
from ingot.text.parser.events import ToolSchema
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.registry import format_by_name
from tests.engines import tiny_tokenizer


class Reader:
    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.batches: list[EventBatch] = []

    def post(self, batch: EventBatch) -> None:
        if self.gone:
            raise OSError("nobody is there")
        self.batches.append(batch)


def job(id: str, reader: Reader) -> ActiveRequest:
    return ActiveRequest(Request(id, ((1,),)), reader, [], tiny_tokenizer())


def said(text: str) -> Failed:
    return Failed(IngotError(text))


def nobody(job: ActiveRequest) -> None:
    raise AssertionError(f"the reader of {job.request.id} is there")


def test_a_reader_is_woken_once_for_all_that_a_step_has_for_it() -> None:
    outbox, readers = Outbox(), [Reader(), Reader()]
    one, two = (job(f"{number}", reader) for number, reader in enumerate(readers))
    first, second, third = (said(word) for word in ("first", "second", "third"))
    outbox.put(one, [first])
    outbox.put(two, [second])
    outbox.put(one, [])
    outbox.put(one, [third])
    outbox.flush(nobody)
    outbox.flush(nobody)
    assert [reader.batches for reader in readers] == [[[first, third]], [[second]]]


def test_whoever_takes_nothing_is_ended_and_hears_no_more_and_the_others_do(caplog: pytest.LogCaptureFixture) -> None:
    outbox, here = Outbox(), Reader()
    deaf, other = job("deaf", Reader(gone=True)), job("other", here)
    ended: list[ActiveRequest] = []

    def end(gone: ActiveRequest) -> None:
        ended.append(gone)
        outbox.put(gone, [Failed(Cancelled("The request was cancelled"))])

    last = said("last")
    outbox.put(deaf, [said("anything")])
    outbox.put(other, [last])
    with caplog.at_level(logging.ERROR, "ingot.engine"):
        outbox.flush(end)
    outbox.flush(nobody)
    assert ended == [deaf] and here.batches == [[last]]
    assert "the reader of request deaf takes no events" in caplog.text


def test_a_job_is_sent_off_with_what_was_still_here_for_it() -> None:
    outbox, reader = Outbox(), Reader()
    leaving = job("leaving", reader)
    earlier, last = said("earlier"), said("last")
    outbox.put(leaving, [earlier])
    outbox.send_last(leaving, last)
    outbox.send_last(job("deaf", Reader(gone=True)), last)
    outbox.flush(nobody)
    assert reader.batches == [[earlier, last]]


QWEN = format_by_name("qwen")
TOOLS = (ToolSchema("look", {"type": "object", "properties": {"at": {"type": "string"}}}),)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the END of it"}}\n</tool_call>'
TEXT = f"<think>\nIs this the END?\n</think>\n\nI will look. {CALL}"


def read(pieces: list[str], reading: AnswerParsing, stop: Stop | None = None) -> tuple[AnswerParser, list[AnswerEvent]]:
    answer = AnswerParser(0, reading, stop or Stop())
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
    positions = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in itertools.pairwise(positions)]
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
    positions = [0, *sorted(cuts), len(TEXT)]
    pieces = [TEXT[a:b] for a, b in itertools.pairwise(positions)]
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
    answer = AnswerParser(0, AnswerParsing(QWEN, thinking=ThinkingStart.OPENED), Stop())
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
        SequenceOutput(TokenSequence(request, index, index, (1,), limit=1, seed=0), tokenizer)
    assert looked == len(tokenizer.special_ids) > 0


def test_calls_that_were_read_out_of_thinking_are_counted() -> None:
    reading = AnswerParsing(QWEN, TOOLS, ThinkingStart.OPENED)
    for text, count in ((f"Hm.\n{CALL}\n{CALL}\n</think>\n", 2), (f"Hm.\n{CALL}", 1), (f"Hm.\n</think>\n{CALL}", 0)):
        for pieces in ([text], list(text)):
            answer, events = read(pieces, reading)
            assert answer.calls_in_thinking == count
            assert sum(isinstance(event, CallBegan) for event in events) == max(1, count)
