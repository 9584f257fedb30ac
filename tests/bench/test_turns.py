"""Many clients who ask by turns for models that exclude each other, with real engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.random_models import write
from bench.turns import Told, take_turns
from ingot.config import Settings

CLIENTS, ASKS, RESIDENCY_S = 20, 6, 0.5


@pytest.mark.slow
def test_nobody_fails_and_models_are_swapped_no_more_often_than_they_may(tmp_path: Path) -> None:
    tables = {name: {"path": str(tmp_path / name)} for name in ("one", "two")}
    for name in tables:
        (tmp_path / name).mkdir()
        write(tmp_path / name, "llama-15m")
    settings = Settings(models=tables, lazy=True, min_residency_s=RESIDENCY_S)
    told = asyncio.run(take_turns(settings, CLIENTS, ASKS))
    assert told.failures == []
    assert len(told.waits) == CLIENTS * ASKS
    assert 2 <= told.loads <= told.swaps_at_most(RESIDENCY_S, len(tables))


def test_swaps_are_bounded_by_how_long_a_model_stays() -> None:
    assert Told(took_s=9.5).swaps_at_most(2.0, models=2) == 6
