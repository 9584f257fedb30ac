"""Speculation in the step loop: proposers offer, the controller chooses, drafts are verified, and what came of it is
learned.

To ask, to choose and to learn takes time, too, which nothing hides where the device waits for the host; so rounds
go by without asking where that was in vain (`SpeculationBackoff`). Only the engine thread may call anything here.
What fails costs time, never a token: a proposer that raises is not asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final, TypeVar

from ingot.engine import sampling
from ingot.engine.forward_pass import DraftTokens
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.controller import (
    DecodingRound,
    DraftChoice,
    DraftOutcome,
    RowOffers,
    SpeculationController,
)
from ingot.engine.speculation.proposer import DraftOffer, Proposal, Proposer
from ingot.kernels.device import is_device_lost
from ingot.observe.metrics import SpeculationMetrics

log = logging.getLogger("ingot.engine")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _VerifiedDraft:
    proposal: Proposal
    accepted: int  # tokens that its sequence had been given by guessing before


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What a step verifies, and what there is to learn from when its tokens are known."""

    rows: int  # that decode
    tokens: int  # of theirs that would be computed anyway
    prompt_tokens: int
    waited: bool  # the tokens before it had to be known before it was launched
    made: dict[TokenSequence, _VerifiedDraft]

    @property
    def by_row(self) -> dict[TokenSequence, DraftTokens]:
        return {row: guessed.proposal.tokens for row, guessed in self.made.items()}


