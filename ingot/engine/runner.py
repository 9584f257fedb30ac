"""Runs a plan: moves sequences into slots, launches the model, draws tokens, and reads them back later.

`launch` only queues work on the device. The tokens of a step are read by `collect`, usually while the next step is
already running, so that the device never waits for Python.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ingot.cache.footprint import CAPACITY_STEP, rounded
from ingot.cache.slots import Slots
from ingot.engine.budget import Budget, slot_count
from ingot.engine.costs import StepCosts
from ingot.engine.reuse import Reuse, needs_of
from ingot.engine.sampling import Drawn, draw, score
from ingot.engine.scheduler import Chunk, Plan
from ingot.engine.seats import Seats
from ingot.engine.sequence import Sequence
from ingot.models.adapter import Adapter

PADDING_SHARE = 0.25
"""Prompts are computed together when at most this share of the launch is padding."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token: (token, logprob) of itself and of the likeliest ones."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a step gave one sequence: a new token, or logprobs of prompt tokens, or both."""

    sequence: Sequence
    token: int | None
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Launched:
    """One forward pass on its way. `rows[i]` draws a token where `draws[i]`; `scored` is a prompt's logprobs."""

    rows: tuple[Sequence, ...]
    draws: tuple[bool, ...]
    drawn: Drawn
    tokens: int
    prefill: bool
    began: float  # when its graph was begun, on the clock of time.perf_counter()
    scored: Drawn | None = None
    spent: list[float] = field(default_factory=list)  # seconds for which this thread was held up by it

    def arrays(self) -> list[mx.array]:
        return self.drawn.arrays() + (self.scored.arrays() if self.scored else [])


@dataclass(frozen=True, slots=True)
class Step:
    launched: list[Launched]


