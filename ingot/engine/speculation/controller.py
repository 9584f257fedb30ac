"""Decides how many draft tokens to verify for each row, so that tokens come as fast as they can; often that is none.

What a round costs and how often drafts are accepted is measured as the server runs, and belongs to the model, not
to a request. Now and then something else is tried than what seems best (`SpeculationTrials`): what is never tried
is never known to have become better. What speculation may lose is bounded (`ExplorationBudget`): a small share of
all time, and what it gained, pay for what it loses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from ingot.engine.speculation.acceptance import AcceptanceRates, DraftLengths, DraftLengthSearch, JudgedDraft
from ingot.engine.speculation.proposer import DraftOffer
from ingot.engine.speculation.step_costs import RoundCosts

TO_BEGIN, TO_GO_ON = 1.02, 0.99
"""How much faster than plainly tokens must come by guessing: to begin with it, and to go on."""

MOST_SLOWDOWN = 2.0
"""A round that takes longer than so many times what was expected counts as one that takes just so long."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    source: str | None  # None: nobody guesses for this row
    count: int


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Of the guesses for one row."""

    key: Hashable
    source: str
    proposed: int
    accepted: int
    cut: bool  # it ended inside of the accepted ones: those behind were never judged


@dataclass(frozen=True, slots=True)
class DecodingRound:
    """What a decoding step took and gave."""

    seconds: float  # from where the tokens before it were known to where its own were, proposing included
    rows: int
    tokens: int  # verified or decoded, without those of prompts
    prompt_tokens: int  # in the same forward pass: then its time says nothing
    waited: bool  # the tokens of the round before were not read while it ran already: to verify guesses, or to look
    outcomes: tuple[DraftOutcome, ...]
    made_graph: bool = False  # something was made that steps like it will find: then its time says nothing, either


NO_DRAFT = DraftChoice(None, 0)


class SpeculationController:
    """Only the engine thread calls it: `choose` before a round, `observe` after it, `forget` when a sequence ends."""

    def __init__(self, most: int = 16, fixed: int | None = None, widest: float = inf) -> None:
        """At most so many guesses a row; `fixed`: always so many, where they are offered. No guess makes a round wider
        than `widest` tokens, which is then computed in another way, far slower."""
        self._most, self._fixed = most, fixed
        self._costs, self._acceptance = RoundCosts(widest), AcceptanceRates(most)
        self._asked: dict[Hashable, DraftOffer] = {}  # what was chosen for the round that runs
        self._guessing = self._pays = False
        self._exploration_budget = ExplorationBudget()
        self._trials = SpeculationTrials(self._exploration_budget)

    def choose(self, rows: Sequence[RowOffers], prompt_tokens: int = 0) -> list[DraftChoice]:
        """Who guesses how many tokens for each row: never more than offered. May be asked several times before a
        round."""
        self._asked.clear()
        self._pays = False
        if not any(row.offers for row in rows):
            return [NO_DRAFT] * len(rows)
        if self._fixed is not None:
            first = [row.offers[0] if row.offers else None for row in rows]
            return self._chosen(rows, first, [self._fixed] * len(rows))
        if not self._costs.known:
            return [NO_DRAFT] * len(rows)
        table = RoundOffers(rows, self._acceptance, self._costs, self._exploration_budget.left, prompt_tokens)
        best = self._best(table)
        self._pays = best.drafts
        slots = best if prompt_tokens else self._trials.instead(table, best)
        return self._chosen(rows, table.offers, slots.counts)

    def observe(self, round: DecodingRound, passed: int = 0) -> None:
        """After every decoding step, plain ones included; `passed`: so many plain ones before it were left out."""
        if self._fixed is not None:
            return
        self._exploration_budget.fill(passed)
        self._trials.passed(passed)
        if round.prompt_tokens or round.made_graph:
            self._costs.interrupted()
        if not round.prompt_tokens:
            guessed, depth = round.tokens - round.rows, self._depth(round.outcomes)
            if round.made_graph:
                self._made(round, guessed, depth)
            else:
                self._settle(round, guessed, depth)
                self._costs.observe(round.seconds, round.rows, guessed, depth, waited=round.waited)
        # A plain round may still run when the next one is chosen: it is no answer to what that one tries.
        if round.outcomes or round.waited or not self._asked:
            self._trials.observe((one.key, one.proposed, one.accepted) for one in round.outcomes)
        if round.outcomes:
            self._acceptance.observe(self._judged(round.outcomes))

    @property
    def pays(self) -> bool:
        """Whether guessing seemed to, when it was last asked what to do: else what was chosen is a trial."""
        return self._fixed is not None or self._pays

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain round; None where nothing depends on it, or nobody knows yet."""
        return self._costs.plain(rows) if self._fixed is None and self._costs.known else None

    def hopeless(self, rows: int) -> bool:
        """Whether guesses would not pay if all of them were right."""
        plain, depths = self._costs.plain(rows), [1 << power for power in range(self._most.bit_length())]
        costs = [self._costs.guessing(rows, range(depth * rows, depth * rows + 1))[0] for depth in depths]
        return all((1 + depth) * plain <= TO_BEGIN * cost for depth, cost in zip(depths, costs, strict=True))

    def _settle(self, round: DecodingRound, guessed: int, depth: int) -> None:
        """Hold a round against plain ones. That one was slow beyond belief is nobody's fault."""
        if not self._costs.known:
            return
        plain = self._costs.plain(round.rows)
        self._exploration_budget.fill()
        self._costs.makings.met(round.rows, guessed, plain)
        if round.waited:
            given = 1 + sum(one.accepted for one in round.outcomes) / round.rows
            believed = self._believed(round.rows, guessed, depth)
            self._exploration_budget.settle(given - min(round.seconds, MOST_SLOWDOWN * believed) / plain)

    def _made(self, round: DecodingRound, guessed: int, depth: int) -> None:
        if self._costs.known:
            believed = self._believed(round.rows, guessed, depth)
            self._costs.makings.made(round.rows, guessed, round.seconds - believed)

    def _believed(self, rows: int, guessed: int, depth: int) -> float:
        """Seconds that a round with such guesses is thought to take."""
        return self._costs.guessing(rows, range(guessed, guessed + 1))[0] + depth * self._costs.step

    def forget(self, key: Hashable) -> None:
        """The sequence ended, or begins anew; nothing need be known of it."""
        self._acceptance.forget(key)
        self._asked.pop(key, None)
        self._trials.forget(key)

    @property
    def remembered(self) -> int:
        """Sequences of which anything is known."""
        return len({*self._asked, *self._acceptance.keys, *self._trials.keys})

    def _best(self, table: RoundOffers) -> DraftLengths:
        plain, guessed = table.choice.plain(), self._there(table.choice)
        enough = table.choice.plain_lower_bound * (TO_GO_ON if self._guessing else TO_BEGIN)
        best = guessed if guessed is not None and guessed.rate > enough else plain
        if best.drafts != self._guessing:
            self._guessing = best.drafts
            self._trials.reset()
        return best

    def _there(self, choice: DraftLengthSearch) -> DraftLengths | None:
        """The best way to guess, of those that need nothing that is not there; what that loses is kept in mind."""
        wanted, makings = choice.best(), self._costs.makings
        if wanted is None or makings.affords(len(wanted.counts), sum(wanted.counts)):
            return wanted
        there = choice.best_there()
        instead = max(choice.plain().rate, there.rate if there is not None else 0.0)
        makings.misses(max(0.0, wanted.tokens / instead - wanted.seconds))
        return there

    def _chosen(
        self, rows: Sequence[RowOffers], offers: Sequence[DraftOffer | None], counts: Sequence[int]
    ) -> list[DraftChoice]:
        chosen = []
        for row, offer, count in zip(rows, offers, counts, strict=True):
            if offer is None or not (count := min(count, offer.most)):
                chosen.append(NO_DRAFT)
            else:
                self._asked[row.key] = offer
                chosen.append(DraftChoice(offer.source, count))
        return chosen

    def _depth(self, outcomes: Sequence[DraftOutcome]) -> int:
        """The longest of the guesses that took time to make."""
        return max((one.proposed for one in outcomes if not self._offer(one).free), default=0)

    def _judged(self, outcomes: Sequence[DraftOutcome]) -> list[JudgedDraft]:
        return [
            JudgedDraft(one.key, self._offer(one), min(one.accepted + (not one.cut), one.proposed), one.accepted)
            for one in outcomes
        ]

    def _offer(self, outcome: DraftOutcome) -> DraftOffer:
        """What the guess was chosen for; one that nobody chose is taken as it came."""
        asked = self._asked.get(outcome.key)
        matches = asked is not None and asked.source == outcome.source
        return asked if asked is not None and matches else DraftOffer(outcome.source, outcome.proposed, free=True)


