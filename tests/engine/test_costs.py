import pytest

from ingot.engine.costs import Line, StepCosts


def test_a_line_is_found_from_two_sizes() -> None:
    line = Line()
    for size in (10, 100, 10, 100):
        line.observe(size, 5 + 0.5 * size)
    assert line.cost(40) == pytest.approx(25)
    assert line.size_for(25) == pytest.approx(40)


def test_one_size_alone_is_taken_as_proportional() -> None:
    line = Line()
    line.observe(8, 16)
    assert line.cost(4) == pytest.approx(8)


def test_a_falling_measurement_never_gives_a_negative_price() -> None:
    line = Line()
    line.observe(10, 100)
    line.observe(100, 10)
    fixed, slope = line.fit()
    assert fixed >= 0 and slope >= 0


def test_noise_on_like_sizes_never_makes_a_huge_one_seem_cheap() -> None:
    line = Line()
    for size, cost in ((64, 1000), (64, 950), (59, 1100)):
        line.observe(size, cost)
    assert line.size_for(2000) < 64 * 6


def test_what_is_measured_later_weighs_more() -> None:
    line = Line()
    for _ in range(100):
        line.observe(10, 10)
    for _ in range(100):
        line.observe(10, 30)
    assert line.cost(10) == pytest.approx(30, rel=0.05)


def test_without_measurements_the_default_is_used() -> None:
    costs = StepCosts()
    assert costs.tokens_within(100, default=64) == 64
    costs.observe_prefill(10, 20)
    assert costs.tokens_within(100, default=64) == 50
