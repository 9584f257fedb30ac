"""However a request is computed, its tokens are the same: alone, among others, after preemption, from what is cached in
memory or on disk, with draft tokens and after other tenants, for every kind of layer by the rules of every device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import CacheReport, Ended, Event, Request, Sampling, SequenceEnded, Stop
from tests import engines
from tests.rehearsed import Rehearsed

Tokens = tuple[int, ...]
CONTEXT, WIDEST = 260, 96
EVICTING = 200_000
"""Bytes of a cache that holds some of the requests, of any kind."""
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.1, top_p=0.8, top_k=12, seed=3),
    Sampling(temperature=0.9, frequency_penalty=0.4, repetition_penalty=1.2, seed=5),
)


def _prompts() -> Iterator[Tokens]:
    """Of many lengths, around those of pages, windows and chunks; the last two share a beginning."""
    dice = random.Random(3)
    for length in (1, 20, 64, 65, 140):
        yield tuple(dice.randrange(95) for _ in range(length))
    shared = tuple(dice.randrange(95) for _ in range(100))
    for length in (90, 130):
        yield (*shared, *(dice.randrange(95) for _ in range(length)))


REQUESTS = [
    Request(
        f"r{number}",
        (prompt,),
        max_tokens=(6, 17, 2, 9)[number % 4],
        sampling=SAMPLINGS[number % len(SAMPLINGS)],
        stop=Stop(ignore_eos=True),
        cache=False,
    )
    for number, prompt in enumerate(_prompts())
]
LONG = 4
"""Those from here on are worth writing to disk."""
CACHED = [replace(request, cache=True) for request in REQUESTS]
GROWING = [
    replace(REQUESTS[0], id=f"g{number}", prompts=(REQUESTS[4].prompts[0][: 54 + 2 * number],), max_tokens=None)
    for number in range(3)
]
"""They may have all of a context of more than a page, of which they reserve one at first."""
GROWN = 76


def start(kind: str, **options: object) -> Engine:
    return engines.start(kind, **{"context": CONTEXT, "widest": WIDEST, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(kind: str) -> Iterator[Engine]:
    """It caches nothing but what a request wants to have cached."""
    made = start(kind, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Tokens]:
    return [tokens_of(engines.answer(engine, request)) for request in REQUESTS]


def tokens_of(events: Sequence[Event]) -> Tokens:
    [tokens] = [event.tokens for event in events if isinstance(event, SequenceEnded)]
    return tokens


def end_of(events: Sequence[Event]) -> Ended:
    assert isinstance(events[-1], Ended), events[-1]
    return events[-1]


def report(events: Sequence[Event]) -> CacheReport:
    return end_of(events).cache[0]


def together(engine: Engine, requests: Sequence[Request]) -> list[list[Event]]:
    """All at once, so that they join and leave each other's batches."""
    streams = [engine.generate(request) for request in requests]
    return [[event for batch in stream for event in batch] for stream in streams]


def test_among_others(engine: Engine, alone: list[Tokens]) -> None:
    assert [tokens_of(events) for events in together(engine, REQUESTS)] == alone
    assert len(set(alone)) == len(alone)


def test_with_what_was_cached(engine: Engine, alone: list[Tokens]) -> None:
    for request in CACHED:
        assert tokens_of(engines.answer(engine, request)) == alone[REQUESTS.index(replace(request, cache=False))]
    again = together(engine, [replace(request, id=f"again-{request.id}") for request in CACHED])
    assert [tokens_of(events) for events in again] == alone
    matched = [report(events).matched for events in again]
    assert all(
        count >= len(request.prompts[0]) - 2 for count, request in zip(matched[LONG:], CACHED[LONG:], strict=True)
    )


def test_under_eviction(kind: str, alone: list[Tokens]) -> None:
    small = start(kind, cache_bytes=EVICTING)
    for turn in range(2):
        found = together(small, [replace(request, id=f"{turn}-{request.id}") for request in CACHED])
        assert [tokens_of(events) for events in found] == alone
        small.check()
    assert 0 < engines.runner_of(small).prefix_cache.index.nbytes <= EVICTING
    small.close()


@pytest.mark.usefixtures("reserved_by_page")
def test_after_preemption(kind: str, engine: Engine) -> None:
    limited = [replace(request, max_tokens=GROWN - len(request.prompts[0])) for request in GROWING]
    expected = [engines.text_of(events) for events in together(engine, limited)]
    memory = engines.tight_memory(engine, rows=3, tokens=64)
    tight = start(kind, memory=memory, context=GROWN, widest=256, limits=EngineLimits(max_sequences=4))
    texts, preempted = engines.preempted(tight, GROWING)
    tight.check()
    tight.close()
    assert preempted > 0
    assert texts == expected


def test_restored_from_disk_by_another_process(kind: str, alone: list[Tokens], tmp_path: Path) -> None:
    first = start(kind, cache_bytes=1 << 26, disk=tmp_path)
    together(first, CACHED)
    first.close()
    second = start(kind, cache_bytes=1 << 26, disk=tmp_path)
    found = together(second, CACHED)
    second.check()
    second.close()
    assert [tokens_of(events) for events in found] == alone
    assert [report(events).tier for events in found[LONG:]] == ["disk"] * len(found[LONG:])


def test_with_draft_tokens_that_are_right_or_wrong(kind: str, alone: list[Tokens]) -> None:
    answers = {(request.prompts[0], 0): tokens for request, tokens in zip(REQUESTS, alone, strict=True)}
    guessing = start(kind, proposers=[Rehearsed(answers, right=0.7)], fixed_draft_tokens=6)
    found = together(guessing, REQUESTS)
    guessing.check()
    guessing.close()
    assert [tokens_of(events) for events in found] == alone
    reports = [end_of(events).speculation for events in found]
    assert 0 < sum(each.accepted for each in reports) < sum(each.proposed for each in reports)


def test_after_another_tenant_had_its_slot(kind: str, alone: list[Tokens]) -> None:
    engine = start(kind, cache_bytes=1 << 26, limits=EngineLimits(max_sequences=1))
    for number in (3, 4, 6):
        mine = replace(CACHED[number], tenant="ann")
        theirs = replace(mine, id=f"bob{number}", tenant="bob", prompts=(mine.prompts[0][::-1],))
        # Both wait in the queue at once, so that the slot is handed on without an idle moment.
        first, other = together(engine, [mine, theirs])
        again = engines.answer(engine, replace(mine, id=f"again{number}"))
        assert tokens_of(first) == tokens_of(again) == alone[number]
        assert report(other).matched == 0 and report(again).matched >= len(mine.prompts[0]) - 2
    engine.check()
    engine.close()
