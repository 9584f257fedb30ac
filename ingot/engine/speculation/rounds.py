"""Speculation in the step loop: proposers offer draft tokens, the controller chooses, a step verifies them, and the
controller learns from the outcome.

Asking proposers, choosing and learning take time, too, which nothing hides where the device waits for the host. So
rounds are skipped where asking was in vain (`SpeculationBackoff`). Only the engine thread may call anything here. A
failure costs time, never a token: a proposer that raises is not asked again.

How far a row gets is known only when its samples are read. So a step with draft tokens is read before the next one is
launched, and one without is not: not speculating costs nothing. What was rejected is rewound: for pages by a length and
the mark of what is written, for window layers because pages are released only by accepted tokens. Recurrent layers
return the states before each token (on CPUs), or write to another slot, so that the earlier state is still in the
first, or are copied before; from an earlier state the row computes the accepted tokens again in its next pass. On CPUs
tokens that may be rewound are computed to the last bit as one by one; on NVIDIA GPUs the bits of a row are the same
among up to 32 rows (64 with quantised weights). Beyond that, and on Metal, other widths may round differently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from math import inf
from typing import Final, TypeVar

from ingot.engine import sampling
from ingot.engine.forward_pass import DeviceTokens, DraftTokens
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.controller import (
    DecodingRound,
    DraftChoice,
    DraftOutcome,
    RowOffers,
    SpeculationController,
)
from ingot.engine.speculation.proposer import DraftOffer, Proposer
from ingot.kernels.device import is_device_lost
from ingot.observe.metrics import SpeculationMetrics

log = logging.getLogger("ingot.engine")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    source: str  # the proposer
    tokens: DraftTokens
    accepted_before: int  # draft tokens of its sequence
    is_first: bool  # its sequence had none before


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What a step verifies, and what there is to learn from when its tokens are known."""

    rows: int  # that decode
    tokens: int  # of theirs that would be computed anyway
    prompt_tokens: int
    waited: bool  # the tokens before it had to be known before it was launched
    drafts: dict[TokenSequence, VerifiedDraft]

    @property
    def by_row(self) -> dict[TokenSequence, DraftTokens]:
        return {row: draft.tokens for row, draft in self.drafts.items()}


