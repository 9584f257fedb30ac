"""Prompts that share a beginning which no message's end marks: models that can be resumed at few places learn where.

Whatever is taken over, the answer is that of a prompt computed whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling
from tests import engines, tiny
from tests.equality.test_cached import ask, run

KINDS = ["llama", "window", "hybrid", "mixed"]
EOS = tiny.VOCAB - 1


@pytest.fixture(scope="module", params=KINDS)
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start(request.param, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


@pytest.fixture
def engine(running: Engine) -> Engine:
    """It has cached nothing yet."""
    running.kept.clear("")
    engines.runner_of(running).prefix_cache.counts.clear()
    return running


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(95) for _ in range(length)]


def cached(engine: Engine, asked: list[Request]) -> list[int]:
    """What each took over, one after another; none may say anything else than without it."""
    counts = []
    for request in asked:
        warm, count = run(engine, request)
        assert warm == run(engine, replace(request, id=request.id + "-cold", cache=False))[0]
        counts.append(count)
    return counts


def test_prompts_that_share_a_thousand_tokens_take_them_over_from_the_third_on(engine: Engine) -> None:
    rng = random.Random(21)
    shared = text(rng, 1000)
    asked = [ask(f"p{number}", [*shared, number, *text(rng, 40)]) for number in range(5)]
    assert cached(engine, asked)[2:] == [1000] * 3


def test_the_same_prompt_again_leaves_one_token_to_compute(engine: Engine) -> None:
    prompt = text(random.Random(22), 300)
    assert cached(engine, [ask(f"same{number}", prompt) for number in range(3)]) == [0, 299, 299]


def test_a_document_and_a_question_in_one_message_are_told_apart(engine: Engine) -> None:
    rng = random.Random(23)
    system, document = [*text(rng, 40), EOS], text(rng, 700)
    asked = [ask(f"q{number}", [*system, *document, number, *text(rng, 8), EOS, 5, 6]) for number in range(4)]
    counts = cached(engine, asked)
    assert counts[0] == 0 and counts[1] >= len(system)
    assert counts[2:] == [len(system) + len(document)] * 2


def test_prompts_that_part_ever_earlier_are_still_told_apart(engine: Engine) -> None:
    rng = random.Random(24)
    shared = text(rng, 600)
    for length in (500, 495, 400, 90):
        asked = [ask(f"at{length}-{number}", [*shared[:length], number, *text(rng, 30)]) for number in range(3)]
        assert cached(engine, asked)[2] >= length - 32


def test_answers_of_one_request_compute_its_prompt_once(engine: Engine) -> None:
    prompt = text(random.Random(25), 400)
    engines.answer(engine, replace(ask("n", prompt), n=4, sampling=Sampling(seed=1)))
    counts = engines.runner_of(engine).prefix_cache.counts[""]
    assert (counts.prompts, counts.matched_tokens) == (4, 3 * 399)


def test_prompts_that_come_together_compute_what_they_share_once(engine: Engine) -> None:
    rng = random.Random(26)
    shared = text(rng, 500)
    asked = [ask(f"together{number}", [*shared, number, *text(rng, 20)]) for number in range(4)]
    streams = [engine.generate(request) for request in asked]
    texts = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
    assert engines.runner_of(engine).prefix_cache.counts[""].matched_tokens >= 3 * len(shared)
    assert texts == [run(engine, replace(request, id=request.id + "c", cache=False))[0] for request in asked]


@pytest.mark.parametrize("kind", ["hybrid", "mixed"])
def test_learning_costs_a_checkpoint_or_two_a_prompt(kind: str) -> None:
    engine = engines.start(kind, cache_bytes=1 << 26)
    rng = random.Random(27)
    shared = text(rng, 900)
    for number in range(12):
        run(engine, ask(f"p{number}", [*shared[: 64 * number + 100], *text(rng, 60)]))
    index = engines.runner_of(engine).prefix_cache.index
    # The answer's end, one before the prompt's end, and where it parted from the others.
    assert sum(node.has_checkpoint for node in index.nodes()) <= 3 * 12
    engine.check()
    engine.close()
