"""Runs a plan: moves sequences into slots, launches the model, draws tokens, and reads them back later.

`launch` only queues work on the device. The tokens of a step are read by `collect`, usually while the next step is
already running, so that the device never waits for Python. Where a draw depends on tokens that were not read yet, the
forward pass before it does not: it is under way while they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ingot.cache.footprint import CAPACITY_STEP, rounded
from ingot.cache.slots import Slots
from ingot.engine import guided
from ingot.engine.budget import Budget, slot_count
from ingot.engine.costs import StepCosts
from ingot.engine.passes import LaunchPart, Passes
from ingot.engine.penalties import TokenHistory, needs_history
from ingot.engine.reuse import Reuse, needs_of
from ingot.engine.sampling import Drawn, draw, score
from ingot.engine.scheduler import StepPlan
from ingot.engine.seats import Seats
from ingot.engine.sequence import Sequence
from ingot.models.adapter import Adapter
from ingot.text.grammar.guide import Mask

ROOMY = 4
"""Slots that take this many times what their rows need are made smaller: kept prefixes get what they give back."""


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
    """A forward pass on its way. `rows` each draw a token; `scored` is a prompt and its logprobs."""

    rows: tuple[Sequence, ...]
    drawn: Drawn | None
    witness: mx.array | None  # where nothing is drawn: something small that exists when the pass is done
    tokens: int
    prefill: bool
    began: float  # when its graph was begun, on the clock of time.perf_counter()
    scored: tuple[Sequence, Drawn] | None = None

    def arrays(self) -> list[mx.array]:
        drawn = self.drawn.arrays() if self.drawn else []
        scored = self.scored[1].arrays() if self.scored else []
        return [*drawn, *scored, *([] if self.witness is None else [self.witness])]


@dataclass(frozen=True, slots=True)
class Step:
    launched: list[Launched]


def leave_device() -> None:
    """Wait for what the device still does. The engine's thread calls it last: mlx's threads must not outlive it."""
    mx.synchronize()
    mx.clear_streams()


class Runner:
    """Owns the slots. Only the engine thread may call it."""

    def __init__(self, adapter: Adapter, budget: Budget, costs: StepCosts, cache_bytes: int) -> None:
        self._adapter, self._budget, self._costs = adapter, budget, costs
        self.slots: Slots = adapter.new_slots()
        self.seats = Seats(self.slots)
        self.reuse = Reuse(needs_of(self.slots), budget, costs, cache_bytes)
        self._passes = Passes(adapter, budget)
        # A CPU gains nothing by working ahead; and states that are written while others are still to read them, such as
        # a record of them that is being made, are copied first.
        self._in_step = adapter.device.kind == "cpu"
        self._latest: dict[Sequence, tuple[mx.array, int]] = {}
        self._histories: dict[Sequence, TokenHistory] = {}  # of those with penalties, from their first draw on
        self._free_at = 0.0

    def launch(self, plan: StepPlan, catch_up: Callable[[], None]) -> Step:
        """Queue the plan's work. Afterwards every sequence of it is as long as if the work were done.

        `catch_up` is called where a row's draw depends on the tokens of the step before: it sees to it that the rows
        know them, and changes nothing else.
        """
        self._seat(plan)
        decoding = self.seats.taken[: self.seats.decoding]
        passes = self._passes.of(decoding, plan.chunks, self.slots.capacity)
        return Step([self._run(parts, catch_up) for parts in passes])

    def collect(self, step: Step) -> Iterable[list[Result]]:
        """Wait for the step's launches, one after another, and yield each one's results."""
        for launched in step.launched:
            mx.eval(launched.arrays())
            if not self._in_step:
                self._measure(launched)
            yield _results(launched)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was cancelled."""
        self._latest.pop(sequence, None)
        self._histories.pop(sequence, None)
        self.reuse.keep(self.slots, sequence, last=True)
        if sequence.slot is not None:
            self.seats.leave(sequence)

    def abandon(self) -> None:
        """A step failed: whatever the slots hold is not to be trusted."""
        for sequence in self.seats.taken:
            sequence.slot = None
        self.seats.taken.clear()
        self._latest.clear()
        self._histories.clear()

    def rest(self) -> None:
        """Nothing runs: give the memory of the states back."""
        if not self.seats.taken and self.slots.nbytes:
            self.slots = self._adapter.new_slots()
            self.seats = Seats(self.slots)
            mx.clear_cache()

    def close(self) -> None:
        leave_device()

    def check(self) -> None:
        self.seats.check()
        self.reuse.check()
        for slot, sequence in enumerate(self.seats.taken):
            assert self.slots.lengths[slot] == sequence.computed, "a slot's length is not its sequence's"
        assert not any(self.slots.lengths[len(self.seats.taken) :]), "a free slot is not empty"

    # Seating

    def _seat(self, plan: StepPlan) -> None:
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
        held = self._budget.state_bytes(self.slots.count, self.slots.capacity)
        most = min(self._budget.states, ROOMY * self._budget.state_bytes(slots, capacity))
        if not large_enough or held > most:
            self.reuse.make_way(slots, capacity)
            self.slots.resize(slots, max(capacity, CAPACITY_STEP))

    # Forward passes

    def _run(self, parts: list[LaunchPart], catch_up: Callable[[], None]) -> Launched:
        """Start a forward pass and account for it as done."""
        if self._in_step:
            mx.synchronize()
        began = time.perf_counter()
        logits = self._forward_mixed(parts) if self._adapter.mixed else self._forward(parts[0])
        rows = tuple(row for part in parts for row, draws in zip(part.rows, part.draws, strict=True) if draws)
        scored = self._score(parts[0], logits) if parts[0].scoring else None
        drawn = self._draw(logits[-len(rows) :], rows, catch_up) if rows else None
        prefill = not all(part.decoding for part in parts)
        tokens = sum(part.tokens for part in parts)
        witness = self.slots.witness() if drawn is None and scored is None else None
        launched = Launched(rows, drawn, witness, tokens, prefill, began, scored)
        mx.async_eval(launched.arrays(), self.slots.arrays())
        if self._in_step:
            mx.synchronize()
            self._measure(launched)
        self._account(launched, parts)
        return launched

    def _forward_mixed(self, parts: list[LaunchPart]) -> mx.array:
        """Logits of each row that draws, or of all tokens of a prompt that is scored."""
        tokens = [self._next_tokens(part.rows) if part.decoding else _prompt(part) for part in parts]
        ends = accumulate(count for part in parts for count in part.counts)
        draws = (draws for part in parts for draws in part.draws)
        at = [end - 1 for end, draws in zip(ends, draws, strict=True) if draws]
        with self.slots.mixed([(part.first, len(part.rows), part.width) for part in parts]) as layers:
            return self._adapter.forward_mixed(mx.concatenate(tokens), layers, None if parts[0].scoring else at)

    def _forward(self, part: LaunchPart) -> mx.array:
        """The same for a model that cannot mix, and a single part."""
        tokens = self._next_tokens(part.rows)[:, None] if part.decoding else mx.array(_tokens(part))
        at = None if part.scoring else [count - 1 for count in part.counts]
        with self.slots.launch(part.first, len(part.rows), part.width, part.counts) as layers:
            logits = self._adapter.forward(tokens, layers, at)
        if part.scoring:
            return logits[0]
        return logits[:, -1] if all(part.draws) else logits[_places(part.draws), -1]

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

    def _draw(self, logits: mx.array, rows: tuple[Sequence, ...], catch_up: Callable[[], None]) -> Drawn:
        histories = [self._history(row) for row in rows]
        drawn = draw(logits, rows, histories, self._masks(logits, rows, catch_up))
        for place, history in enumerate(histories):
            if history is not None:
                history.learn(drawn.tokens[place])
        return drawn

    def _masks(self, logits: mx.array, rows: tuple[Sequence, ...], catch_up: Callable[[], None]) -> list[Mask | None]:
        if all(row.guide is None for row in rows):
            return []
        mx.async_eval(logits)  # the device works while tokens are read and masks are made
        if any(guided.needs_tokens(row) for row in rows):
            catch_up()
        return guided.masks(rows)

    def _history(self, row: Sequence) -> TokenHistory | None:
        if needs_history(row.sampling) and row not in self._histories:
            self._histories[row] = TokenHistory(self._adapter.vocab, row.prompt, row.generated)
        return self._histories.get(row)

    def _score(self, part: LaunchPart, logits: mx.array) -> tuple[Sequence, Drawn] | None:
        """Logprobs of the prompt tokens that follow the chunk's; the prompt's last token has none to predict. What
        was scored before the row was preempted is not scored again."""
        row = part.rows[0]
        known = max(0, row.scored - row.computed)
        targets = row.prompt[row.computed + 1 : row.computed + part.width + 1][known:]
        if not targets:
            return None
        row.scored += len(targets)
        top = row.sampling.prompt_logprobs or 0
        return row, score(logits[known : known + len(targets)].astype(mx.float32), mx.array(targets), top)

    def _account(self, launched: Launched, parts: list[LaunchPart]) -> None:
        for place, row in enumerate(launched.rows):
            assert launched.drawn is not None
            self._latest[row] = (launched.drawn.tokens, place)
        for row, count, draws in [work for part in parts for work in part.work()]:
            row.computed += count
            row.sampled += draws
            if not row.decoding:
                self.reuse.keep(self.slots, row, last=draws)
                if draws:
                    self.seats.start_decoding(row)

    def _measure(self, launched: Launched) -> None:
        now = time.perf_counter()
        spent = now - max(self._free_at, launched.began)
        self._free_at = now
        if launched.prefill:
            self._costs.observe_prefill(launched.tokens, 1000 * spent)
        else:
            self._costs.observe_decode(len(launched.rows), 1000 * spent)


def _tokens(part: LaunchPart) -> list[list[int]]:
    """The next tokens of its rows, padded on the right."""
    counted = zip(part.rows, part.counts, strict=True)
    return [row.tokens[row.computed : row.computed + n] + [0] * (part.width - n) for row, n in counted]


def _prompt(part: LaunchPart) -> mx.array:
    return mx.array(_tokens(part)[0], dtype=mx.uint32)


def _places(chosen: tuple[bool, ...]) -> mx.array:
    return mx.array([place for place, wanted in enumerate(chosen) if wanted], dtype=mx.int32)


def _listed(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


def _results(launched: Launched) -> list[Result]:
    tokens = _listed(launched.drawn.tokens) if launched.drawn is not None else []
    found: list[Logprobs | None] = [None] * len(tokens)
    if launched.drawn is not None and launched.drawn.logprobs is not None:
        found = [*_logprobs(launched.drawn, tokens)]
    results = [Result(*drawn) for drawn in zip(launched.rows, tokens, found, strict=True)]
    if launched.scored is None:
        return results
    row, scores = launched.scored
    scored = tuple(_logprobs(scores, _listed(scores.tokens)))
    last = results[0] if results else Result(row, None)
    return [Result(row, last.token, last.logprobs, scored)]


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
