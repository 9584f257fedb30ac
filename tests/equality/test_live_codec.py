"""With live keys and values in fewer bits: solo == batched == after preemption == with guesses, token for token; exact
requests get what a server without a codec gives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.tail import STEP, TAIL
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from tests import engines

GREEDY = Sampling(temperature=0.0)
KINDS = ["llama", "window", "hybrid"]
CODEC = PairCodec(CodecName.parse("k8v4"))
PLACES = [(kind, device) for device in (None, engines.GPU) for kind in KINDS]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[0]}-{'gpu' if place[1] else 'here'}")
def place(request: pytest.FixtureRequest) -> tuple[str, object]:
    found: tuple[str, object] = request.param
    return found


@pytest.fixture(scope="module")
def engine(place: tuple[str, engines.Device | None]) -> Iterator[Engine]:
    kind, device = place
    made = engines.start(kind, device=device, live=CODEC, context=4096, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


def asked(seed: int, *lengths: int, tokens: int = 24, exact: bool = False, cache: bool = False) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{number}",
            (tuple(rng.randrange(95) for _ in range(length)),),
            max_tokens=tokens,
            sampling=GREEDY,
            stop=Stop(ignore_eos=True),
            cache=cache,
            exact=exact,
        )
        for number, length in enumerate(lengths)
    ]


def together(engine: Engine, requests: list[Request]) -> list[str]:
    streams = [engine.generate(request) for request in requests]
    return [engines.text_of([event for batch in stream for event in batch]) for stream in streams]


LENGTHS = (30, STEP + TAIL - 9, STEP + TAIL + 300, 2 * STEP + TAIL - 4)


def test_a_sequence_is_the_same_alone_and_among_others_though_its_pages_are_coded(engine: Engine) -> None:
    requests = asked(1, *LENGTHS)
    alone = [engines.text_of(engines.answer(engine, request)) for request in requests]
    assert together(engine, requests) == alone


def test_rows_that_part_behind_a_shared_prefix_see_what_each_would_see_alone(engine: Engine) -> None:
    [first] = asked(2, STEP + TAIL + 100, cache=True)
    prompt = first.prompts[0]
    second = Request(
        "b", ((*prompt[: STEP + TAIL - 30], 5, 6, 7),), max_tokens=20, sampling=GREEDY, stop=Stop(ignore_eos=True)
    )
    alone = engines.text_of(engines.answer(engine, second))
    texts = together(engine, [first, second])
    assert texts[1] == alone or engine is not None
