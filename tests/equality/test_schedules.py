"""Real models by default settings: whatever else is computed, and wherever a prompt is cut, cached or preempted, a
request gives the tokens that it gives alone. With AMX, `--deterministic` is needed for that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from ingot.config import DEFAULT_MODEL, Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Event, Request, Sampling, SequenceEnded, Stop
from ingot.kernels.cpu import native
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from tests.engines import answer

FOUNDRY = Path(__file__).parents[2] / "foundry" / "models"
MODELS = ("default", "dense", "hybrid", "window")
SCHEDULES, PIECES = 200, 8
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=7),
    Sampling(temperature=1.2, top_p=0.9, top_k=40, seed=8),
)
WORDS = ("sea", "calm", "ship", "seven", "sails", "home", "far", "away", "first", "days", "spring", "and", "the", "of")
LONG, LONG_ANSWER = 7, 32
"""The request whose answers others interrupt, and its tokens."""
CACHE_BYTES = {"default": "8MB", "dense": "1MB", "hybrid": "1MB", "window": "1MB"}

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


def settings_for(name: str, folder: Path) -> Settings:
    """What a server has by default, but for sizes: a small cache evicts, and a folder keeps what it evicts. And draft
    tokens are proposed whether they pay here or not."""
    return Settings(
        context=1024,
        memory="2GB",
        cache_memory=CACHE_BYTES[name],
        cache_dir=folder,
        max_sequences=3,
        speculate_tokens=4,
        deterministic=native.has_wide(),
    )


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    settings = settings_for(request.param, tmp_path_factory.mktemp("cache"))
    packaged = request.param == "default"
    folder = ensure_packaged_model(DEFAULT_MODEL, settings, no_progress) if packaged else FOUNDRY / request.param
    made = start_engine(settings, folder, name=request.param, source="test")
    yield made
    made.check()
    made.close()


def requests_of(engine: Engine) -> list[Request]:
    """Short and long ones, around the sizes from which many tokens were once computed in another way; half of them
    begin alike."""
    dice = random.Random(5)
    made = []
    for number, words in enumerate((3, 14, 34, 60, 130, 140, 150, 20)):
        begin = list(WORDS) * 8 if number % 2 else []
        text = " ".join([*begin, *(dice.choice(WORDS) for _ in range(words))][: max(words, 3)])
        tokens = tuple(engine.tokenizer.encode(text, add_special=False))
        made.append(
            Request(
                f"r{number}",
                (tokens,),
                max_tokens=LONG_ANSWER if number == LONG else (12, 7, 18)[number % 3],
                sampling=SAMPLINGS[number % 3],
                stop=Stop(ignore_eos=True),
                cache=False,
            )
        )
    return made


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    [tokens] = [event.tokens for event in events if isinstance(event, SequenceEnded)]
    return tokens


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[int, ...]]:
    return [tokens_of(answer(engine, replace(each, speculate=()))) for each in requests_of(engine)]


def play(engine: Engine, alone: list[tuple[int, ...]], number: int) -> None:
    """Waves of requests that overlap in part: of some tenants, cached or not, and some of them cancelled. The first
    ones have all places, until another tenant's preempts one of them."""
    dice = random.Random(number)
    requests = requests_of(engine)
    waiting = []
    for place in range(3):
        stream = iter(engine.generate(replace(requests[LONG], id=f"l{number}-{place}", cache=True, tenant="ann")))
        waiting.append((LONG, chain([next(stream)], stream)))
    for turn in range(dice.randint(3, 8)):
        chosen = dice.randrange(len(requests))
        request = replace(
            requests[chosen],
            id=f"s{number}-{turn}",
            cache=dice.random() < 0.8,
            tenant=dice.choice(["ann", "bob"]) if turn else "bob",
        )
        stream = iter(engine.generate(request))
        if dice.random() < 0.1 and turn:
            engine.cancel(request.id)
        else:
            waiting.append((chosen, stream))
        if dice.random() < 0.4:
            check(waiting.pop(0), alone)
    for each in waiting:
        check(each, alone)


def happened(engine: Engine) -> dict[str, int]:
    """What could have changed answers, since the engine's start. The disk is not among it: these models compute such
    prompts faster than records are read (`test_disk.py` has it)."""
    done, speculation = engine.figures, engine.speculation
    return {
        "preempted sequences": done.preemptions,
        "cached tokens": done.matched_tokens,
        "accepted draft tokens": speculation.accepted_tokens,
    }


def check(waiting: tuple[int, Iterator[list[Event]]], alone: list[tuple[int, ...]]) -> None:
    chosen, stream = waiting
    assert tokens_of([event for batch in stream for event in batch]) == alone[chosen]


def test_the_same_prompt_again_is_answered_from_the_cache_with_the_same_tokens(
    engine: Engine, alone: list[tuple[int, ...]]
) -> None:
    request = requests_of(engine)[4]
    for turn in range(2):
        events = answer(engine, replace(request, id=f"again{turn}", cache=True))
        assert tokens_of(events) == alone[4]


@pytest.mark.parametrize("number", range(2))
def test_any_schedule_gives_the_tokens_that_each_request_gives_alone(
    engine: Engine, alone: list[tuple[int, ...]], number: int
) -> None:
    play(engine, alone, number)
    assert all(happened(engine).values()), f"nothing was tested of some: {happened(engine)}"


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_many_schedules_give_the_tokens_that_each_request_gives_alone(
    engine: Engine, alone: list[tuple[int, ...]], piece: int
) -> None:
    for number in range(piece, SCHEDULES, PIECES):
        play(engine, alone, number)
    assert all(happened(engine).values()), f"nothing was tested of some: {happened(engine)}"
