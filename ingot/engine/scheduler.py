"""Who runs in the next step. Pure Python: no mlx, no clock of its own, no threads.

There is no prefill phase: a sequence has tokens whose states are still to be computed. A step takes every decoding
row, then prompt tokens, up to what the latency target leaves. The contract:

- `add` queues a sequence; `remove` takes it out at any time; both are the only ways in and out.
- `plan` says what to run now, and moves sequences between waiting and running as memory allows. A sequence that it
  preempts loses its slot and its states, keeps its tokens, and is computed again later.
- `check` raises if anything was lost or counted twice.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from ingot.cache.footprint import CAPACITY_STEP, rounded
from ingot.engine.costs import StepCosts
from ingot.engine.sequence import Sequence

UNHURRIED_STEP_MS = 1000.0
"""Longest step while nobody waits for a next token: how long a cancel or a newcomer may have to wait."""
SMALLEST_CHUNK = 8
UNMEASURED_CHUNK = 64
SLOW_SHARE = 4.0
"""Where decode steps alone come near the latency target or exceed it, smooth streams are not to be had, and prefill
gets up to this many times the time of a decode step: short steps would only make everything slower."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence; `final` when they are its last, so that a token is drawn."""

    sequence: Sequence
    count: int
    final: bool


@dataclass(frozen=True, slots=True)
class Plan:
    preempted: tuple[Sequence, ...] = ()
    retired: tuple[Sequence, ...] = ()  # all their tokens are drawn: the slot is free
    admitted: tuple[Sequence, ...] = ()
    decode: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.decode or self.chunks)


class Prefixes(Protocol):
    """What is known of a sequence before it runs."""

    def waits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether it should wait, as one that runs is computing its prefix."""
        ...

    def admit(self, sequence: Sequence) -> None:
        """Sets `computed` to what it can take over; the runner does so when it seats the sequence."""
        ...

    def next_stop(self, sequence: Sequence) -> int:
        """The length at which its next chunk ends at the latest."""
        ...


@dataclass
class Scheduler:
    fits: Callable[[Many[int]], bool]  # can sequences with these reservations run together?
    widest: Callable[[Sequence], int]  # most tokens of its next chunk
    prefixes: Prefixes
    costs: StepCosts
    max_sequences: int
    target_ms: float
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)

    def add(self, sequence: Sequence) -> None:
        """Queue in order of arrival, which a preempted sequence keeps."""
        insort(self.waiting, sequence, key=lambda queued: queued.ticket)

    def remove(self, sequence: Sequence) -> None:
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
        _release(sequence)

    def plan(self, now: float) -> Plan:
        retired = self._retire()
        preempted = self._grow()
        admitted = self._admit(now)
        decode = tuple(sequence for sequence in self.running if sequence.decoding)
        return Plan(tuple(preempted), tuple(retired), tuple(admitted), decode, tuple(self._chunks(now, len(decode))))

    def check(self) -> None:
        everyone = self.waiting + self.running
        assert len({id(sequence) for sequence in everyone}) == len(everyone), "a sequence is queued twice"
        assert len(self.running) <= self.max_sequences, "more sequences run than there are slots"
        assert all(not sequence.ended for sequence in everyone), "an ended sequence is still queued"
        assert all(s.reserved == 0 and s.computed == 0 for s in self.waiting), "a waiting sequence holds states"
        assert all(s.reserved >= s.computed for s in self.running), "a sequence outgrew its reservation"
        assert self.fits([s.reserved for s in self.running]), "more memory is reserved than there is"

    def _retire(self) -> list[Sequence]:
        """Rows that need no further computing give up their slot while their last token is still on its way."""
        done = [sequence for sequence in self.running if sequence.exhausted]
        for sequence in done:
            self.running.remove(sequence)
            _release(sequence)
        return done

    def _grow(self) -> list[Sequence]:
        """See that every running row has room for its next tokens; the newest go back to the queue if need be."""
        preempted = []
        for sequence in sorted(self.running, key=lambda running: running.ticket):
            while sequence in self.running and sequence.total > sequence.reserved:
                wanted = min(rounded(sequence.total + CAPACITY_STEP), rounded(sequence.peak))
                others = [other.reserved for other in self.running if other is not sequence]
                if self.fits([*others, wanted]):
                    sequence.reserved = wanted
                else:
                    preempted.append(self._preempt_newest())
        return preempted

    def _preempt_newest(self) -> Sequence:
        newest = max(self.running, key=lambda running: running.ticket)
        self.running.remove(newest)
        _release(newest)
        newest.preemptions += 1
        self.add(newest)
        return newest

    def _admit(self, now: float) -> list[Sequence]:
        """First come, first served: only who waits for another's prefix is overtaken, so nobody starves."""
        admitted: list[Sequence] = []
        for head in list(self.waiting):
            if len(self.running) >= self.max_sequences:
                break
            if not head.known:  # preempted a moment ago; its last token is read before the next step
                break
            if self.prefixes.waits(head, self.running):
                continue
            wanted = rounded(min(head.peak, max(head.total + CAPACITY_STEP, _stated_peak(head))))
            if not self.fits([*(running.reserved for running in self.running), wanted]):
                break
            head.reserved = wanted
            head.admitted_at = head.admitted_at or now
            self.waiting.remove(head)
            self.running.append(head)
            self.prefixes.admit(head)
            admitted.append(head)
        return admitted

    def _chunks(self, now: float, decoding: int) -> Iterable[Chunk]:
        pending = [sequence for sequence in self.running if not sequence.decoding]
        # The shortest first, but a second of age weighs as much as a second of work: a long prompt lets short ones
        # pass only as long as that costs it little.
        pending.sort(key=lambda s: (self.costs.prefill_ms(s.remaining) - 1000 * (now - s.arrived), s.ticket))
        budget = self._prefill_budget(decoding, pending)
        for sequence in pending:
            if budget <= 0:
                return
            room = self.prefixes.next_stop(sequence) - sequence.computed
            count = min(sequence.remaining, room, budget, self.widest(sequence))
            budget -= count
            yield Chunk(sequence, count, final=count == sequence.remaining)

    def _prefill_budget(self, decoding: int, pending: Many[Sequence]) -> int:
        """Prompt tokens of this step."""
        if not decoding or not pending:
            return max(SMALLEST_CHUNK, self.costs.tokens_within(UNHURRIED_STEP_MS, UNMEASURED_CHUNK))
        step = self.costs.decode_ms(decoding)
        # Up to half the target, prefill gets what is left of it, which is at least as much as decoding takes. Beyond,
        # what it gets rises again, as there is less and less to be saved.
        beyond = min(SLOW_SHARE * (2 * step - self.target_ms), SLOW_SHARE * step)
        time = max(self.target_ms - step, beyond)
        least = max(SMALLEST_CHUNK, self.costs.efficient_tokens())
        return max(least, self.costs.tokens_within(time, UNMEASURED_CHUNK))


def _stated_peak(sequence: Sequence) -> int:
    """The whole length where the client said how long, nothing where it left that to the context's end."""
    return sequence.peak if sequence.request.max_tokens is not None else 0


def _release(sequence: Sequence) -> None:
    sequence.reserved = sequence.computed = 0
    sequence.decoding = False
