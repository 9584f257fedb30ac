"""With guesses == without, token for token: every layer kind, greedy and sampled, alone and in batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Request, Sampling, SequenceEnded, Stop
from ingot.engine.speculation.proposer import ForcedTokensProposer
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from tests import engines, tiny
from tests.rehearsed import Rehearsed

KINDS = ["llama", "window", "hybrid", "moe"]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "w": {"enum": ["yes", "no"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}
PLACES = [
    *(pytest.param((kind, None), id=kind) for kind in KINDS),
    *(pytest.param((kind, engines.GPU), id=f"{kind}-gpu", marks=pytest.mark.slow) for kind in KINDS),
]


@pytest.fixture(scope="module", params=PLACES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine, Rehearsed]]:
    """An engine that does not guess, and one that does."""
    kind, device = request.param
    rehearsed = Rehearsed({})
    plain = engines.start(kind, device=device)
    guessing = engines.start(kind, device=device, proposers=[rehearsed], fixed_draft_tokens=6, cache_bytes=1 << 24)
    yield plain, guessing, rehearsed
    for engine in (plain, guessing):
        engine.check()
        engine.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(engines.tiny_tokenizer(), tiny.VOCAB)
    yield made
    made.close()


def ask(seed: int, count: int = 8, *, stop: Stop | None = None) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            f"r{seed}-{number}",
            (tuple(rng.randrange(95) for _ in range(rng.choice([3, 20, 61, 130]))),),
            max_tokens=rng.choice([1, 2, 17, 60]),
            sampling=rng.choice(SAMPLINGS),
            stop=stop or Stop(ignore_eos=True),
        )
        for number in range(count)
    ]


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.1, top_p=0.8, seed=3),
    Sampling(temperature=0.9, top_k=12, seed=5, logprobs=2),
    Sampling(temperature=0.8, frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.2, seed=7),
    Sampling(temperature=0.0, repetition_penalty=1.3),
]


def rehearse(plain: Engine, rehearsed: Rehearsed, asked: list[Request]) -> list[list[Event]]:
    """What is right, told to whoever guesses."""
    events = [engines.answer(plain, request) for request in asked]
    for request, told in zip(asked, events, strict=True):
        for ended in told:
            if isinstance(ended, SequenceEnded):
                rehearsed.answers[request.prompts[ended.index // request.n], ended.index] = ended.tokens
    return events


def together(engine: Engine, asked: list[Request]) -> list[list[Event]]:
    streams = [engine.generate(request) for request in asked]
    return [[event for batch in stream for event in batch] for stream in streams]


def same(ones: list[list[Event]], others: list[list[Event]]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert engines.text_of(one) == engines.text_of(other)
        assert _ends(one) == _ends(other)
        assert _usage(one) == _usage(other)


def _ends(events: list[Event]) -> list[SequenceEnded]:
    return [replace(event, logprob_sum=None) for event in events if isinstance(event, SequenceEnded)]


def _usage(events: list[Event]) -> tuple[int, int]:
    ended = events[-1]
    assert isinstance(ended, Ended), ended
    return ended.usage.prompt_tokens, ended.usage.completion_tokens


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_guesses_change_no_token(pair: tuple[Engine, Engine, Rehearsed], right: float) -> None:
    plain, guessing, rehearsed = pair
    rehearsed.right = right
    asked = ask(int(10 * right))
    told = rehearse(plain, rehearsed, asked)
    same([engines.answer(guessing, request) for request in asked[:3]], told[:3])
    found = together(guessing, asked)
    same(found, told)
    reports = [events[-1].speculation for events in found if isinstance(events[-1], Ended)]
    assert sum(report.proposed for report in reports) > 50
    if right == 1.0:
        assert all(report.accepted == report.proposed for report in reports)
        for report, (_, tokens) in zip(reports, map(_usage, found), strict=True):
            assert report.passes + report.accepted == tokens - 1  # the first is the prompt's


def test_an_answer_that_is_stopped_inside_a_right_guess_ends_there(pair: tuple[Engine, Engine, Rehearsed]) -> None:
    plain, guessing, rehearsed = pair
    rehearsed.right = 1.0
    [whole] = rehearse(
        plain,
        rehearsed,
        [Request("whole", ((5, 6, 7),), max_tokens=60, stop=Stop(ignore_eos=True), sampling=Sampling(temperature=0.0))],
    )
    text = engines.text_of(whole)
    for length in (2, 9):
        stop = Stop(strings=(text[20 : 20 + length],), ignore_eos=True)
        request = Request(
            f"stopped-{length}", ((5, 6, 7),), max_tokens=60, stop=stop, sampling=Sampling(temperature=0.0)
        )
        same([engines.answer(guessing, request)], [engines.answer(plain, request)])
    guessing.check()


def test_a_second_turn_takes_over_what_was_guessed(pair: tuple[Engine, Engine, Rehearsed]) -> None:
    plain, guessing, rehearsed = pair
    rehearsed.right = 0.7
    prompt = tuple(random.Random(4).randrange(95) for _ in range(150))
    asked = [Request("turn", (prompt,), max_tokens=80, stop=Stop(ignore_eos=True), sampling=Sampling(temperature=0.0))]
    [told] = rehearse(plain, rehearsed, asked)
    same([engines.answer(guessing, asked[0])], [told])
    answer = rehearsed.answers[prompt, 0]
    following = replace(asked[0], id="next", prompts=((*prompt, *answer, 1, 2, 3),))
    told = rehearse(plain, rehearsed, [following])
    found = engines.answer(guessing, following)
    same([found], told)
    assert isinstance(found[-1], Ended)
    assert found[-1].usage.cached_tokens >= 150 + 80 - 16


def held(grammars: Grammars) -> list[CompiledGrammar]:
    return [
        grammars.json_schema(SCHEMA),
        grammars.json_schema({"type": "object"}),
        grammars.regex("(ab|cd)+[0-9]{4,40}x"),
        grammars.choice(["yellow", "yes", "no"]),
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("right", [0.3, 1.0])
def test_guesses_change_no_token_of_a_constrained_answer(
    pair: tuple[Engine, Engine, Rehearsed], grammars: Grammars, right: float
) -> None:
    plain, guessing, rehearsed = pair
    rehearsed.right = right
    asked = [
        Request(
            f"g{right}-{number}-{at}",
            ((7, at, number),),
            max_tokens=60,
            sampling=SAMPLINGS[at % len(SAMPLINGS)],
            grammar=plan,
        )
        for number, plan in enumerate(held(grammars))
        for at in range(3)
    ]
    told = rehearse(plain, rehearsed, asked)
    same(together(guessing, asked), told)


def test_what_a_guide_forces_is_proposed_and_never_wrong(grammars: Grammars) -> None:
    plain, forced = (
        engines.start("llama"),
        engines.start("llama", proposers=[ForcedTokensProposer()], fixed_draft_tokens=16),
    )
    plan = grammars.regex("[ab]the same long words again and again[0-9]{3} and a little more")
    asked = [
        Request(f"f{number}", ((7, number),), max_tokens=90, grammar=plan, sampling=sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    told = [engines.answer(plain, request) for request in asked]
    found = together(forced, asked)
    for engine in (plain, forced):
        engine.check()
        engine.close()
    same(found, told)
    for events in found:
        assert isinstance(events[-1], Ended)
        assert events[-1].speculation.accepted == events[-1].speculation.proposed > 30


@pytest.mark.usefixtures("reserved_by_page")
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_change_no_token_of_a_preempted_sequence(kind: str) -> None:
    rng = random.Random(9)
    asked = [
        Request(
            f"p{number}",
            (tuple(rng.randrange(95) for _ in range(44 + 10 * number)),),
            sampling=Sampling(temperature=0.0),
            stop=Stop(ignore_eos=True),
        )
        for number in range(3)
    ]
    rehearsed = Rehearsed({}, right=0.9)
    roomy = engines.start(kind, context=140)
    told = rehearse(roomy, rehearsed, asked)
    roomy.close()
    tight_bytes = engines.tight_memory(roomy, rows=3, tokens=128)
    tight = engines.start(
        kind, context=140, memory=tight_bytes, limits=EngineLimits(max_sequences=4), proposers=[rehearsed]
    )
    texts, preempted = engines.preempted(tight, asked)
    tight.check()
    tight.close()
    assert preempted > 0
    assert texts == [engines.text_of(events) for events in told]
