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
        (ONES * 0, 1e-4, "differs by 1"),
    ],
)
def test_what_is_off_by_more_than_its_bound_or_no_number_is_wrong(
    found: mx.array, bound: float, wrong: str | None
) -> None:
    assert Case("differs by {off}", found, ONES, bound).wrong() == wrong


def test_zeros_where_zeros_are_expected_are_right() -> None:
    assert Case("differs by {off}", ONES * 0, ONES * 0, 1e-4).wrong() is None
    assert Case("differs by {off}", ONES, ONES * 0, 1e-4).wrong() == "differs by 1"


def test_what_padding_adds_up_to_is_zero() -> None:
    assert Case("differs by {off}", ONES * 1e-11, ONES * 0, 1e-2).wrong() is None
    assert Case("differs by {off}", ONES * 1e-6, ONES * 0, 1e-2).wrong() == "differs by 1e-06"


class Run:
    """A launcher with a name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Doubling(Launched):
    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> str:
        return str(self._run.name)


def test_all_cases_are_rehearsed_before_the_first_is_compared_and_none_behind_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selfcheck, "compile_kernels", lambda device, rehearsed: rehearsed(Run("rehearsed")))
    met: list[tuple[str, int]] = []

    def cases(kernels: Doubling) -> Iterator[Case]:
        for number in range(3):
            met.append((kernels.run, number))
            yield Case(f"case {number} differs", mx.array(2 * min(number, 0)), mx.array(2 * number))

    assert check_cases(GPU, "doubling", lambda: Doubling(Run("launched")), cases) == "case 1 differs"
    assert met == [*(("rehearsed", number) for number in range(3)), ("launched", 0), ("launched", 1)]


def test_a_kernel_that_cannot_be_made_does_not_run() -> None:
    def make() -> Doubling:
        raise ValueError("no such\n  instruction")

    assert check_cases(GPU, "none", make, lambda kernels: []) == "does not run: no such instruction"


def test_what_was_right_once_is_not_checked_again_with_the_same_launcher_and_what_was_wrong_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selfcheck, "compile_kernels", lambda device, rehearsed: None)
    checked: list[int] = []

    def verdict(kind: str, run: Run, found: int) -> str | None:
        def cases(kernels: Doubling) -> Iterator[Case]:
            checked.append(found)
            yield Case("differs", mx.array(found), mx.array(2))

        return check_cases(GPU, kind, lambda: Doubling(run), cases)

    first, other = Run("first"), Run("other")
    assert verdict("a", first, 1) == verdict("a", first, 1) == "differs"
    assert verdict("a", first, 2) is None and checked == [1, 1, 2]
    assert verdict("a", first, 1) is None and checked == [1, 1, 2]
    assert verdict("b", first, 1) == verdict("a", other, 1) == "differs"


def test_each_kind_is_checked_once_and_the_first_way_that_is_right_is_taken() -> None:
    verdicts, asked = Verdicts[str, int](GPU), list[int]()

    def check(way: int) -> str | None:
        asked.append(way)
        return None if way == 2 else f"{way} is wrong"

    assert [verdicts._first_right("some", [1, 2, 3], check) for _ in range(2)] == [2, 2]
    assert [verdicts._first_right("other", [1, 3], check) for _ in range(2)] == [None, None]
    assert asked == [1, 2, 1, 3] and verdicts.wrong["other"] == "3 is wrong"
