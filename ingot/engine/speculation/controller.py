"""Decides how far to guess ahead for each row, so that tokens come as fast as they can; often that is not at all.

What a round costs and how often guesses are right is measured as the server runs, and belongs to the model, not to a
request. Now and then something else is tried than what seems best.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from ingot.engine.speculation.acceptance import Acceptance, Judged
from ingot.engine.speculation.proposer import Offer
from ingot.engine.speculation.purse import Purse
from ingot.engine.speculation.slots import Choice, Slots
from ingot.engine.speculation.step_costs import RoundCosts
from ingot.engine.speculation.table import Asked, Table
from ingot.engine.speculation.trials import Trials

TO_BEGIN, TO_GO_ON = 1.02, 0.99
"""How much faster than plainly tokens must come by guessing: to begin with it, and to go on."""

BELIEVED = 2.0
"""A round that takes longer than so many times what was expected counts as one that takes just so long."""


@dataclass(frozen=True, slots=True)
class Chosen:
    source: str | None  # None: nobody guesses for this row
    count: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the guesses for one row."""

    key: Hashable
    source: str
    proposed: int
    accepted: int
    cut: bool  # it ended inside of the accepted ones: those behind were never judged


@dataclass(frozen=True, slots=True)
class Round:
    """What a decoding step took and gave."""

    seconds: float  # from where the tokens before it were known to where its own were, proposing included
    rows: int
    tokens: int  # verified or decoded, without those of prompts
    prompt_tokens: int  # in the same forward pass: then its time says nothing
    waited: bool  # the tokens of the round before were not read while it ran already: to verify guesses, or to look
    outcomes: tuple[Outcome, ...]
    novel: bool = False  # something was made that steps like it will find: then its time says nothing, either


PLAIN = Chosen(None, 0)


class Controller:
    """Only the engine thread calls it: `choose` before a round, `observe` after it, `forget` when a sequence ends."""

    def __init__(self, most: int = 16, fixed: int | None = None, widest: float = inf) -> None:
        """At most so many guesses a row; `fixed`: always so many, where they are offered. No guess makes a round wider
        than `widest` tokens, which is then computed in another way, far slower."""
        self._most, self._fixed = most, fixed
        self._costs, self._acceptance = RoundCosts(widest), Acceptance(most)
        self._asked: dict[Hashable, Offer] = {}  # what was chosen for the round that runs
        self._guessing = self._pays = False
        self._purse = Purse()
        self._trials = Trials(self._purse)

    def choose(self, rows: Sequence[Asked], prompt_tokens: int = 0) -> list[Chosen]:
        """Who guesses how many tokens for each row: never more than offered. May be asked several times before a
        round."""
        self._asked.clear()
        self._pays = False
        if not any(row.offers for row in rows):
            return [PLAIN] * len(rows)
        if self._fixed is not None:
            first = [row.offers[0] if row.offers else None for row in rows]
            return self._chosen(rows, first, [self._fixed] * len(rows))
        if not self._costs.known:
            return [PLAIN] * len(rows)
        table = Table(rows, self._acceptance, self._costs, self._purse.left, prompt_tokens)
        best = self._best(table)
        self._pays = best.guesses
        slots = best if prompt_tokens else self._trials.instead(table, best)
        return self._chosen(rows, table.offers, slots.counts)

    def observe(self, round: Round, passed: int = 0) -> None:
        """After every decoding step, plain ones included; `passed`: so many plain ones before it were left out."""
        if self._fixed is not None:
            return
        self._purse.fill(passed)
        self._trials.passed(passed)
        if round.prompt_tokens or round.novel:
            self._costs.interrupted()
        if not round.prompt_tokens:
            guessed, depth = round.tokens - round.rows, self._depth(round.outcomes)
            if round.novel:
                self._made(round, guessed, depth)
            else:
                self._settle(round, guessed, depth)
                self._costs.observe(round.seconds, round.rows, guessed, depth, waited=round.waited)
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

    def _settle(self, round: Round, guessed: int, depth: int) -> None:
        """Hold a round against plain ones. That one was slow beyond belief is nobody's fault."""
        if not self._costs.known:
            return
        plain = self._costs.plain(round.rows)
        self._purse.fill()
        self._costs.makings.met(round.rows, guessed, plain)
        if round.waited:
            given = 1 + sum(one.accepted for one in round.outcomes) / round.rows
            believed = self._believed(round.rows, guessed, depth)
            self._purse.settle(given - min(round.seconds, BELIEVED * believed) / plain)

    def _made(self, round: Round, guessed: int, depth: int) -> None:
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

    def _best(self, table: Table) -> Slots:
        plain, guessed = table.choice.plain(), self._there(table.choice)
        enough = table.choice.plain_at_best * (TO_GO_ON if self._guessing else TO_BEGIN)
        best = guessed if guessed is not None and guessed.rate > enough else plain
        if best.guesses != self._guessing:
            self._guessing = best.guesses
            self._trials.reset()
        return best

    def _there(self, choice: Choice) -> Slots | None:
        """The best way to guess, of those that need nothing that is not there; what that loses is kept in mind."""
        wanted, makings = choice.best(), self._costs.makings
        if wanted is None or makings.affords(len(wanted.counts), sum(wanted.counts)):
            return wanted
        there = choice.best_there()
        instead = max(choice.plain().rate, there.rate if there is not None else 0.0)
        makings.misses(max(0.0, wanted.tokens / instead - wanted.seconds))
        return there

    def _chosen(self, rows: Sequence[Asked], offers: Sequence[Offer | None], counts: Sequence[int]) -> list[Chosen]:
        chosen = []
        for row, offer, count in zip(rows, offers, counts, strict=True):
            if offer is None or not (count := min(count, offer.most)):
                chosen.append(PLAIN)
            else:
                self._asked[row.key] = offer
                chosen.append(Chosen(offer.source, count))
        return chosen

    def _depth(self, outcomes: Sequence[Outcome]) -> int:
        """The longest of the guesses that took time to make."""
        return max((one.proposed for one in outcomes if not self._offer(one).free), default=0)

    def _judged(self, outcomes: Sequence[Outcome]) -> list[Judged]:
        return [
            Judged(one.key, self._offer(one), min(one.accepted + (not one.cut), one.proposed), one.accepted)
            for one in outcomes
        ]

    def _offer(self, outcome: Outcome) -> Offer:
        """What the guess was chosen for; one that nobody chose is taken as it came."""
        asked = self._asked.get(outcome.key)
        matches = asked is not None and asked.source == outcome.source
        return asked if asked is not None and matches else Offer(outcome.source, outcome.proposed, free=True)
