"""What an engine remembers of its clients is bounded, however many there are and whatever they call themselves."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest

from ingot.cache.disk.store import DiskLimits
from ingot.cache.tree import Owner
from ingot.engine.request import Ended, Request, Sampling
from tests import engines

ROUND = 40


def owners() -> int:
    gc.collect()
    return sum(type(each) is Owner for each in gc.get_objects())


@pytest.mark.alone
def test_a_client_with_another_salt_each_time_makes_nothing_grow(tmp_path: Path) -> None:
    engine = engines.start("llama", cache_bytes=1 << 17, disk=tmp_path, disk_limits=DiskLimits(1 << 18, sync=False))
    rng, seen = random.Random(1), []
    for turn in range(3):
        for number in range(ROUND):
            prompt = tuple(rng.randrange(95) for _ in range(100))
            sampling, salt = Sampling(temperature=0.0), f"salt-{turn}-{number}"
            asked = Request(salt, (prompt,), max_tokens=2, sampling=sampling, salt=salt)
            assert isinstance(engines.answer(engine, asked)[-1], Ended)
        seen.append(owners())
    engine.check()
    engine.close()
    assert seen[2] - seen[0] < ROUND, f"of {2 * ROUND} further salts, so many are remembered: {seen}"
