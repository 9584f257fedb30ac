"""Cached == cold, token for token, for every kind of layer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Request, Sampling, Stop
from tests import engines, tiny

KINDS = ["llama", "window", "hybrid", "moe", "mixed", "indexed"]
EOS = tiny.VOCAB - 1


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start(request.param, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


def ask(name: str, tokens: list[int], **options: object) -> Request:
    sampling = Sampling(temperature=0.0)
    return Request(name, (tuple(tokens),), max_tokens=12, sampling=sampling, stop=Stop(ignore_eos=True), **options)  # type: ignore[arg-type]


def run(engine: Engine, request: Request) -> tuple[str, int]:
    events = engines.answer(engine, request)
    assert isinstance(events[-1], Ended)
    return engines.text_of(events), events[-1].usage.cached_tokens


def message(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(95) for _ in range(length)] + [EOS]


def test_a_conversation_costs_only_its_new_tokens_and_reads_the_same(engine: Engine) -> None:
    rng = random.Random(11)
    history = message(rng, 90)
    before = 0
    for turn in range(4):
        history += message(rng, 30 + turn)
        asked = ask(f"turn{turn}", [*history, 5, 6])
        cold, none = run(engine, replace(asked, id=f"cold{turn}", cache=False))
        warm, cached = run(engine, asked)
        assert warm == cold and none == 0
        assert cached >= before
        before = len(history)
        history += [engine.tokenizer.encode(letter, add_special=False)[0] for letter in warm if letter != " "] + [EOS]


def test_an_edited_message_is_computed_again_from_where_it_differs(engine: Engine) -> None:
    rng = random.Random(12)
    first, second, third = message(rng, 80), message(rng, 70), message(rng, 60)
    run(engine, ask("original", first + second + third + [3]))
    edited = ask("edited", first + message(rng, 50) + third + [3])
    warm, cached = run(engine, edited)
    assert warm == run(engine, replace(edited, id="edited-cold", cache=False))[0]
    assert cached == len(first)


def test_the_same_prompt_again_leaves_one_token_to_compute(engine: Engine) -> None:
    prompt = [*message(random.Random(13), 120), 4, 5]
    cold, _ = run(engine, ask("again1", prompt))
    warm, cached = run(engine, ask("again2", prompt))
    assert warm == cold
    assert len(prompt) - 3 <= cached < len(prompt)


def test_another_salt_finds_nothing(engine: Engine) -> None:
    prompt = [*message(random.Random(14), 100), 4]
    run(engine, ask("mine", prompt, salt="me"))
    assert run(engine, ask("yours", prompt, salt="you"))[1] == 0
    assert run(engine, ask("mine2", prompt, salt="me"))[1] > 0


def test_requests_that_share_a_prompt_and_come_together_compute_it_once(engine: Engine) -> None:
    rng = random.Random(15)
    shared = message(rng, 300)
    asked = [ask(f"together{number}", shared + message(rng, 5) + [number]) for number in range(4)]
    streams = [engine.generate(request) for request in asked]
    warm = [[event for batch in stream for event in batch] for stream in streams]
    cached = [events[-1].usage.cached_tokens for events in warm if isinstance(events[-1], Ended)]
    assert sorted(cached)[0] == 0 and all(count >= len(shared) for count in sorted(cached)[1:])
    for request, events in zip(asked, warm, strict=True):
        assert engines.text_of(events) == run(engine, replace(request, id=request.id + "c", cache=False))[0]


def test_answers_of_one_request_share_its_prompt(engine: Engine) -> None:
    prompt = [*message(random.Random(16), 200), 3]
    events = engines.answer(engine, replace(ask("n", prompt), n=3, sampling=Sampling(seed=1)))
    assert isinstance(events[-1], Ended)
    assert len({engines.text_of(events, index) for index in range(3)}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_eviction_under_concurrency_changes_no_answer(kind: str) -> None:
    small = engines.start(kind, cache_bytes=150_000)
    rng = random.Random(17)
    heads = [message(rng, 60) for _ in range(3)]
    asked = [
        ask(f"e{number}", rng.choice(heads) + message(rng, rng.randrange(1, 40)) + rng.choice(heads)[:5])
        for number in range(24)
    ]
    cold = [run(small, replace(request, id=request.id + "c", cache=False))[0] for request in asked]
    for begin in range(0, len(asked), 6):
        streams = [small.generate(request) for request in asked[begin : begin + 6]]
        warm = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
        assert warm == cold[begin : begin + 6]
        small.check()
    assert 0 < engines.runner_of(small).prefix_cache.index.nbytes <= 150_000
    small.close()
