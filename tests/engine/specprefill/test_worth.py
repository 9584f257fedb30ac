"""Whether scoring pays, as far as is measured."""

from __future__ import annotations

from ingot.engine.sparse.worth import TRY_AGAIN, Worth
from ingot.engine.step_costs import StepCosts


def measured(*scoring_s: float) -> Worth:
    """A millisecond a token to compute, and so long to score 1,000."""
    costs = StepCosts()
    costs.observe_prefill(1000, 1000.0)
    worth = Worth(costs)
    for seconds in scoring_s:
        worth.observe(1000, seconds)
    return worth


def test_nothing_pays_where_nothing_could_be_left_out() -> None:
    assert not Worth(StepCosts()).pays(1000, 1000, 1000)


def test_what_is_not_measured_is_tried() -> None:
    assert Worth(StepCosts()).pays(1000, 300, 1000)
    assert measured().pays(1000, 300, 1000)


def test_the_first_prompt_does_not_count_and_of_the_next_the_quickest() -> None:
    assert measured(5.0).pays(1000, 300, 1000)
    assert not measured(0.1, 0.8, 0.9).pays(1000, 300, 1000)
    assert measured(5.0, 0.8, 0.6).pays(1000, 300, 1000)


def test_a_scorer_that_has_read_most_of_it_before_pays() -> None:
    worth = measured(1.0, 1.0, 1.0)
    assert not worth.pays(1000, 300, 1000) and worth.pays(1000, 300, 600)


def test_of_many_that_would_not_pay_one_is_scored_since_that_may_change() -> None:
    worth = measured(1.0, 1.0, 1.0)
    told = [worth.pays(1000, 300, 1000) for _ in range(2 * TRY_AGAIN)]
    assert told == 2 * [*[False] * (TRY_AGAIN - 1), True]
    worth.observe(1000, 0.1)
    assert worth.pays(1000, 300, 1000)
