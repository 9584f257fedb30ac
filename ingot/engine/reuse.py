"""Taking over what was computed before: the prefix index at work in the step loop.

A sequence that is admitted starts behind the longest prefix that is known; what it computes is kept as it goes, at the
ends of messages and at strides, and at its own end. Kept records give way to running sequences at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ingot.cache.layers import WindowState
from ingot.cache.prefix import Match, Needs, PrefixIndex, agreement
from ingot.cache.records import put, take
from ingot.cache.slots import Slots
from ingot.engine.budget import Budget
from ingot.engine.costs import StepCosts
from ingot.engine.sequence import Sequence

STRIDE = 512
"""Tokens of a prompt after which what was computed is kept, so that a cancelled or a shared prompt is not lost."""
CHECKPOINT_STRIDE = 2048
"""The same where a sequence can only be resumed at checkpoints, which cost much and mostly stand at messages' ends."""
WORTH_WAITING = 64
"""A sequence waits for another one's prompt when at least this many tokens of it are its own as well."""


def needs_of(slots: Slots) -> Needs:
    windows = tuple(
        (number, state.window) for number, state in enumerate(slots.states) if isinstance(state, WindowState)
    )
    return Needs("recurrent" in slots.kinds, windows)


class Reuse:
    def __init__(self, needs: Needs, budget: Budget, costs: StepCosts, limit: int) -> None:
        self.index = PrefixIndex(needs, lambda tokens: costs.prefill_ms(tokens) / 1000)
        self._needs, self._budget, self._limit = needs, budget, limit
        self._stride = STRIDE if needs.anywhere else CHECKPOINT_STRIDE
        self._found: dict[Sequence, Match] = {}

    # Planning

    def admit(self, sequence: Sequence) -> None:
        """Let an admitted sequence start behind what is known of it."""
        if not self._uses(sequence):
            return
        found = self.index.match(sequence.request.salt, sequence.tokens, len(sequence.tokens) - 1)
        if found.length:
            self._found[sequence] = found
        sequence.computed = sequence.kept = found.length
        if sequence.preemptions == 0:
            sequence.cached = found.length

    def waits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence is about to compute what this one could take over from it."""
        if not self._uses(sequence):
            return False
        return any(self._shares(sequence, other) for other in running if not other.decoding)

    def _uses(self, sequence: Sequence) -> bool:
        # A prompt that is scored is computed whole: its logprobs are not part of any record.
        return self._limit > 0 and sequence.request.cache and sequence.sampling.prompt_logprobs is None

    def _shares(self, sequence: Sequence, other: Sequence) -> bool:
        if other.request.salt != sequence.request.salt or not self._uses(other):
            return False
        if sequence.tokens[:WORTH_WAITING] != other.tokens[:WORTH_WAITING]:
            return False
        shared = min(agreement(sequence.tokens, other.tokens), len(sequence.tokens) - 1)
        if not self._needs.anywhere:
            shared = max((mark for mark in other.marks if mark <= shared), default=0)
        return shared - other.kept >= WORTH_WAITING

    def next_stop(self, sequence: Sequence) -> int:
        """Where the next chunk must end at the latest, so that a checkpoint can be taken there."""
        if self._needs.anywhere or not self._uses(sequence):
            return sequence.total
        ahead = (mark for mark in sequence.marks if mark > sequence.computed)
        return min(ahead, default=sequence.total)

    # Running

    def restore(self, slots: Slots, sequence: Sequence) -> None:
        """Fill the slot of a sequence that was just seated."""
        found = self._found.pop(sequence, None)
        if found is not None:
            assert sequence.slot is not None
            put(slots, sequence.slot, found.records, found.length)

    def keep(self, slots: Slots, sequence: Sequence, *, last: bool = False) -> None:
        """Keep what the sequence computed since the last time, if this is a place to do so."""
        slot = sequence.slot
        if slot is None or not self._uses(sequence):
            return
        computed = slots.lengths[slot]
        if not (last or computed in sequence.marks or computed - sequence.kept >= self._stride):
            return
        if computed <= sequence.kept:
            return
        made = self.index.insert(
            sequence.request.salt, sequence.tokens, computed, lambda begin: take(slots, slot, begin)
        )
        sequence.kept = computed
        if made is not None:
            # Before the next launch writes to the slots: it could not write in place while these copies wait.
            mx.async_eval(made.arrays())
            self.make_way(slots.count, slots.capacity)

    def make_way(self, slots: int, capacity: int) -> None:
        """Hold no more than running sequences leave."""
        self.index.shrink(min(self._limit, self._budget.states - self._budget.state_bytes(slots, capacity)))

    def check(self) -> None:
        self.index.check()
        assert not self._found, "a prefix was found for a sequence that never ran"