LEAST_WORTH = 0.7
"""A guess that is needed more rarely than this part of what it costs is none that could pay."""


@dataclass(frozen=True, slots=True)
class RowOffers:
    """A decoding row of the coming round."""

    key: Hashable  # the sequence
    offers: tuple[DraftOffer, ...]  # by preference; empty: nothing can be guessed for it


class RoundOffers:
    """Takes for each row the offer that is worth most, the first of those that are worth the same."""

    def __init__(
        self,
        rows: Sequence[RowOffers],
        acceptance: AcceptanceRates,
        costs: RoundCosts,
        purse: float,
        prompt_tokens: int,
    ) -> None:
        self._rows, self._acceptance, self._costs, self._exploration_budget = rows, acceptance, costs, purse
        self._seconds = prompt_tokens * costs.token
        plainly = len(rows) / costs.plain(len(rows))
        # In tokens that would come plainly in the same time.
        self._price, self._price_of_step = costs.token * plainly, costs.step * plainly / len(rows)
        self.offers = [self._preferred(row) for row in rows]
        self._lay()

    @property
    def keys(self) -> list[Hashable]:
        return [row.key for row in self._rows]

    @property
    def wait(self) -> float:
        """Seconds that the first plain round behind others takes longer."""
        return self._costs.wait

    def turn(self) -> bool:
        """Take for each row the offer behind the one that it has; whether that changes anything."""
        turned = [_next_offer(row.offers, offer) for row, offer in zip(self._rows, self.offers, strict=True)]
        if turned == self.offers:
            return False
        self.offers = turned
        self._lay()
        return True

    def _lay(self) -> None:
        self.reach = [0 if offer is None else self._acceptance.reach(offer) for offer in self.offers]
        """How many guesses of each row anything is known of."""
        survival = [
            () if offer is None else self._survival(row.key, offer)
            for row, offer in zip(self._rows, self.offers, strict=True)
        ]
        computed = [offer is not None and not offer.free for offer in self.offers]
        self.choice = DraftLengthSearch(survival, computed, self._costs, self._exploration_budget, self._seconds)

    def _survival(self, key: Hashable, offer: DraftOffer) -> Sequence[float]:
        """How likely each guess and all before it are right: the first, and as many more as could be worth it."""
        return self._acceptance.survival(key, offer, self._price * LEAST_WORTH)

    def _preferred(self, row: RowOffers) -> DraftOffer | None:
        if len(row.offers) < 2:
            return row.offers[0] if row.offers else None
        return max(row.offers, key=lambda offer: self._worth(row, offer))  # of equals, the first

    def _worth(self, row: RowOffers, offer: DraftOffer) -> float:
        """Tokens that it saves, less those that would come plainly in the time that it takes."""
        made = 0.0 if offer.free else self._price_of_step
        return sum(max(0.0, one - self._price - made) for one in self._survival(row.key, offer))


