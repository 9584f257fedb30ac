"""However the events are cut, streamed and whole messages tell the same, and the stream keeps the order it promises."""

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
from ingot.errors import Cancelled, ContextOverflow, IngotError, NotFound, Overloaded, RequestTooLarge, Unavailable
from ingot.protocol.anthropic.answers import AppliedEdits, MessageAnswerOptions, StreamedMessage, WholeMessage
from ingot.protocol.chat.answers import AnswerHead
from ingot.protocol.errors import AnthropicError
from ingot.protocol.served import ThinkingSeal

SEAL = ThinkingSeal.of(b"secret", "")
HEAD = AnswerHead("msg_1", 1, "toy", "fp", ["quux"])
END = Ended(Usage(10, 3, 4, 1), Timing(0.5, 0.25, 1.0))
STOP = SequenceEnded(0, "stop", 257, 3)


def telling(**changes: Any) -> MessageAnswerOptions:
    return MessageAnswerOptions(HEAD, SEAL, **{"prompt_tokens": 10, "max_tokens": 3, **changes})


def plain(struct: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(struct))


def whole(events: Iterable[Event], **changes: Any) -> Any:
    view = WholeMessage(telling(**changes))
    for event in events:
        view.take(event)
    return plain(view.body())


def streamed(events: Iterable[Event], silences: frozenset[int] = frozenset(), **changes: Any) -> list[Any]:
    """`silences` are the places of events that were long in coming."""
    view = StreamedMessage(telling(**changes))
    chunks = view.opening()
    for at, event in enumerate(events):
        chunks += [*(view.empty() if at in silences else []), *view.chunks(event)]
    return [plain(chunk) for chunk in chunks]


def added_up(chunks: list[Any]) -> Any:
    """The message that a client makes of a stream, which must keep its order while it does."""
    first, *rest = chunks
    assert first["type"] == "message_start"
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    opened: int | None = None
    inputs: dict[int, str] = {}
    for at, chunk in enumerate(rest):
        match chunk["type"]:
            case "ping":
                continue
            case "content_block_start":
                assert opened is None and chunk["index"] == len(message["content"])
                opened = chunk["index"]
                message["content"].append(chunk["content_block"])
            case "content_block_delta":
                assert chunk["index"] == opened
                add(message["content"][opened], chunk["delta"], inputs, opened)
            case "content_block_stop":
                assert chunk["index"] == opened
                opened = None
            case "message_delta":
                assert opened is None and at == len(rest) - 2
                message |= chunk["delta"] | {"usage": chunk["usage"], "ingot": chunk["ingot"]}
            case kind:
                assert kind == "message_stop" and at == len(rest) - 1
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text) if text else {}
    return message


def add(block: Any, delta: Any, inputs: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            assert block["signature"] == ""
            block["signature"] = delta["signature"]
        case "input_json_delta":
            inputs[index] = inputs.get(index, "") + delta["partial_json"]


Part = tuple[str, str]
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.text(min_size=1, max_size=20)),
        st.tuples(st.just("thinking"), st.text(min_size=1, max_size=20)),
        st.tuples(
            st.just("call"), st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3).map(json.dumps)
        ),
    ),
    max_size=6,
)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    positions = sorted(draw(st.sets(st.integers(0, len(text)), max_size=5)))
    return [text[begin:end] for begin, end in zip([0, *positions], [*positions, len(text)], strict=True)]


def answer(draw: st.DrawFn, parts: list[Part]) -> list[Event]:
    events: list[Event] = []
    calls = 0
    for kind, text in parts:
        pieces = cut(draw, text)
        if kind == "text":
            events += [TextDelta(0, piece) for piece in pieces]
        elif kind == "thinking":
            events += [ThinkingDelta(0, piece) for piece in pieces]
        else:
            events.append(CallBegan(0, calls, f"call_{calls}", "look"))
            events += [CallArguments(0, calls, piece) for piece in pieces]
            events.append(CallEnded(0, calls, True))
            calls += 1
    reason = "tool_calls" if calls else "stop"
    return [*events, SequenceEnded(0, reason, 257, 3), END]


@given(st.data())
def test_however_the_events_are_cut_the_message_is_the_same(data: st.DataObject) -> None:
    parts = data.draw(PARTS)
    hidden = data.draw(st.booleans())
    first, second = answer(data.draw, parts), answer(data.draw, parts)
    message = whole(first, hides_thinking=hidden)
    assert whole(second, hides_thinking=hidden) == message
    assert added_up(streamed(first, hides_thinking=hidden)) == message
    assert added_up(streamed(second, hides_thinking=hidden)) == message


@given(st.data())
def test_a_silence_changes_nothing_but_that_a_first_block_of_another_kind_is_empty(data: st.DataObject) -> None:
    parts = data.draw(PARTS)
    events = answer(data.draw, parts)
    silences = frozenset(data.draw(st.sets(st.integers(0, len(events) - 1))))
    thinks, hidden = data.draw(st.booleans()), data.draw(st.booleans())
    plain, filled = (
        added_up(streamed(events, positions, may_think=thinks, hides_thinking=hidden))
        for positions in (frozenset[int](), silences)
    )
    speculated = "thinking" if thinks else "text"
    if filled != plain:
        first = filled["content"].pop(0)
        assert first["type"] == speculated and not first[speculated]
        assert not plain["content"] or plain["content"][0]["type"] != speculated
        assert silences, "only where there was one"
    assert filled == plain


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (TextDelta(0, "x"), {"type": "text_delta", "text": ""}),
        (ThinkingDelta(0, "x"), {"type": "thinking_delta", "thinking": ""}),
        (CallBegan(0, 0, "c", "look"), {"type": "input_json_delta", "partial_json": ""}),
    ],
)
def test_a_silence_within_a_block_is_filled_with_an_empty_piece_of_it(event: Event, delta: Any) -> None:
    view = StreamedMessage(telling(hides_thinking=True))
    view.opening()
    view.chunks(event)
    assert [plain(chunk) for chunk in view.empty()] == [{"type": "content_block_delta", "index": 0, "delta": delta}]