class Speculation:
    def __init__(
        self,
        proposers: Many[Proposer],
        controller: SpeculationController,
        counts: SpeculationMetrics,
        places: int,
        end: Callable[[TokenSequence], float] = lambda row: inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """At most so many tokens are drawn in a pass: that is what memory is set aside for. `end` is where a row's next
        launch ends at the latest."""
        self._places, self._end, self._clock = places, end, clock
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._controller, self._counts = controller, counts
        self._backoff = SpeculationBackoff()
        self._passed = 0  # rounds that went by, since anything was learned
        self._learning = 0.0  # seconds that it took for the last time

    def seems_worthwhile(self, running: Iterable[TokenSequence]) -> bool:
        """Whether guessing seems worth it for sequences that decode, by the tokens of theirs that are known: the newest
        may still be on their way."""
        rows = [row for row in running if row.decoding] if self._proposers else []
        return self._looks(rows) and any(chosen.count for chosen in self._look(rows, 0))

    def guess(self, plan: StepPlan, *, waited: bool) -> StepDrafts:
        """For sequences that decode, whose tokens are all known, what may come next; it will be verified.

        `waited`: the device has nothing to do meanwhile, as the tokens of the step before were read first.
        """
        for sequence in plan.preempted:
            self.forget(sequence)
        made: dict[TokenSequence, _VerifiedDraft] = {}
        prompt_tokens = sum(chunk.count for chunk in plan.chunks)
        if self._looks(plan.decode) and all(row.known for row in plan.decode):
            chosen = self._held(self._look(plan.decode, prompt_tokens), len(plan.chunks))
            for name in self._proposers.keys() & {each.source for each in chosen if each.count}:
                asked = zip(plan.decode, chosen, strict=True)
                made |= self._ask(
                    name, [(row, each.count) for row, each in asked if each.source == name and each.count]
                )
        tokens = sum(row.remaining for row in plan.decode)
        return StepDrafts(len(plan.decode), tokens, prompt_tokens, waited or bool(made), made)

    def learn(self, drafts: StepDrafts, seconds: float, *, made_graph: bool = False) -> None:
        """What came of a step, which took so long from where the tokens before it were known, or from its beginning if
        that was later, to where its own were; `made_graph`: something was made meanwhile that others will find."""
        if not self._proposers or not drafts.rows or self._is_skipped(drafts):
            return
        began = self._clock()
        outcomes = tuple(self._outcome(row, guessed) for row, guessed in drafts.made.items())
        for outcome in outcomes:
            self._counts.add(outcome.proposed, outcome.accepted)
        tokens = drafts.tokens + sum(outcome.proposed for outcome in outcomes)
        if made_graph:
            self._counts.made += 1
        elif not drafts.prompt_tokens:
            self._counts.ran(drafts.rows, tokens, seconds)
        round = DecodingRound(seconds, drafts.rows, tokens, drafts.prompt_tokens, drafts.waited, outcomes, made_graph)
        self._controller.observe(round, self._passed)
        self._passed = 0
        for row in drafts.made:
            if row.ended:
                self._controller.forget(row)
        self._learning = self._clock() - began

    def forget(self, sequence: TokenSequence) -> None:
        """It ended or was preempted."""
        self._controller.forget(sequence)
        self._backoff.forget(sequence)
        for name in list(self._proposers):
            self._guarded(name, lambda proposer: proposer.forget(sequence))

    def check(self, held: Collection[TokenSequence]) -> None:
        """Raises AssertionError if something is kept for a sequence that is not among those held."""
        for proposer in self._proposers.values():
            assert set(proposer.follows) <= set(held), f"{proposer.name} follows a sequence that is gone"

    def rest(self) -> None:
        """Nothing runs."""
        for proposer in self._proposers.values():
            proposer.rest()

    def _outcome(self, row: TokenSequence, guessed: _VerifiedDraft) -> DraftOutcome:
        proposal = guessed.proposal
        return DraftOutcome(row, proposal.source, len(proposal.tokens), row.accepted - guessed.accepted, cut=row.ended)

    def _looks(self, rows: Many[TokenSequence]) -> bool:
        """Whether it is to be found out what could be guessed for rows that decode."""
        return bool(self._proposers and rows) and not self._backoff.rests(rows)

    def _look(self, rows: Many[TokenSequence], prompt_tokens: int) -> list[DraftChoice]:
        """What is to be guessed; where that is nothing, maybe not to look for it again for some rounds."""
        began = self._clock()
        chosen = self._chosen(rows, prompt_tokens)
        self._backoff.looked(self._clock() - began + self._learning, rows)
        if self._controller.pays:
            self._backoff.found()
        elif not any(each.count for each in chosen) and (plain := self._controller.plain(len(rows))) is not None:
            self._backoff.found_nothing(plain, hopeless=self._controller.hopeless(len(rows)))
        return chosen

    def _is_skipped(self, drafts: StepDrafts) -> bool:
        """Whether nothing is learned from a plain round, as of those without a look only the last says what they
        cost."""
        if drafts.waited or not self._backoff.resting:
            return False
        is_skipped = not self._backoff.passes()
        self._passed += is_skipped
        return is_skipped

    def _chosen(self, rows: Many[TokenSequence], prompt_tokens: int) -> list[DraftChoice]:
        offers: list[list[DraftOffer]] = [[] for _ in rows]
        for name in list(self._proposers):
            able = [number for number, row in enumerate(rows) if self._may(row, name)]
            asked = [rows[number] for number in able]
            made = self._guarded(name, partial(_make_offers, rows=asked))
            for number, made_first in zip(able, made or [], strict=False):
                row = rows[number]
                offer = made_first and made_first.behind(row.total - len(row.tokens))
                if offer is not None and offer.most > 0:
                    offers[number].append(replace(offer, most=min(offer.most, self._room(row))))
        return self._controller.choose(
            [RowOffers(row, tuple(own)) for row, own in zip(rows, offers, strict=True)], prompt_tokens
        )

    def _held(self, chosen: list[DraftChoice], beside: int) -> list[DraftChoice]:
        """No more than there are places for, beside those that the rows themselves and prompts draw at."""
        left = max(0, self._places - len(chosen) - beside)
        held = []
        for each in chosen:
            held.append(replace(each, count=min(each.count, left)))
            left -= held[-1].count
        return held

    def _ask(self, name: str, wanted: Many[tuple[TokenSequence, int]]) -> dict[TokenSequence, _VerifiedDraft]:
        rows, counts = [row for row, _ in wanted], [count for _, count in wanted]
        made = self._guarded(name, partial(_make_proposals, rows=rows, counts=counts))
        guessed = {}
        for row, proposal in zip(rows, made or [], strict=False):
            tokens = sampling.grammatical_prefix(row, _cut_before_stop(row, proposal.tokens[: self._room(row)]))
            if tokens:
                guessed[row] = _VerifiedDraft(replace(proposal, tokens=tokens), row.accepted)
        return guessed

    def _may(self, row: TokenSequence, name: str) -> bool:
        wanted = row.request.speculate
        return self._room(row) > 0 and (wanted is None or name in wanted)

    def _room(self, row: TokenSequence) -> int:
        """How many tokens may be guessed: the last one that it may have is drawn, and what is guessed is stored."""
        return int(min(row.limit - row.sampled - 1, row.reserved - row.total, self._end(row) - row.total))

    def _guarded(self, name: str, work: Callable[[Proposer], T]) -> T | None:
        try:
            return work(self._proposers[name])
        except Exception as error:
            if is_device_lost(error):
                raise
            log.exception("%s failed to guess; answers go on without it", name)
            del self._proposers[name]
            return None


def _make_offers(proposer: Proposer, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
    return proposer.offers(rows)


def _make_proposals(proposer: Proposer, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
    return proposer.propose(rows, counts)


def _cut_before_stop(row: TokenSequence, tokens: DraftTokens) -> DraftTokens:
    """What comes before the first token that would end it: that one is drawn where it would have been guessed."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in row.stop_tokens), len(tokens))]


ASKING_SHARE: Final = 0.004
"""Of all time, so much may be spent on looks that are in vain;"""
MOST_CREDIT: Final = 0.25
"""and besides, of a plain round's time, so much for rows that are new, and since something was found."""
LONGEST_BACKOFF: Final = 64
"""Rounds that go by, at most;"""
HOPELESS_BACKOFF: Final = 256
"""and where not even right guesses would pay."""
FIRST_ASKING_S: Final = 2e-5
"""Seconds that a look is thought to take, for each row."""
ASKING_FOLLOWS: Final = 0.1
"""How fast what is known of that follows it. One that takes very long, as a prompt's first, counts as twice as long."""


class SpeculationBackoff:
    """Rows are named by anything that can be."""

    def __init__(self) -> None:
        self._seconds = FIRST_ASKING_S  # of a look, for each row
        self._credit = MOST_CREDIT  # for looks in vain, in plain rounds
        self._seen: set[Hashable] = set()
        self._left = 0  # rounds that are still to go by

    def rests(self, rows: Collection[Hashable]) -> bool:
        """Whether the coming round, which is one of these rows, is to go by."""
        if self._left and (len(rows) != len(self._seen) or not self._seen.issuperset(rows)):
            self._meet(rows)
        return self._left > 0

    @property
    def resting(self) -> bool:
        return self._left > 0

    def passes(self) -> bool:
        """A round goes by; whether it was the last before a look."""
        self._left -= 1
        return self._left == 0

    def looked(self, seconds: float, rows: Collection[Hashable]) -> None:
        """A look took so long."""
        self._meet(rows)
        each = min(seconds / len(rows), 2 * self._seconds)
        self._seconds += (each - self._seconds) * ASKING_FOLLOWS
        self._left = 0

    def found(self) -> None:
        """Something that seems to pay."""
        self._credit = MOST_CREDIT

    def found_nothing(self, plain: float, *, hopeless: bool) -> None:
        """A plain round takes `plain`; `hopeless`: whatever were guessed, and right, would not pay."""
        self._credit = min(self._credit + ASKING_SHARE, MOST_CREDIT) - self._seconds * len(self._seen) / plain
        rounds = HOPELESS_BACKOFF if hopeless else min(int(-self._credit / ASKING_SHARE), LONGEST_BACKOFF)
        if rounds > 0:
            self._credit = min(self._credit + rounds * ASKING_SHARE, MOST_CREDIT)
            self._left = rounds + 1  # the round that was looked at goes by, too

    def forget(self, row: Hashable) -> None:
        self._seen.discard(row)

    def _meet(self, rows: Collection[Hashable]) -> None:
        """For whoever is new, nobody looked yet; and fewer rows have more to win."""
        same = len(self._seen.intersection(rows)) / max(len(self._seen), len(rows))
        self._credit = min(self._credit + (1 - same) * MOST_CREDIT, MOST_CREDIT)
        self._left = int(self._left * same)
        self._seen = set(rows)
