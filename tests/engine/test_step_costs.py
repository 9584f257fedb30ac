import random

import pytest

from ingot.engine.step_costs import (
    RECENT_COSTS,
    REMEMBERED_COSTS,
    SURE_COSTS,
    TELLING_RATIO,
    VARIED_BY,
    CostLine,
    LeastCost,
    StepCosts,
)


def test_a_line_is_found_from_two_sizes() -> None:
    line = CostLine()
    for size in (10, 100, 10, 100):
        line.observe(size, 5 + 0.5 * size)
    assert line.cost(40) == pytest.approx(25)
    assert line.size_for(25) == pytest.approx(40)


def test_one_size_alone_is_taken_as_proportional() -> None:
    line = CostLine()
    line.observe(8, 16)
    assert line.cost(4) == pytest.approx(8)


def test_a_falling_measurement_never_gives_a_negative_price() -> None:
    line = CostLine()
    line.observe(10, 100)
    line.observe(100, 10)
    fixed, slope = line.fit()
    assert fixed >= 0 and slope >= 0


def test_noise_on_like_sizes_never_makes_a_huge_one_seem_cheap() -> None:
    line = CostLine()
    for size, cost in ((64, 1000), (64, 950), (59, 1100)):
        line.observe(size, cost)
    assert line.size_for(2000) < 64 * 6


def test_what_is_measured_later_weighs_more() -> None:
    line = CostLine()
    for _ in range(100):
        line.observe(10, 10)
    for _ in range(100):
        line.observe(10, 30)
    assert line.cost(10) == pytest.approx(30, rel=0.05)


def test_what_was_paid_once_when_work_was_first_met_is_forgotten_when_it_is_seen_to_be_cheaper() -> None:
    line = CostLine()
    line.observe(64, 2400)  # something was compiled
    line.observe(26, 10)
    assert line.size_for(1000) == pytest.approx(2600)
    line.observe(2048, 80)
    assert line.size_for(1000) > 10_000


def test_what_takes_long_once_is_not_all_that_is_known() -> None:
    line = CostLine()
    for _ in range(20):
        line.observe(100, 50)
    line.observe(100, 2000)
    assert line.cost(100) < 250


def test_the_fixed_part_is_known_once_there_were_enough_of_both_sizes() -> None:
    line = CostLine()
    for _ in range(REMEMBERED_COSTS):
        line.observe(100, 55)
    assert not line.sure
    for number in range(SURE_COSTS):
        assert not line.sure
        line.observe(25 + number, 5 + 0.5 * (25 + number))
    assert line.sure
    assert line.fit() == pytest.approx((5, 0.5))


def test_sizes_that_lie_close_together_say_nothing_of_the_fixed_part() -> None:
    line, dice = CostLine(), random.Random(1)
    for _ in range(REMEMBERED_COSTS):
        line.observe(dice.randrange(80, 120), dice.uniform(40, 70))
    assert not line.sure
    assert line.cost(200) == pytest.approx(2 * line.cost(100))


def test_single_measurements_that_are_far_off_change_no_line() -> None:
    line = CostLine()
    for number in range(24):
        size = 25 if number % 4 == 0 else 100
        line.observe(size, (5 + 0.5 * size) * (8 if number in (3, 8, 10) else 1))
    assert line.fit() == pytest.approx((5, 0.5))


def test_the_same_few_of_many_sizes_do_not_stand_for_the_rest() -> None:
    line = CostLine()
    for size in (25, 32, 38, *range(108, 128)):
        line.observe(size, (10 + size) * (4 if size == 25 else 1))
    fixed, slope = line.fit()
    assert fixed == pytest.approx(10, abs=10) and slope == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("mixes", "rows"), [(False, 1), (False, 40), (True, 1), (True, 8)])
