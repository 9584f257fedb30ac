"""SpecPrefill in the step loop: a sequence that asks for it is scored while it waits, a piece between two steps, and
thinned out before it runs, if scoring and computing a part is faster than computing everything, as far as is measured.

For the engine thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.engine.prefix_cache import PrefixCache
from ingot.engine.request import SpecPrefillReport, SpecPrefillRequest, SpecPrefillSkipped, TokenRange
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.scorers import PromptScorer, ScoringWork
from ingot.engine.specprefill.selection import (
    KeptPositions,
    ScoredPrompt,
    SelectionMemory,
    TokenFlags,
    count_selected,
    required_tokens,
    select_tokens,
)
from ingot.engine.step_costs import LeastCost, StepCosts
from ingot.text.tokenizer.tokenizer import TranslatePrompt


@dataclass(frozen=True, slots=True)
class SpecPrefillSetup:
    """The scorer of prompts with at least `threshold` new tokens, and the default share that is kept of them, or the
    `quality` by which one is chosen for each. `translate` where the scorer has another tokenizer. `expected_cost` is
    about what scoring a token costs relative to computing it: it counts until both are measured."""

    scorer: PromptScorer
    threshold: int
    keep: float
    translate: TranslatePrompt | None = None
    quality: float | None = None
    expected_cost: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class _ReusedPrefix:
    """The first `length` tokens of a prompt, of which those in `selection` have KV."""

    length: int
    selection: KeptPositions

    @property
    def reused(self) -> int:
        """Its length, if an earlier request thinned it out, else 0."""
        return self.length if len(self.selection) < self.length else 0


@dataclass(eq=False, slots=True)
class _ScoringJob:
    terms: Hashable  # what a selection depends on besides the prompt
    keep: float  # the share of optional tokens that is kept, or expected to be where `quality` decides
    quality: float | None
    prefix: _ReusedPrefix
    flags: TokenFlags  # tokens that are computed in any case
    media: list[TokenRange]  # tokens that are kept or left out together
    unread: int  # tokens that the scorer has to read
    scoring: ScoringWork | None = None
    spent_s: float = 0.0

    @property
    def new(self) -> TokenFlags:
        """The flags of the tokens that are not reused."""
        return self.flags[self.prefix.length :]

    def share_kept(self, selection: KeptPositions) -> float:
        """The share of the new tokens that need not be computed which a selection has all the same."""
        optional = np.flatnonzero(~self.new) + self.prefix.length
        return float(np.isin(optional, selection, assume_unique=True).mean()) if optional.size else 0.0

    def select(self, scored: ScoredPrompt) -> KeptPositions:
        """The selection of the whole prompt, where that begins with the reused prefix, so that a repeated prompt is
        thinned out alike and finds its KV; else of the new tokens alone."""
        prefix, (scores, mass) = self.prefix, (scored.scores, scored.mass)
        selection = select_tokens(scores, self.flags, self.keep, self.media, mass=mass, quality=self.quality)
        if np.array_equal(selection[: len(prefix.selection)], prefix.selection):
            return selection
        media = [
            (max(0, begin - prefix.length), end - prefix.length) for begin, end in self.media if end > prefix.length
        ]
        new = select_tokens(
            *(scores[prefix.length :], self.new, self.keep, media),
            mass=None if mass is None else mass[prefix.length :],
            quality=self.quality,
        )
        return np.concatenate([prefix.selection, prefix.length + new]).astype(np.int32)


class SpecPrefill:
    def __init__(
        self,
        setup: SpecPrefillSetup,
        costs: StepCosts,
        prefix_cache: PrefixCache,
        window: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`costs` and `prefix_cache` are the target's; `window` is its widest, or 0."""
        self._setup, self._scorer = setup, setup.scorer
        self._prefix_cache, self._window, self._clock = prefix_cache, window, clock
        self._jobs: dict[TokenSequence, _ScoringJob] = {}
        self._selections = SelectionMemory()
        self._payoff = ScoringPayoff(costs, setup.expected_cost)
        self._share = setup.keep  # of optional tokens, that prompts keep where quality decides

    def ready(self, sequence: TokenSequence) -> bool:
        """Whether it is decided how much of a waiting sequence is computed. If not, it will be scored; or it was just
        thinned out, and may have to wait for another cached prefix."""
        options = sequence.request.specprefill
        if options is None or sequence.specprefill is not None:
            return True
        if sequence in self._jobs:
            return False
        if (reason := self._unsupported_reason(sequence, options)) is not None:
            sequence.specprefill = self._report(options, unused=reason)
            return True
        job = self._new_job(sequence, options)
        unused = self._skip_reason(sequence, options, job)
        if job.prefix.reused and (unused is not None or job.prefix.length == len(sequence.prompt)):
            self._extend_prefix(sequence, job)
        elif unused is not None:
            sequence.specprefill = self._report(options, unused=unused)
        else:
            self._jobs[sequence] = job
        return sequence.specprefill is not None and sequence.thinned is None

    @property
    def next(self) -> TokenSequence | None:
        """Whose prompt is scored next."""
        return next(iter(self._jobs), None)

    def advance(self, sequence: TokenSequence, seconds: float) -> None:
        """Score a sequence's prompt for about so long, but at least one piece. Raises what the scorer raises."""
        job, began = self._jobs[sequence], self._clock()
        if job.scoring is None:
            if self._reuse_selection(sequence, job):  # another answer to the same prompt was scored meanwhile
                del self._jobs[sequence]
                return
            sequence.scoring_at = began
            job.scoring = self._scorer.score(sequence)
        scored = self._score_until(job.scoring, began + seconds)
        job.spent_s += self._clock() - began
        if scored is not None:
            self._payoff.observe(job.unread, job.spent_s)
            del self._jobs[sequence]
            selection = job.select(scored)
            if job.quality is not None:
                self._share += SHARE_MEMORY * (job.share_kept(selection) - self._share)
            self._settle(sequence, job, selection, scored.kept_mass(selection, job.flags))

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

    def _new_job(self, sequence: TokenSequence, options: SpecPrefillRequest) -> _ScoringJob:
        quality = self._setup.quality if options.keep is None else None
        keep = self._setup.keep if options.keep is None else options.keep
        media = [] if sequence.prompt_media is None else sequence.prompt_media.spans
        terms = self._prefix_cache.owner(sequence.request), keep, quality
        flags = self._flags(sequence, options, media)
        prefix = self._reusable_prefix(sequence, terms, flags)
        expected = keep if quality is None else self._share
        return _ScoringJob(terms, expected, quality, prefix, flags, media, self._scorer.unread(sequence))

    def _flags(self, sequence: TokenSequence, options: SpecPrefillRequest, media: list[TokenRange]) -> TokenFlags:
        request, number = sequence.request, sequence.index // sequence.request.n
        whole = options.whole[number] if options.whole else ()
        ends = request.marks[number] if request.marks else ()
        return required_tokens(len(sequence.prompt), whole, ends, window=self._window, media=media)

    def _reusable_prefix(self, sequence: TokenSequence, terms: Hashable, flags: TokenFlags) -> _ReusedPrefix:
        """The cached prefix, or a longer one that an earlier request with the same terms thinned out, unless that lacks
        tokens that are computed in any case."""
        exact = self._prefix_cache.known(sequence)
        whole = _ReusedPrefix(exact, np.arange(exact, dtype=np.int32))
        earlier = self._selections.longest(terms, sequence.keys) if sequence.request.cache else None
        if earlier is None:
            return whole
        length, selection = earlier.length, earlier.positions
        if length < len(sequence.prompt):
            like = sequence.with_prompt(sequence.prompt)
            like.prompt_media = sequence.prompt_media
            like.thin(np.concatenate([selection, np.arange(length, len(sequence.prompt), dtype=np.int32)]))
            stored = self._prefix_cache.reusable_tokens(like)
            assert like.thinned is not None
            selection = like.thinned.selection[:stored]
            length = int(selection[-1]) + 1 if stored else 0
        lacking = np.setdiff1d(np.flatnonzero(flags[:length]), selection, assume_unique=True)
        # A whole prefix of all but the last token is the best that there is.
        if lacking.size or min(length, len(sequence.prompt) - 1) <= exact:
            return whole
        return _ReusedPrefix(length, selection)

    def _unsupported_reason(self, sequence: TokenSequence, options: SpecPrefillRequest) -> SpecPrefillSkipped | None:
        """Why the whole prompt is computed, whatever is cached of it, if so."""
        if sequence.sampling.prompt_logprobs is not None:
            return "unsupported"
        return "below_threshold" if not options.forced and len(sequence.prompt) < self._setup.threshold else None

    def _skip_reason(
        self, sequence: TokenSequence, options: SpecPrefillRequest, job: _ScoringJob
    ) -> SpecPrefillSkipped | None:
        """Why all new tokens of a prompt are computed, if so."""
        if job.prefix.length and (job.new.all() or (not options.forced and job.new.size < self._setup.threshold)):
            return "cached"
        if not self._scorer.able(sequence):
            return "unsupported"
        pays = self._payoff.pays(job.new.size, count_selected(job.new, job.keep), job.unread, proven=options.auto)
        return None if pays else "does_not_pay"

    def _score_until(self, scoring: ScoringWork, end: float) -> ScoredPrompt | None:
        """The scores, if they are complete in time."""
        try:
            while True:
                next(scoring)
                if self._clock() >= end:
                    return None
        except StopIteration as done:
            scored: ScoredPrompt = done.value
            return scored

    # What comes of it

    def _reuse_selection(self, sequence: TokenSequence, job: _ScoringJob) -> bool:
        """Reuse the selection of the same prompt, if there is one."""
        found = self._selections.longest(job.terms, sequence.keys) if sequence.request.cache else None
        if found is None or found.length < len(sequence.prompt):
            return False
        self._settle(sequence, job, found.positions, found.mass)
        return True

    def _extend_prefix(self, sequence: TokenSequence, job: _ScoringJob) -> None:
        """Continue a thinned-out prefix with all new tokens."""
        prefix, prompt = job.prefix, len(sequence.prompt)
        selection = np.concatenate([prefix.selection, np.arange(prefix.length, prompt, dtype=np.int32)])
        self._thin(sequence, job, selection, None)
        sequence.specprefill = self._report(sequence.request.specprefill, reused=prefix.reused)

    def _settle(self, sequence: TokenSequence, job: _ScoringJob, selection: KeptPositions, mass: float | None) -> None:
        prefix = job.prefix
        sequence.specprefill = self._report(
            sequence.request.specprefill,
            scored=job.new.size,
            kept=int((selection >= prefix.length).sum()),
            scoring_s=job.spent_s,
            reused=prefix.reused,
            mass=mass,
        )
        if len(selection) < len(sequence.prompt):
            self._thin(sequence, job, selection, mass)

    def _report(self, options: SpecPrefillRequest | None, **facts: Any) -> SpecPrefillReport:
        return SpecPrefillReport(self._scorer.name, auto=options is not None and options.auto, **facts)

    def _thin(self, sequence: TokenSequence, job: _ScoringJob, selection: KeptPositions, mass: float | None) -> None:
        if sequence.request.cache:
            self._selections.remember(job.terms, sequence.keys, selection, mass)
        sequence.thin(selection)
        self._prefix_cache.keys_changed(sequence)


