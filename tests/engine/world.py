"""A world without mlx for the scheduler: steps that cost what they say, tokens that can be told apart."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from ingot.cache.footprint import Footprint
from ingot.cache.forward_batch import Row
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Request
from ingot.engine.scheduler import PromptChunk, Scheduler
from ingot.engine.sequence import TokenSequence
from ingot.engine.step_costs import StepCosts

DECODE_MS, ROW_MS, TOKEN_MS = 20.0, 1.0, 0.5
SHAPE = Footprint(groups=((None, 1),), recurrent=0, activation=0, score=0, logits=0)


class CountingRows:
    """Remembers which tokens each row was given."""

    def __init__(self) -> None:
        self.held: dict[TokenSequence, list[int]] = {}

    def seat(self, sequence: TokenSequence) -> None:
        assert sequence.row is None
        sequence.row, self.held[sequence] = Row(len(self.held), ()), []

    def leave(self, sequence: TokenSequence) -> None:
        if sequence.row is not None:
            del self.held[sequence]
            sequence.row, sequence.decoding = None, False


class NothingKnown:
    """A prefix index that is always empty."""

    def expect(self, waiting: object) -> None: ...

    def waits(self, sequence: TokenSequence, running: object) -> bool:
        return False

    def admit(self, sequence: TokenSequence) -> None:
        pass

    def next_stop(self, sequence: TokenSequence) -> int:
        return sequence.total


def expected_token(ticket: int, number: int) -> int:
    return ticket * 100_000 + number


@dataclass
class World:
    memory: int
    max_sequences: int = 4
    target_ms: float = 50.0
    context: int = 4096
    mixes: bool = False  # decoding rows and prompt tokens share forward passes
    widest: int = 512  # most tokens of a chunk
    token_ms: float = TOKEN_MS
    decode_ms: float = DECODE_MS  # of a forward pass in which rows decode, whatever else is in it
    pass_ms: float = 0.0  # of one over prompt tokens alone
    noise: Callable[[], float] = lambda: 1.0  # what each pass takes, over what it should
    now: float = 0.0
    arrived: int = 0
    in_flight: list[tuple[TokenSequence, int]] = field(default_factory=list)
    finished: list[TokenSequence] = field(default_factory=list)
    alive: list[TokenSequence] = field(default_factory=list)
    stalls: dict[int, float] = field(default_factory=dict)
    last_token_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        budget = MemoryBudget(self.memory, 0, SHAPE, context=self.context, widest=self.widest, rows=self.max_sequences)
        self.context = budget.longest(self.context)
        self.costs = StepCosts(mixes=self.mixes)
        self.scheduler = Scheduler(
            lambda reserved: budget.fits([(tokens, False) for _, tokens in reserved]),
            lambda _: self.widest,
            NothingKnown(),
            self.costs,
            self.max_sequences,
            self.target_ms,
        )
        self.rows = CountingRows()

    def arrive(
        self, prompt: int, limit: int, stated: bool = True, tenant: str = "", priority: int = 0
    ) -> TokenSequence:
        prompt = min(prompt, self.context - 1)
        limit = min(limit, self.context - prompt)
        tokens = tuple(expected_token(self.arrived, -number) for number in range(prompt, 0, -1))
        most = limit if stated else None
        request = Request(
            f"r{self.arrived}", (tokens,), max_tokens=most, arrived=self.now, tenant=tenant, priority=priority
        )
        sequence = TokenSequence(request, 0, self.arrived, tokens, limit, seed=0)
        self.arrived += 1
        self.alive.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: TokenSequence) -> None:
        sequence.ended = True
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)
        self.rows.leave(sequence)

    def step(self) -> None:
        """Plan and launch a step, then read the tokens of the one before, as the engine does."""
        plan = self.scheduler.plan(self.now)
        for sequence in (*plan.preempted, *plan.retired):
            self.rows.leave(sequence)
        for sequence in plan.admitted:
            self.rows.seat(sequence)
        before, self.in_flight = self.in_flight, []
        decoding = [PromptChunk(sequence, 1, True) for sequence in plan.decode]
        assert set(plan.decode) == {sequence for sequence in self.rows.held if sequence.decoding}
        spent = self._mixed(decoding, plan.chunks) if self.mixes else self._apart(decoding, plan.chunks)
        self.now += spent / 1000
        self._read(before)
        self.scheduler.check()

    def _apart(self, decoding: list[PromptChunk], chunks: Many[PromptChunk]) -> float:
        spent = 0.0
        if decoding:
            self._run(decoding)
            spent += self.noise() * (self.decode_ms + ROW_MS * len(decoding))
            self.costs.observe_decode(len(decoding), spent)
        for chunk in chunks:
            cost = self.noise() * (self.pass_ms + self.token_ms * chunk.count)
            self._run([chunk])
            self.costs.observe_prefill(chunk.count, cost)
            spent += cost
        return spent

    def _mixed(self, decoding: list[PromptChunk], chunks: Many[PromptChunk]) -> float:
        tokens = sum(chunk.count for chunk in (*decoding, *chunks))
        if not tokens:
            return 0.0
        spent = self.noise() * (self.decode_ms + self.token_ms * tokens)
        self._run([*decoding, *chunks])
        if chunks:
            self.costs.observe_prefill(tokens, spent)
        else:
            self.costs.observe_decode(tokens, spent)
        return spent

    def _run(self, chunks: Many[PromptChunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            row = self.rows.held[sequence]
            assert len(row) == sequence.computed
            row += [self._token(sequence, sequence.computed + number) for number in range(chunk.count)]
            sequence.computed += chunk.count
            if chunk.final:
                self.in_flight.append((sequence, expected_token(sequence.ticket, sequence.sampled)))
                sequence.sampled += 1
                sequence.decoding = True

    def _token(self, sequence: TokenSequence, position: int) -> int:
        number = position - len(sequence.prompt)
        return sequence.prompt[position] if number < 0 else expected_token(sequence.ticket, number)

    def _read(self, results: list[tuple[TokenSequence, int]]) -> None:
        for sequence, token in results:
            if sequence.ended:
                continue
            sequence.tokens.append(token)
            last = self.last_token_at.get(sequence.ticket, self.now)
            self.stalls[sequence.ticket] = max(self.stalls.get(sequence.ticket, 0.0), self.now - last)
            self.last_token_at[sequence.ticket] = self.now
            if len(sequence.generated) == sequence.limit:
                sequence.ended = True
                self.alive.remove(sequence)
                self.finished.append(sequence)
                self.scheduler.remove(sequence)
                self.rows.leave(sequence)
