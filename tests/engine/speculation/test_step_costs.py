"""Sizes of rounds for which something has to be made first, as a GPU's graphs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ingot.engine.speculation.controller import SpeculationController
from ingot.engine.speculation.step_costs import CAPTURE_SHARE, FREE_CAPTURES, REMEMBERED_SIZES, GraphCaptures
from tests.engine.speculation.device import H200, Simulation, best_fixed, everywhere

TAKES, PLAIN = 0.035, 0.005


def spent() -> GraphCaptures:
    """One that has made what is free, and nothing else."""
    makings = GraphCaptures()
    for guessed in range(1, FREE_CAPTURES + 1):
        assert makings.affords(1, guessed)
        makings.made(1, guessed, TAKES)
    return makings


def test_where_nothing_has_to_be_made_every_size_is_affordable() -> None:
    makings = GraphCaptures()
    for guessed in range(100):
        makings.met(1, guessed, PLAIN)
    assert all(makings.affords(rows, guessed) for rows in range(1, 20) for guessed in range(200))


def test_behind_the_first_ones_only_what_is_there_is_affordable() -> None:
    makings = spent()
    assert makings.affords(1, 1) and not makings.affords(1, 7) and not makings.affords(2, 1)


def test_one_is_made_when_doing_without_has_cost_as_much() -> None:
    makings, rounds = spent(), 0
    while not makings.affords(1, 7):
        makings.misses(0.0035 - CAPTURE_SHARE * PLAIN)
        makings.met(1, 1, PLAIN)
        rounds += 1
    assert rounds == pytest.approx(TAKES / 0.0035, abs=1)
    makings.made(1, 7, TAKES)
    assert makings.affords(1, 7) and not makings.affords(1, 9)


def test_what_was_missed_is_counted_once_a_round() -> None:
    makings = spent()
    for _ in range(1000):
        makings.misses(TAKES / 2)
    makings.met(1, 1, PLAIN)
    assert not makings.affords(1, 7)


def test_plain_rounds_make_what_they_need_and_owe_nothing() -> None:
    makings = GraphCaptures()
    for rows in range(1, 9):
        makings.made(rows, 0, TAKES)
    assert makings.affords(1, 3)


def test_no_more_sizes_are_remembered_than_are_kept() -> None:
    makings = spent()
    for power in range(REMEMBERED_SIZES):
        makings.met(2, 1 << power, 0.0)
    assert not makings.affords(1, 1) and makings.affords(2, 1 << REMEMBERED_SIZES - 1)


def test_what_is_missed_by_so_many_rows_is_saved_for_them() -> None:
    makings = spent()
    makings.misses(2 * TAKES)
    makings.met(4, 0, PLAIN)
    assert makings.affords(4, 12) and not makings.affords(3, 12)


def test_what_ran_before_anything_had_to_be_made_is_known_to_be_there() -> None:
    makings = GraphCaptures()
    makings.met(1, 7, PLAIN)
    for guessed in (1, 3):
        makings.made(2, guessed, TAKES)
    assert makings.affords(1, 7) and makings.affords(1, 6) and not makings.affords(1, 12)


def test_no_guess_makes_a_round_wider_than_it_may_be() -> None:
    running = Simulation(H200, 4, everywhere(0.9), seed=3)
    running.controller = SpeculationController(widest=8)
    running.run(128)
    assert max(4 + sum(counts) for counts in running.counts) == 8


# On a GPU, whose costs were measured


@pytest.mark.parametrize(
    ("rate", "rows"), [(0.9, 1), (0.9, 4), (0.9, 16), (0.65, 1), (0.65, 4), (0.65, 16), (0.5, 1), (0.5, 4)]
)
def test_from_a_cold_start_it_guesses_soon_and_nearly_as_well_as_can_be(rate: float, rows: int) -> None:
    ratios = []
    for seed in range(2):
        running = Simulation(H200, rows, everywhere(rate), seed)
        running.run(192)
        assert any(any(counts) for counts in running.counts[:10])
        ratios.append(running.rate(64) / best_fixed(H200, rows, everywhere(rate))[0])
    assert sum(ratios) / len(ratios) > 0.94


@pytest.mark.parametrize("rows", (1, 4))
def test_changes_of_the_rate_do_not_lead_to_ever_more_sizes(rows: int) -> None:
    running = Simulation(H200, rows, everywhere(0.9), seed=1)
    met = []
    for rate in (0.9, 0.5, 0.65, 0.2) * 2:
        running.rates = everywhere(rate)
        running.run(96)
        met.append(len(running.sizes))
    assert met[-1] < 10 and all(after - before < 3 for before, after in pairwise(met[1:]))


@pytest.mark.parametrize("rows", (1, 4, 16))
def test_where_guesses_are_wrong_little_is_made_for_them(rows: int) -> None:
    running = Simulation(H200, rows, everywhere(0.05), seed=2)
    running.run(640)
    plain, _ = best_fixed(H200, rows, everywhere(0.05), most=0)
    assert running.rate(0) > 0.98 * plain
    lost = H200.making * (len(running.sizes) - 1)
    assert lost < 0.03 * sum(spent for _, spent in running.given)
