"""Which cases of a `sampled` test are quick."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


class Case:
    def __init__(self, *marks: Any) -> None:
        self.marks = list(marks)

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


def quick(cases: list[Case], file: str) -> list[int]:
    made = conftest.pytest_pycollect_makeitem(SimpleNamespace(nodeid=file))  # type: ignore[arg-type]
    next(made)
    with pytest.raises(StopIteration) as ended:
        made.send(cases)
    assert ended.value.value is cases
    return [number for number, case in enumerate(cases) if case.get_closest_marker("slow") is None]


def test_each_test_of_a_file_begins_with_another_case_and_none_is_left_without() -> None:
    def cases(count: int) -> list[Case]:
        return [Case(pytest.mark.sampled(3).mark) for _ in range(count)]

    assert [quick(cases(7), "one") for _ in range(4)] == [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]
    assert [quick(cases(2), "two") for _ in range(3)] == [[0], [1], [0]]
    assert [quick(cases(1), "three") for _ in range(2)] == [[0], [0]]


def test_what_is_slow_anyway_is_not_counted_and_what_is_not_sampled_stays_quick() -> None:
    slow, sampled = pytest.mark.slow.mark, pytest.mark.sampled(2).mark
    assert quick([Case(sampled, slow), Case(sampled), Case(sampled), Case(sampled)], "four") == [1, 3]
    assert quick([Case(), Case(), Case(slow)], "five") == [0, 1]