def test_steps_of_one_size_are_varied_until_the_fixed_part_is_known_and_seldom_then(mixes: bool, rows: int) -> None:
    costs, fewer = StepCosts(mixes=mixes), 0
    for number in range(10 * REMEMBERED_COSTS):
        tokens = costs.varied(100, rows)
        assert tokens in (100, 100 // VARIED_BY)
        fewer += tokens < 100
        costs.observe_prefill(tokens + mixes * rows, 20 + 0.5 * (tokens + mixes * rows))
        assert costs.fixed_ms(1) == pytest.approx(20 if number > 2 * (SURE_COSTS + 1) else 0) or number <= 2 * (
            SURE_COSTS + 1
        )
    assert fewer <= (SURE_COSTS + 1) * 11


def test_beside_so_many_rows_that_fewer_tokens_make_no_small_step_none_is_varied() -> None:
    costs = StepCosts(mixes=True)
    for _ in range(REMEMBERED_COSTS):
        costs.observe_prefill(140, 90)
    assert costs.varied(40, 100) == 40
    assert costs.varied(int(140 * TELLING_RATIO), 0) == int(140 * TELLING_RATIO), (
        "what was measured is small beside that"
    )
    assert costs.varied(140, 0) == 140 // VARIED_BY


def test_a_further_prompt_costs_a_forward_pass_only_where_it_takes_one() -> None:
    assert measured(mixes=False).further_tokens() == pytest.approx(20, abs=1)
    assert measured(mixes=True).further_tokens() == 0


def test_without_measurements_the_default_is_used() -> None:
    costs = StepCosts()
    assert costs.tokens_within(100, 0, default=64) == 64
    costs.observe_prefill(10, 20)
    assert costs.tokens_within(100, 0, default=64) == 50


def measured(*, mixes: bool) -> StepCosts:
    """Ten milliseconds for any work at all and half of one for a token."""
    costs = StepCosts(mixes=mixes)
    for size in (10, 100) * SURE_COSTS:
        costs.observe_prefill(size, 10 + 0.5 * size)
    return costs


def test_apart_decoding_leaves_prefill_the_rest_of_the_time() -> None:
    costs = measured(mixes=False)
    for rows in (4, 8, 4, 8):
        costs.observe_decode(rows, 20 + rows)
    assert costs.tokens_within(60, 4, default=64) == pytest.approx((60 - costs.decode_ms(4) - 10) / 0.5, abs=1)
    assert costs.efficient_tokens(4) == pytest.approx(4 * 10 / 0.5, abs=1)


def test_mixed_a_decoding_row_takes_the_place_of_one_token_and_pays_for_the_launch() -> None:
    costs = measured(mixes=True)
    assert costs.tokens_within(60, 4, default=64) == pytest.approx((60 - 10) / 0.5 - 4, abs=1)
    assert costs.efficient_tokens(4) == 1
    assert costs.efficient_tokens(0) == pytest.approx(4 * 10 / 0.5, abs=1)


def test_mixed_a_step_of_decoding_alone_has_a_price_before_there_was_one() -> None:
    costs = measured(mixes=True)
    assert costs.decode_ms(4) == pytest.approx(12)
    costs.observe_decode(4, 8)
    assert costs.decode_ms(4) == pytest.approx(8)
    # One size alone says little of others, which cost at most as much as a prompt of so many tokens.
    assert costs.decode_ms(40) == pytest.approx(30)
    assert costs.decode_ms(0) == 0


def test_the_least_of_a_size_is_believed_once_it_was_paid_again() -> None:
    price = LeastCost()
    price.observe(8000, 9000)  # something was compiled
    assert price.cost(8000) == 0
    price.observe(8000, 3000)  # and again, for another shape
    assert price.cost(8000) == 0
    price.observe(6000, 300)
    assert price.cost(7000) == pytest.approx(350)


def test_a_price_is_that_of_about_as_much_work_and_of_lately() -> None:
    price = LeastCost()
    for _ in range(3):
        price.observe(8000, 400)
    assert price.cost(8000) == pytest.approx(400) and price.cost(32000) == 0
    for _ in range(RECENT_COSTS):
        price.observe(8000, 800)
    assert price.cost(8000) == pytest.approx(800)


def test_a_prompt_that_is_longer_than_any_pass_so_far_is_as_many_passes() -> None:
    costs = StepCosts(mixes=True)
    for tokens in (64, 512, 64, 512):
        costs.observe_prefill(tokens, 20 + tokens / 64)
    assert costs.prompt_ms(256) == pytest.approx(24)
    assert costs.prompt_ms(51_200) == pytest.approx(100 * 28)
    assert StepCosts().prompt_ms(100) == 0


def test_the_cost_of_a_prompt_is_sure_after_some_passes_that_are_not_much_shorter() -> None:
    costs = StepCosts(mixes=True)
    for passes in range(3):
        assert costs.sure_prompt_ms(512) == 0, passes
        costs.observe_prefill(512, 28)
    assert costs.sure_prompt_ms(512) == pytest.approx(28)
    assert costs.sure_prompt_ms(32 * 512) == pytest.approx(32 * 28)
    assert costs.sure_prompt_ms(87_000) == 0
