"""What the tables of sparse prefill are made of."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from bench.sparse import Figures
from bench.sparse_quality import Sample, calls, posed, recalls, required_calls, tallied
from foundry import vocabulary
from ingot.engine.specprefill.selection import ScoredPrompt


def test_tool_calls_have_a_long_text_before_them_that_is_not_computed_in_any_case() -> None:
    for sample in islice(calls("json", 1200, 0), 3):
        (begin, schemas), (question, end) = sample.whole
        assert begin == 0 and end == len(sample.prompt)
        assert question - schemas > 800 and end - question > 10


@pytest.mark.parametrize("style", ["json", "xml"])
def test_a_call_that_is_required_has_its_opening_in_the_prompt_and_nothing_else_of_it(style: str) -> None:
    [opening] = vocabulary.encoded("<tool_call>")
    for free, required in islice(zip(calls(style, 300, 0), required_calls(style, 300, 0), strict=True), 3):
        assert required.prompt[-1] == opening and required.whole[1][1] == len(required.prompt)
        assert required.prompt.count(opening) == free.prompt.count(opening) + 1
        assert free.answer[-len(required.answer) :] == required.answer


def test_questions_are_the_same_each_time_and_other_ones_from_another_seed_on() -> None:
    [first, second] = islice(recalls("json", 200, 3), 2)
    assert first == next(recalls("json", 200, 3)) and second == next(recalls("json", 200, 4)) != first


def test_tasks_say_how_long_texts_are() -> None:
    assert next(posed("300", "json", 2)) == next(recalls("json", 300, 2))
    assert next(posed("tools:300", "json", 2)) == next(calls("json", 300, 2)) != next(calls("json", 400, 2))
    assert next(posed("required:300", "json", 2)) == next(required_calls("json", 300, 2))
    for task in ("calls:300", "tools", ":300:"):
        with pytest.raises(ValueError):
            posed(task, "json", 2)


def test_the_best_gain_is_what_is_left_to_compute_and_the_draft() -> None:
    figures = Figures(1000, 2.0, 1.0, 0.2, 0.3, 300, 50.0, 60.0)
    assert figures.gain == 2 and figures.best == pytest.approx(1 / (0.3 + 0.1))


def test_right_answers_are_counted_by_task_and_by_who_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        def new_batch_state(self) -> Target:
            return self

        groups = ()

    def answered(_: object, sample: Sample, kept: np.ndarray) -> tuple[bool, float]:
        return sample.prompt[0] in sample.answer and len(kept) > 150, 2.0

    def evenly(prompt: tuple[int, ...]) -> ScoredPrompt:
        return ScoredPrompt(np.ones(len(prompt), np.float32), np.ones(len(prompt), np.float32))

    monkeypatch.setattr("bench.sparse_quality.answered", answered)
    samples = [Sample("a", (1,) * 400, (1,)), Sample("a", (2,) * 400, (3,)), Sample("b", (1,) * 150, (1, 4))]
    found, by_mass = tallied(Target(), {"evenly": evenly}, samples, [0.1], [0.5])
    assert (found["a", "all", "1.0"].right, found["a", "all", "1.0"].count) == (1, 2)
    assert found["a", "evenly", "0.1"].right == 1 and found["b", "evenly", "0.1"].right == 0
    assert found["b", "all", "1.0"].tokens == 2
    assert found["a", "evenly", "quality 0.5"].kept / 2 == pytest.approx((128 + 5 * 32) / 400)
    assert {least: tally.count for least, tally in by_mass.items()} == {0.0: 2, 0.4: 2, 0.99: 2}
