"""What tells an ordering fault from rounding, and rounding from what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bench import gpu_diagnosis
from bench.children import Outcome
from ingot.kernels.paged_attention.kernels import has_paged_kernels
from tests import engines


@pytest.fixture(autouse=True)
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")


@pytest.mark.skipif(not has_paged_kernels(engines.GPU), reason="kernels run on no device here, nor can be emulated")
def test_rows_that_join_and_leave_are_compared_with_themselves_alone() -> None:
    said = list(gpu_diagnosis.equality(["kernel"]))
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


def test_what_ends_the_process_is_named_and_the_rest_is_tried_by_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two operations abort here, one amid others and the last."""
    edges = ["first", "second", "third", "last"]

    def hear(command: list[str], environment: object, limit_s: float, told: Callable[[str], None]) -> Outcome:
        for edge in edges[int(command[-1]) :]:
            if edge in ("second", "last"):
                return Outcome("was ended by SIGFPE", ())
            told(f"{edge}: right")
        return Outcome(None, ())

    monkeypatch.setattr(gpu_diagnosis, "hear", hear)
    monkeypatch.setattr(gpu_diagnosis, "_at_the_edge", lambda many: dict.fromkeys(edges))
    assert gpu_diagnosis.main(["--only", "limits"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "first: right",
        "second: FAILED, it was ended by SIGFPE",
        "third: right",
        "last: FAILED, it was ended by SIGFPE",
    ]


def test_a_section_that_fails_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_diagnosis, "hear", lambda *_: Outcome("ended with 1", ("why",)))
    gpu_diagnosis.main(["--only", "long"])
    assert "FAILED, it ended with 1" in capsys.readouterr().out
