"""The memory model against what mlx really took."""

from __future__ import annotations

import random

import pytest

from ingot.cache.footprint import rounded
from ingot.cache.reserved import ReservedStorage
from ingot.engine.budget import Budget
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from tests import engines
from tests.memory import settled


def reserved_bytes(engine: Engine) -> int:
    """What is held of memory that mlx does not know."""
    storages = [storage for group in engines.runner_of(engine).rows.groups for storage in group.storages]
    return sum(storage.nbytes for storage in storages if isinstance(storage, ReservedStorage))


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid", "moe"])
def test_what_was_predicted_covers_what_was_used(kind: str) -> None:
    import mlx.core as mx

    engine = engines.start(kind, context=2048, widest=128)
    budget: Budget = engine._loaded.budget
    rng = random.Random(2)
    lengths = [700, 300, 1200, 20, 900]
    asked = [
        Request(
            f"m{number}",
            (tuple(rng.randrange(95) for _ in range(length)),),
            max_tokens=40,
            sampling=Sampling(temperature=0.0),
            stop=Stop(ignore_eos=True),
        )
        for number, length in enumerate(lengths)
    ]
    before = settled()
    reserved = 0
    for stream in [engine.generate(request) for request in asked]:
        for _ in stream:
            reserved = max(reserved, reserved_bytes(engine))
    used = mx.get_peak_memory() - before + reserved
    engine.close()
    states = sum(budget.row_bytes(rounded(length + 40)) for length in lengths) + budget.slot_bytes(len(asked))
    # Slabs are made a quarter larger than what is asked for.
    assert used <= 1.25 * states + budget.transient
    # And it is no wild guess: a model that asks for ten times too much would refuse what fits.
    assert states <= 10 * used
