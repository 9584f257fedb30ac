"""Sizes of rounds for which a graph has to be captured first, on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ingot.engine.speculation.controller import SpeculationController
from ingot.engine.speculation.step_costs import CAPTURE_SHARE, FREE_CAPTURES, REMEMBERED_GRAPHS, GraphCache
from tests.engine.speculation.device import H200, Simulation, best_fixed, everywhere

TAKES, PLAIN = 0.035, 0.005


def spent() -> GraphCache:
    """One that has captured what is free, and nothing else."""
    graphs = GraphCache()
    for drafted in range(1, FREE_CAPTURES + 1):
        assert graphs.affords(1, drafted)
        graphs.captured(1, drafted, TAKES)
    return graphs


def test_where_nothing_has_to_be_captured_every_size_is_affordable() -> None:
    graphs = GraphCache()
    for drafted in range(100):
        graphs.ran(1, drafted, PLAIN)
    assert all(graphs.affords(rows, drafted) for rows in range(1, 20) for drafted in range(200))


def test_behind_the_first_ones_only_what_is_there_is_affordable() -> None:
    graphs = spent()
    assert graphs.affords(1, 1) and not graphs.affords(1, 7) and not graphs.affords(2, 1)


def test_a_graph_is_captured_when_doing_without_has_cost_as_much() -> None:
    graphs, rounds = spent(), 0
    while not graphs.affords(1, 7):
        graphs.misses(0.0035 - CAPTURE_SHARE * PLAIN)
        graphs.ran(1, 1, PLAIN)
        rounds += 1
    assert rounds == pytest.approx(TAKES / 0.0035, abs=1)
    graphs.captured(1, 7, TAKES)
    assert graphs.affords(1, 7) and not graphs.affords(1, 9)


def test_what_was_missed_is_counted_once_a_round() -> None:
    graphs = spent()
    for _ in range(1000):
        graphs.misses(TAKES / 2)
    graphs.ran(1, 1, PLAIN)
    assert not graphs.affords(1, 7)


def test_plain_rounds_capture_what_they_need_and_owe_nothing() -> None:
    graphs = GraphCache()
    for rows in range(1, 9):
        graphs.captured(rows, 0, TAKES)
    assert graphs.affords(1, 3)


def test_no_more_sizes_are_remembered_than_are_kept() -> None:
    graphs = spent()
    for power in range(REMEMBERED_GRAPHS):
        graphs.ran(2, 1 << power, 0.0)
    assert not graphs.affords(1, 1) and graphs.affords(2, 1 << REMEMBERED_GRAPHS - 1)


def test_what_is_missed_by_so_many_rows_is_saved_for_them() -> None:
    graphs = spent()
    graphs.misses(2 * TAKES)
    graphs.ran(4, 0, PLAIN)
    assert graphs.affords(4, 12) and not graphs.affords(3, 12)


def test_what_ran_before_anything_had_to_be_captured_is_known_to_be_there() -> None:
    graphs = GraphCache()
    graphs.ran(1, 7, PLAIN)
    for drafted in (1, 3):
        graphs.captured(2, drafted, TAKES)
    assert graphs.affords(1, 7) and graphs.affords(1, 6) and not graphs.affords(1, 12)


def test_no_draft_makes_a_round_wider_than_it_may_be() -> None:
    running = Simulation(H200, 4, everywhere(0.9), seed=3)
    running.controller = SpeculationController(widest=8)
    running.run(128)
    assert max(4 + sum(counts) for counts in running.counts) == 8


# On a GPU, whose costs were measured


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rate", "rows"), [(0.9, 1), (0.9, 4), (0.9, 16), (0.65, 1), (0.65, 4), (0.65, 16), (0.5, 1), (0.5, 4)]
)
def test_from_a_cold_start_it_drafts_soon_and_nearly_as_well_as_can_be(rate: float, rows: int) -> None:
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
def test_where_drafts_are_wrong_few_graphs_are_captured_for_them(rows: int) -> None:
    running = Simulation(H200, rows, everywhere(0.05), seed=2)
    running.run(640)
    plain, _ = best_fixed(H200, rows, everywhere(0.05), most=0)
    assert running.rate(0) > 0.98 * plain
    lost = H200.making * (len(running.sizes) - 1)
    assert lost < 0.03 * sum(spent for _, spent in running.rounds)
