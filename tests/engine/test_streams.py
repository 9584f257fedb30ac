"""What waits for a reader: all of it, in little room, up to a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine import streams
from ingot.engine.request import (
    CallArguments,
    CallBegan,
    Ended,
    Event,
    Failed,
    SequenceEnded,
    TextDelta,
    ThinkingDelta,
    Timing,
    TokenInfo,
    TokenLogprob,
    Usage,
)
from ingot.engine.streams import EventStream, merge_deltas
from ingot.errors import Cancelled, IngotError

pytestmark = pytest.mark.anyio
END = Ended(Usage(), Timing())
LATE = 10 * streams.MERGED_AFTER
INFO = TokenInfo(TokenLogprob(1, "x", b"x", -0.5), (TokenLogprob(1, "x", b"x", -0.5),) * 20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def turn() -> None:
    """Lets what was posted arrive."""
    await asyncio.sleep(0)


async def read(stream: EventStream) -> list[Event]:
    async with asyncio.timeout(10):
        return [event async for batch in stream for event in batch]


async def test_a_reader_in_time_gets_each_batch_as_it_comes() -> None:
    stream = EventStream(lambda cause: None)
    batches = stream.__aiter__()
    for word in ("one", "two"):
        stream.post([TextDelta(0, word)])
        assert await anext(batches) == [TextDelta(0, word)]


async def test_a_reader_that_is_late_gets_everything_and_the_end_last() -> None:
    stream = EventStream(lambda cause: None)
    for at in range(LATE):
        stream.post([TextDelta(0, f"{at} "), ThinkingDelta(1, f"{at} ")])
    stream.post([END])
    await turn()
    events = await read(stream)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "".join(
        f"{at} " for at in range(LATE)
    )
    assert events[-1] == END


async def test_what_waits_for_long_takes_little_more_room_than_its_text() -> None:
    stream = EventStream(lambda cause: None)
    for _ in range(LATE):
        stream.post([TextDelta(0, "x"), TextDelta(1, "y")])
    await turn()
    assert len(stream) < 3 * streams.MERGED_AFTER


async def test_a_reader_that_falls_too_far_behind_gets_what_waits_and_is_told_why_there_is_no_more() -> None:
    cancelled: list[IngotError] = []
    stream = EventStream(cancelled.append)
    count = 2 * streams.MOST_WAITING_BYTES // streams.TOKEN_INFO_BYTES // 20
    for _ in range(count):
        stream.post([TextDelta(0, "x", (INFO,))])
    stream.post([END])
    await turn()
    events = await read(stream)
    told = [event for event in events if isinstance(event, TextDelta)]
    assert 0 < sum(len(event.text) for event in told) < count
    assert sum(len(event.tokens) for event in told) == sum(len(event.text) for event in told)
    last = events[-1]
    assert isinstance(last, Failed) and isinstance(last.error, Cancelled)
    assert "behind" in last.error.message and cancelled == [last.error]


async def test_a_reader_that_catches_up_may_fall_behind_again() -> None:
    stream = EventStream(lambda cause: None)
    batches = stream.__aiter__()
    half = "x" * (streams.MOST_WAITING_BYTES // 2)
    for _ in range(8):
        stream.post([TextDelta(0, half)])
        assert await anext(batches) == [TextDelta(0, half)]


deltas = st.one_of(
    st.builds(TextDelta, st.integers(0, 2), st.text(max_size=3), st.just(()) | st.just((INFO,))),
    st.builds(ThinkingDelta, st.integers(0, 2), st.text(max_size=3)),
    st.builds(CallArguments, st.integers(0, 2), st.integers(0, 1), st.text(max_size=3)),
    st.builds(CallBegan, st.integers(0, 2), st.integers(0, 1), st.just("id"), st.just("name")),
    st.builds(SequenceEnded, st.integers(0, 2), st.just("stop"), st.none(), st.integers(0, 3)),
)


def told(events: Sequence[Event], index: int) -> list[object]:
    """One sequence's events a character at a time."""
    pieces: list[object] = []
    for event in events:
        match event:
            case TextDelta(at, text, tokens) if at == index:
                pieces += [("text", character) for character in text]
                pieces += [("token", token) for token in tokens]
            case ThinkingDelta(at, text) if at == index:
                pieces += [("thinking", character) for character in text]
            case CallArguments(at, call, fragment) if at == index:
                pieces += [("arguments", call, character) for character in fragment]
            case CallBegan(at) | SequenceEnded(at) if at == index:
                pieces.append(event)
    return pieces


def without_tokens(pieces: list[object]) -> list[object]:
    return [piece for piece in pieces if not (isinstance(piece, tuple) and piece[0] == "token")]


@given(st.lists(deltas, max_size=30))
def test_joining_changes_nothing_that_a_sequence_says(events: list[Event]) -> None:
    after = merge_deltas(events)
    assert len(after) <= len(events)
    for index in range(3):
        before_pieces, after_pieces = told(events, index), told(after, index)
        assert without_tokens(after_pieces) == without_tokens(before_pieces)
        assert after_pieces.count(("token", INFO)) == before_pieces.count(("token", INFO))
