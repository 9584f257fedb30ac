import pytest

from ingot.engine.costs import LATELY, CostLine, LeastCost, StepCosts


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


def test_without_measurements_the_default_is_used() -> None:
    costs = StepCosts()
    assert costs.tokens_within(100, 0, default=64) == 64
    costs.observe_prefill(10, 20)
    assert costs.tokens_within(100, 0, default=64) == 50


def measured(*, mixes: bool) -> StepCosts:
    """Ten milliseconds for any work at all and half of one for a token."""
    costs = StepCosts(mixes=mixes)
    for size in (10, 100, 10, 100):
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
    for _ in range(LATELY):
        price.observe(8000, 800)
    assert price.cost(8000) == pytest.approx(800)
