import random
import sys
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.engine.speculation.controller import (
    DecodingRound,
    DraftChoice,
    DraftOutcome,
    RowOffers,
    SpeculationController,
)
from ingot.engine.speculation.proposer import DraftOffer
from ingot.engine.speculation.step_costs import FIRST_ROUNDS
from tests.engine.speculation.device import (
    BETWEEN,
    COMPUTE_BOUND,
    DEVICES,
    MEMORY_BOUND,
    Device,
    Simulation,
    best_fixed,
    everywhere,
)

PLAIN = DraftChoice(None, 0)


def plain_round(seconds: float = 0.01, rows: int = 1, prompt_tokens: int = 0) -> DecodingRound:
    return DecodingRound(seconds, rows, rows, prompt_tokens, False, ())


# How good its choices are


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", (1, 8))
@pytest.mark.parametrize("name", ("memory", "between", "drafting"))
def test_sixty_four_rounds_after_a_change_it_is_nearly_as_good_as_the_best_depth(name: str, rows: int) -> None:
    device, free = DEVICES[name], name != "drafting"
    found: dict[tuple[float, float], list[float]] = {}
    for seed in range(3):
        running = Simulation(device, rows, everywhere(0.0), seed, free=free)
        for before, rate in pairwise((0.0, 0.9, 0.5, 0.65, 0.2, 0.9)):
            running.rates = everywhere(rate)
            changed = len(running.rounds)
            running.run(192)
            best, _ = best_fixed(device, rows, running.rates, computed=not free)
            found.setdefault((before, rate), []).append(running.rate(changed + 64) / best)
    # Where to try costs a good part of a round, and there is one row to learn from, it takes longer to dare it again.
    enough = 0.85 if (name, rows) == ("drafting", 1) else 0.95
    assert {change: near for change, near in found.items() if fmean(near) < enough} == {}


SHAPES = st.builds(
    Device,
    fixed=st.just(10.0),
    row=st.sampled_from((0.0, 0.2, 1.0)),
    token=st.sampled_from((0.02, 0.1, 0.3, 1.0, 3.0, 10.0)),
    wait=st.sampled_from((0.0, 0.2, 1.0, 3.0, 6.0)),
    step=st.sampled_from((0.0, 0.5, 1.5)),
    noise=st.sampled_from((0.0, 0.02, 0.05)),
    ahead=st.booleans(),
)
"""From devices on which a token costs nothing beside reading the weights to ones on which it costs all there is."""


@settings(max_examples=settings().max_examples // 3)
@example(Device(row=0.0, token=10.0, wait=6.0, ahead=False), 1, [0.5, 1.0], 37)  # near the bound
@given(
    SHAPES, st.sampled_from((1, 2, 4, 8, 16)), st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2), st.integers(0, 99)
)
def test_it_never_loses_four_hundredths_in_256_rounds(device: Device, rows: int, rates: list[float], seed: int) -> None:
    running = Simulation(device, rows, everywhere(rates[0]), seed, free=not device.step)
    floors = []
    for rate in rates:
        running.rates = everywhere(rate)
        begin = len(running.rounds)
        running.run(288)
        plain, _ = best_fixed(device, rows, running.rates, most=0)
        floors += [running.rate(first, first + 256) / plain for first in range(begin, begin + 33, 16)]
    assert min(floors) > 0.96


def test_where_exploring_costs_most_of_a_round_it_begins_later() -> None:
    near = []
    for seed in range(8):
        running = Simulation(COMPUTE_BOUND, 1, everywhere(0.2), seed)
        running.run(256)
        assert running.rate(0) < 1.01 * best_fixed(COMPUTE_BOUND, 1, everywhere(0.2))[0]
        running.rates = everywhere(0.9)
        running.run(320)
        near.append(running.rate(256 + 192) / best_fixed(COMPUTE_BOUND, 1, everywhere(0.9))[0])
    assert fmean(near) > 0.92


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rate", (0.0, 0.2))
@pytest.mark.parametrize("rows", (1, 4, 16))
@pytest.mark.parametrize("name", DEVICES)
def test_hopeless_texts_lose_next_to_nothing(name: str, rows: int, rate: float) -> None:
    device = DEVICES[name]
    running = Simulation(device, rows, everywhere(rate), seed=2, free=name != "drafting")
    running.run(640)
    plain, _ = best_fixed(device, rows, everywhere(rate), most=0)
    for begin in range(0, 129, 16):
        assert running.rate(begin, begin + 512) > 0.97 * plain, begin


