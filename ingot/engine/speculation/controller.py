"""Decides how many draft tokens to verify for each row, so that tokens come as fast as they can; often that is none.

What a round costs and how often draft tokens are accepted is measured as the server runs, and belongs to the model, not
to a request. The controller takes the plan that gives most tokens a second by these measurements, and explores: what
is never tried is never known to have become better.

Whatever was measured may be wrong by now. So rounds with draft tokens are compared with plain ones, and what they lost
is taken from an exploration budget, which a small share of all time and whatever they gained refill. Nothing is tried
that the budget could not bear to be all wrong.

What each part buys on the simulated devices of the tests, as a share of the best fixed depth: without exploring rows
that have no drafts, 0.74 instead of 0.95 where drafts become good again on a compute-bound device; without going on
with what was accepted there, 1.01 instead of 1.13 where one row of eight copies; with all of the budget at stake at
once, 0.92 instead of 0.95 on that device; without a budget, 0.80 instead of 0.97 of plain decoding after drafts turned
bad; without factors by size, 0.91 instead of 0.98 on a device with a knee; without odds of each sequence, 0.92 instead
of 0.98 after changes; without the graph cache, 0.91 instead of 0.92 on an H200; without the lower bound of plain
rounds, 0.93 instead of 0.96 on a machine that slows down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from math import inf
from operator import neg, not_
from typing import Final

from ingot.engine.speculation.acceptance import AcceptanceRates, JudgedDraft
from ingot.engine.speculation.proposer import DraftOffer
from ingot.engine.speculation.step_costs import RoundCosts

TO_BEGIN, TO_GO_ON = 1.02, 0.99
"""How many times as fast as plainly tokens must come with draft tokens: to begin with them, and to go on."""
MOST_SLOWDOWN: Final = 2.0
"""A round that takes more than so many times what was expected counts as one that takes just so long."""
LEAST_WORTH: Final = 0.7
"""A draft token that is needed more rarely than this part of what it costs cannot pay."""

FIRST_BUDGET, MOST_BUDGET, LEAST_BUDGET = 1.5, 4.0, -1.0
"""The exploration budget, in plain rounds: at first, however much was gained, and however much was lost. One long draft
that was all wrong, in a round that was slow by chance, is not to forbid for a hundred rounds what paid before."""
BUDGET_SHARE: Final = 0.012
"""Of all time, so much is added to it."""
STAKE, TRUST = 0.7, 0.5
"""The part of the budget that a round may cost more than a plain one, and the part of the first token that is expected
of it which may be added to that. Who stakes all of it is ruined by two unlucky rounds, and waits for a hundred."""
WAKING_INTERVAL: Final = 8
"""Rounds between two explorations of rows without draft tokens, at least."""
WAKING_DEPTHS: Final = (1, 2)
"""Draft tokens of such a row, by turns: what more of them cost is to be known, too."""


@dataclass(frozen=True, slots=True)
class RowOffers:
    """A decoding row of the coming round."""

    key: Hashable  # the sequence
    offers: tuple[DraftOffer, ...]  # by preference; empty: there can be no draft tokens for it


@dataclass(frozen=True, slots=True)
class DraftChoice:
    source: str | None  # the proposer; None: no draft tokens for this row
    count: int


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What came of the draft tokens of one row."""

    key: Hashable
    source: str
    proposed: int
    accepted: int
    cut: bool  # the sequence ended inside the accepted ones: those behind were never judged


@dataclass(frozen=True, slots=True)
class DecodingRound:
    """What a decoding step took and gave."""

    seconds: float  # from where the tokens before it were known to where its own were, proposing included
    rows: int
    tokens: int  # verified or decoded, without those of prompts
    prompt_tokens: int  # in the same forward pass: then its time says nothing
    waited: bool  # it began when the tokens before it had been read: to verify drafts, or to ask for some in vain
    outcomes: tuple[DraftOutcome, ...]
    captured_graph: bool = False  # a graph was captured that later steps reuse: then its time says nothing, either
    is_first: bool = False  # some row had no draft tokens before: likewise, if a proposer had to catch up for them