def _next_offer(offers: tuple[DraftOffer, ...], offer: DraftOffer | None) -> DraftOffer | None:
    return offer if offer is None else offers[(offers.index(offer) + 1) % len(offers)]


SOONEST_TRIAL, LATEST_TRIAL = 8, 64
"""Rounds between two trials of a kind, while they cost next to nothing."""
RAREST_TRIAL = 512
"""And however much they cost."""
TRIAL_SHARE = 0.004
"""Of all time, so much may be lost to trials of other guesses where guessing pays."""
TRIAL_ROUNDS = 2
"""How long those last: in the second round it shows what such rounds cost."""
WAKING_DEPTHS = (1, 3)
"""How much is guessed for rows that are woken, by turns: what a round costs for more guesses is to be known, too."""

DraftCounts = tuple[int, ...]
Trial = Callable[[RoundOffers, DraftLengths], DraftCounts | None]
"""How many guesses for each row, instead of what seems best; None: that is the same."""


class SpeculationTrials:
    """Of two kinds. Rows that sleep, as guessing for them seems not to pay, are woken for a round, and for further ones
    while most of what is guessed is right: twice as much each time, if all was. And where guessing pays, so might other
    guesses, or none.

    What to try is decided once a round, however often it is asked for.
    """

    def __init__(self, purse: ExplorationBudget) -> None:
        self._exploration_budget, self._others = purse, _TrialTimer(TRIAL_SHARE)
        self._kinds: tuple[Trial, ...] = (_try_deeper, _try_another, _try_plain)
        self._turn = 0
        self._decided = False
        self._trial: Trial | None = None  # of this round
        self._rounds = 0  # for which it goes on
        self._since = 0  # rounds since rows were woken
        self._turns = 0  # how often that was
        self._tried: dict[Hashable, int] = {}  # at which of these turns a row was, for the last time
        self._woken: dict[Hashable, int] = {}  # how much is guessed for those that are awake

    def instead(self, table: RoundOffers, best: DraftLengths) -> DraftLengths:
        """What to do in this round: what seems best, or a trial."""
        if not self._decided:
            self._decided, self._trial = True, self._next(table, best)
        counts = self._trial(table, best) if self._trial is not None else None
        return best if counts is None else table.choice.exactly(counts)

    def observe(self, guessed: Iterable[tuple[Hashable, int, int]]) -> None:
        """A round was run: for whom it guessed, how many tokens, and how many of them were right."""
        self._decided = False
        woken, self._woken = self._woken, {}
        for key, proposed, right in guessed:
            if key in woken and 2 * right >= proposed:
                self._woken[key] = 2 * proposed if right == proposed else proposed

    def passed(self, rounds: int) -> None:
        """So many were run that nobody chose anything for."""
        self._since += rounds
        self._others.tick(rounds)

    def reset(self) -> None:
        """What seems best has changed: other things may have, too."""
        self._others.reset()
        self._rounds = 0

    def forget(self, key: Hashable) -> None:
        self._woken.pop(key, None)
        self._tried.pop(key, None)

    @property
    def keys(self) -> Iterable[Hashable]:
        """Sequences that were woken."""
        return self._tried

    def _next(self, table: RoundOffers, best: DraftLengths) -> Trial | None:
        self._since += 1
        self._others.tick()
        if self._rounds:
            self._rounds -= 1
            return self._trial
        return self._wake(table, best) or self._other(table, best)

    def _wake(self, table: RoundOffers, best: DraftLengths) -> Trial | None:
        asleep = [
            key for key, count, reach in zip(table.keys, best.counts, table.reach, strict=True) if reach and not count
        ]
        self._woken = self._going_on({key: self._woken[key] for key in asleep if key in self._woken}, table, best)
        if asleep and not self._woken and self._since >= SOONEST_TRIAL:
            self._begin_with(asleep, table, best)
        return partial(_with_woken, self._woken) if self._woken else None

    def _begin_with(self, asleep: list[Hashable], table: RoundOffers, best: DraftLengths) -> None:
        """As many as can be paid for, those first that were not woken for longest."""
        asleep.sort(key=lambda key: self._tried.get(key, -1))
        turn = self._turns % len(WAKING_DEPTHS)
        depths = [*WAKING_DEPTHS[turn:], *WAKING_DEPTHS[:turn]]
        while asleep:
            ways = [dict.fromkeys(asleep, depth) for depth in depths]
            woken = next((way for way in ways if table.choice.there(_with_woken(way, table, best))), ways[0])
            if self._affordable(woken, table, best):
                self._woken, self._since, self._turns = woken, 0, self._turns + 1
                self._tried |= dict.fromkeys(woken, self._turns)
                return
            del asleep[len(asleep) // 2 :]

    def _going_on(self, woken: dict[Hashable, int], table: RoundOffers, best: DraftLengths) -> dict[Hashable, int]:
        """As much for each as can be paid for."""
        while woken and not self._affordable(woken, table, best):
            woken = {key: depth // 2 for key, depth in woken.items() if depth > 1}
        return woken

    def _affordable(self, woken: Mapping[Hashable, int], table: RoundOffers, best: DraftLengths) -> bool:
        tried = table.choice.exactly(_with_woken(woken, table, best))
        back = 0.0 if best.drafts else table.wait
        lost = (tried.seconds + back - tried.tokens / best.rate) / best.seconds
        return lost <= self._exploration_budget.left and table.choice.payable(tried)

    def _other(self, table: RoundOffers, best: DraftLengths) -> Trial | None:
        if not self._others.due or not best.drafts:
            return None
        for _ in self._kinds:
            self._turn = (self._turn + 1) % len(self._kinds)
            trial = self._kinds[self._turn]
            counts = trial(table, best)
            if counts is not None and (not any(counts) or _is_payable(table, counts)):
                self._others.restart(TRIAL_ROUNDS * _rounds_lost(table, best, counts))
                self._rounds = TRIAL_ROUNDS - 1
                return trial
        return None


def _with_woken(woken: Mapping[Hashable, int], table: RoundOffers, best: DraftLengths) -> DraftCounts:
    return tuple(
        count or min(woken.get(key, 0), reach)
        for key, count, reach in zip(table.keys, best.counts, table.reach, strict=True)
    )


def _rounds_lost(table: RoundOffers, best: DraftLengths, counts: DraftCounts) -> float:
    """How many of the best rounds it takes to make up for one that is tried."""
    tried = table.choice.exactly(counts)
    return (tried.seconds - tried.tokens / best.rate) / best.seconds


def _is_payable(table: RoundOffers, counts: DraftCounts) -> bool:
    return table.choice.payable(table.choice.exactly(counts))


def _try_deeper(table: RoundOffers, best: DraftLengths) -> DraftCounts | None:
    counts = tuple(min(reach, count + (count + 1) // 2) for count, reach in zip(best.counts, table.reach, strict=True))
    return counts if counts != best.counts else None


def _try_another(table: RoundOffers, best: DraftLengths) -> DraftCounts | None:
    """Of others than those that seem to guess best, where there are any."""
    if not table.turn():
        return None
    return tuple(min(reach, count) for count, reach in zip(best.counts, table.reach, strict=True))


def _try_plain(table: RoundOffers, best: DraftLengths) -> DraftCounts | None:
    return (0,) * len(best.counts) if best.drafts else None


class _TrialTimer:
    """Counts rounds until trials are due. They become rarer while nothing changes, until they are LATEST rounds apart,
    or further where they cost more than a share of all time."""

    def __init__(self, share: float) -> None:
        self._share, self._wait = share, SOONEST_TRIAL
        self._affordable = 0.0
        self._since = 0

    def tick(self, rounds: int = 1) -> None:
        self._since += rounds

    @property
    def due(self) -> bool:
        return self._since >= max(self._wait, self._affordable)

    def restart(self, lost: float) -> None:
        """A trial begins. It loses as much time as so many rounds take."""
        self._affordable = min(max(lost, 0.0) / self._share, RAREST_TRIAL)
        self._wait = min(2 * self._wait, LATEST_TRIAL)
        self._since = 0

    def reset(self) -> None:
        self._wait = SOONEST_TRIAL


FIRST_BUDGET: Final = 1.5
"""What there is to begin with, in plain rounds."""
MOST_BUDGET: Final = 3.0
"""However much was won, no more may be lost again."""
BUDGET_SHARE: Final = 0.014
"""Of all time, so much may be lost."""
MOST_DEBT: Final = 1.0
"""What is owed at most: one long guess that was all wrong, in a round that was slow by chance, is not to forbid for a
hundred rounds what paid before. What may be lost at once is bounded anyway, by what there is to pay it from."""


class ExplorationBudget:
    """In plain rounds of as many rows."""

    def __init__(self) -> None:
        self.left = FIRST_BUDGET

    def fill(self, rounds: int = 1) -> None:
        """Time goes by."""
        self.left = min(self.left + rounds * BUDGET_SHARE, MOST_BUDGET)

    def settle(self, gained: float) -> None:
        """A round gave so many plain rounds' tokens more than plain ones would have in its time, or fewer."""
        self.left = max(min(self.left + gained, MOST_BUDGET), -MOST_DEBT)
