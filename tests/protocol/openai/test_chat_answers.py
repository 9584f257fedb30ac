"""However the events are cut, streamed and whole answers tell the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
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
from ingot.protocol.chat.answers import AnswerHead
from ingot.protocol.openai.chat_answers import ChatAnswerOptions, StreamedChat, WholeChat
from tests.http.scripted import info

HEAD = AnswerHead("chatcmpl-1", 1, "toy", "fp", ["quux"])
END = Ended(Usage(5, 3, 2, 1), Timing(0.5, 0.25, 1.0))


def plain(struct: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(struct))


def whole(events: list[Event], n: int = 1, **given: Any) -> Any:
    view = WholeChat(HEAD, n, ChatAnswerOptions(**given))
    for event in events:
        view.take(event)
    return plain(view.body())


def streamed(events: list[Event], n: int = 1, *, filled: bool = False, **given: Any) -> list[Any]:
    """`filled`: every event was long in coming."""
    view = StreamedChat(HEAD, n, ChatAnswerOptions(**given))
    chunks = view.opening()
    for event in events:
        chunks += [*(view.empty() if filled else []), *view.chunks(event)]
    return [plain(chunk) for chunk in chunks]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[int, list[Event]]:
    n = draw(st.integers(1, 4))
    pieces = draw(st.lists(st.tuples(st.integers(0, n - 1), st.text(max_size=3)), max_size=20))
    deltas: list[Event] = [TextDelta(index, text, (info(text or "a"),)) for index, text in pieces]
    ends: list[Event] = [SequenceEnded(at, draw(st.sampled_from(["stop", "length"])), None, 1) for at in range(n)]
    return n, [*deltas, *draw(st.permutations(ends)), END]


@given(conversations(), st.booleans(), st.booleans(), st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(
    made: tuple[int, list[Event]], logprobs: bool, usage: bool, filled: bool
) -> None:
    n, events = made
    body = whole(events, n, logprobs=logprobs)
    chunks = streamed(events, n, logprobs=logprobs, include_usage=usage, filled=filled)
    assert {chunk["id"] for chunk in chunks} == {body["id"]}
    for choice in body["choices"]:
        own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] is not None
        if logprobs:
            answer = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert answer == choice["logprobs"]["content"]
    assert [at for at, chunk in enumerate(chunks) if "ingot" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["ingot"] == body["ingot"]
    if usage:
        assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [body["usage"]]
    else:
        assert all("usage" not in chunk for chunk in chunks)


@st.composite
def agents_answers(draw: st.DrawFn) -> list[Event]:
    """Thinking, text and calls of one sequence."""
    events: list[Event] = [ThinkingDelta(0, text) for text in draw(st.lists(st.text(min_size=1, max_size=3)))]
    events += [TextDelta(0, text) for text in draw(st.lists(st.text(max_size=3)))]
    for call in range(draw(st.integers(0, 3))):
        events.append(CallBegan(0, call, f"call_{call}", draw(st.text(min_size=1, max_size=3))))
        events += [CallArguments(0, call, piece) for piece in draw(st.lists(st.text(min_size=1, max_size=3)))]
        events.append(CallEnded(0, call, True))
    return [*events, SequenceEnded(0, "tool_calls", None, 1), END]


@given(agents_answers())
def test_streamed_thinking_and_calls_add_up_to_the_whole_answer(events: list[Event]) -> None:
    message = whole(events)["choices"][0]["message"]
    deltas = [part["delta"] for chunk in streamed(events) for part in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get("reasoning_content", "")
    assert message.get("reasoning") == message.get("reasoning_content")
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    calls: list[Any] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", [])):
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    assert calls == message.get("tool_calls", [])
    assert (message["content"] is None) == (bool(calls) and not any(delta.get("content") for delta in deltas))


def test_logprobs_have_the_tokens_bytes_and_the_likeliest() -> None:
    token = info("é", -0.25, top=[("é", -0.25), ("x", float("-inf"))])
    body = whole([TextDelta(0, "é", (token,)), SequenceEnded(0, "stop", None, 1), END], logprobs=True)
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "é",
            "logprob": -0.25,
            "bytes": [0xC3, 0xA9],
            "top_logprobs": [
                {"token": "é", "logprob": -0.25, "bytes": [0xC3, 0xA9]},
                {"token": "x", "logprob": -9999.0, "bytes": [0x78]},
            ],
        }
    ]


def test_usage_tells_what_was_cached() -> None:
    body = whole([SequenceEnded(0, "stop", None, 0), END])
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_metadata_and_tier_are_given_back() -> None:
    body = whole([SequenceEnded(0, "stop", None, 0), END], metadata={"a": "b"}, tiered=True)
    assert (body["metadata"], body["service_tier"]) == ({"a": "b"}, "default")
    assert "metadata" not in whole([END])


def test_a_choice_that_ends_early_is_told_at_once() -> None:
    view = StreamedChat(HEAD, 2, ChatAnswerOptions())
    assert len(view.chunks(SequenceEnded(1, "stop", None, 1))) == 1
    assert view.chunks(SequenceEnded(0, "stop", None, 1)) == []
    assert len(view.chunks(END)) == 1
