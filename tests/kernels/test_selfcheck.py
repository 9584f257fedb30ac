"""How kernels are compared, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from ingot.kernels import selfcheck
from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import Launched
from ingot.kernels.selfcheck import Case, Verdicts, check_cases

GPU = Device("cuda", "a GPU", 1)
ONES = mx.ones(3)


@pytest.mark.parametrize(
    ("found", "bound", "wrong"),
    [
        (ONES, 0.0, None),
        (ONES + 1e-6, 0.0, "differs by {off}"),
        (ONES + 1e-6, 1e-4, None),
        (ONES + 1, 1e-4, "differs by 1"),
        (ONES * mx.nan, 1e-4, "differs by nan"),
    ],
)
def test_what_is_off_by_more_than_its_bound_or_no_number_is_wrong(
    found: mx.array, bound: float, wrong: str | None
) -> None:
    assert Case("differs by {off}", found, ONES, bound).wrong() == wrong


class Doubling(Launched):
    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run


def test_all_cases_are_rehearsed_before_the_first_is_compared_and_none_behind_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selfcheck, "compile_kernels", lambda device, rehearsed: rehearsed("rehearsed"))
    met: list[tuple[str, int]] = []

    def cases(kernels: Doubling) -> Iterator[Case]:
        for number in range(3):
            met.append((kernels.run, number))
            yield Case(f"case {number} differs", mx.array(2 * min(number, 0)), mx.array(2 * number))

    assert check_cases(GPU, lambda: Doubling("launched"), cases) == "case 1 differs"
    assert met == [*(("rehearsed", number) for number in range(3)), ("launched", 0), ("launched", 1)]


def test_a_kernel_that_cannot_be_made_does_not_run() -> None:
    def make() -> Doubling:
        raise ValueError("no such\n  instruction")

    assert check_cases(GPU, make, lambda kernels: []) == "does not run: no such instruction"


def test_each_kind_is_checked_once_and_the_first_way_that_is_right_is_taken() -> None:
    verdicts, asked = Verdicts[str, int](GPU), list[int]()

    def check(way: int) -> str | None:
        asked.append(way)
        return None if way == 2 else f"{way} is wrong"

    assert [verdicts._first_right("some", [1, 2, 3], check) for _ in range(2)] == [2, 2]
    assert [verdicts._first_right("other", [1, 3], check) for _ in range(2)] == [None, None]
    assert asked == [1, 2, 1, 3] and verdicts.wrong["other"] == "3 is wrong"
