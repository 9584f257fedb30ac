"""Whose tokens are guessed, by whom and how far: proposers offer, the controller chooses, and what came of it is told.

Only the engine thread may call anything here. What fails in guessing costs time, never a token: a proposer that raises
is not asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TypeVar

from ingot.engine import guided
from ingot.engine.forward_pass import Guess
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.controller import Chosen, Controller, Outcome, Round
from ingot.engine.speculation.lookout import Lookout
from ingot.engine.speculation.proposer import Offer, Proposal, Proposer
from ingot.engine.speculation.table import Asked
from ingot.kernels.device import is_lost
from ingot.observe.speculation import SpeculationCounts

log = logging.getLogger("ingot.engine")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Guessed:
    proposal: Proposal
    accepted: int  # tokens that its sequence had been given by guessing before


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a step verifies, and what there is to learn from when its tokens are known."""

    rows: int  # that decode
    tokens: int  # of theirs that would be computed anyway
    prompt_tokens: int
    waited: bool  # the tokens before it had to be known before it was launched
    made: dict[Sequence, _Guessed]

    @property
    def by_row(self) -> dict[Sequence, Guess]:
        return {row: guessed.proposal.tokens for row, guessed in self.made.items()}


class Speculation:
    def __init__(
        self,
        proposers: Many[Proposer],
        controller: Controller,
        counts: SpeculationCounts,
        places: int,
        end: Callable[[Sequence], float] = lambda row: inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """At most so many tokens are drawn in a pass: that is what memory is set aside for. `end` is where a row's next
        launch ends at the latest."""
        self._places, self._end, self._clock = places, end, clock
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._controller, self._counts = controller, counts
        self._lookout = Lookout()
        self._passed = 0  # rounds that went by, since anything was learned
        self._learning = 0.0  # seconds that it took for the last time

    def tempts(self, running: Iterable[Sequence]) -> bool:
        """Whether guessing seems worth it for sequences that decode, by the tokens of theirs that are known: the newest
        may still be on their way."""
        rows = [row for row in running if row.decoding] if self._proposers else []
        return self._looks(rows) and any(chosen.count for chosen in self._look(rows, 0))

    def guess(self, plan: StepPlan, *, waited: bool) -> Guesses:
        """For sequences that decode, whose tokens are all known, what may come next; it will be verified.

        `waited`: the device has nothing to do meanwhile, as the tokens of the step before were read first.
        """
        for sequence in plan.preempted:
            self.forget(sequence)
        made: dict[Sequence, _Guessed] = {}
        prompt_tokens = sum(chunk.count for chunk in plan.chunks)
        if self._looks(plan.decode) and all(row.known for row in plan.decode):
            chosen = self._held(self._look(plan.decode, prompt_tokens), len(plan.chunks))
            for name in self._proposers.keys() & {each.source for each in chosen if each.count}:
                asked = zip(plan.decode, chosen, strict=True)
                made |= self._ask(
                    name, [(row, each.count) for row, each in asked if each.source == name and each.count]
                )
        tokens = sum(row.remaining for row in plan.decode)
        return Guesses(len(plan.decode), tokens, prompt_tokens, waited or bool(made), made)

    def learn(self, guesses: Guesses, seconds: float, *, novel: bool = False) -> None:
        """What came of a step, which took so long from where the tokens before it were known, or from its beginning if
        that was later, to where its own were; `novel`: something was made meanwhile that others will find."""
        if not self._proposers or not guesses.rows or self._goes_by(guesses):
            return
        began = self._clock()
        outcomes = tuple(self._outcome(row, guessed) for row, guessed in guesses.made.items())
        for outcome in outcomes:
            self._counts.add(outcome.proposed, outcome.accepted)
        tokens = guesses.tokens + sum(outcome.proposed for outcome in outcomes)
        if novel:
            self._counts.made += 1
        elif not guesses.prompt_tokens:
            self._counts.ran(guesses.rows, tokens, seconds)
        round = Round(seconds, guesses.rows, tokens, guesses.prompt_tokens, guesses.waited, outcomes, novel)
        self._controller.observe(round, self._passed)
        self._passed = 0
        for row in guesses.made:
            if row.ended:
                self._controller.forget(row)
        self._learning = self._clock() - began

    def forget(self, sequence: Sequence) -> None:
        """It ended or was preempted."""
        self._controller.forget(sequence)
        self._lookout.forget(sequence)
        for name in list(self._proposers):
            self._guarded(name, lambda proposer: proposer.forget(sequence))

    def check(self, held: Collection[Sequence]) -> None:
        """Raises AssertionError if something is kept for a sequence that is not among those held."""
        for proposer in self._proposers.values():
            assert set(proposer.follows) <= set(held), f"{proposer.name} follows a sequence that is gone"

    def rest(self) -> None:
        """Nothing runs."""
        for proposer in self._proposers.values():
            proposer.rest()

    def _outcome(self, row: Sequence, guessed: _Guessed) -> Outcome:
        proposal = guessed.proposal
        return Outcome(row, proposal.source, len(proposal.tokens), row.accepted - guessed.accepted, cut=row.ended)

    def _looks(self, rows: Many[Sequence]) -> bool:
        """Whether it is to be found out what could be guessed for rows that decode."""
        return bool(self._proposers and rows) and not self._lookout.rests(rows)

    def _look(self, rows: Many[Sequence], prompt_tokens: int) -> list[Chosen]:
        """What is to be guessed; where that is nothing, maybe not to look for it again for some rounds."""
        began = self._clock()
        chosen = self._chosen(rows, prompt_tokens)
        self._lookout.looked(self._clock() - began + self._learning, rows)
        if self._controller.pays:
            self._lookout.found()
        elif not any(each.count for each in chosen) and (plain := self._controller.plain(len(rows))) is not None:
            self._lookout.found_nothing(plain, hopeless=self._controller.hopeless(len(rows)))
        return chosen

    def _goes_by(self, guesses: Guesses) -> bool:
        """Whether nothing is learned from a plain round, as of those without a look only the last says what they
        cost."""
        if guesses.waited or not self._lookout.resting:
            return False
        goes_by = not self._lookout.passes()
        self._passed += goes_by
        return goes_by

    def _chosen(self, rows: Many[Sequence], prompt_tokens: int) -> list[Chosen]:
        offers: list[list[Offer]] = [[] for _ in rows]
        for name in list(self._proposers):
            able = [number for number, row in enumerate(rows) if self._may(row, name)]
            asked = [rows[number] for number in able]
            made = self._guarded(name, partial(_offers, rows=asked))
            for number, made_first in zip(able, made or [], strict=False):
                row = rows[number]
                offer = made_first and made_first.behind(row.total - len(row.tokens))
                if offer is not None and offer.most > 0:
                    offers[number].append(replace(offer, most=min(offer.most, self._room(row))))
        return self._controller.choose(
            [Asked(row, tuple(own)) for row, own in zip(rows, offers, strict=True)], prompt_tokens
        )

    def _held(self, chosen: list[Chosen], beside: int) -> list[Chosen]:
        """No more than there are places for, beside those that the rows themselves and prompts draw at."""
        left = max(0, self._places - len(chosen) - beside)
        held = []
        for each in chosen:
            held.append(replace(each, count=min(each.count, left)))
            left -= held[-1].count
        return held

    def _ask(self, name: str, wanted: Many[tuple[Sequence, int]]) -> dict[Sequence, _Guessed]:
        rows, counts = [row for row, _ in wanted], [count for _, count in wanted]
        made = self._guarded(name, partial(_proposals, rows=rows, counts=counts))
        guessed = {}
        for row, proposal in zip(rows, made or [], strict=False):
            tokens = guided.agreed(row, _before_stop(row, proposal.tokens[: self._room(row)]))
            if tokens:
                guessed[row] = _Guessed(replace(proposal, tokens=tokens), row.accepted)
        return guessed

    def _may(self, row: Sequence, name: str) -> bool:
        wanted = row.request.speculate
        return self._room(row) > 0 and (wanted is None or name in wanted)

    def _room(self, row: Sequence) -> int:
        """How many tokens may be guessed: the last one that it may have is drawn, and what is guessed is stored."""
        return int(min(row.limit - row.sampled - 1, row.reserved - row.total, self._end(row) - row.total))

    def _guarded(self, name: str, work: Callable[[Proposer], T]) -> T | None:
        try:
            return work(self._proposers[name])
        except Exception as error:
            if is_lost(error):
                raise
            log.exception("%s failed to guess; answers go on without it", name)
            del self._proposers[name]
            return None


def _offers(proposer: Proposer, rows: Many[Sequence]) -> list[Offer | None]:
    return proposer.offers(rows)


def _proposals(proposer: Proposer, rows: Many[Sequence], counts: Many[int]) -> list[Proposal]:
    return proposer.propose(rows, counts)


def _before_stop(row: Sequence, tokens: Guess) -> Guess:
    """What comes before the first token that would end it: that one is drawn where it would have been guessed."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in row.stop_tokens), len(tokens))]