class Runner:
    """Owns the slots. Only the engine thread may call it."""

    def __init__(self, adapter: Adapter, budget: Budget, costs: StepCosts, cache_bytes: int) -> None:
        self._adapter, self._budget, self._costs = adapter, budget, costs
        self.slots: Slots = adapter.new_slots()
        self.seats = Seats(self.slots)
        self.reuse = Reuse(needs_of(self.slots), budget, costs, cache_bytes)
        self._latest: dict[Sequence, tuple[mx.array, int]] = {}
        self._free_at = 0.0

    def launch(self, plan: Plan) -> Step:
        """Queue the plan's work. Afterwards every sequence of it is as long as if the work were done."""
        self._seat(plan)
        launched = []
        if plan.decode:
            launched += [self._decode(rows) for rows in self._decode_groups()]
        launched += [self._prefill(group) for group in self._prefill_groups(plan.chunks)]
        return Step(launched)

    def collect(self, step: Step) -> Iterable[list[Result]]:
        """Wait for the step's launches, one after another, and yield each one's results."""
        for launched in step.launched:
            asked = time.perf_counter()
            mx.eval(launched.arrays())
            launched.spent.append(time.perf_counter() - asked)
            self._measure(launched)
            yield _results(launched)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was cancelled."""
        self._latest.pop(sequence, None)
        self.reuse.keep(self.slots, sequence, last=True)
        if sequence.slot is not None:
            self.seats.leave(sequence)

    def abandon(self) -> None:
        """A step failed: whatever the slots hold is not to be trusted."""
        for sequence in self.seats.taken:
            sequence.slot = None
        self.seats.taken.clear()

    def rest(self) -> None:
        """Nothing runs: give the memory of the states back."""
        if not self.seats.taken and self.slots.nbytes:
            self.slots = self._adapter.new_slots()
            self.seats = Seats(self.slots)
            mx.clear_cache()

    def close(self) -> None:
        """Wait for what the device still does; mlx's threads must not outlive this one."""
        mx.synchronize()
        mx.clear_streams()

    def check(self) -> None:
        self.seats.check()
        self.reuse.check()
        for slot, sequence in enumerate(self.seats.taken):
            assert self.slots.lengths[slot] == sequence.computed, "a slot's length is not its sequence's"
        assert not any(self.slots.lengths[len(self.seats.taken) :]), "a free slot is not empty"

    # Seating

    def _seat(self, plan: Plan) -> None:
        for sequence in plan.retired:
            self.reuse.keep(self.slots, sequence, last=True)
        for sequence in (*plan.preempted, *plan.retired):
            if sequence.slot is not None:
                self.seats.leave(sequence)
        running = len(self.seats.taken) + len(plan.admitted)
        reserved = [sequence.reserved for sequence in (*self.seats.taken, *plan.admitted)]
        if reserved:
            self._make_room(running, rounded(max(reserved)))
        for sequence in plan.admitted:
            self.seats.sit(sequence)
            self.reuse.restore(self.slots, sequence)

    def _make_room(self, rows: int, capacity: int) -> None:
        slots = slot_count(rows)
        large_enough = slots <= self.slots.count and capacity <= self.slots.capacity
        kept = self._budget.state_bytes(self.slots.count, self.slots.capacity)
        if not large_enough or kept > self._budget.states:
            self.reuse.make_way(slots, capacity)
            self.slots.resize(slots, max(capacity, CAPACITY_STEP))

    # Decoding

    def _decode_groups(self) -> list[tuple[int, int]]:
        """Slots [first, last) that run together: all decoding ones, or runs of equal length."""
        count = self.seats.decoding
        if self._adapter.ragged:
            return [(0, count)]
        groups: list[tuple[int, int]] = []
        for slot in range(count):
            if groups and self.slots.lengths[groups[-1][0]] == self.slots.lengths[slot]:
                groups[-1] = (groups[-1][0], slot + 1)
            else:
                groups.append((slot, slot + 1))
        return groups

    def _decode(self, span: tuple[int, int]) -> Launched:
        began = time.perf_counter()
        first, last = span
        rows = tuple(self.seats.taken[first:last])
        tokens = self._next_tokens(rows)
        with self.slots.launch(first, len(rows), 1) as layers:
            logits = self._adapter.forward(tokens[:, None], layers)
        drawn = draw(logits[:, -1], rows)
        launched = Launched(rows, (True,) * len(rows), drawn, len(rows), prefill=False, began=began)
        return self._sent(launched, [1] * len(rows))

    def _next_tokens(self, rows: tuple[Sequence, ...]) -> mx.array:
        """The rows' newest tokens, from the device where Python has not seen them yet."""
        sources = [self._latest.get(row) for row in rows]
        newest = {id(source[0]): source[0] for source in sources if source is not None}
        in_place = all(source is not None and source[1] == place for place, source in enumerate(sources))
        if in_place and len(newest) == 1 and (tokens := newest.popitem()[1]).shape[0] == len(rows):
            return tokens
        if all(row.known for row in rows):
            return mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)
        return mx.stack(
            [
                mx.array(row.tokens[-1], dtype=mx.uint32) if row.known or source is None else source[0][source[1]]
                for row, source in zip(rows, sources, strict=True)
            ]
        )

    # Prefill

    def _prefill_groups(self, chunks: tuple[Chunk, ...]) -> list[list[Chunk]]:
        """Chunks of neighbouring slots and like widths run together."""
        groups: list[list[Chunk]] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.sequence.slot or 0):
            if groups and self._joins(groups[-1], chunk):
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        return groups

    def _joins(self, group: list[Chunk], chunk: Chunk) -> bool:
        members = [*group, chunk]
        if any(member.sequence.scoring for member in members) or not self._adapter.padded:
            return False
        assert chunk.sequence.slot is not None and group[-1].sequence.slot is not None
        width = max(member.count for member in members)
        longest = max(member.sequence.computed for member in members)
        padding = 1 - sum(member.count for member in members) / (width * len(members))
        return (
            chunk.sequence.slot == group[-1].sequence.slot + 1
            and padding <= PADDING_SHARE
            and longest + width <= self.slots.capacity
            and width * len(members) <= self._budget.widest_launch(longest)
        )

    def _prefill(self, group: list[Chunk]) -> Launched:
        began = time.perf_counter()
        rows = tuple(chunk.sequence for chunk in group)
        counts = [chunk.count for chunk in group]
        width = max(counts)
        tokens = [
            _padded(row.tokens[row.computed : row.computed + n], width) for row, n in zip(rows, counts, strict=True)
        ]
        first = rows[0].slot
        assert first is not None
        scoring = rows[0].scoring
        with self.slots.launch(first, len(rows), width, counts) as layers:
            at = None if scoring else [count - 1 for count in counts]
            logits = self._adapter.forward(mx.array(tokens), layers, at)
        drawn = draw(logits[:, -1], rows)
        scored = self._score(rows[0], counts[0], logits) if scoring else None
        draws = tuple(chunk.final for chunk in group)
        launched = Launched(rows, draws, drawn, sum(counts), prefill=True, began=began, scored=scored)
        return self._sent(launched, counts)

    def _score(self, row: Sequence, count: int, logits: mx.array) -> Drawn | None:
        """Logprobs of the prompt tokens that follow the chunk's; the prompt's last token has none to predict."""
        targets = row.prompt[row.computed + 1 : row.computed + count + 1]
        if not targets:
            return None
        top = row.sampling.prompt_logprobs or 0
        return score(logits[0, : len(targets)].astype(mx.float32), mx.array(targets), top)

    def _sent(self, launched: Launched, counts: list[int]) -> Launched:
        """Start the work and account for it as done."""
        mx.async_eval(launched.arrays(), self.slots.arrays())
        launched.spent.append(time.perf_counter() - launched.began)
        for place, (row, draws, count) in enumerate(zip(launched.rows, launched.draws, counts, strict=True)):
            row.computed += count
            if draws:
                row.sampled += 1
                self._latest[row] = (launched.drawn.tokens, place)
        for row, draws in zip(launched.rows, launched.draws, strict=True):
            if not row.decoding:
                self.reuse.keep(self.slots, row, last=draws)
                if draws:
                    self.seats.start_decoding(row)
        return launched

    def _measure(self, launched: Launched) -> None:
        now = time.perf_counter()
        if self._adapter.device.kind == "cpu":
            # There a launch returns only when most of it is done, and what is read late was done long before.
            spent = sum(launched.spent)
        else:
            spent = now - max(self._free_at, launched.began)
        self._free_at = now
        if launched.prefill:
            self._costs.observe_prefill(launched.tokens, 1000 * spent)
        else:
            self._costs.observe_decode(len(launched.rows), 1000 * spent)


