"""SpecPrefill in the step loop: a sequence that asks for it is scored while it waits, a piece between two steps, and
is thinned out before it runs, if scoring and computing a part takes less than computing all, as far as is
measured.

Only the engine thread may call anything here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from ingot.engine.prefix_cache import PrefixCache
from ingot.engine.request import SpecPrefillReport, SpecPrefillRequest, SpecPrefillSkipped, TokenRange
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.scorers import PromptScorer, ScoringWork
from ingot.engine.specprefill.selection import (
    KeptPlaces,
    PromptScores,
    SelectionMemory,
    TokenFlags,
    count_kept,
    required_tokens,
    select_tokens,
)
from ingot.engine.step_costs import LeastCost, StepCosts
from ingot.text.tokenizer.tokenizer import TranslatePrompt


@dataclass(frozen=True, slots=True)
class SpecPrefillSetup:
    """What a server offers: who scores prompts of which at least `threshold` tokens are new, and the share that is kept
    of them where a request does not say; `translate` where the scorer reads them in other tokens."""

    scorer: PromptScorer
    threshold: int
    keep: float
    translate: TranslatePrompt | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _ReusedPrefix:
    """What is taken over of a prompt: its first `length` tokens, of which those at `kept` have states."""

    length: int
    kept: KeptPlaces

    @property
    def reused(self) -> int:
        """Its length, if an earlier request thinned it out."""
        return self.length if len(self.kept) < self.length else 0


@dataclass(eq=False, slots=True)
class _ScoringJob:
    terms: Hashable  # what a selection depends on besides the prompt
    keep: float
    begun: _ReusedPrefix
    flags: TokenFlags  # what is computed in any case
    media: list[TokenRange]  # what is kept or left out together
    unread: int  # tokens that the scorer has to read
    scoring: ScoringWork | None = None
    spent_s: float = 0.0

    @property
    def new(self) -> TokenFlags:
        """Of what is not taken over, what is computed in any case."""
        return self.flags[self.begun.length :]

    def chosen(self, scores: PromptScores) -> KeptPlaces:
        """What is kept of the prompt: the same as if nothing were taken over, where that begins with what is, so that a
        prompt that is asked again is thinned out alike and finds what was computed of it; else of what is new alone."""
        begun, kept = self.begun, select_tokens(scores, self.flags, self.keep, self.media)
        if np.array_equal(kept[: len(begun.kept)], begun.kept):
            return kept
        media = [(max(0, begin - begun.length), end - begun.length) for begin, end in self.media if end > begun.length]
        new = select_tokens(scores[begun.length :], self.new, self.keep, media)
        return np.concatenate([begun.kept, begun.length + new]).astype(np.int32)


class SpecPrefill:
    def __init__(
        self,
        offer: SpecPrefillSetup,
        costs: StepCosts,
        reuse: PrefixCache,
        window: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`costs` are the target's and so is `reuse`; `window` is its widest, or 0."""
        self._offer, self._scorer = offer, offer.scorer
        self._reuse, self._window, self._clock = reuse, window, clock
        self._jobs: OrderedDict[TokenSequence, _ScoringJob] = OrderedDict()
        self._selections = SelectionMemory()
        self._worth = ScoringPayoff(costs)

    def ready(self, sequence: TokenSequence) -> bool:
        """Whether it is settled how much of a waiting sequence is computed. If not, it will be scored; or it is known
        by other keys from now on, and may have to wait for what it can take over."""
        ask = sequence.request.sparse
        if ask is None or sequence.sparse is not None:
            return True
        if sequence in self._jobs:
            return False
        if (refused := self._refused(sequence, ask)) is not None:
            sequence.sparse = SpecPrefillReport(self._scorer.name, unused=refused)
            return True
        job = self._job(sequence, ask)
        unused = self._unused(sequence, ask, job)
        if job.begun.reused and (unused is not None or job.begun.length == len(sequence.prompt)):
            self._go_on(sequence, job)
        elif unused is not None:
            sequence.sparse = SpecPrefillReport(self._scorer.name, unused=unused)
        else:
            self._jobs[sequence] = job
        return sequence.sparse is not None and sequence.thinned is None

    @property
    def next(self) -> TokenSequence | None:
        """Whose prompt is scored next."""
        return next(iter(self._jobs), None)

    def advance(self, sequence: TokenSequence, seconds: float) -> None:
        """Score a sequence's prompt for about so long, at least by a piece. Raises what goes wrong."""
        job, began = self._jobs[sequence], self._clock()
        if job.scoring is None:
            if self._recalled(sequence, job):  # another of its answers was scored meanwhile
                del self._jobs[sequence]
                return
            sequence.scoring_at = began
            job.scoring = self._scorer.score(sequence)
        scores = self._advanced(job.scoring, began + seconds)
        job.spent_s += self._clock() - began
        if scores is not None:
            self._worth.observe(job.unread, job.spent_s)
            del self._jobs[sequence]
            self._settle(sequence, job, job.chosen(scores))

    def forget(self, sequence: TokenSequence) -> None:
        """It ended."""
        job = self._jobs.pop(sequence, None)
        if job is not None and job.scoring is not None:
            job.scoring.close()

    def rest(self) -> None:
        self._scorer.rest()

    def check(self) -> None:
        self._scorer.check()

    # Whether to

    def _job(self, sequence: TokenSequence, ask: SpecPrefillRequest) -> _ScoringJob:
        keep, media = self._offer.keep if ask.keep is None else ask.keep, _media_spans(sequence)
        terms = self._reuse.owner(sequence.request), keep
        flags = self._flags(sequence, ask, media)
        begun = self._beginning(sequence, terms, flags)
        return _ScoringJob(terms, keep, begun, flags, media, self._scorer.unread(sequence))

    def _flags(self, sequence: TokenSequence, ask: SpecPrefillRequest, media: list[TokenRange]) -> TokenFlags:
        request, number = sequence.request, sequence.index // sequence.request.n
        whole = ask.whole[number] if ask.whole else ()
        ends = request.marks[number] if request.marks else ()
        return required_tokens(len(sequence.prompt), whole, ends, window=self._window, media=media)

    def _beginning(self, sequence: TokenSequence, terms: Hashable, flags: TokenFlags) -> _ReusedPrefix:
        """As much as can be taken over whole, or more of it as an earlier request by the same terms has left it, unless
        that lacks what is computed in any case."""
        exact = self._reuse.known(sequence)
        whole = _ReusedPrefix(exact, np.arange(exact, dtype=np.int32))
        earlier = self._selections.longest(terms, sequence.keys) if sequence.request.cache else None
        if earlier is None:
            return whole
        length, kept = earlier.length, earlier.kept
        if length < len(sequence.prompt):
            like = _thinned_copy(
                sequence, np.concatenate([kept, np.arange(length, len(sequence.prompt), dtype=np.int32)])
            )
            stored = self._reuse.reusable_tokens(like)
            assert like.thinned is not None
            kept = like.thinned.kept[:stored]
            length = int(kept[-1]) + 1 if stored else 0
        lacking = np.setdiff1d(np.flatnonzero(flags[:length]), kept, assume_unique=True)
        # An exact state of all but the last token is all that there is to take over.
        return whole if lacking.size or min(length, len(sequence.prompt) - 1) <= exact else _ReusedPrefix(length, kept)

    def _refused(self, sequence: TokenSequence, ask: SpecPrefillRequest) -> SpecPrefillSkipped | None:
        """Why all of a prompt is computed, whatever was left of it before, if so."""
        if sequence.sampling.prompt_logprobs is not None:
            return "unsupported"
        return "below_threshold" if not ask.forced and len(sequence.prompt) < self._offer.threshold else None

    def _unused(self, sequence: TokenSequence, ask: SpecPrefillRequest, job: _ScoringJob) -> SpecPrefillSkipped | None:
        """Why all of what is new of a prompt is computed, if so."""
        if job.begun.length and (job.new.all() or (not ask.forced and job.new.size < self._offer.threshold)):
            return "cached"
        if not self._scorer.able(sequence):
            return "unsupported"
        pays = self._worth.pays(job.new.size, count_kept(job.new, job.keep), job.unread)
        return None if pays else "does_not_pay"

    def _advanced(self, scoring: ScoringWork, end: float) -> PromptScores | None:
        """The scores, if they are there in time."""
        try:
            while True:
                next(scoring)
                if self._clock() >= end:
                    return None
        except StopIteration as done:
            scores: PromptScores = done.value
            return scores

    # What comes of it

    def _recalled(self, sequence: TokenSequence, job: _ScoringJob) -> bool:
        """Take the selection that was made of the same prompt before, if there is one."""
        found = self._selections.longest(job.terms, sequence.keys) if sequence.request.cache else None
        if found is None or found.length < len(sequence.prompt):
            return False
        self._settle(sequence, job, found.kept)
        return True

    def _go_on(self, sequence: TokenSequence, job: _ScoringJob) -> None:
        """From where an earlier request was thinned out, with all that is new."""
        begun, prompt = job.begun, len(sequence.prompt)
        kept = np.concatenate([begun.kept, np.arange(begun.length, prompt, dtype=np.int32)])
        self._thin(sequence, job, kept)
        sequence.sparse = SpecPrefillReport(self._scorer.name, reused=begun.reused)

    def _settle(self, sequence: TokenSequence, job: _ScoringJob, kept: KeptPlaces) -> None:
        begun = job.begun
        new = int((kept >= begun.length).sum())
        sequence.sparse = SpecPrefillReport(self._scorer.name, job.new.size, new, job.spent_s, begun.reused)
        if len(kept) < len(sequence.prompt):
            self._thin(sequence, job, kept)

    def _thin(self, sequence: TokenSequence, job: _ScoringJob, kept: KeptPlaces) -> None:
        if sequence.request.cache:
            self._selections.remember(job.terms, sequence.keys, kept)
        sequence.thin(kept)
        self._reuse.keys_changed(sequence)


