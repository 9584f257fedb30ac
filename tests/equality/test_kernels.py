"""The same answers by a GPU's kernels, emulated: alone, among others, after preemption, and from what was kept.

The kernels' source is the one that the GPUs compile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ingot.cache.layers import AppendState
from ingot.cache.slabs import KernelStorage
from ingot.engine.engine import Engine, Limits
from ingot.engine.request import Request, Sampling, Stop
from ingot.kernels.paged.kernels import available
from tests import engines

KINDS = ["kernel", "kernel-window"]
pytestmark = pytest.mark.skipif(not available(engines.GPU), reason="kernels run on no device here, nor can be emulated")


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start(request.param, context=540, device=engines.GPU, cache_bytes=1 << 24)
    yield made
    made.close()


def prompt(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(95) for _ in range(count))


def asked(name: str, tokens: tuple[int, ...], *, cache: bool = False) -> Request:
    return Request(
        name, (tokens,), max_tokens=12, sampling=Sampling(temperature=0.0), stop=Stop(ignore_eos=True), cache=cache
    )


def texts(engine: Engine, requests: list[Request]) -> list[str]:
    return [
        engines.text_of([event for batch in stream for event in batch])
        for stream in [engine.generate(request) for request in requests]
    ]


def test_the_kernels_are_used(engine: Engine) -> None:
    engines.answer(engine, asked("k", prompt(5, 0)))
    states = engines.runner_of(engine).rows.states
    assert all(isinstance(state, AppendState) and isinstance(state.storage, KernelStorage) for state in states)
    assert not any("gathered" in note for note in engine.card.notes)


def test_rows_of_any_length_answer_as_they_do_alone(engine: Engine) -> None:
    requests = [asked(f"r{length}", prompt(length, length)) for length in (3, 64, 65, 130, 200)]
    alone = [texts(engine, [request])[0] for request in requests]
    assert texts(engine, requests) == alone
    engine.check()


def test_what_was_kept_answers_as_what_is_computed(engine: Engine) -> None:
    shared = prompt(100, 7)
    requests = [asked(f"c{number}", (*shared, *prompt(9, number)), cache=True) for number in range(4)]
    cold = [texts(engine, [asked(f"cold{number}", request.prompts[0])])[0] for number, request in enumerate(requests)]
    assert texts(engine, requests) == cold
    assert (
        texts(engine, [asked(f"again{n}", request.prompts[0], cache=True) for n, request in enumerate(requests)])
        == cold
    )
    engine.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_the_same_after_preemption(kind: str) -> None:
    requests = [replace(asked(f"p{number}", prompt(250 + number, number)), max_tokens=285) for number in range(2)]
    roomy = engines.start(kind, context=540, device=engines.GPU)
    alone = [texts(roomy, [request])[0] for request in requests]
    # Room for two sequences of up to 512 tokens, so that growing beyond pushes the newest out.
    memory = engines.tight_memory(roomy, rows=2, tokens=512)
    roomy.close()
    tight = engines.start(kind, context=540, device=engines.GPU, memory=memory, limits=Limits(max_sequences=2))
    found, preempted = engines.preempted(tight, requests)
    tight.check()
    tight.close()
    assert preempted > 0
    assert found == alone