def _padded(tokens: list[int], width: int) -> list[int]:
    return tokens + [0] * (width - len(tokens))


def _listed(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


def _results(launched: Launched) -> list[Result]:
    tokens = _listed(launched.drawn.tokens)
    found = _logprobs(launched.drawn, tokens) if launched.drawn.logprobs is not None else [None] * len(tokens)
    scored: tuple[Logprobs, ...] = ()
    if launched.scored is not None:
        scored = tuple(_logprobs(launched.scored, _listed(launched.scored.tokens)))
    return [
        Result(row, token if draws else None, logprobs, scored)
        for row, draws, token, logprobs in zip(launched.rows, launched.draws, tokens, found, strict=True)
        if draws or scored
    ]


def _logprobs(drawn: Drawn, tokens: list[int]) -> list[Logprobs]:
    assert drawn.logprobs is not None
    values = _listed(drawn.logprobs)
    if drawn.top_tokens is None or drawn.top_logprobs is None:
        return [Logprobs((token, value), ()) for token, value in zip(tokens, values, strict=True)]
    likeliest = zip(_listed(drawn.top_tokens), _listed(drawn.top_logprobs), strict=True)
    return [
        Logprobs((token, value), tuple(zip(ids, logs, strict=True)))
        for token, value, (ids, logs) in zip(tokens, values, likeliest, strict=True)
    ]