TRIED_AGAIN_AFTER = 8
"""Of so many prompts in a row that would not have paid, the last is scored: the costs may have changed."""
SHARE_MEMORY = 1 / 4
"""How much one prompt changes the share that the next is expected to keep."""


class ScoringPayoff:
    def __init__(self, costs: StepCosts, expected_cost: float = 0.0) -> None:
        """`costs` are the target's; `expected_cost` is that of scoring a token, relative to computing it."""
        self._costs, self._expected_cost = costs, expected_cost
        self._scoring_ms = LeastCost()  # by tokens read
        self._declined = 0  # prompts in a row that would not have paid

    def observe(self, read: int, seconds: float) -> None:
        """Scoring a prompt took so long, for which the scorer read so many tokens."""
        self._scoring_ms.observe(read, 1000 * seconds)

    def pays(self, new: int, selected: int, unread: int, *, proven: bool = False) -> bool:
        """Whether to score a prompt of `new` tokens, of which so many would be selected, when the scorer has to read
        `unread`. What is not measured yet is tried, or with `proven` only if it is expected to pay."""
        if selected >= new:
            return False
        whole, scoring = self._costs.prefill_ms(new), self._scoring_ms.cost(unread)
        if proven and not (whole and scoring):
            # The first measurements may have compiled something: what is known beforehand counts until there are more.
            return self._expected_cost * unread + selected < new
        if not whole or scoring + self._costs.prefill_ms(selected) < whole:
            self._declined = 0
            return True
        self._declined += 1
        return self._declined % TRIED_AGAIN_AFTER == 0
