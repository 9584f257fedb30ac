"""The scheduler: which sequences run in the next step, and how many tokens of each. Pure Python: no mlx, no clock of
its own, no threads.

There is no prefill phase: a sequence has tokens whose KV is still to be computed. A step takes every decoding row,
then prompt tokens up to what the latency target leaves, and at least so many that a step's fixed cost is at most a
quarter of it. Of the prompt tokens

- half go to prompts with at most LITTLE_TOKENS left, in order of arrival: such a prompt is computed within three
  steps, unless others like it fill that half;
- the other half goes to longer prompts, in one step shortest first, in the next oldest first: so short prompts need
  not wait for a long one, and no prompt waits for those that came later.

Tenants take turns for prefill and for slots in the batch, of which each has an equal share. Unused shares are lent and
taken back when their tenant asks. The contract:

- `add` queues a sequence and `remove` takes it out at any time; there is no other way in or out.
- `plan` decides what runs now, and moves sequences between waiting and running as memory allows. A preempted sequence
  loses its batch row and its KV, keeps its tokens, and is computed again later.
- `check` raises if a sequence was lost or counted twice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ingot.cache.footprint import CAPACITY_STEP, round_up_capacity
from ingot.engine.sequence import TokenSequence
from ingot.engine.step_costs import StepCosts

LONGEST_STEP_MS = 1000.0
"""Most prefill in one step: how long a cancel, a new request or, on slow devices, a running stream may have to wait."""
ENOUGH_TOKENS = 2048
"""Forward passes over more prompt tokens than this gain no speed, but new requests wait longer for them."""
SMALLEST_CHUNK = 8
LITTLE_TOKENS = 3 * SMALLEST_CHUNK
"""Prompts with at most this many tokens left have half of a step's prompt tokens, and at least the smallest chunk."""
LEAST_PREFILL_SHARE = 3.0
"""Prefill gets at least this many times the time that a step costs before its first prompt token: alongside one stream
it keeps three quarters of its speed, less what learning the costs takes."""
UNMEASURED_CHUNK = 64
SLOW_SHARE = 8.0
"""Where decode steps alone take more than half of the latency target, streams cannot be smooth, and prefill gets up to
this many times the time of a decode step: short steps would only make everything slower."""
STEEPNESS = 4.0
"""How fast that share grows beyond half of the target."""
OVERTAKEN_FOR_S = 10.0
"""How long a sequence that does not fit may be overtaken by others. Then they wait, so that it fits in the end."""
PRIORITY_STEP_S = 5.0
"""Waiting this long counts as one step of priority, so that no sequence starves."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next `count` tokens of a sequence; `final` when they are its last, so that a token is sampled."""

    sequence: TokenSequence
    count: int
    final: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    preempted: tuple[TokenSequence, ...] = ()
    retired: tuple[TokenSequence, ...] = ()  # all their tokens are sampled: their KV is free
    admitted: tuple[TokenSequence, ...] = ()
    decode: tuple[TokenSequence, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.decode or self.chunks)


class PrefixLookup(Protocol):
    """What the scheduler asks the prefix cache."""

    def expect(self, waiting: Sequence[TokenSequence]) -> None:
        """Start to onload the prefixes of waiting sequences."""

    def waits(self, sequence: TokenSequence, running: Iterable[TokenSequence]) -> bool:
        """Whether it should wait, as its prefix is being computed by a running sequence or read from disk."""

    def admit(self, sequence: TokenSequence) -> None:
        """Set `computed` to the length of its cached prefix, which the runner restores when it adds the row."""

    def next_stop(self, sequence: TokenSequence) -> int:
        """The length at which its next chunk ends at the latest."""