@pytest.mark.parametrize("device", (MEMORY_BOUND, BETWEEN), ids=("memory", "between"))
def test_a_row_that_copies_gets_drafts_and_its_neighbours_do_not(device: Device) -> None:
    def rates(row: int, position: int) -> float:
        return 0.95 if row == 3 else 0.02

    running = Simulation(device, 8, rates, seed=3)
    running.run(384)
    late = running.counts[128:]
    assert sum(counts[3] for counts in late) / len(late) > 5
    others = [count for counts in late for row, count in enumerate(counts) if row != 3]
    assert sum(others) / len(others) < 0.5
    best, _ = best_fixed(device, 8, rates)
    assert running.rate(128) > 1.02 * best  # than any depth that is the same for all


def test_a_row_without_drafts_that_begins_to_copy_is_noticed() -> None:
    copying = False

    def rates(row: int, position: int) -> float:
        return 0.95 if row == 0 or copying else 0.05

    running = Simulation(BETWEEN, 4, rates, seed=4)
    running.run(256)
    copying = True
    running.run(192)
    assert running.rate(320) > 0.95 * best_fixed(BETWEEN, 4, rates)[0]


def test_rates_that_fall_with_the_position_bound_the_depth() -> None:
    def rates(row: int, position: int) -> float:
        return (0.9, 0.6)[position] if position < 2 else 0.05

    running = Simulation(MEMORY_BOUND, 2, rates, seed=5)
    running.run(256)
    assert running.rate(64) > 0.95 * best_fixed(MEMORY_BOUND, 2, rates)[0]


def test_a_device_that_is_not_linear_is_learned_where_it_is_used() -> None:
    device = replace(MEMORY_BOUND, token=0.4, knee=8)
    running = Simulation(device, 1, everywhere(0.9), seed=6)
    running.run(256)
    assert running.rate(64) > 0.95 * best_fixed(device, 1, everywhere(0.9))[0]


@pytest.mark.parametrize("slow", ({0}, {0, 1, 2}, {3, 4}, {4, 5, 6}, set(range(0, 256, 19))), ids=str)
def test_rounds_that_are_many_times_too_slow_lock_nothing_in(slow: set[int]) -> None:
    running = Simulation(BETWEEN, 4, everywhere(0.8), seed=7)
    for number in range(256):
        running.round(slowed=20.0 if number in slow else 1.0)
    assert running.rate(96) > 0.93 * best_fixed(BETWEEN, 4, everywhere(0.8))[0]


def test_a_machine_that_slows_down_for_everybody_changes_nothing() -> None:
    running = Simulation(BETWEEN, 4, everywhere(0.65), seed=8)
    for number in range(512):
        running.round(slowed=1.0 + number / 128)
    assert running.rate(64) > 0.95 * best_fixed(BETWEEN, 4, everywhere(0.65))[0]


# What it learns, and what it does with it


def trained(*outcomes: DraftOutcome, rounds: int = 40, seconds: float = 0.0101) -> SpeculationController:
    """One that knows a device on which draft tokens cost next to nothing, and so many rounds with these outcomes."""
    controller = SpeculationController()
    for _ in range(8):
        controller.observe(plain_round(rows=max(1, len(outcomes))))
    for _ in range(rounds if outcomes else 0):
        tokens = len(outcomes) + sum(one.proposed for one in outcomes)
        controller.observe(DecodingRound(seconds, len(outcomes), tokens, 0, True, outcomes))
    return controller


def test_a_row_without_an_offer_gets_no_drafts() -> None:
    controller = trained(DraftOutcome(1, "some", 4, 4, False))
    assert controller.choose([RowOffers(1, ()), RowOffers(2, ())]) == [PLAIN, PLAIN]
    chosen = controller.choose([RowOffers(1, ()), RowOffers(2, (DraftOffer("some", 4),))])
    assert chosen[0] == PLAIN and chosen[1].source == "some"