NO_DRAFT: Final = DraftChoice(None, 0)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """So many draft tokens for each row, the tokens to be expected of them, and how long the round takes."""

    counts: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def drafts(self) -> bool:
        return any(self.counts)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class SpeculationController:
    """Only the engine thread calls it: `choose` before a round, `observe` after it, `forget` when a sequence ends."""

    def __init__(self, most: int = 16, fixed: int | None = None, widest: float = inf) -> None:
        """At most so many draft tokens a row; `fixed`: always so many, where they are offered. No draft tokens make a
        round wider than `widest` tokens: another, far slower implementation would compute it."""
        self._most, self._fixed = most, fixed
        self._costs, self._acceptance = RoundCosts(widest), AcceptanceRates(most)
        self._chosen_offers: dict[Hashable, DraftOffer] = {}  # for the coming round, or the one that runs
        self._drafting = self._pays = False
        self._budget = FIRST_BUDGET
        self._exploration = _Exploration()

    def choose(self, rows: Sequence[RowOffers], prompt_tokens: int = 0) -> list[DraftChoice]:
        """The proposer and the number of draft tokens of each row: never more than offered. May be called several times
        before a round."""
        self._chosen_offers.clear()
        self._pays = False
        if not any(row.offers for row in rows):
            return [NO_DRAFT] * len(rows)
        if self._fixed is not None:
            first = [row.offers[0] if row.offers else None for row in rows]
            return self._choices(rows, first, [self._fixed] * len(rows))
        if not self._costs.known:
            return [NO_DRAFT] * len(rows)
        options = RoundOptions(rows, self._acceptance, self._costs, self._budget, prompt_tokens)
        best = self._best(options)
        self._pays = best.drafts
        plan = best if prompt_tokens else self._exploration.choose(options, best)
        return self._choices(rows, options.offers, plan.counts)

    def observe(self, round: DecodingRound, skipped: int = 0) -> None:
        """After every decoding step, plain ones included; `skipped`: so many plain ones before it were left out."""
        if self._fixed is not None:
            return
        self._add_to_budget(skipped * BUDGET_SHARE)
        offers = [self._offer(outcome) for outcome in round.outcomes]
        catches_up = round.is_first and not all(offer.free for offer in offers)
        if round.prompt_tokens or round.captured_graph or catches_up:
            self._costs.interrupted()
        if not round.prompt_tokens and (round.captured_graph or not catches_up):
            computed = (one.proposed for one, offer in zip(round.outcomes, offers, strict=True) if not offer.free)
            self._account(round, max(computed, default=0))
        self._exploration.passed(skipped + 1)
        # A plain round may still run when the next one is chosen: it is no answer to what that one explores.
        if round.outcomes or round.waited or not self._chosen_offers:
            self._exploration.observe(round.outcomes)
        self._acceptance.observe(
            JudgedDraft(one.key, offer, min(one.accepted + (not one.cut), one.proposed), one.accepted)
            for one, offer in zip(round.outcomes, offers, strict=True)
        )

    @property
    def pays(self) -> bool:
        """Whether draft tokens seemed to pay in the last choice: else what was chosen is an exploration."""
        return self._fixed is not None or self._pays

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain round; None where nothing depends on it, or it is not known yet."""
        return self._costs.plain(rows) if self._fixed is None and self._costs.known else None

    def hopeless(self, rows: int) -> bool:
        """Whether draft tokens would not pay if all of them were accepted."""
        plain, depths = self._costs.plain(rows), [1 << power for power in range(self._most.bit_length())]
        return all((1 + depth) * plain <= TO_BEGIN * self._costs.round(rows, depth * rows, 0) for depth in depths)

    def forget(self, key: Hashable) -> None:
        """The sequence ended, or begins anew; nothing need be known of it."""
        self._acceptance.forget(key)
        self._chosen_offers.pop(key, None)
        self._exploration.forget(key)

    @property
    def remembered(self) -> int:
        """Sequences of which anything is known."""
        return len({*self._chosen_offers, *self._acceptance.keys, *self._exploration.keys})

    def _best(self, options: RoundOptions) -> DraftPlan:
        drafts = self._best_drafts(options)
        enough = options.plain_upper_rate * (TO_GO_ON if self._drafting else TO_BEGIN)
        self._drafting = drafts is not None and drafts.rate > enough
        return drafts if drafts is not None and self._drafting else options.plain

    def _best_drafts(self, options: RoundOptions) -> DraftPlan | None:
        """Of the plans that have a graph, or may capture one; what is lost without the others is remembered."""
        wanted = options.best()
        if wanted is None or options.has_graph(wanted.counts):
            return wanted
        there = options.best(with_graph=True)
        instead = max(options.plain.rate, there.rate if there is not None else 0.0)
        self._costs.graphs.misses(max(0.0, wanted.tokens / instead - wanted.seconds))
        return there

    def _account(self, round: DecodingRound, depth: int) -> None:
        """Compare a round with plain ones, and learn what it cost. `depth`: the most draft tokens of a row that had to
        be computed."""
        rows, drafted = round.rows, round.tokens - round.rows
        if self._costs.known:
            plain, expected = self._costs.plain(rows), self._costs.round(rows, drafted, depth)
            if round.captured_graph:
                self._costs.graphs.captured(rows, drafted, round.seconds - expected)
                return
            self._costs.graphs.ran(rows, drafted, plain)
            self._add_to_budget(BUDGET_SHARE)
            if round.waited:
                tokens = 1 + sum(one.accepted for one in round.outcomes) / rows
                self._add_to_budget(tokens - min(round.seconds, MOST_SLOWDOWN * expected) / plain)
        if not round.captured_graph:
            self._costs.observe(round.seconds, rows, drafted, depth, waited=round.waited)

    def _add_to_budget(self, gained: float) -> None:
        self._budget = max(min(self._budget + gained, MOST_BUDGET), LEAST_BUDGET)

    def _choices(
        self, rows: Sequence[RowOffers], offers: Sequence[DraftOffer | None], counts: Sequence[int]
    ) -> list[DraftChoice]:
        choices = []
        for row, offer, count in zip(rows, offers, counts, strict=True):
            if offer is None or not (count := min(count, offer.most)):
                choices.append(NO_DRAFT)
            else:
                self._chosen_offers[row.key] = offer
                choices.append(DraftChoice(offer.source, count))
        return choices

    def _offer(self, outcome: DraftOutcome) -> DraftOffer:
        """The offer that was chosen; draft tokens that nobody chose are taken as they came."""
        offer = self._chosen_offers.get(outcome.key)
        if offer is not None and offer.source == outcome.source:
            return offer
        return DraftOffer(outcome.source, outcome.proposed, free=True)


class RoundOptions:
    """How the coming round could run. Each row takes the offer that is worth most, the first of equals."""

    def __init__(
        self,
        rows: Sequence[RowOffers],
        acceptance: AcceptanceRates,
        costs: RoundCosts,
        budget: float,
        prompt_tokens: int,
    ) -> None:
        self._acceptance, self._costs, self.budget = acceptance, costs, budget
        self._rows, self._plain = len(rows), costs.plain(len(rows))
        self._prompt_s = prompt_tokens * costs.token
        # In tokens that would come plainly in the same time.
        self._price, self._step_price = costs.token * self._rows / self._plain, costs.step / self._plain
        self.keys = [row.key for row in rows]
        preferred = [self._preferred(row) for row in rows]
        self.offers = [offer for offer, _ in preferred]
        self._survival = [survival for _, survival in preferred]
        self._computed = [offer is not None and not offer.free for offer in self.offers]
        self.reach = [0 if offer is None else acceptance.reach(offer) for offer in self.offers]
        """How many draft tokens of each row anything is known of."""
        self.plain = DraftPlan((0,) * self._rows, self._rows, self._plain + self._prompt_s)

    @property
    def plain_upper_rate(self) -> float:
        """Tokens a second of a plain round that is as fast as it may well be."""
        return self._rows / (self._costs.plain_lower_bound(self._rows) + self._prompt_s)

    @property
    def wait(self) -> float:
        """Seconds that the first plain round behind others takes longer."""
        return self._costs.wait

    def plan(self, counts: tuple[int, ...]) -> DraftPlan:
        """A round with so many draft tokens for each row."""
        if not any(counts):
            return self.plain
        tokens = self._rows + sum(sum(row[:count]) for row, count in zip(self._survival, counts, strict=True))
        depth = max(count * computed for count, computed in zip(counts, self._computed, strict=True))
        seconds = self._costs.round(self._rows, sum(counts), depth)
        return DraftPlan(counts, tokens, seconds + self._prompt_s)

    def affords(self, plan: DraftPlan) -> bool:
        return self._affords(sum(plan.counts), plan.seconds, plan.tokens) and self.has_graph(plan.counts)

    def has_graph(self, counts: Sequence[int]) -> bool:
        """Whether such a round needs no new graph, or may capture one."""
        return self._costs.graphs.affords(self._rows, sum(counts))

    def best(self, *, with_graph: bool = False) -> DraftPlan | None:
        """The affordable plan with draft tokens that gives most tokens a second; None: there is none. `with_graph`: of
        those that need no new graph, or may capture one.

        As draft tokens that are likelier to be needed are verified first, the question is only how many, and how deep
        those may go that have to be computed.
        """
        if self.budget <= 0:
            return None
        computed = list(compress(self._survival, self._computed))
        chances = [chance for row in compress(self._survival, map(not_, self._computed)) for chance in row]
        seconds = self._costs.verifying(self._rows, len(chances) + sum(map(len, computed)))
        best, least, deepest = 0.0, 0.0, 0
        for depth in range(max(map(len, computed), default=0) + 1):
            chances += [row[depth - 1] for row in computed if depth and len(row) >= depth]
            if chances:
                step_s = depth * self._costs.step + self._prompt_s
                rate, last = self._fastest(chances, seconds, step_s, with_graph=with_graph)
                if rate > best:
                    best, least, deepest = rate, last, depth
        return self.plan(self._down_to(least, deepest)) if best else None

    def _fastest(
        self, chances: list[float], seconds: list[float], more: float, *, with_graph: bool
    ) -> tuple[float, float]:
        """The most tokens a second that the likeliest of these tokens give, and how likely the last of them is. Sorts
        them. Equally likely ones are taken together."""
        chances.sort(reverse=True)
        tokens = list(accumulate(chances, initial=float(self._rows)))
        rates = [given / (spent + more) for given, spent in zip(tokens, seconds, strict=False)]
        rates[0] = 0.0
        for count, (chance, following) in enumerate(pairwise(chances), 1):
            if chance == following:
                rates[count] = 0.0

        def allowed(count: int) -> bool:
            return self._affords(count, seconds[count] + more, tokens[count]) and (
                not with_graph or self._costs.graphs.affords(self._rows, count)
            )

        count = rates.index(max(rates))
        if rates[count] and not allowed(count):
            rates = [rate if rate and allowed(count) else 0.0 for count, rate in enumerate(rates)]
            count = rates.index(max(rates))
        return rates[count], chances[count - 1]

    def _down_to(self, least: float, depth: int) -> tuple[int, ...]:
        """The draft tokens that are at least so likely to be needed, of computed ones those up to a depth."""
        return tuple(
            bisect_right(row, -least, 0, min(depth, len(row)) if computed else len(row), key=neg)
            for row, computed in zip(self._survival, self._computed, strict=True)
        )

    def _affords(self, drafted: int, seconds: float, tokens: float) -> bool:
        """Whether the budget can bear that all of it is wrong."""
        if self._rows <= self._costs.widest < self._rows + drafted:
            return False
        longer, expected = (seconds - self._prompt_s) / self._plain - 1, tokens / self._rows - 1
        return self.budget > 0 and longer <= STAKE * self.budget + TRUST * min(expected, 1.0)

    def _preferred(self, row: RowOffers) -> tuple[DraftOffer | None, list[float]]:
        """The offer that is worth most, and how likely each token and all before it are accepted: the first, and as
        many more as could be worth it."""
        least = self._price * LEAST_WORTH
        survivals = [(offer, self._acceptance.survival(row.key, offer, least)) for offer in row.offers]
        if len(survivals) < 2:
            return survivals[0] if survivals else (None, [])
        return max(survivals, key=lambda each: self._worth(*each))  # of equals, the first

    def _worth(self, offer: DraftOffer, survival: Sequence[float]) -> float:
        """Tokens that it saves, less those that would come plainly in the time that it takes."""
        price = self._price + (0.0 if offer.free else self._step_price)
        return sum(max(0.0, chance - price) for chance in survival)


class _Exploration:
    """Rows without draft tokens get some for a round, and go on while most of them are accepted: with twice as many, if
    all were.

    `choose` may be called several times before a round, or while another one runs: only `observe` goes on to the next.
    """

    def __init__(self) -> None:
        self._since = 0  # rounds
        self._turns = 0  # how often rows were explored
        self._woken: dict[Hashable, int] = {}  # draft tokens of rows that are explored in the chosen round
        self._promising: dict[Hashable, int] = {}  # draft tokens of rows that are to be explored further

    def choose(self, options: RoundOptions, best: DraftPlan) -> DraftPlan:
        """What to do in the coming round: what seems best, or that and an exploration."""
        self._woken = self._wake(options, best)
        return options.plan(_with_woken(self._woken, options, best)) if self._woken else best

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """The chosen round was run."""
        if self._woken and not self._promising:
            self._since, self._turns = 0, self._turns + 1
        self._promising = {
            one.key: one.proposed * (1 + (one.accepted == one.proposed))
            for one in outcomes
            if one.key in self._woken and 2 * one.accepted >= one.proposed
        }
        self._woken = {}

    def passed(self, rounds: int) -> None:
        self._since += rounds

    def forget(self, key: Hashable) -> None:
        self._woken.pop(key, None)
        self._promising.pop(key, None)

    @property
    def keys(self) -> set[Hashable]:
        return {*self._woken, *self._promising}

    def _wake(self, options: RoundOptions, best: DraftPlan) -> dict[Hashable, int]:
        """Draft tokens for rows that have none."""
        asleep = [
            key
            for key, count, reach in zip(options.keys, best.counts, options.reach, strict=True)
            if reach and not count
        ]
        woken = {key: self._promising[key] for key in asleep if key in self._promising}
        while woken and not self._is_affordable(woken, options, best):
            woken = {key: depth // 2 for key, depth in woken.items() if depth > 1}
        if woken or not asleep or self._since < WAKING_INTERVAL:
            return woken
        turn = self._turns % 2
        choices = [dict.fromkeys(asleep, depth) for depth in (WAKING_DEPTHS[turn], WAKING_DEPTHS[1 - turn])]
        woken = next((each for each in choices if options.has_graph(_with_woken(each, options, best))), choices[0])
        return woken if self._is_affordable(woken, options, best) else {}

    def _is_affordable(self, woken: Mapping[Hashable, int], options: RoundOptions, best: DraftPlan) -> bool:
        plan = options.plan(_with_woken(woken, options, best))
        back = 0.0 if best.drafts else options.wait
        lost = (plan.seconds + back - plan.tokens / best.rate) / best.seconds
        return lost <= options.budget and options.affords(plan)


def _with_woken(woken: Mapping[Hashable, int], options: RoundOptions, best: DraftPlan) -> tuple[int, ...]:
    return tuple(
        count or min(woken.get(key, 0), reach)
        for key, count, reach in zip(options.keys, best.counts, options.reach, strict=True)
    )