@dataclass
class Scheduler:
    fits: Callable[[Sequence[tuple[TokenSequence, int]]], bool]  # can sequences with these reservations run together?
    widest: Callable[[TokenSequence], int]  # most tokens of its next chunk
    prefixes: PrefixLookup
    costs: StepCosts
    max_sequences: int
    target_ms: float
    ready: Callable[[TokenSequence], bool] = lambda _: True  # is everything there that it is computed from?
    waiting: list[TokenSequence] = field(default_factory=list)
    running: list[TokenSequence] = field(default_factory=list)
    _last_turns: Counter[str] = field(default_factory=Counter)  # by tenant: when it last got a slot
    _turn: int = 0
    # By tenant: when a prompt of its went first, among those with little left and among the others.
    _little_turns: Counter[str] = field(default_factory=Counter)
    _other_turns: Counter[str] = field(default_factory=Counter)
    _oldest_first: bool = True  # in the last step in which several long prompts waited

    def add(self, sequence: TokenSequence) -> None:
        """Queue in order of arrival, which a preempted sequence keeps."""
        insort(self.waiting, sequence, key=lambda queued: queued.ticket)

    def remove(self, sequence: TokenSequence) -> None:
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        _release(sequence)

    def plan(self, now: float) -> StepPlan:
        retired = self._retire()
        self.prefixes.expect(self.waiting)
        preempted = [*self._clear_the_way(), *self._grow()]
        admitted, displaced = self._admit(now)
        preempted += displaced
        decode = tuple(sequence for sequence in self.running if sequence.decoding)
        chunks = tuple(self._chunks(now, len(decode)))
        return StepPlan(tuple(preempted), tuple(retired), tuple(admitted), decode, chunks)

    def check(self) -> None:
        everyone = self.waiting + self.running
        assert len({id(sequence) for sequence in everyone}) == len(everyone), "a sequence is queued twice"
        assert len(self.running) <= self.max_sequences, "more sequences run than may"
        assert all(not sequence.ended for sequence in everyone), "an ended sequence is still queued"
        assert all(s.reserved == 0 and s.computed == 0 for s in self.waiting), "a waiting sequence holds KV"
        assert all(s.reserved >= s.computed for s in self.running), "a sequence outgrew its reservation"
        assert self.fits(_reservations(self.running)), "more memory is reserved than there is"

    def _retire(self) -> list[TokenSequence]:
        """Sequences with nothing left to compute give up their KV while their last token is still to be read."""
        done = [sequence for sequence in self.running if sequence.exhausted]
        for sequence in done:
            self.running.remove(sequence)
            _release(sequence)
        return done

    def _grow(self) -> list[TokenSequence]:
        """Reserve room for every running sequence's next tokens; the newest are preempted where there is none."""
        preempted = []
        for sequence in sorted(self.running, key=lambda running: running.ticket):
            while sequence in self.running and sequence.total > sequence.reserved:
                wanted = min(round_up_capacity(sequence.total + CAPACITY_STEP), round_up_capacity(sequence.peak))
                others = [other for other in self.running if other is not sequence]
                if self.fits([*_reservations(others), (sequence, wanted)]):
                    sequence.reserved = wanted
                else:
                    preempted.append(self._preempt(_least_entitled(self.running, self._slots_by_tenant())))
        return preempted

    def _slots_by_tenant(self) -> Counter[str]:
        return Counter(sequence.tenant for sequence in self.running)

    def _share(self) -> int:
        """Slots that each tenant with sequences may have."""
        return self.max_sequences // max(1, len({row.tenant for row in (*self.waiting, *self.running)}))

    def _preempt(self, sequence: TokenSequence) -> TokenSequence:
        self.running.remove(sequence)
        _release(sequence)
        sequence.preemptions += 1
        self.add(sequence)
        return sequence

    def _admit(self, now: float) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """The sequences that join, and those preempted for them. First come, first served within a tenant, except that
        sequences which wait for another's prefix may be overtaken, and for a while those that do not fit."""
        admitted: list[TokenSequence] = []
        preempted: list[TokenSequence] = []
        for head in self._in_turn(now):
            if not head.known:  # just preempted; its last token is read before the next step
                break
            if len(self.running) >= self.max_sequences and self._slots_by_tenant()[head.tenant] >= self._share():
                break
            if self._yields(head) or self.prefixes.waits(head, self.running) or not self.ready(head):
                continue
            wanted = round_up_capacity(min(head.peak, head.total + CAPACITY_STEP))
            if not self._has_room(self.running, head, wanted):
                leaving = self._borrowers_of_share(head, wanted, admitted)
                if leaving:
                    preempted += [self._preempt(sequence) for sequence in leaving]
                elif now - head.arrived > OVERTAKEN_FOR_S:
                    break
                else:
                    continue
            self._start(head, wanted, now)
            admitted.append(head)
        return admitted, preempted

    def _has_room(self, rows: Sequence[TokenSequence], head: TokenSequence, wanted: int) -> bool:
        return len(rows) < self.max_sequences and self.fits([*_reservations(rows), (head, wanted)])

    def _start(self, head: TokenSequence, wanted: int, now: float) -> None:
        head.reserved = wanted
        head.admitted_at = head.admitted_at or now
        self.waiting.remove(head)
        self.running.append(head)
        self._turn += 1
        self._last_turns[head.tenant] = self._turn
        self.prefixes.admit(head)

    def _in_turn(self, now: float) -> Iterator[TokenSequence]:
        """Waiting sequences in the order in which they get slots. Of the tenants with the highest priority, next is the
        one with the fewest running sequences, then the one whose turn was longest ago; of its sequences the one with
        the highest priority, then the one that has waited longest. The caller may start what was yielded."""
        queues: dict[str, deque[TokenSequence]] = {}
        for sequence in self.waiting:
            queues.setdefault(sequence.tenant, deque()).append(sequence)
        for tenant, queue in queues.items():
            most = max(sequence.priority for sequence in queue)
            queues[tenant] = deque(sorted(queue, key=partial(_priority_behind, most, now)))
        while queues:
            runs = self._slots_by_tenant() if len(queues) > 1 else Counter()
            heads = [queue[0] for queue in queues.values()]
            highest = max(head.priority for head in heads)
            head = min(heads, key=partial(self._rank, runs, highest, now))
            tenant = head.tenant
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def _rank(self, runs: Counter[str], highest: int, now: float, head: TokenSequence) -> tuple[int, ...]:
        """A tenant's rank in the order, by the sequence that would be its next."""
        return _priority_behind(highest, now, head), runs[head.tenant], self._last_turns[head.tenant], head.ticket

    def _borrowers_of_share(
        self, head: TokenSequence, wanted: int, joined: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        """Sequences to preempt so that a tenant gets a slot of its own share; none where that would not help."""
        share, runs = self._share(), self._slots_by_tenant()
        if runs[head.tenant] >= share:
            return []
        leaving: list[TokenSequence] = []
        staying = list(self.running)
        while borrowers := [row for row in staying if runs[row.tenant] > share and row not in joined]:
            leaving.append(_least_entitled(borrowers, runs))
            staying.remove(leaving[-1])
            runs[leaving[-1].tenant] -= 1
            if self._has_room(staying, head, wanted):
                return leaving
        return []

    def _clear_the_way(self) -> list[TokenSequence]:
        """Preempt background sequences when others come."""
        return [self._preempt(sequence) for sequence in list(self.running) if self._yields(sequence)]

    def _yields(self, sequence: TokenSequence) -> bool:
        if not sequence.request.background:
            return False
        return any(not other.request.background for other in (*self.waiting, *self.running))

    def _chunks(self, now: float, decoding: int) -> Iterable[PromptChunk]:
        pending = [sequence for sequence in self.running if not sequence.decoding]
        if not pending:
            return
        budget, least = self._prefill_budget(decoding), self._least_chunk(decoding)
        little = [row for row in pending if row.remaining <= LITTLE_TOKENS]
        others = [row for row in pending if row.remaining > LITTLE_TOKENS]
        # Its size may be varied to learn costs: there is more to do than it holds, and no prompt is about to end.
        if not little and budget < sum(row.remaining for row in others) and (decoding or budget < ENOUGH_TOKENS):
            budget = self.costs.varied(budget, decoding)
        little, others = self._taking_turns(little, self._little_turns, now), self._others(others, now)
        counts: dict[TokenSequence, int] = {}
        share = max(SMALLEST_CHUNK, budget // 2)
        spent = self._hand_out(share, little, least, counts)
        self._hand_out(max(budget - spent, budget // 2), [*others, *little], least, counts)
        for sequence, count in counts.items():
            yield PromptChunk(sequence, count, final=count == sequence.remaining)

    def _hand_out(
        self, tokens: int, rows: Sequence[TokenSequence], least: int, counts: dict[TokenSequence, int]
    ) -> int:
        """Give sequences tokens of a step, in their order, on top of their `counts`. Returns what that costs, which may
        be slightly more than `tokens`."""
        spent = 0
        for sequence in rows:
            if tokens - spent < (least if spent and sequence.remaining > LITTLE_TOKENS else 1):
                break
            has = counts.get(sequence, 0)
            count = self._cut(sequence, has + tokens - spent, least)
            if count > has:
                spent += count - has + (self.costs.further_tokens() if counts and not has else 0)
                counts[sequence] = count
        return spent

    def _cut(self, sequence: TokenSequence, count: int, least: int) -> int:
        """How many of its next tokens to compute where the step has room for `count`."""
        room = min(self.prefixes.next_stop(sequence) - sequence.computed, sequence.remaining)
        if room - count < least:  # what would be left is not worth a pass of its own
            count = room
        count = min(count, self.widest(sequence))
        return count if sequence.prompt_media is None else sequence.prompt_media.uncut(sequence.computed, count)

    def _taking_turns(self, rows: Iterable[TokenSequence], turns: Counter[str], now: float) -> list[TokenSequence]:
        """One sequence of each tenant, then another of each, in order of arrival; the highest priority first, then the
        tenant whose turn was longest ago."""
        rows = sorted(rows, key=lambda row: row.ticket)
        highest = max((row.priority for row in rows), default=0)
        before: Counter[tuple[int, str]] = Counter()
        ranks: dict[TokenSequence, tuple[int, int, int]] = {}
        for row in rows:
            behind = _priority_behind(highest, now, row)
            ranks[row] = behind, before[behind, row.tenant], turns[row.tenant]
            before[behind, row.tenant] += 1
        rows.sort(key=ranks.__getitem__)
        if rows:
            turns[rows[0].tenant] = max(turns.values(), default=0) + 1
        return rows

    def _others(self, rows: Sequence[TokenSequence], now: float) -> list[TokenSequence]:
        """Shortest first in one step, oldest first in the next."""
        if len(rows) > 1:
            self._oldest_first = not self._oldest_first
        if self._oldest_first:
            return self._taking_turns(rows, self._other_turns, now)
        return sorted(rows, key=lambda row: (self._work(row), row.remaining, row.ticket))

    def _work(self, sequence: TokenSequence) -> float:
        """Milliseconds of prefill left, less what its priority counts for."""
        return self.costs.prefill_ms(sequence.remaining) - 1000 * PRIORITY_STEP_S * sequence.priority

    def _least_chunk(self, decoding: int) -> int:
        return max(SMALLEST_CHUNK, self.costs.efficient_tokens(decoding))

    def _prefill_budget(self, decoding: int) -> int:
        """Prompt tokens of this step."""
        step = self.costs.decode_ms(decoding)
        most = self._tokens_within(step + self._prefill_ms(step), decoding)
        if not decoding:
            most = min(max(most, ENOUGH_TOKENS), self._tokens_within(LONGEST_STEP_MS, 0))
        return max(self._least_chunk(decoding), most, self._worthwhile_tokens(decoding))

    def _worthwhile_tokens(self, decoding: int) -> int:
        """So many that the fixed cost of a step takes no more than its share, as far as that cost is known: not for
        steps much longer than those before."""
        longest = (1 + LEAST_PREFILL_SHARE) * self.costs.fixed_ms(decoding)
        return min(self._tokens_within(longest, decoding), 2 * self.costs.largest_tokens)

    def _tokens_within(self, milliseconds: float, decoding: int) -> int:
        return self.costs.tokens_within(milliseconds, decoding, UNMEASURED_CHUNK)

    def _prefill_ms(self, step: float) -> float:
        """How much longer a step may take than decoding alone, which takes `step`."""
        # Up to half of the target, prefill gets what decoding leaves of it. Beyond, its share grows again, as there is
        # less and less smoothness to save.
        beyond = SLOW_SHARE * min(step, STEEPNESS * (2 * step - self.target_ms))
        return min(max(self.target_ms - step, beyond), max(LONGEST_STEP_MS, self.target_ms))


def _priority_behind(highest: int, now: float, sequence: TokenSequence) -> int:
    """Steps of priority that a sequence is behind the highest, less those that its waiting counts for."""
    return max(0, highest - sequence.priority - int((now - sequence.arrived) / PRIORITY_STEP_S))


def _reservations(rows: Iterable[TokenSequence]) -> list[tuple[TokenSequence, int]]:
    return [(row, row.reserved) for row in rows]


def _least_entitled(rows: Iterable[TokenSequence], runs: Counter[str]) -> TokenSequence:
    """The newest sequence of the tenant with the most."""
    return max(rows, key=lambda row: (runs[row.tenant], row.ticket))


def _release(sequence: TokenSequence) -> None:
    sequence.reserved = sequence.computed = 0
    sequence.decoding = False
