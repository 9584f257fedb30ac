"""A model with a trained head: the same text with its guesses and without, and guesses that are worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from foundry import mtp_acceptance
from foundry.rows import lesson, written
from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Ended, Event, Request, Sampling, SequenceEnded, SpeculationReport, Stop
from ingot.kernels.device import current_device
from tests.engines import answer, text_of

HYBRID = Path(mtp_acceptance.__file__).parent / "models" / "hybrid"
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=4, logprobs=1),
)


GPUS_ARE_SLOW = pytest.mark.parametrize(
    "rules",
    ["cpu", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cuda", "metal"))],
    indirect=True,
)


def start(**changes: object) -> Engine:
    # In 16 bits a GPU rounds otherwise for other widths.
    dtype = None if current_device().kind == "cpu" else "float32"
    settings = replace(Settings(memory="2GB", dtype=dtype), **changes)  # type: ignore[arg-type]
    return start_engine(settings, HYBRID, name="hybrid", source="foundry")


@pytest.fixture(scope="module")
def plain(rules: str) -> Iterator[Engine]:
    made = start(speculate="off")
    yield made
    made.check()
    made.close()


@pytest.fixture(scope="module")
def guessing(rules: str) -> Iterator[Engine]:
    made = start(speculate="mtp", speculate_tokens=2)
    yield made
    made.check()
    made.close()


def ask(seeds: Sequence[int], **options: object) -> list[Request]:
    return [
        Request(
            f"h{seed}",
            (tuple(written(lesson(seed, held_out=True), "xml")[0]),),
            **{"max_tokens": 36, "sampling": SAMPLINGS[seed % len(SAMPLINGS)], **options},  # type: ignore[arg-type]
        )
        for seed in seeds
    ]


def together(engine: Engine, asked: Sequence[Request]) -> list[list[Event]]:
    streams = [engine.generate(request) for request in asked]
    return [[event for batch in stream for event in batch] for stream in streams]


def report(found: Sequence[Sequence[Event]]) -> SpeculationReport:
    told = [events[-1].speculation for events in found if isinstance(events[-1], Ended)]
    return SpeculationReport(
        sum(each.proposed for each in told), sum(each.accepted for each in told), sum(each.passes for each in told)
    )


@GPUS_ARE_SLOW
def test_its_guesses_change_no_token_and_most_are_right(plain: Engine, guessing: Engine) -> None:
    asked = ask(range(len(SAMPLINGS)))
    told = [answer(plain, request) for request in asked]
    found = together(guessing, asked)
    assert [text_of(events) for events in found] == [text_of(events) for events in told]
    told_of = report(found)
    assert (told_of.accepted + told_of.passes) / told_of.passes > 2.2
    assert report(told) == replace(report(told), proposed=0, accepted=0)


def test_the_head_knows_a_conversation_that_was_taken_over(plain: Engine, guessing: Engine) -> None:
    [first] = ask([4], sampling=SAMPLINGS[0], max_tokens=12)
    [ended] = [event for event in answer(guessing, first) if isinstance(event, SequenceEnded)]
    question = written(lesson(40, held_out=True), "xml")[0]
    following = replace(first, id="following", prompts=((*first.prompts[0], *ended.tokens, *question),))
    told, found = answer(plain, following), answer(guessing, following)
    assert text_of(found) == text_of(told)
    assert isinstance(found[-1], Ended) and isinstance(told[-1], Ended)
    assert found[-1].usage.cached_tokens > 0.97 * len(first.prompts[0])
    [cold] = [replace(following, id="cold", cache=False)]
    alone = answer(guessing, cold)
    assert text_of(alone) == text_of(told)
    assert abs(report([found]).accepted - report([alone]).accepted) <= 1


def test_a_request_may_do_without(guessing: Engine, plain: Engine) -> None:
    [asked] = ask([5], speculate=())
    found = answer(guessing, asked)
    assert report([found]).proposed == 0
    assert text_of(found) == text_of(answer(plain, asked))


@GPUS_ARE_SLOW
def test_whoever_leaves_in_the_middle_of_a_guess_disturbs_nobody(plain: Engine, guessing: Engine) -> None:
    asked = ask(range(20, 24), stop=Stop(ignore_eos=True), max_tokens=16)
    told = [text_of(answer(plain, request)) for request in asked]
    streams = [guessing.generate(request) for request in asked]
    for number, stream in enumerate(streams[::2]):
        for _ in range(number + 1):
            next(iter(stream))
        guessing.cancel(asked[2 * number].id)
    found = [text_of([event for batch in stream for event in batch]) for stream in streams[1::2]]
    assert found == told[1::2]
    guessing.check()