def _media_spans(sequence: TokenSequence) -> list[TokenRange]:
    return [] if sequence.sight is None else sequence.sight.spans


def _thinned_copy(sequence: TokenSequence, kept: KeptPlaces) -> TokenSequence:
    """Another of the same prompt, of which so much is left."""
    request, prompt = sequence.request, sequence.prompt
    made = TokenSequence(request, sequence.index, sequence.ticket, prompt, sequence.limit, sequence.seed)
    made.sight = sequence.sight
    made.thin(kept)
    return made


TRIED_AGAIN_AFTER = 8
"""Of so many prompts in a row that would not have paid, the last is scored: what is measured may change."""


class ScoringPayoff:
    def __init__(self, costs: StepCosts) -> None:
        """`costs` are those of whoever computes prompts."""
        self._costs = costs
        self._scoring_ms = LeastCost()  # by tokens that were read
        self._declined = 0  # prompts in a row that would not have paid

    def observe(self, read: int, seconds: float) -> None:
        """So many tokens were read to score a prompt, and so long it took."""
        self._scoring_ms.observe(read, 1000 * seconds)

    def pays(self, new: int, kept: int, unread: int) -> bool:
        """Whether to score a prompt of which so many tokens are new, and so many of them would be kept, when the scorer
        has to read so many."""
        if kept >= new:
            return False
        whole = self._costs.prefill_ms(new)
        if not whole or self._scoring_ms.cost(unread) + self._costs.prefill_ms(kept) < whole:
            self._declined = 0
            return True
        self._declined += 1
        return self._declined % TRIED_AGAIN_AFTER == 0
