"""What is kept of one tenant's prompts stays as it was computed, whatever the slots are used for next."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from tests import engines
from tests.equality.test_cached import ask, run

KINDS = ["single", "llama", "window", "hybrid"]


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One slot, which every request takes over from the one before."""
    made = engines.start(request.param, cache_bytes=1 << 26, limits=EngineLimits(max_sequences=1))
    yield made
    made.check()
    made.close()


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(95) for _ in range(length)]


@pytest.mark.parametrize("length", [*range(200, 220, 3), 255, 256, 257, 512])
def test_a_kept_prompt_is_not_touched_by_the_next_request_in_its_slot(engine: Engine, length: int) -> None:
    rng = random.Random(length)
    asked = ask(f"ann{length}", prompt(rng, length), tenant="ann")
    # Both wait in the queue at once, so that the slot is handed on without an idle moment.
    streams = [engine.generate(asked), engine.generate(ask(f"bob{length}", prompt(rng, length + 9), tenant="bob"))]
    for stream in streams:
        for _ in stream:
            pass
    longer = replace(asked, id=f"more{length}", prompts=((*asked.prompts[0], 3, 4),))
    warm, _ = run(engine, longer)
    again, _ = run(engine, replace(longer, id=f"again{length}"))
    cold, none = run(engine, replace(longer, id=f"cold{length}", cache=False))
    assert none == 0
    assert warm == again == cold
