from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.measure.figures import LEAST_TURNS, Figure, Said, line_of, ratios_by_part
from ingot.measure.subjects import ROUNDS, Pair, Subject, WrongKernel, figure_of, times_in_turns, times_of


class Clock:
    """Time passes only as work says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch, cost: dict[int, float]) -> None:
    """Evaluating a list of arrays takes what its first number says."""
    evaluate = mx.eval

    def eval_(*arrays: object) -> None:
        evaluate(*arrays)
        for group in arrays:
            for array in group if isinstance(group, list) else []:
                clock.now += cost[int(array.item())]

    monkeypatch.setattr(mx, "eval", eval_)


OURS, THEIRS = 1, 2


def test_both_sides_take_turns_and_the_ratio_is_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), list[int]()
    timed(clock, monkeypatch, {OURS: 0.2, THEIRS: 0.1})

    def side(which: int) -> mx.array:
        asked.append(which)
        return mx.array(which)

    times = times_in_turns(lambda: side(OURS), lambda: side(THEIRS), seconds=100, clock=clock)
    assert times == pytest.approx((0.2, 0.1, 2.0, ROUNDS))
    turns = asked[4:]
    assert len(turns) == 2 * ROUNDS
    assert turns[:4] == [OURS, THEIRS, THEIRS, OURS], "who begins alternates"


def test_work_that_takes_long_has_few_turns_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(), list[int]()
    timed(clock, monkeypatch, {OURS: 50.0, THEIRS: 50.0})
    times_in_turns(lambda: mx.array(asked.append(1) or OURS), lambda: mx.array(THEIRS), seconds=1, clock=clock)
    assert len(asked) == 2 + LEAST_TURNS


def test_a_disturbed_turn_does_not_decide() -> None:
    assert times_of([(1.0, 1.0), (9.0, 1.0), (1.0, 1.0)]).ratio == 1.0


def test_a_figure_has_what_was_measured_and_how_far_results_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    timed(clock, monkeypatch, {4: 0.3, 5: 0.1})
    subject = Subject("sums", "a part", lambda: Pair(lambda: mx.array([4.0]), lambda: mx.array([5.0]), bound=0.3))
    figure = figure_of(subject, seconds=1, clock=clock)
    assert (figure.part, figure.right, figure.ratio) == ("a part", True, 3.0)
    assert figure.off == pytest.approx(0.2)


def test_ours_is_wrong_where_it_differs_by_more_than_its_bound() -> None:
    subject = Subject("sums", None, lambda: Pair(lambda: mx.array([4.0]), lambda: mx.array([5.0]), bound=0.1))
    figure = figure_of(subject, seconds=0)
    assert figure.right is False and "differs from MLX's own by 0.2" in str(figure.wrong)


def test_what_its_own_check_finds_wrong_is_not_timed() -> None:
    def fails() -> Pair:
        raise WrongKernel("write differs")

    figure = figure_of(Subject("sums", None, fails), seconds=0)
    assert (figure.right, figure.wrong, figure.ours) == (False, "write differs", None)


def test_what_fails_is_a_figure_that_says_so() -> None:
    def fails() -> Pair:
        raise RuntimeError("no such\ninstruction")

    figure = figure_of(Subject("sums", None, fails), seconds=0)
    assert figure.note == "fails: no such instruction" and figure.right is None


def test_a_part_is_judged_by_all_its_cases_with_enough_turns_and_never_by_wrong_ones() -> None:
    figures = [
        Figure("one", "kernels", "a part", True, ratio=0.5, turns=3),
        Figure("two", "kernels", "a part", True, ratio=2.0, turns=3),
        Figure("three", "kernels", "another", False, ratio=9.0, turns=3),
        Figure("four", "kernels", None, True, ratio=9.0, turns=3),
        Figure("five", "kernels", "a third", note="no kernel here"),
        Figure("six", "kernels", "a fourth", True, ratio=9.0, turns=LEAST_TURNS - 1),
    ]
    assert ratios_by_part(figures) == pytest.approx({"a part": 1.0})


def test_what_was_planned_and_not_measured_is_named() -> None:
    said = Said()
    for line in (
        "a library says something",
        line_of(about={"emulated": False}),
        line_of(planned=["one", "two"]),
        line_of(begun="one"),
        line_of(figure=Figure("one", "kernels", ratio=1.0)),
        line_of(begun="two"),
    ):
        said.hear(line)
    assert (said.unmeasured, said.current) == (["two"], "two")
    assert said.figures["one"].ratio == 1.0 and said.about == {"emulated": False}
