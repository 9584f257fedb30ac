"""Solo == batched with joiners and leavers == after preemption, greedy, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from tests import engines

KINDS = ["llama", "tied", "window", "hybrid", "moe"]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """`make test-as-gpus` starts the same ones by the rules of GPUs."""
    made = engines.start(request.param)
    yield made
    made.check()
    made.close()


def requests(seed: int, count: int = 8, *, longest: int = 300) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{number}",
            (tuple(rng.randrange(95) for _ in range(rng.choice([1, 3, 20, 61, longest]))),),
            max_tokens=rng.choice([1, 2, 17, 40]),
            sampling=GREEDY,
            stop=Stop(ignore_eos=True),
        )
        for number in range(count)
    ]


def together(engine: Engine, asked: list[Request]) -> list[str]:
    """Open all at once, so that they join and leave each other's batches; read them in order."""
    streams = [engine.generate(request) for request in asked]
    return [engines.text_of([event for batch in stream for event in batch]) for stream in streams]


def test_a_sequence_is_the_same_alone_and_among_joiners_and_leavers(engine: Engine) -> None:
    asked = requests(3)
    alone = [engines.text_of(engines.answer(engine, request)) for request in asked]
    assert together(engine, asked) == alone


def test_sampled_text_depends_on_its_seed_alone(engine: Engine) -> None:
    asked = [
        Request(
            f"s{number}",
            ((number + 1, 7, 9),),
            max_tokens=15,
            sampling=Sampling(
                temperature=1.1,
                top_p=0.8 if number % 2 else 1.0,
                top_k=12 if number % 3 else 0,
                frequency_penalty=0.4 if number % 4 == 1 else 0.0,
                repetition_penalty=1.2 if number % 4 == 2 else 1.0,
                seed=number,
            ),
            stop=Stop(ignore_eos=True),
        )
        for number in range(8)
    ]
    alone = [engines.text_of(engines.answer(engine, request)) for request in asked]
    assert together(engine, asked) == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.usefixtures("reserved_by_page")
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_the_same_after_preemption(kind: str) -> None:
    rng = random.Random(9)
    asked = [
        Request(
            f"p{number}",
            (tuple(rng.randrange(95) for _ in range(44 + 10 * number)),),
            sampling=GREEDY,
            stop=Stop(ignore_eos=True),
        )
        for number in range(3)
    ]
    roomy = engines.start(kind, context=140)
    alone = [engines.text_of(engines.answer(roomy, request)) for request in asked]
    roomy.close()
    # Room for three sequences of up to 128 tokens, so that growing beyond pushes the newest out.
    tight_bytes = engines.tight_memory(roomy, rows=3, tokens=128)
    tight = engines.start(kind, context=140, memory=tight_bytes, limits=EngineLimits(max_sequences=4))
    texts, preempted = engines.preempted(tight, asked)
    tight.check()
    tight.close()
    assert preempted > 0
    assert texts == alone
