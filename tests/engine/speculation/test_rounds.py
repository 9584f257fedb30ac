"""What the controller learns of the rounds that an engine runs, and when proposers are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.scheduler import PromptChunk, StepPlan
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.controller import DecodingRound, SpeculationController
from ingot.engine.speculation.proposer import DraftOffer, Proposal
from ingot.engine.speculation.rounds import (
    ASKING_SHARE,
    HOPELESS_BACKOFF,
    LONGEST_BACKOFF,
    MOST_CREDIT,
    Speculation,
    SpeculationBackoff,
)
from ingot.kernels.device import Device
from ingot.observe.metrics import SpeculationMetrics
from tests import engines
from tests.memory import pretended
from tests.rehearsed import Rehearsed

TOKENS = 24


class Silent(Rehearsed):
    """Offers, and then has nothing to say in every other round."""

    def __init__(self, *, offering: bool) -> None:
        super().__init__({})
        self._offering, self._calls = offering, 0

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return [DraftOffer(self.name, 2) if self._offering else None for _ in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        self._calls += 1
        return [Proposal((1, 2)[: count * (self._calls % 2)], self.name) for count in counts]


Started = Callable[[Device | None, bool], tuple[Engine, list[DecodingRound]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    running: list[Engine] = []

    def start(device: Device | None, offering: bool) -> tuple[Engine, list[DecodingRound]]:
        engine = engines.start("llama", device=device, proposers=[Silent(offering=offering)], fixed_draft_tokens=2)
        running.append(engine)
        rounds: list[DecodingRound] = []
        monkeypatch.setattr(
            engine._workload._core.speculation._controller, "observe", lambda round, passed: rounds.append(round)
        )
        return engine, rounds

    yield start
    for engine in running:
        engine.check()
        engine.close()


def decode(engine: Engine) -> None:
    sampling, stop = Sampling(temperature=0.0), Stop(ignore_eos=True)
    engines.answer(engine, Request("r", (tuple(range(9)),), max_tokens=TOKENS, sampling=sampling, stop=stop))
    engine.check()  # when the step is over that ended it


def test_where_the_device_works_ahead_a_round_that_asked_for_drafts_in_vain_has_waited(started: Started) -> None:
    engine, rounds = started(engines.GPU, True)
    decode(engine)
    *before, last = rounds
    silent = [round for round in before if not round.outcomes]
    assert silent and all(round.waited for round in silent)
    assert not last.waited  # there is no room for a draft: one more token is sampled, and that is all
    assert all(round.waited for round in rounds if round.outcomes)


def test_a_round_for_which_nobody_offered_anything_has_not_waited(started: Started) -> None:
    engine, rounds = started(engines.GPU, False)
    decode(engine)
    assert len(rounds) == TOKENS - 1 and not any(round.waited for round in rounds)


@pretended
def test_where_nothing_works_ahead_only_drafts_are_waited_for(started: Started) -> None:
    engine, rounds = started(None, True)
    decode(engine)
    assert {round.waited == bool(round.outcomes) for round in rounds} == {True}
    assert {bool(round.outcomes) for round in rounds} == {True, False}


PLAIN = 0.01


def askings(
    backoff: SpeculationBackoff, rows: list[int], rounds: int, seconds: float, *, hopeless: bool = False
) -> list[int]:
    """In which of so many rounds proposers are asked, each time in vain."""
    found = []
    for number in range(rounds):
        if not backoff.skips(rows):
            found.append(number)
            backoff.asked(seconds, rows)
            backoff.found_nothing(PLAIN, hopeless=hopeless)
        if backoff.skipping:
            backoff.skip()
    return found


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_asking_in_vain_takes_a_small_share_of_all_time(share: float) -> None:
    rows = list(range(16))
    found = askings(SpeculationBackoff(), rows, 2000, share * PLAIN)
    assert len(found) * share <= MOST_CREDIT + 1.1 * ASKING_SHARE * 2000
    assert max(after - before for before, after in pairwise(found)) <= LONGEST_BACKOFF + 1


def test_where_asking_is_cheap_proposers_are_asked_in_every_round() -> None:
    assert askings(SpeculationBackoff(), [1], 500, 0.9 * ASKING_SHARE * PLAIN) == list(range(500))


def test_where_nothing_could_pay_rounds_are_skipped_at_once() -> None:
    assert askings(SpeculationBackoff(), [1, 2], 2 * HOPELESS_BACKOFF + 3, 1e-5, hopeless=True) == [
        0,
        HOPELESS_BACKOFF + 1,
        2 * HOPELESS_BACKOFF + 2,
    ]


def test_for_a_new_row_proposers_are_asked_at_once_and_for_a_while() -> None:
    backoff = SpeculationBackoff()
    askings(backoff, [1], 1000, 0.03 * PLAIN)
    tired = askings(backoff, [1], 5, 0.03 * PLAIN)
    assert len(tired) <= 1
    assert askings(backoff, [2], 5, 0.03 * PLAIN) == [0, 1, 2, 3, 4]


def test_a_new_row_among_many_changes_little() -> None:
    backoff, rows = SpeculationBackoff(), list(range(16))
    askings(backoff, rows, 1000, 0.05 * PLAIN)
    found = []
    for newcomer in range(16, 116):  # another one every four rounds
        rows = [*rows[1:], newcomer]
        found += askings(backoff, rows, 4, 0.05 * PLAIN)
    assert len(found) * 0.05 < 0.01 * 400


def test_when_few_rows_are_left_proposers_are_asked_again() -> None:
    backoff = SpeculationBackoff()
    assert askings(backoff, list(range(16)), 3, 1e-5, hopeless=True) == [0]
    assert askings(backoff, [0], 30, 1e-5, hopeless=True)


def test_after_something_was_found_proposers_are_asked_in_every_round_for_a_while() -> None:
    backoff = SpeculationBackoff()
    askings(backoff, [1], 1000, 0.02 * PLAIN)
    while backoff.skips([1]):
        backoff.skip()
    backoff.asked(0.02 * PLAIN, [1])
    backoff.found()
    assert askings(backoff, [1], 8, 0.02 * PLAIN) == list(range(8))


@given(st.lists(st.tuples(st.sets(st.integers(0, 9), min_size=1), st.floats(0, 1), st.booleans()), max_size=60))
def test_no_more_rounds_are_skipped_than_may_be(rounds: list[tuple[set[int], float, bool]]) -> None:
    backoff, skipped = SpeculationBackoff(), 0
    for rows, seconds, hopeless in rounds:
        if backoff.skips(rows):
            skipped += 1
        else:
            skipped = 0
            backoff.asked(seconds, rows)
            backoff.found_nothing(PLAIN, hopeless=hopeless)
        if backoff.skipping:
            backoff.skip()
        assert skipped <= HOPELESS_BACKOFF


class Sevens:
    """Proposes sevens, whatever comes."""

    def __init__(self, name: str = "sevens", fails: str = "") -> None:
        self.name, self.fails = name, fails
        self.forgotten: list[TokenSequence] = []

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        if self.fails == "offers":
            raise ValueError
        return [DraftOffer(self.name, 9) for _ in rows]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        if self.fails == "propose":
            raise ValueError
        return [Proposal((7,) * count, self.name) for count in counts]

    def forget(self, sequence: TokenSequence) -> None:
        self.forgotten.append(sequence)

    @property
    def follows(self) -> Many[TokenSequence]:
        return ()

    def rest(self) -> None:
        pass


def row(number: int = 0, *, limit: int = 50, reserved: int = 256, **options: Any) -> TokenSequence:
    request = Request(f"r{number}", ((1, 2, 3),), **options)
    made = TokenSequence(request, 0, number, request.prompts[0], limit, 0)
    made.tokens.append(4)
    made.sampled, made.computed, made.decoding, made.reserved = 1, 3, True, reserved
    return made


def speculation(*proposers: Sevens, fixed: int = 5, places: int = 99) -> tuple[Speculation, SpeculationMetrics]:
    counts = SpeculationMetrics()
    return Speculation(proposers, SpeculationController(fixed=fixed), counts, places), counts


def test_no_more_draft_tokens_are_verified_than_an_answer_may_still_have() -> None:
    made, _ = speculation(Sevens())
    few, none, tight = row(0, limit=4), row(1, limit=2), row(2, reserved=6)
    drafts = made.draft(StepPlan(decode=(few, none, tight)), waited=False).by_row
    assert {each: len(tokens) for each, tokens in drafts.items()} == {few: 2, tight: 2}


def test_drafts_end_before_a_token_that_would_end_the_answer() -> None:
    made, _ = speculation(Sevens())
    stopping = row(0)
    stopping.stop_tokens = frozenset({7})
    assert made.draft(StepPlan(decode=(stopping,)), waited=False).by_row == {}


def test_a_pass_samples_at_no_more_positions_than_memory_is_reserved_for() -> None:
    made, _ = speculation(Sevens(), places=12)
    rows = tuple(row(number) for number in range(4))
    drafts = made.draft(StepPlan(decode=rows, chunks=(PromptChunk(row(9), 5, True),)), waited=False).by_row
    assert sum(map(len, drafts.values())) + len(rows) + 1 == 12


@pytest.mark.parametrize(("wanted", "found"), [(None, "one"), ((), None), (("two",), "two"), (("none",), None)])
def test_a_request_names_its_proposers(wanted: tuple[str, ...] | None, found: str | None) -> None:
    made, _ = speculation(Sevens("one"), Sevens("two"))
    sequence = row(0, speculate=wanted)
    drafts = made.draft(StepPlan(decode=(sequence,)), waited=False)
    assert (sequence in drafts.by_row) == (found is not None)
    sequence.proposed, sequence.accepted = 5, 3
    made.learn(drafts, 0.1)


@pytest.mark.parametrize("fails", ["offers", "propose"])
def test_a_proposer_that_fails_is_not_asked_again(fails: str) -> None:
    broken, other = Sevens("broken", fails=fails), Sevens("other")
    made, _ = speculation(broken, other)
    sequence = row()
    made.draft(StepPlan(decode=(sequence,)), waited=False)
    broken.fails = ""
    assert made.draft(StepPlan(decode=(sequence,)), waited=False).by_row[sequence] == (7,) * 5
    made.forget(sequence)
    assert sequence in other.forgotten and sequence not in broken.forgotten


def test_there_is_no_draft_for_a_sequence_whose_tokens_are_on_their_way() -> None:
    made, _ = speculation(Sevens())
    unknown = row()
    unknown.sampled += 1
    assert made.seems_worthwhile([unknown])
    assert made.draft(StepPlan(decode=(unknown, row(1))), waited=False).by_row == {}


class Following(Sevens):
    """Has its draft already: so many sevens behind what is known."""

    def __init__(self, most: int) -> None:
        super().__init__("following")
        self.most = most

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return [DraftOffer(self.name, self.most, (0.5, 0.8, 0.9), free=True) for _ in rows]


@pytest.mark.parametrize(("most", "worthwhile"), [(1, False), (2, True)])
def test_a_draft_that_an_unread_token_uses_up_is_no_reason_to_wait_for_the_token(most: int, worthwhile: bool) -> None:
    made, _ = speculation(Following(most))
    unknown = row()
    unknown.sampled += 1
    assert made.seems_worthwhile([unknown]) == worthwhile
    assert made.seems_worthwhile([row()])


def test_a_draft_leads_further_only_if_its_first_tokens_are_sampled() -> None:
    offer = DraftOffer("some", 4, (0.5, 0.8, 0.9), free=True)
    assert offer.behind(0) == offer
    assert offer.behind(1) == DraftOffer("some", 3, (0.4, 0.9), free=True)
    assert offer.behind(3) == DraftOffer("some", 1, (pytest.approx(0.5 * 0.8 * 0.9 * 0.9),), free=True)
    assert offer.behind(4) is None
    computed = DraftOffer("some", 4, (0.5,))
    assert computed.behind(1) == computed


def test_proposed_and_accepted_tokens_are_counted() -> None:
    made, counts = speculation(Sevens())
    sequence = row(stop=Stop(ignore_eos=True))
    drafts = made.draft(StepPlan(decode=(sequence,)), waited=False)
    sequence.accepted = 3
    made.learn(drafts, 0.1)
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (1, 5, 3)
    made.draft(StepPlan(preempted=(sequence,)), waited=False)


class Thinking(Sevens):
    """Takes a millisecond to say that it has no idea."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.calls = 0.0, 0

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        self.now += 0.001
        self.calls += 1
        return [None for _ in rows]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_proposer_that_takes_long_to_offer_nothing_is_not_asked_in_every_round(ahead: bool) -> None:
    thinking = Thinking()
    made = Speculation([thinking], SpeculationController(), SpeculationMetrics(), 99, clock=lambda: thinking.now)
    rows = tuple(row(number) for number in range(16))
    for each in rows:
        each.sampled += ahead  # a token is on its way, and was not read
        each.computed += ahead
    for _ in range(500):
        assert not made.seems_worthwhile(rows) if ahead else True
        made.learn(made.draft(StepPlan(decode=rows), waited=False), 0.01)
    assert 20 <= thinking.calls < 50