def test_blocks_come_in_the_order_in_which_they_were_written() -> None:
    events = [
        ThinkingDelta(0, "Hm."),
        TextDelta(0, "Let me "),
        TextDelta(0, "look."),
        CallBegan(0, 0, "c1", "look"),
        CallArguments(0, 0, '{"at": '),
        CallArguments(0, 0, "1}"),
        CallEnded(0, 0, True),
        CallBegan(0, 1, "c2", "wait"),
        CallEnded(0, 1, True),
        SequenceEnded(0, "tool_calls", 257, 3),
        END,
    ]
    message = whole(events)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][2] == {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
    assert message["content"][3]["input"] == {}
    assert SEAL.open(message["content"][0]["signature"]) == "Hm."
    assert (message["type"], message["role"], message["model"], message["id"]) == (
        "message",
        "assistant",
        "toy",
        "msg_1",
    )
    assert message["ingot"]["ignored"] == ["quux"]


def test_the_events_of_a_stream_are_named_and_ordered_as_promised() -> None:
    names = [chunk["type"] for chunk in streamed([ThinkingDelta(0, "Hm."), TextDelta(0, "Hi"), STOP, END])]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",  # the signature
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("ended", "reason", "sequence"),
    [
        (SequenceEnded(0, "stop", 257, 3), "end_turn", None),
        (SequenceEnded(0, "stop", None, 3), "end_turn", None),
        (SequenceEnded(0, "stop", "END", 3), "stop_sequence", "END"),
        (SequenceEnded(0, "length", None, 3), "max_tokens", None),
        (SequenceEnded(0, "length", None, 2), "model_context_window_exceeded", None),
        (SequenceEnded(0, "tool_calls", 257, 3), "tool_use", None),
    ],
)
def test_why_it_stopped_is_told(ended: SequenceEnded, reason: str, sequence: str | None) -> None:
    message = whole([ended, END])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert streamed([ended, END])[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_arguments_that_were_cut_off_are_not_guessed_at() -> None:
    events = [CallBegan(0, 0, "c", "look"), CallArguments(0, 0, '{"at": "the'), CallEnded(0, 0, False)]
    message = whole([*events, SequenceEnded(0, "length", None, 3), END])
    given = {"_unparsed": '{"at": "the'}
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "look", "input": given}]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("marked", "usage"),
    [
        (False, {"input_tokens": 6, "cache_creation_input_tokens": 0}),
        (True, {"input_tokens": 1, "cache_creation_input_tokens": 5}),
    ],
)
def test_the_usage_adds_up_to_the_prompt(marked: bool, usage: dict[str, int]) -> None:
    answer = whole([STOP, END], marked=marked)["usage"]
    assert answer.items() >= (usage | {"cache_read_input_tokens": 4, "output_tokens": 3}).items()
    assert answer["output_tokens_details"] == {"thinking_tokens": 1}
    first = streamed([], marked=marked)[0]["message"]["usage"]
    assert (first["input_tokens"], first["output_tokens"]) == (10, 0)


def test_hidden_thinking_is_carried_by_its_signature_alone() -> None:
    events = [ThinkingDelta(0, "Hm."), STOP, END]
    [block] = whole(events, hides_thinking=True)["content"]
    assert block["thinking"] == "" and SEAL.open(block["signature"]) == "Hm."
    deltas = [chunk for chunk in streamed(events, hides_thinking=True) if chunk["type"] == "content_block_delta"]
    assert [delta["delta"]["type"] for delta in deltas] == ["signature_delta"]


def test_edits_are_told_where_they_were_asked_for() -> None:
    assert "context_management" not in whole([STOP, END])
    edits = AppliedEdits([])
    assert whole([STOP, END], edits=edits)["context_management"] == {"applied_edits": []}
    assert streamed([STOP, END], edits=edits)[-2]["context_management"] == {"applied_edits": []}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextOverflow(needed=9, limit=8), "invalid_request_error"),
        (NotFound("x"), "not_found_error"),
        (RequestTooLarge("x"), "request_too_large"),
        (Overloaded("x"), "rate_limit_error"),
        (Unavailable("x"), "overloaded_error"),
        (IngotError("x"), "api_error"),
        (Cancelled("x"), "invalid_request_error"),
    ],
)
def test_errors_have_the_types_that_clients_know(error: IngotError, kind: str) -> None:
    body = plain(AnthropicError.of(error, "msg_1"))
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, "msg_1")


def test_a_prompt_that_is_too_long_is_said_to_be_in_the_words_that_agents_know() -> None:
    body = AnthropicError.of(ContextOverflow(needed=9, limit=8), "msg_1")
    assert body.error.message.startswith("prompt is too long: 9 tokens > 8 maximum")


def test_a_broken_stream_ends_in_an_error_event() -> None:
    [last] = StreamedMessage(telling()).failed(Overloaded("Out of memory."))
    assert plain(last)["error"] == {"type": "rate_limit_error", "message": "Out of memory."}
