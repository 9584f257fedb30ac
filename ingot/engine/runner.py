"""Runs a plan: gives sequences rows, launches the model, samples tokens, and reads them back later.

`launch` only queues work on the device. The tokens of a step are read by `collect`, usually while the next step is
already running, so that the device never waits for Python. Where a draw depends on tokens that were not read yet,
the forward pass before it does not: it is under way while they are read. Where draft tokens are verified, how far
a sequence got is known only when its draws are: such a step is collected before the next is launched. Owns the
rows; only the engine thread may call it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import mlx.core as mx

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.engine.forward_pass import (
    NO_DRAFT_TOKENS,
    BatchPart,
    DraftTokens,
    LaunchedPass,
    PassPlanner,
    SequenceResult,
    read_results,
)
from ingot.engine.memory_budget import KVReservations, MemoryBudget
from ingot.engine.prefix_cache import PrefixCache
from ingot.engine.sampling import SampledTokens, Sampler, count_accepted, draft_positions, score_tokens
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.draft_heads import MOST_WAITING_TOKENS, DraftHeadProposer
from ingot.engine.step_costs import StepCosts
from ingot.engine.vision_encoder import visual_inputs
from ingot.kernels.sampling import checked_sampling
from ingot.models.adapter import ModelAdapter
from ingot.models.kv_codec import record_form_of


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    launched: list[LaunchedPass]

    @property
    def verifies(self) -> bool:
        """Whether how far its sequences got is known only when it is collected."""
        return any(place.guessed for launched in self.launched for place in launched.places)


class Runner:
    """Owns the rows. Only the engine thread may call it."""

    def __init__(
        self,
        adapter: ModelAdapter,
        budget: MemoryBudget,
        costs: StepCosts,
        cache_bytes: int,
        disk: DiskBackend | None = None,
        codec: PairCodec = RAW_CODEC,
    ) -> None:
        """Raises ConfigError where the model's states cannot be put into that codec."""
        self._adapter, self._budget, self._costs = adapter, budget, costs
        self.rows: BatchState = adapter.new_batch_state(budget.states, budget.earlier)
        self.seated: list[TokenSequence] = []  # those that have a row
        form = record_form_of(adapter, self.rows) if codec.lossy or disk is not None else None
        self.reuse = PrefixCache(self.rows, budget, costs, cache_bytes, adapter.encoding(self.rows, codec, form))
        if disk is not None and form is not None:
            self.reuse.attach(disk, form)
        self.room = KVReservations(budget, self.reuse.reusable_pages)
        self._passes = PassPlanner(adapter, budget)
        # A CPU gains nothing by working ahead; and states that are written while others are still to read them, such as
        # a record of them that is being made, are copied first.
        self._is_synchronous = adapter.device.kind == "cpu"
        self._sampler = Sampler(adapter.vocab, checked_sampling(adapter.device))
        self._latest: dict[TokenSequence, tuple[mx.array, int]] = {}
        self._unverified: dict[
            TokenSequence, int
        ] = {}  # how many tokens are sure of those for which something was guessed
        self._handed: list[mx.array] = []  # hidden states that were picked out of a pass's
        self.heads: DraftHeadProposer | None = None  # whom to tell what passes computed, where the model has a head
        self._free_at = 0.0
        self._reserved: list[tuple[TokenSequence, int]] = []

    def launch(
        self,
        plan: StepPlan,
        catch_up: Callable[[], None],
        drafts: Mapping[TokenSequence, DraftTokens] = NO_DRAFT_TOKENS,
    ) -> LaunchedStep:
        """Queue the plan's work. Afterwards every sequence of it is as long as if the work were done, but those for
        which something was guessed: all their tokens are known, and they are as long as they were until `collect`.

        `catch_up` is called where a row's draw depends on the tokens of the step before: it sees to it that the rows
        know them, and changes nothing else.
        """
        self._seat(plan)
        passes = self._passes.of(plan.decode, plan.chunks, drafts)
        return LaunchedStep([self._run(parts, drafts, catch_up) for parts in passes])

    def collect(self, step: LaunchedStep) -> Iterable[list[list[SequenceResult]]]:
        """Wait for the step's launches, one after another, and yield each one's results: those with each sequence's
        first token, then those with its second, where a guess was right, and so on."""
        for launched in step.launched:
            mx.eval(launched.arrays())
            if not self._is_synchronous:
                self._measure(launched)
            yield self._waves(launched)

    def release(self, sequence: TokenSequence) -> None:
        """Forget a sequence that ended or was cancelled."""
        self._latest.pop(sequence, None)
        self._sampler.forget(sequence)
        self._take_back(sequence)
        self._keep(sequence, last=True)
        if self.heads is not None:
            self.heads.forget(sequence)
        self._leave(sequence)

    def abandon(self) -> None:
        """A step failed: whatever the rows hold is not to be trusted."""
        for sequence in list(self.seated):
            self._leave(sequence)
        self._latest.clear()
        self._unverified.clear()
        self._sampler.clear()

    @property
    def active_bytes(self) -> int:
        """What mlx has in use, for whatever it is."""
        return mx.get_active_memory()

    def rest(self) -> None:
        """Nothing runs: give back the memory of states that nobody holds."""
        # On CPUs mlx waits for all threads' work to clear its cache, which is small there, and holds Python up
        # meanwhile.
        if not self.seated and self.rows.trim() and not self._is_synchronous:
            mx.clear_cache()
        self.reuse.rest()

    def free(self) -> None:
        """Let go of the memory of all states, kept ones too, whatever is wrong with the books. The last call."""
        for sequence in self.seated:
            sequence.row, sequence.decoding = None, False
        self.seated.clear()
        self._latest.clear()
        self._sampler.clear()
        self._handed.clear()
        if self.heads is not None:
            self.heads.free()
        self.reuse.free()
        self.rows.free()
        if not self._is_synchronous:  # see `rest`
            mx.clear_cache()

    def close(self) -> None:
        self.reuse.close()

    def check(self) -> None:
        self.rows.check()
        self.reuse.check()
        assert self.rows.count == len(self.seated), "a row is nobody's"
        for sequence in self.seated:
            assert sequence.row is not None and sequence.row.length == sequence.computed, "a row is not its sequence's"

    # Seating

    def _seat(self, plan: StepPlan) -> None:
        for sequence in plan.retired:
            self._keep(sequence, last=True)
        for sequence in (*plan.preempted, *plan.retired):
            self._leave(sequence)
        if any(map(self.reuse.needs_new_pages, plan.admitted)):
            coming = [(sequence, sequence.reserved) for sequence in (*self.seated, *plan.admitted)]
            self.reuse.make_room_for_running(self.room.needed(coming))
        for sequence in plan.admitted:
            sequence.row = self.rows.new(exact=sequence.request.exact, lora=self._slot(sequence))
            self.seated.append(sequence)
            self.reuse.restore(sequence)
            if self.heads is not None:
                self.heads.begin(sequence)
        reserved = [(sequence, sequence.reserved) for sequence in self.seated]
        if reserved != self._reserved:
            self._reserved = reserved
            self.reuse.make_room_for_running(self.room.needed(reserved))

    def _slot(self, sequence: TokenSequence) -> int:
        digest = sequence.request.lora_digest
        return self._adapter.loras.slot(digest) if digest else 0

    def _keep(self, sequence: TokenSequence, *, last: bool) -> None:
        if self.heads is not None:
            self.heads.catch_up([sequence])  # whoever takes over its pages finds there what the head needs
        self.reuse.keep(sequence, last=last)

    def _leave(self, sequence: TokenSequence) -> None:
        if sequence.row is not None:
            self.rows.leave(sequence.row)
            self.seated.remove(sequence)
            sequence.row, sequence.decoding = None, False

    # Forward passes

    def _run(
        self, parts: list[BatchPart], drafts: Mapping[TokenSequence, DraftTokens], catch_up: Callable[[], None]
    ) -> LaunchedPass:
        """Start a forward pass and account for it as done."""
        if self._is_synchronous:
            mx.synchronize()
        began = time.perf_counter()
        logits = self._forward(parts, drafts)
        drawing = [row for part in parts if part.draws for row in part.sequences]
        drawn_at = tuple(place for row in drawing for place in draft_positions(row, drafts.get(row, ())))
        scored = self._score(parts[0], logits) if parts[0].scoring else None
        drawn = self._sampler.draw(logits[-len(drawn_at) :], drawn_at, catch_up) if drawn_at else None
        prefill = not all(part.decoding for part in parts)
        tokens = sum(part.tokens for part in parts)
        witness = mx.sum(logits) if drawn is None and scored is None else None
        launched = LaunchedPass(drawn_at, drawn, witness, tokens, prefill, began, scored)
        handed, self._handed = self._handed, []
        mx.async_eval(launched.arrays(), self.rows.pending(), handed)
        if self._is_synchronous:
            mx.synchronize()
            self._measure(launched)
        self._account(launched, parts)
        if self.heads is not None:
            self.heads.catch_up(launched.rows, least=MOST_WAITING_TOKENS)
        return launched

    def _forward(self, parts: list[BatchPart], drafts: Mapping[TokenSequence, DraftTokens]) -> mx.array:
        """Logits wherever something is drawn, or of all tokens of a prompt that is scored."""
        tokens = [self._tokens(part, drafts) for part in parts]
        ends = list(accumulate(part.width for part in parts for _ in part.sequences))
        drawn = [part.guessed + 1 if part.draws else 0 for part in parts for _ in part.sequences]
        at = [place for end, count in zip(ends, drawn, strict=True) for place in range(end - count, end)]
        # Where nobody draws, the last token's stand for the work: there is nothing else that is small and made last.
        wanted = None if parts[0].scoring else at or [ends[-1] - 1]
        launched = [part.part for part in parts]
        visual = visual_inputs((row, row.computed, part.width) for part in parts for row in part.sequences)
        if self.heads is None:
            return self._adapter.run(self.rows, _concatenate_tokens(tokens), launched, wanted, visual=visual)
        logits, hidden = self._adapter.run(
            self.rows, _concatenate_tokens(tokens), launched, wanted, hidden=True, visual=visual
        )
        self._show_heads(parts, hidden)
        return logits

    def _show_heads(self, parts: list[BatchPart], hidden: mx.array) -> None:
        """Hand over the hidden states of a pass. Those of decoding rows may wait for long, and not with a prompt's."""
        assert self.heads is not None
        decoding = sum(part.tokens for part in parts if part.decoding)
        if 0 < decoding < hidden.shape[0]:
            small = mx.take(hidden, mx.arange(decoding), axis=0)
            self._handed.append(small)
        else:
            small = hidden
        end = 0
        for part in parts:
            for row in part.sequences:
                end += part.width
                self.heads.saw(row, small if part.decoding else hidden, end - part.width, end)

    def _tokens(self, part: BatchPart, drafts: Mapping[TokenSequence, DraftTokens]) -> mx.array:
        if part.decoding and part.width == 1:
            return self._next_tokens(part.sequences)
        # Whoever has more than one to compute, a prompt's or guessed ones, knows them.
        known = part.width - part.guessed
        rows = [
            [*row.tokens[row.computed : row.computed + known], *drafts.get(row, ())[: part.guessed]]
            for row in part.sequences
        ]
        return mx.array([token for row in rows for token in row], dtype=mx.uint32)

    def _next_tokens(self, rows: tuple[TokenSequence, ...]) -> mx.array:
        """The rows' newest tokens, from the device where Python has not seen them yet."""
        if all(row.known for row in rows):
            return mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)
        sources = [None if row.known else self._latest[row] for row in rows]
        arrays = {id(source[0]): source[0] for source in sources if source is not None}
        if len(arrays) == 1 and None not in sources:
            newest, places = arrays.popitem()[1], [source[1] for source in sources if source is not None]
            return newest if places == list(range(newest.shape[0])) else newest[mx.array(places)]
        return mx.stack(
            [
                mx.array(row.tokens[-1], dtype=mx.uint32) if source is None else source[0][source[1]]
                for row, source in zip(rows, sources, strict=True)
            ]
        )

    def _score(self, part: BatchPart, logits: mx.array) -> tuple[TokenSequence, SampledTokens] | None:
        """Logprobs of the prompt tokens that follow the chunk's; the prompt's last token has none to predict. What
        was scored before the row was preempted is not scored again."""
        row = part.sequences[0]
        known = max(0, row.scored - row.computed)
        targets = row.prompt[row.computed + 1 : row.computed + part.width + 1][known:]
        if not targets:
            return None
        row.scored += len(targets)
        top = row.sampling.prompt_logprobs or 0
        return row, score_tokens(logits[known : known + len(targets)].astype(mx.float32), mx.array(targets), top)

    def _account(self, launched: LaunchedPass, parts: list[BatchPart]) -> None:
        for number, place in enumerate(launched.places):
            assert launched.drawn is not None
            if not place.guessed:
                self._latest[place.sequence] = (launched.drawn.tokens, number)
        for part in parts:
            for row in part.sequences:
                row.passes += row.decoding
                if part.guessed:
                    self._unverified[row] = row.total
                    continue  # how far it got is not known yet
                row.computed += part.width
                row.sampled += part.draws
                if not row.decoding:
                    self._keep(row, last=part.draws)
                    row.decoding = part.draws

    def _measure(self, launched: LaunchedPass) -> None:
        now = time.perf_counter()
        spent = now - max(self._free_at, launched.began)
        self._free_at = now
        if launched.prefill:
            self._costs.observe_prefill(launched.tokens, 1000 * spent)
        elif launched.tokens == len(launched.places) == len(launched.rows):
            self._costs.observe_decode(launched.tokens, 1000 * spent)

    # Results

    def _waves(self, launched: LaunchedPass) -> list[list[SequenceResult]]:
        drafts, drawn = launched.drafts, read_results(launched)
        given = [self._verified(row, drafts[row], own) if row in drafts else own for row, own in drawn.items()]
        return [[result for result in wave if result is not None] for wave in zip_longest(*given)]

    def _verified(self, row: TokenSequence, guess: DraftTokens, drawn: list[SequenceResult]) -> list[SequenceResult]:
        """The draws that count; the sequence is as long as they make it."""
        tokens = [result.token for result in drawn if result.token is not None]
        right = count_accepted(guess, tokens)
        if self._unverified.pop(row, None) is None or row.row is None:  # it ended while the pass ran
            return drawn[:1]
        if self.heads is not None:
            self.heads.settled(row, row.total + right)
        row.computed = self.rows.rewind(row.row, row.total + right)
        row.sampled += right + 1
        row.proposed += len(guess)
        row.accepted += right
        row.unread = tokens[: right + 1]
        self._sampler.learn(row, row.unread)
        return drawn[: right + 1]

    def _take_back(self, sequence: TokenSequence) -> None:
        """Let a row forget guessed tokens that were never verified."""
        sure = self._unverified.pop(sequence, None)
        if sure is not None and sequence.row is not None:
            self.rows.rewind(sequence.row, sure)


def _concatenate_tokens(tokens: list[mx.array]) -> mx.array:
    return tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)