def test_before_plain_rounds_were_measured_there_are_no_drafts() -> None:
    controller = SpeculationController()
    rows = [RowOffers(1, (DraftOffer("some", 4, free=True),))]
    for _ in range(FIRST_ROUNDS):
        assert controller.choose(rows) == [PLAIN]
        controller.observe(plain_round())
    assert controller.choose(rows) != [PLAIN]


def test_rounds_with_prompts_say_nothing_of_costs() -> None:
    controller = SpeculationController()
    for _ in range(8):
        controller.observe(plain_round(prompt_tokens=100))
    assert controller.choose([RowOffers(1, (DraftOffer("some", 4, free=True),))]) == [PLAIN]


def test_rounds_that_captured_a_graph_say_nothing_of_costs() -> None:
    controller, offers = SpeculationController(), (RowOffers(1, (DraftOffer("some", 4, free=True),)),)
    for _ in range(30):
        controller.observe(plain_round())
    plain, budget = controller.plain(1), controller._budget
    wrong = DraftOutcome(1, "some", 4, 0, cut=False)
    controller.observe(
        replace(plain_round(), seconds=50.0, tokens=5, waited=True, outcomes=(wrong,), captured_graph=True)
    )
    assert controller.plain(1) == plain and controller._budget == budget and not controller.hopeless(1)
    assert len(controller.choose(offers)) == 1


def test_choosing_twice_before_a_round_changes_nothing() -> None:
    once, twice = (Simulation(BETWEEN, 4, everywhere(0.3), seed=11) for _ in range(2))
    for _ in range(300):
        twice.controller.choose(twice.offers)
        assert once.round() == twice.round()


def test_what_is_to_be_explored_outlives_the_round_that_runs_when_it_is_chosen() -> None:
    controller = trained(DraftOutcome(1, "some", 1, 0, False))
    rows = [RowOffers(1, (DraftOffer("some", 4, free=True),))]
    for _ in range(100):
        if controller.choose(rows) != [PLAIN]:
            break
        controller.observe(plain_round())
    assert not controller.pays
    controller.observe(plain_round())  # it was launched before its successor was chosen
    [chosen] = controller.choose(rows)
    assert chosen.count
    rejected = DraftOutcome(1, "some", chosen.count, 0, False)
    controller.observe(DecodingRound(0.0105, 1, 1 + chosen.count, 0, True, (rejected,)))
    assert controller.choose(rows) == [PLAIN]


def test_a_fixed_number_is_always_chosen_where_it_is_offered() -> None:
    controller = SpeculationController(fixed=3)
    offers = (DraftOffer("first", 8), DraftOffer("second", 8))
    assert controller.choose([RowOffers(1, offers), RowOffers(2, (DraftOffer("few", 2),)), RowOffers(3, ())]) == [
        DraftChoice("first", 3),
        DraftChoice("few", 2),
        PLAIN,
    ]


def test_what_was_never_judged_counts_for_nothing() -> None:
    ended = trained(DraftOutcome(1, "some", 8, 1, True), seconds=0.014)
    missed = trained(DraftOutcome(1, "some", 8, 1, False), seconds=0.014)
    rows = [RowOffers(1, (DraftOffer("some", 16, free=True),))]
    assert ended.choose(rows)[0].count > missed.choose(rows)[0].count


def test_the_proposer_with_better_drafts_is_chosen() -> None:
    controller = trained(DraftOutcome(1, "good", 4, 4, False), DraftOutcome(2, "bad", 4, 0, False))
    offers = (DraftOffer("bad", 8, free=True), DraftOffer("good", 8, free=True))
    chosen = [controller.choose([RowOffers(key, offers)])[0].source for key in range(3, 7)]
    assert chosen == ["good"] * 4


def test_of_equal_proposers_the_first_is_chosen() -> None:
    controller = trained(DraftOutcome(1, "this", 4, 3, False), DraftOutcome(2, "that", 4, 3, False))
    for names in (("this", "that"), ("that", "this")):
        offers = tuple(DraftOffer(name, 8, free=True) for name in names)
        assert controller.choose([RowOffers(3, offers)])[0].source == names[0]


