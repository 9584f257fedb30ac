"""What tells an ordering fault from rounding, and rounding from what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from bench import gpu_diagnosis
from ingot.kernels.paged.kernels import available
from tests import engines


@pytest.fixture(autouse=True)
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")


@pytest.mark.skipif(not available(engines.GPU), reason="kernels run on no device here, nor can be emulated")
def test_rows_that_join_and_leave_are_compared_with_themselves_alone() -> None:
    said = gpu_diagnosis.equality(["kernel"])
    assert said[0] == "kernel: order right, sums right"


def test_a_plan_has_joiners_and_leavers_and_feeds_no_row_that_left() -> None:
    plan = gpu_diagnosis.plan(90)
    left: set[str] = set()
    for number, step in enumerate(plan.steps):
        left |= set(plan.leavers.get(number, []))
        assert not left & {name for name, _ in step}
    assert left


def test_a_difference_beyond_rounding_is_located() -> None:
    expected = {("a", 1): np.array([0.0, 1.0]), ("b", 2): np.array([0.0, 1.0])}
    found = {("a", 1): np.array([0.0, 1.0 + 1e-7]), ("b", 2): np.array([1.0, 0.0])}
    seen = gpu_diagnosis.difference(found, expected)
    assert (seen.first, seen.flips, seen.worst) == ("row b at 2 tokens", 1, 1.0)


def test_operations_at_the_edge_are_right_here() -> None:
    assert {line.rsplit(" ", 1)[-1] for line in gpu_diagnosis.limits(tiny=True)} == {"right"}


def test_a_long_prompt_is_cut_into_pieces_of_any_width_beside_short_rows() -> None:
    assert "right" in gpu_diagnosis.long(300, shape="dispatch")[0]
