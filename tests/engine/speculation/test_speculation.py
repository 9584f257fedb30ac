"""Who is asked for whom, and how much of what is guessed goes into a pass."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest

from ingot.engine.request import Request, Stop
from ingot.engine.scheduler import Chunk, StepPlan
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.controller import Controller
from ingot.engine.speculation.proposer import Offer, Proposal
from ingot.engine.speculation.rounds import Speculation
from ingot.observe.speculation import SpeculationCounts


class Sevens:
    """Guesses seven, whatever comes."""

    def __init__(self, name: str = "sevens", fails: str = "") -> None:
        self.name, self.fails = name, fails
        self.forgotten: list[Sequence] = []

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        if self.fails == "offers":
            raise ValueError
        return [Offer(self.name, 9) for _ in rows]

    def propose(self, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
        if self.fails == "propose":
            raise ValueError
        return [Proposal((7,) * count, self.name) for count in counts]

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    @property
    def follows(self) -> Many[Sequence]:
        return ()

    def rest(self) -> None:
        pass


def row(number: int = 0, *, limit: int = 50, reserved: int = 256, **options: Any) -> Sequence:
    request = Request(f"r{number}", ((1, 2, 3),), **options)
    made = Sequence(request, 0, number, request.prompts[0], limit, 0)
    made.tokens.append(4)
    made.sampled, made.computed, made.decoding, made.reserved = 1, 3, True, reserved
    return made


def speculation(*proposers: Sevens, fixed: int = 5, places: int = 99) -> tuple[Speculation, SpeculationCounts]:
    counts = SpeculationCounts()
    return Speculation(proposers, Controller(fixed=fixed), counts, places), counts


def test_no_more_is_guessed_than_an_answer_may_still_have() -> None:
    made, _ = speculation(Sevens())
    few, none, tight = row(0, limit=4), row(1, limit=2), row(2, reserved=6)
    guesses = made.guess(StepPlan(decode=(few, none, tight)), waited=False).by_row
    assert {each: len(guess) for each, guess in guesses.items()} == {few: 2, tight: 2}


def test_guesses_end_before_a_token_that_would_end_the_answer() -> None:
    made, _ = speculation(Sevens())
    stopping = row(0)
    stopping.stop_tokens = frozenset({7})
    assert made.guess(StepPlan(decode=(stopping,)), waited=False).by_row == {}


def test_a_pass_draws_at_no_more_places_than_memory_is_set_aside_for() -> None:
    made, _ = speculation(Sevens(), places=12)
    rows = tuple(row(number) for number in range(4))
    guesses = made.guess(StepPlan(decode=rows, chunks=(Chunk(row(9), 5, True),)), waited=False).by_row
    assert sum(map(len, guesses.values())) + len(rows) + 1 == 12


@pytest.mark.parametrize(("wanted", "found"), [(None, "one"), ((), None), (("two",), "two"), (("none",), None)])
def test_a_request_says_who_may_guess_for_it(wanted: tuple[str, ...] | None, found: str | None) -> None:
    made, _ = speculation(Sevens("one"), Sevens("two"))
    asked = row(0, speculate=wanted)
    guesses = made.guess(StepPlan(decode=(asked,)), waited=False)
    assert (asked in guesses.by_row) == (found is not None)
    asked.proposed, asked.accepted = 5, 3
    made.learn(guesses, 0.1)


@pytest.mark.parametrize("fails", ["offers", "propose"])
def test_a_proposer_that_fails_is_not_asked_again(fails: str) -> None:
    broken, other = Sevens("broken", fails=fails), Sevens("other")
    made, _ = speculation(broken, other)
    asked = row()
    made.guess(StepPlan(decode=(asked,)), waited=False)
    broken.fails = ""
    assert made.guess(StepPlan(decode=(asked,)), waited=False).by_row[asked] == (7,) * 5
    made.forget(asked)
    assert asked in other.forgotten and asked not in broken.forgotten


def test_nothing_is_guessed_for_a_sequence_whose_tokens_are_on_their_way() -> None:
    made, _ = speculation(Sevens())
    unknown = row()
    unknown.sampled += 1
    assert made.tempts([unknown])
    assert made.guess(StepPlan(decode=(unknown, row(1))), waited=False).by_row == {}


class Following(Sevens):
    """Has its guess already: so many sevens behind what is known."""

    def __init__(self, most: int) -> None:
        super().__init__("following")
        self.most = most

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        return [Offer(self.name, self.most, (0.5, 0.8, 0.9), free=True) for _ in rows]


@pytest.mark.parametrize(("most", "tempting"), [(1, False), (2, True)])
def test_a_guess_that_a_token_on_its_way_uses_up_is_no_reason_to_wait_for_the_token(most: int, tempting: bool) -> None:
    made, _ = speculation(Following(most))
    unknown = row()
    unknown.sampled += 1
    assert made.tempts([unknown]) == tempting
    assert made.tempts([row()])


def test_a_guess_leads_further_only_if_what_is_drawn_is_what_it_named() -> None:
    offer = Offer("some", 4, (0.5, 0.8, 0.9), free=True)
    assert offer.behind(0) == offer
    assert offer.behind(1) == Offer("some", 3, (0.4, 0.9), free=True)
    assert offer.behind(3) == Offer("some", 1, (pytest.approx(0.5 * 0.8 * 0.9 * 0.9),), free=True)
    assert offer.behind(4) is None
    made_when_asked = Offer("some", 4, (0.5,))
    assert made_when_asked.behind(1) == made_when_asked


def test_what_came_of_guesses_is_counted() -> None:
    made, counts = speculation(Sevens())
    asked = row(stop=Stop(ignore_eos=True))
    guesses = made.guess(StepPlan(decode=(asked,)), waited=False)
    asked.accepted = 3
    made.learn(guesses, 0.1)
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (1, 5, 3)
    made.guess(StepPlan(preempted=(asked,)), waited=False)


class Thinking(Sevens):
    """Takes a millisecond to say that it has no idea."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.asked = 0.0, 0

    def offers(self, rows: Many[Sequence]) -> list[Offer | None]:
        self.now += 0.001
        self.asked += 1
        return [None for _ in rows]


@pytest.mark.parametrize("ahead", [False, True])
def test_who_takes_long_to_say_nothing_is_not_asked_in_every_round(ahead: bool) -> None:
    thinking = Thinking()
    made = Speculation([thinking], Controller(), SpeculationCounts(), 99, clock=lambda: thinking.now)
    rows = tuple(row(number) for number in range(16))
    for each in rows:
        each.sampled += ahead  # a token is on its way, and was not read
        each.computed += ahead
    for _ in range(500):
        assert not made.tempts(rows) if ahead else True
        made.learn(made.guess(StepPlan(decode=rows), waited=False), 0.01)
    assert 20 <= thinking.asked < 50
