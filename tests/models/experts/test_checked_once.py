"""Steps that are likely to find all experts in slots are checked once, at their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import Row
from ingot.models.adapter import ModelAdapter
from ingot.models.experts.checked_once import CheckedOnce
from ingot.models.experts.streaming import UncheckedChoice
from tests.launches import computed, decoded
from tests.models.experts.mixtures import PROMPT, loaded, saved, store_of
from tests.one_path import one_path

__all__ = ["one_path"]
pytestmark = pytest.mark.usefixtures("rules")


def behind(adapter: ModelAdapter) -> tuple[BatchState, Row]:
    """A row behind a prompt."""
    rows = adapter.new_batch_state()
    row = rows.new()
    computed(adapter, rows, row, PROMPT[:5])
    return rows, row


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_steps_that_are_likely_to_find_all_experts_are_checked_once_and_computed_again_where_one_was_missing(
    family: str, rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, checked = saved(family, tmp_path), list[bool]()
    adapter, whole = loaded(folder, 0.7), loaded(folder, 2.0, always=True)
    store, check = store_of(adapter), CheckedOnce.check

    def noted(of: CheckedOnce, choices: Sequence[UncheckedChoice]) -> bool:
        assert len(choices) == sum(not layer.slots.is_complete for layer in store.layers)
        checked.append(check(of, choices))
        return checked[-1]

    monkeypatch.setattr(CheckedOnce, "check", noted)
    monkeypatch.setattr(CheckedOnce, "is_likely_whole", property(lambda of: of is adapter.checked_once))
    (rows, row), (rows_of_whole, row_of_whole) = behind(adapter), behind(whole)
    for token in (5, 5, 5, 8, 8, 11, 14, 17):
        wanted = decoded(whole, rows_of_whole, [row_of_whole], [token])
        before = store.stats
        assert mx.array_equal(decoded(adapter, rows, [row], [token]), wanted)
        found = store.stats.since(before)
        assert (found.misses + found.predicted == 0) == checked[-1]
        needed = sum(2 for layer in store.layers if not layer.slots.is_complete)
        assert found.hits + found.misses + found.predicted == needed, "each choice counts once"
    assert {True, False} == {*checked}
    store.check()


def test_whether_steps_are_checked_once_follows_from_how_many_found_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = loaded(saved("qwen3_moe", tmp_path), 0.9, read_ahead=False)
    once, check, checks = adapter.checked_once, CheckedOnce.check, list[int]()
    assert once is not None

    def noted(of: CheckedOnce, choices: Sequence[UncheckedChoice]) -> bool:
        checks[-1] += 1
        return check(of, choices)

    monkeypatch.setattr(CheckedOnce, "check", noted)
    for _ in range(20):
        once.note(was_whole=False)
    for _ in range(12):  # the same step again and again, which finds all experts
        checks.append(0)
        rows, row = behind(adapter)
        decoded(adapter, rows, [row], [5])
    assert checks[0] == 0 and checks[-1] == 2 and once.is_likely_whole
    for _ in range(20):
        once.note(was_whole=False)
    assert not once.is_likely_whole


def test_rows_with_recurrent_states_are_never_computed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckedOnce, "is_likely_whole", True)
    monkeypatch.setattr(CheckedOnce, "check", lambda *_: pytest.fail("it was to be checked at its end"))
    adapter = loaded(saved("qwen3_5_moe", tmp_path), 0.7)
    rows, row = behind(adapter)
    decoded(adapter, rows, [row], [5])
