"""Sparse prefill at work in the step loop: a sequence that asks for it is scored while it waits, a piece between two
steps, and is thinned out before it runs.

Only the engine thread may call anything here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ingot.engine.costs import CostLine, StepCosts
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.ask import SparseReport, Unused
from ingot.engine.sparse.scorer import Scorer, Scoring
from ingot.engine.sparse.selection import Flags, Places, Scores, always, kept_count, select

REMEMBERED = 64
"""Selections: the same prompt that is asked again is not scored again."""
TRY_AGAIN = 8
"""Of so many prompts in a row that would not have paid, the last is scored: what is measured may change."""


@dataclass(frozen=True, slots=True)
class SparseOffer:
    """What a server offers: who scores prompts of which at least `threshold` tokens are new, and the share that is kept
    of them where a request does not say."""

    scorer: Scorer
    threshold: int
    keep: float


@dataclass(eq=False, slots=True)
class _Job:
    flags: Flags  # what is computed in any case
    keep: float  # of the rest
    known: int  # tokens that are taken over
    unread: int  # tokens that the scorer has to read
    key: bytes  # of its selection
    scoring: Scoring | None = None
    spent_s: float = 0.0

    @classmethod
    def of(cls, sequence: Sequence, flags: Flags, keep: float, known: int, unread: int) -> _Job:
        """Its key tells all that a selection depends on, but for what was known: the same prompt is thinned out alike
        when it is asked again, so that it finds what was computed of it."""
        request, tokens = sequence.request, np.asarray(sequence.prompt, np.int64)
        key = blake2b(repr((request.tenant, request.salt, keep, len(flags))).encode())
        key.update(tokens.tobytes())
        key.update(flags.tobytes())
        flags = flags.copy()
        flags[:known] = True
        return cls(flags, keep, known, unread, key.digest())


class SparsePrefill:
    def __init__(self, offer: SparseOffer, costs: StepCosts, known: Callable[[Sequence], int], window: int) -> None:
        """`costs` are the target's, `known` says how much of a sequence it would take over now, and `window` is its
        widest, or 0."""
        self._offer, self._scorer = offer, offer.scorer
        self._costs, self._known, self._window = costs, known, window
        self._jobs: OrderedDict[Sequence, _Job] = OrderedDict()
        self._selections: OrderedDict[bytes, Places] = OrderedDict()
        self._scoring_ms = CostLine()  # by tokens that were read
        self._declined = 0  # prompts in a row that would not have paid

    def ready(self, sequence: Sequence) -> bool:
        """Whether it is settled how much of a waiting sequence is computed. If not, it will be scored."""
        ask = sequence.request.sparse
        if ask is None or sequence.sparse is not None:
            return True
        if sequence in self._jobs:
            return False
        keep, known = self._offer.keep if ask.keep is None else ask.keep, self._known(sequence)
        job = _Job.of(sequence, self._flags(sequence), keep, known, self._scorer.unread(sequence))
        if (unused := self._unused(sequence, job)) is not None:
            sequence.sparse = SparseReport(self._scorer.name, unused=unused)
            return True
        if self._recalled(sequence, job):
            return True
        self._jobs[sequence] = job
        return False

    @property
    def next(self) -> Sequence | None:
        """Whose prompt is scored next."""
        return next(iter(self._jobs), None)

    def advance(self, sequence: Sequence, seconds: float) -> None:
        """Score a sequence's prompt for about so long, at least by a piece. Raises what goes wrong."""
        job, began = self._jobs[sequence], time.monotonic()
        if job.scoring is None:
            if self._recalled(sequence, job):  # another of its answers was scored meanwhile
                del self._jobs[sequence]
                return
            sequence.scoring_at = began
            job.scoring = self._scorer.score(sequence)
        scores = _advanced(job.scoring, began + seconds)
        job.spent_s += time.monotonic() - began
        if scores is not None:
            self._scoring_ms.observe(job.unread, 1000 * job.spent_s)
            del self._jobs[sequence]
            kept = select(scores, job.flags, job.keep)
            if sequence.request.cache:
                self._remember(job, kept)
            _settle(sequence, job, kept, self._scorer.name)

    def forget(self, sequence: Sequence) -> None:
        """It ended."""
        job = self._jobs.pop(sequence, None)
        if job is not None and job.scoring is not None:
            job.scoring.close()

    def rest(self) -> None:
        self._scorer.rest()

    def check(self) -> None:
        self._scorer.check()

    def _flags(self, sequence: Sequence) -> Flags:
        request, number = sequence.request, sequence.index // sequence.request.n
        assert request.sparse is not None
        whole = request.sparse.whole[number] if request.sparse.whole else ()
        ends = request.marks[number] if request.marks else ()
        return always(len(sequence.prompt), whole, ends, window=self._window)

    def _unused(self, sequence: Sequence, job: _Job) -> Unused | None:
        """Why all of a prompt is computed, if so."""
        if sequence.sampling.prompt_logprobs is not None or sequence.sight is not None:
            return "unsupported"
        if len(sequence.prompt) < self._offer.threshold:
            return "below_threshold"
        if len(sequence.prompt) - job.known < self._offer.threshold:
            return "cached"
        if not self._scorer.able(sequence):
            return "unsupported"
        return None if self._pays(job) else "does_not_pay"

    def _pays(self, job: _Job) -> bool:
        """Whether scoring and computing what is kept takes less than computing all, as far as is measured."""
        kept, new = kept_count(job.flags, job.keep) - job.known, len(job.flags) - job.known
        if kept >= new:
            return False
        whole = self._costs.prefill_ms(new)
        scoring = self._scoring_ms.cost(job.unread) if self._scoring_ms.known else 0.0
        if not whole or scoring + self._costs.prefill_ms(kept) < whole:
            self._declined = 0
            return True
        self._declined += 1
        return self._declined % TRY_AGAIN == 0

    def _recalled(self, sequence: Sequence, job: _Job) -> bool:
        """Take the selection that was made of the same prompt before, if there is one."""
        kept = self._selections.get(job.key) if sequence.request.cache else None
        if kept is None:
            return False
        self._selections.move_to_end(job.key)
        _settle(sequence, job, kept, self._scorer.name)
        return True

    def _remember(self, job: _Job, kept: Places) -> None:
        self._selections[job.key] = kept
        if len(self._selections) > REMEMBERED:
            self._selections.popitem(last=False)


def _advanced(scoring: Scoring, end: float) -> Scores | None:
    """The scores, if they are there in time."""
    try:
        while True:
            next(scoring)
            if time.monotonic() >= end:
                return None
    except StopIteration as done:
        scores: Scores = done.value
        return scores


def _settle(sequence: Sequence, job: _Job, kept: Places, scorer: str) -> None:
    scored = len(sequence.prompt) - job.known
    sequence.sparse = SparseReport(scorer, scored, int((kept >= job.known).sum()), job.spent_s)
    if len(kept) < len(sequence.prompt):
        sequence.thin(kept)
