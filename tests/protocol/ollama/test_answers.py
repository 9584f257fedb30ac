"""However the events are cut, Ollama's lines add up to the whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    SequenceEnded,
    TextDelta,
    ThinkingDelta,
    Timing,
    Usage,
)
from ingot.errors import Overloaded
from ingot.protocol.chat.answers import AnswerHead
from ingot.protocol.ollama.answers import (
    OllamaAnswerShape,
    OllamaChatShape,
    OllamaCompletionShape,
    StreamedOllamaAnswer,
    WholeOllamaAnswer,
)
from tests.http.scripted import info

HEAD = AnswerHead("req-1", 1, "toy", "fp", ["quux"])
END = Ended(Usage(10, 3, 4, 1), Timing(0.5, 0.25, 1.0))
STOP = SequenceEnded(0, "stop", 257, 3)


def plain(struct: msgspec.Struct) -> Any:
    made = json.loads(msgspec.json.encode(struct))
    made.pop("created_at", None)
    return made


def whole(events: Iterable[Event], shape: OllamaAnswerShape) -> Any:
    view = WholeOllamaAnswer(shape)
    for event in events:
        view.take(event)
    return plain(view.body())


def streamed(events: Iterable[Event], shape: OllamaAnswerShape) -> list[Any]:
    view = StreamedOllamaAnswer(shape)
    return [plain(chunk) for chunk in [*view.opening(), *(c for event in events for c in view.chunks(event))]]


def call(number: int, arguments: list[str], complete: bool = True) -> list[Event]:
    pieces = [CallArguments(0, number, piece) for piece in arguments]
    return [CallBegan(0, number, f"call_{number}", "look"), *pieces, CallEnded(0, number, complete)]


TEXTS = st.text(max_size=5).map(lambda text: [TextDelta(0, text, (info(text or "a"),))])
THOUGHTS = st.text(max_size=5).map(lambda text: [ThinkingDelta(0, text)])
ENDS = st.sampled_from([STOP, SequenceEnded(0, "length", None, 3)])


@given(st.lists(st.one_of(TEXTS, THOUGHTS), max_size=8), ENDS, st.booleans())
def test_lines_add_up_to_the_whole_chat(parts: list[list[Event]], end: Event, logprobs: bool) -> None:
    events = [event for part in parts for event in part] + call(0, ['{"at"', ": 1}"]) + [end, END]
    shape = OllamaChatShape(HEAD, logprobs=logprobs)
    body, lines = whole(events, shape), streamed(events, shape)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for key in ("content", "thinking"):
        assert "".join(line["message"].get(key, "") for line in lines) == body["message"].get(key, "")
    assert [one for line in lines for one in line["message"].get("tool_calls", [])] == body["message"]["tool_calls"]
    assert [one for line in lines for one in line.get("logprobs", [])] == body.get("logprobs", [])
    stored = {key: value for key, value in body.items() if key not in ("message", "logprobs")}
    assert {key: value for key, value in lines[-1].items() if key not in ("message", "logprobs")} == stored


def test_a_call_is_told_once_and_whole() -> None:
    events = [*call(0, ['{"at', '": "', 'x"}']), *call(1, []), STOP, END]
    calls = [line["message"]["tool_calls"] for line in streamed(events, OllamaChatShape(HEAD))[:-1]]
    assert calls == [
        [{"id": "call_0", "function": {"name": "look", "arguments": {"at": "x"}}}],
        [{"id": "call_1", "function": {"name": "look", "arguments": {}}}],
    ]


def test_of_a_call_that_was_cut_off_its_text_is_told() -> None:
    events = [*call(0, ['{"at'], complete=False), SequenceEnded(0, "length", None, 3), END]
    body = whole(events, OllamaChatShape(HEAD))
    [result] = body["message"]["tool_calls"]
    assert result["function"]["arguments"] == {"_unparsed": '{"at'} and body["done_reason"] == "length"


def test_a_completion_has_its_text_and_its_thinking() -> None:
    body = whole([ThinkingDelta(0, "Hm."), TextDelta(0, "Hi"), STOP, END], OllamaCompletionShape(HEAD))
    assert (body["response"], body["thinking"]) == ("Hi", "Hm.")


def test_the_last_line_tells_times_in_nanoseconds_and_tokens() -> None:
    [last] = streamed([STOP, END], OllamaCompletionShape(HEAD))
    assert last["total_duration"] == 1_750_000_000
    assert (last["prompt_eval_count"], last["prompt_eval_duration"]) == (10, 250_000_000)
    assert (last["eval_count"], last["eval_duration"]) == (3, 1_000_000_000)
    assert (last["done_reason"], last["load_duration"]) == ("stop", 0)
    assert last["ingot"]["ignored"] == ["quux"]


@pytest.mark.parametrize("shape", [OllamaChatShape(HEAD), OllamaCompletionShape(HEAD)])
def test_a_broken_stream_ends_in_an_error(shape: OllamaAnswerShape) -> None:
    assert [plain(last) for last in StreamedOllamaAnswer(shape).failed(Overloaded("Full."))] == [{"error": "Full."}]