class Speculation:
    def __init__(
        self,
        proposers: Many[Proposer],
        controller: SpeculationController,
        counts: SpeculationMetrics,
        places: int,
        end: Callable[[TokenSequence], float] = lambda row: inf,
        clock: Callable[[], float] = time.perf_counter,
        widest: float = inf,
    ) -> None:
        """At most `places` tokens are sampled in a pass: that is what memory is reserved for. `end` is where a row's
        next forward batch ends at the latest, and of no row with draft tokens does it have more tokens than
        `widest`."""
        self._positions, self._end, self._clock, self._widest = places, end, clock, widest
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._controller, self._counts = controller, counts
        self._backoff = SpeculationBackoff()
        self._skipped = 0  # rounds since the last one that was learned from
        self._learning_s = 0.0  # what that took

    def seems_worthwhile(self, running: Iterable[TokenSequence]) -> bool:
        """Whether speculation seems worth it for sequences that decode, by the tokens of theirs that are known: the
        newest may still be on their way."""
        rows = [row for row in running if row.decoding] if self._proposers else []
        return self._is_due(rows) and any(choice.count for choice in self._choose(rows, 0))

    def draft(self, plan: StepPlan, *, waited: bool) -> StepDrafts:
        """Draft tokens for sequences that decode and whose tokens are all known; the step will verify them.

        `waited`: the device has nothing to do meanwhile, as the tokens of the step before were read first.
        """
        for sequence in plan.preempted:
            self.forget(sequence)
        drafts: dict[TokenSequence, VerifiedDraft] = {}
        prompt_tokens = sum(chunk.count for chunk in plan.chunks)
        if self._is_due(plan.decode) and all(row.known for row in plan.decode):
            choices = self._limit_positions(self._choose(plan.decode, prompt_tokens), len(plan.chunks))
            for name in self._proposers.keys() & {choice.source for choice in choices if choice.count}:
                chosen = zip(plan.decode, choices, strict=True)
                drafts |= self._propose(
                    name, [(row, each.count) for row, each in chosen if each.source == name and each.count]
                )
        tokens = sum(row.remaining for row in plan.decode)
        return StepDrafts(len(plan.decode), tokens, prompt_tokens, waited or bool(drafts), drafts)

    def learn(self, drafts: StepDrafts, seconds: float, *, captured_graph: bool = False) -> None:
        """The outcome of a step, which took so long from where the tokens before it were known, or from its beginning
        if that was later, to where its own were; `captured_graph`: it captured a graph that others will reuse."""
        if not self._proposers or not drafts.rows or self._is_skipped(drafts):
            return
        began = self._clock()
        outcomes = tuple(
            DraftOutcome(row, draft.source, len(draft.tokens), row.accepted - draft.accepted_before, cut=row.ended)
            for row, draft in drafts.drafts.items()
        )
        for outcome in outcomes:
            self._counts.add(outcome.proposed, outcome.accepted)
        tokens = drafts.tokens + sum(outcome.proposed for outcome in outcomes)
        if captured_graph:
            self._counts.made += 1
        elif not drafts.prompt_tokens:
            self._counts.ran(drafts.rows, tokens, seconds)
        is_first = any(draft.is_first for draft in drafts.drafts.values())
        round = DecodingRound(
            seconds, drafts.rows, tokens, drafts.prompt_tokens, drafts.waited, outcomes, captured_graph, is_first
        )
        self._controller.observe(round, self._skipped)
        self._skipped = 0
        for row in drafts.drafts:
            if row.ended:
                self._controller.forget(row)
        self._learning_s = self._clock() - began

    def forget(self, sequence: TokenSequence) -> None:
        """It ended or was preempted."""
        self._controller.forget(sequence)
        self._backoff.forget(sequence)
        for name in list(self._proposers):
            self._guarded(name, lambda proposer: proposer.forget(sequence))

    def check(self, held: Collection[TokenSequence]) -> None:
        """Raises AssertionError if a proposer has state of a sequence that is not among those held."""
        for proposer in self._proposers.values():
            assert set(proposer.follows) <= set(held), f"{proposer.name} follows a sequence that is gone"

    def rest(self) -> None:
        """Nothing runs."""
        for proposer in self._proposers.values():
            proposer.rest()

    def _is_due(self, rows: Many[TokenSequence]) -> bool:
        """Whether proposers are to be asked for rows that decode."""
        return bool(self._proposers and rows) and not self._backoff.skips(rows)

    def _choose(self, rows: Many[TokenSequence], prompt_tokens: int) -> list[DraftChoice]:
        """How many draft tokens each row gets; where that is none, maybe nobody is asked again for some rounds."""
        began = self._clock()
        offers = self._offers(rows)
        choices = self._controller.choose(
            [RowOffers(row, tuple(own)) for row, own in zip(rows, offers, strict=True)], prompt_tokens
        )
        self._backoff.asked(self._clock() - began + self._learning_s, rows)
        if self._controller.pays:
            self._backoff.found()
        elif not any(choice.count for choice in choices) and (plain := self._controller.plain(len(rows))) is not None:
            self._backoff.found_nothing(plain, hopeless=self._controller.hopeless(len(rows)))
        return choices

    def _is_skipped(self, drafts: StepDrafts) -> bool:
        """Whether nothing is learned from a plain round: of those for which nobody was asked, only the last one shows
        what they cost."""
        if drafts.waited or not self._backoff.skipping:
            return False
        is_skipped = not self._backoff.skip()
        self._skipped += is_skipped
        return is_skipped

    def _offers(self, rows: Many[TokenSequence]) -> list[list[DraftOffer]]:
        offers: list[list[DraftOffer]] = [[] for _ in rows]
        for name in list(self._proposers):
            numbers = [number for number, row in enumerate(rows) if self._may_propose(row, name)]
            allowed = [rows[number] for number in numbers]
            for number, first in zip(numbers, self._offers_of(name, allowed), strict=False):
                row = rows[number]
                offer = first and first.behind(row.total - len(row.tokens))
                if offer is not None and offer.most > 0:
                    offers[number].append(replace(offer, most=min(offer.most, self._room(row))))
        return offers

    def _offers_of(self, name: str, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        return self._guarded(name, lambda proposer: proposer.offers(rows)) or []

    def _limit_positions(self, choices: list[DraftChoice], prompts: int) -> list[DraftChoice]:
        """No more than a pass may sample at, besides the rows' own next tokens and those of prompts."""
        left = max(0, self._positions - len(choices) - prompts)
        limited = []
        for choice in choices:
            limited.append(replace(choice, count=min(choice.count, left)))
            left -= limited[-1].count
        return limited

    def _propose(self, name: str, wanted: Many[tuple[TokenSequence, int]]) -> dict[TokenSequence, VerifiedDraft]:
        rows, counts = [row for row, _ in wanted], [count for _, count in wanted]
        proposals = self._guarded(name, lambda proposer: proposer.propose(rows, counts))
        drafts = {}
        for row, proposal in zip(rows, proposals or [], strict=False):
            tokens = proposal.tokens[: self._room(row)]
            depends_on_them = row.matcher is not None or sampling.needs_history(row.sampling)
            if depends_on_them or not isinstance(tokens, DeviceTokens):
                tokens = sampling.grammatical_prefix(row, _cut_before_stop(row, tuple(tokens)))
            if tokens:
                drafts[row] = VerifiedDraft(proposal.source, tokens, row.accepted, not row.proposed)
        return drafts

    def _may_propose(self, row: TokenSequence, name: str) -> bool:
        wanted = row.request.speculate
        return self._room(row) > 0 and (wanted is None or name in wanted)

    def _room(self, row: TokenSequence) -> int:
        """The most draft tokens: the last token that it may have is sampled, and draft tokens are stored."""
        room = min(row.limit - row.sampled - 1, row.reserved - row.total, self._end(row) - row.total)
        return int(min(room, self._widest - row.remaining))

    def _guarded(self, name: str, work: Callable[[Proposer], T]) -> T | None:
        try:
            return work(self._proposers[name])
        except Exception as error:
            if is_device_lost(error):
                raise
            log.exception("proposer %s failed; answers go on without it", name)
            del self._proposers[name]
            return None


def _cut_before_stop(row: TokenSequence, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """What comes before the first token that would end it: that one is sampled, not verified."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in row.stop_tokens), len(tokens))]


ASKING_SHARE: Final = 0.004
"""Of all time, so much may be spent on asking proposers in vain;"""
MOST_CREDIT: Final = 0.25
"""and besides, of a plain round's time, so much for rows that are new, and since something was found."""
LONGEST_BACKOFF: Final = 64
"""Rounds that are skipped, at most;"""
HOPELESS_BACKOFF: Final = 256
"""and where draft tokens would not pay even if all were accepted."""
FIRST_ASKING_S: Final = 2e-5
"""The first estimate of what asking takes, in seconds a row."""
ASKING_RATE: Final = 0.1
"""How fast that estimate follows. What takes very long, as a prompt's first, counts as twice as long."""


class SpeculationBackoff:
    """In which rounds proposers are asked at all. Rows are named by anything hashable."""

    def __init__(self) -> None:
        self._asking_s = FIRST_ASKING_S  # a row
        self._credit = MOST_CREDIT  # for asking in vain, in plain rounds
        self._rows: set[Hashable] = set()
        self._left = 0  # rounds that are still to be skipped

    def skips(self, rows: Collection[Hashable]) -> bool:
        """Whether nobody is asked for the coming round of these rows."""
        if self._left and (len(rows) != len(self._rows) or not self._rows.issuperset(rows)):
            self._meet(rows)
        return self._left > 0

    @property
    def skipping(self) -> bool:
        return self._left > 0

    def skip(self) -> bool:
        """A round is skipped; whether it was the last one."""
        self._left -= 1
        return self._left == 0

    def asked(self, seconds: float, rows: Collection[Hashable]) -> None:
        """Asking took so long."""
        self._meet(rows)
        each = min(seconds / len(rows), 2 * self._asking_s)
        self._asking_s += (each - self._asking_s) * ASKING_RATE
        self._left = 0

    def found(self) -> None:
        """Something was offered that seems to pay."""
        self._credit = MOST_CREDIT

    def found_nothing(self, plain: float, *, hopeless: bool) -> None:
        """A plain round takes `plain` seconds; `hopeless`: draft tokens would not pay if all were accepted."""
        self._credit = min(self._credit + ASKING_SHARE, MOST_CREDIT) - self._asking_s * len(self._rows) / plain
        rounds = HOPELESS_BACKOFF if hopeless else min(int(-self._credit / ASKING_SHARE), LONGEST_BACKOFF)
        if rounds > 0:
            self._credit = min(self._credit + rounds * ASKING_SHARE, MOST_CREDIT)
            self._left = rounds + 1  # the round that was asked for is skipped, too

    def forget(self, row: Hashable) -> None:
        self._rows.discard(row)

    def _meet(self, rows: Collection[Hashable]) -> None:
        """New rows may have something to offer, and fewer rows have more to win."""
        same = len(self._rows.intersection(rows)) / max(len(self._rows), len(rows))
        self._credit = min(self._credit + (1 - same) * MOST_CREDIT, MOST_CREDIT)
        self._left = int(self._left * same)
        self._rows = set(rows)
