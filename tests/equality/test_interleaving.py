"""Requests of all sorts at once, over a cache that is far too small: each gets what a model without any would say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Failed, Request, Sampling, Stop
from ingot.engine.streams import BlockingStream
from tests import engines, tiny

KINDS = ["llama", "window", "hybrid", "moe"]
EOS = tiny.VOCAB - 1
CACHE_BYTES = 120_000
IDS = count()


@dataclass(frozen=True)
class Move:
    """A prompt that begins like the trunk of this number, up to `cut` of it, and goes on in its own way."""

    trunk: int
    cut: float
    tail: int
    salt: str
    cached: bool
    cancelled: bool
    awaited: bool  # before the next one is sent


MOVES = st.lists(
    st.builds(
        Move,
        trunk=st.integers(0, 2),
        cut=st.floats(0.0, 1.0),
        tail=st.integers(1, 6),
        salt=st.sampled_from(["", "other"]),
        cached=st.integers(0, 5).map(bool),
        cancelled=st.integers(0, 7).map(lambda number: number == 0),
        awaited=st.booleans(),
    ),
    min_size=3,
    max_size=10,
)


def trunk(number: int) -> list[int]:
    rng = random.Random(number)
    return [token for _ in range(4) for token in [*(rng.randrange(95) for _ in range(40)), EOS]]


def request(move: Move) -> Request:
    whole = trunk(move.trunk)
    prompt = [*whole[: round(move.cut * len(whole))], *(50 + move.tail for _ in range(move.tail))]
    return asked(tuple(prompt), cache=move.cached, salt=move.salt)


def asked(prompt: tuple[int, ...], *, cache: bool, salt: str = "") -> Request:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    return Request(f"r{next(IDS)}", (prompt,), max_tokens=5, sampling=greedy, stop=endless, cache=cache, salt=salt)


@dataclass
class Sides:
    """An engine, and what it says when it takes over nothing."""

    engine: Engine
    cold: dict[tuple[int, ...], str]

    def says(self, prompt: tuple[int, ...]) -> str:
        if prompt not in self.cold:
            self.cold[prompt] = engines.text_of(engines.answer(self.engine, asked(prompt, cache=False)))
        return self.cold[prompt]


@pytest.fixture(scope="module", params=KINDS)
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    engine = engines.start(request.param, cache_bytes=CACHE_BYTES, limits=EngineLimits(max_sequences=4))
    yield Sides(engine, {})
    engine.close()


def finished(stream: BlockingStream) -> str | None:
    events = [event for batch in stream for event in batch]
    if isinstance(events[-1], Failed):
        return None
    assert isinstance(events[-1], Ended)
    report = events[-1].cache[0]
    assert report.matched == events[-1].usage.cached_tokens <= report.known
    return engines.text_of(events)


@settings(max_examples=settings().max_examples // 5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES)
def test_whatever_comes_at_once_gets_what_it_would_get_alone(sides: Sides, moves: list[Move]) -> None:
    wanted = [request(move) for move in moves]
    expected = [sides.says(one.prompts[0]) for one in wanted]
    streams: list[BlockingStream] = []
    answers: dict[int, str | None] = {}
    for number, (move, one) in enumerate(zip(moves, wanted, strict=True)):
        streams.append(sides.engine.generate(one))
        if move.cancelled:
            sides.engine.cancel(one.id)
        if move.awaited:
            answers[number] = finished(streams[number])
    for number, stream in enumerate(streams):
        if number not in answers:
            answers[number] = finished(stream)
    for number, move in enumerate(moves):
        assert answers[number] == expected[number] or (move.cancelled and answers[number] is None)
    sides.engine.check()
    assert sides.engine.kept.status("").used_bytes <= CACHE_BYTES