def test_the_confidences_of_a_proposer_are_calibrated() -> None:
    controller, dice = trained(), random.Random(9)
    for _ in range(8):
        controller.observe(plain_round(rows=2))
    counts: dict[float, list[int]] = {0.5: [], 0.95: []}
    for _ in range(400):
        sure = dice.choice((0.5, 0.95))
        rows = [RowOffers(key, (DraftOffer("sure", 4, (sure,) * 4, free=True),)) for key in (1, 2)]
        chosen = controller.choose(rows)
        outcomes = []
        for row, one in zip(rows, chosen, strict=True):
            if one.count:
                accepted = 0
                while accepted < one.count and dice.random() < (0.8 if sure == 0.95 else 0.02):
                    accepted += 1
                outcomes.append(DraftOutcome(row.key, "sure", one.count, accepted, False))
        counts[sure].append(sum(one.count for one in chosen))
        tokens = 2 + sum(one.count for one in chosen)
        controller.observe(DecodingRound(0.01 + 0.001 * (tokens - 2), 2, tokens, 0, bool(outcomes), tuple(outcomes)))
    unsure, certain = counts[0.5][-60:], counts[0.95][-60:]
    assert sum(unsure) / len(unsure) < 2 < 4 < sum(certain) / len(certain)


ROWS = st.lists(
    st.lists(
        st.builds(
            DraftOffer,
            st.sampled_from(("one", "two", "three")),
            st.integers(0, 20),
            st.lists(st.floats(0.0, 1.0), max_size=4).map(tuple),
            st.booleans(),
        ),
        max_size=3,
        unique_by=lambda offer: offer.source,
    ).map(tuple),
    min_size=1,
    max_size=6,
)


@given(
    st.lists(st.tuples(ROWS, st.integers(0, 2), st.floats(1e-5, 10.0)), max_size=24), st.randoms(), st.integers(1, 16)
)
def test_it_never_chooses_more_than_is_offered_and_forgets_sequences_that_ended(
    rounds: list[tuple[list[tuple[DraftOffer, ...]], int, float]], dice: random.Random, most: int
) -> None:
    controller = SpeculationController(most)
    for _ in range(FIRST_ROUNDS):
        controller.observe(plain_round())
    for offers, prompt_tokens, seconds in rounds:
        rows = [RowOffers(key, some) for key, some in enumerate(offers)]
        chosen = controller.choose(rows, prompt_tokens)
        assert len(chosen) == len(rows)
        outcomes = []
        for row, one in zip(rows, chosen, strict=True):
            limits = {offer.source: min(offer.most, most) for offer in row.offers}
            assert (one.source is None) == (one.count == 0)
            if one.source is not None:
                assert 0 < one.count <= limits[one.source]
                proposed = dice.randint(0, one.count)
                outcomes.append(
                    DraftOutcome(row.key, one.source, proposed, dice.randint(0, proposed), dice.random() < 0.2)
                )
        tokens = len(rows) + sum(one.proposed for one in outcomes)
        controller.observe(DecodingRound(seconds, len(rows), tokens, prompt_tokens, bool(outcomes), tuple(outcomes)))
    for key in range(6):
        controller.forget(key)
    assert controller.remembered == 0


def calls_of_a_round(rows: int) -> int:
    """Functions that are called, of Python's and of ours, where so many rows choose and learn."""
    running = Simulation(MEMORY_BOUND, rows, everywhere(0.65), seed=10)
    running.run(64)
    outcomes = tuple(DraftOutcome(key, "some", 4, 2, False) for key in range(rows))
    called: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, given: called.append(event) if event in ("call", "c_call") else None)
    try:
        running.controller.choose(running.offers)
        running.controller.observe(DecodingRound(0.015, rows, 5 * rows, 0, True, outcomes))
    finally:
        sys.setprofile(before)
    return len(called)


def test_choosing_and_learning_is_little_work_and_grows_with_the_rows_alone() -> None:
    few, many = calls_of_a_round(16), calls_of_a_round(32)
    assert few < 1500
    assert many < 2.2 * few
