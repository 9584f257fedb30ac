"""What is kept is told without looking at it: other tenants' streams wait for nobody's list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ingot.cache.codecs.pair import RAW_CODEC
from ingot.cache.tree import Owner
from ingot.engine.cache_admin import KeptPrefixes
from ingot.engine.prefix_cache import Counts
from ingot.engine.status import SaltStatus
from tests.cache.paper import HYBRID, Paper, index, store

SALTS = 200


def test_no_record_is_looked_at_on_the_engine_thread_however_many_salts_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, looks = index(HYBRID), [0]
    for number in range(SALTS):
        store(held, [1, 2, 3], HYBRID, Owner("me", f"s{number}"))
        store(held, [1, 2, 3, 4, 5], HYBRID, Owner("me", f"s{number}", exact=True))
    store(held, [7] * 9, HYBRID, Owner("you"))
    held.pin(Owner("me", "s3"), [1, 2])
    nbytes = Paper.nbytes

    def counted(paper: Paper) -> int:
        looks[0] += 1
        return cast(Any, nbytes).fget(paper)

    def run(work: Callable[[Any], Any]) -> Any:
        return work(SimpleNamespace(index=held, limit=1 << 20, counts=defaultdict(Counts)))

    monkeypatch.setattr(Paper, "nbytes", property(counted))
    kept = KeptPrefixes(run, cast(Any, SimpleNamespace(live=None)), None, None, RAW_CODEC)
    status = kept.status("me")
    assert looks[0] == 0
    assert len(status.salts) == SALTS and sum(salt.bytes for salt in status.salts) == status.used_bytes
    assert status.salts[0] == SaltStatus("s0", records=2, tokens=8, checkpoints=2, pinned_tokens=0, bytes=280)
    assert [salt.pinned_tokens for salt in status.salts[2:5]] == [0, 2, 0]
    assert kept.status("nobody").salts == ()
