"""The runner executes a step's plan: it gives sequences batch rows, runs the model, samples tokens, and reads them
back later.

`launch` only queues work on the device. The tokens of a step are read by `collect`, usually while the next step is
already running, so that the device never waits for Python. Where sampling depends on tokens that were not read yet,
they are read while the forward pass runs. Where draft tokens are verified, how far a sequence got is known only when
its tokens are: such a step is collected before the next one is launched. Only the engine thread may call the runner.
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
    DeviceTokens,
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
from ingot.engine.speculation.draft_heads import MOST_PENDING_TOKENS, DraftHeadProposer
from ingot.engine.step_costs import StepCosts
from ingot.engine.vision_encoder import visual_inputs
from ingot.kernels.sampling import checked_sampling
from ingot.models.adapter import ModelAdapter
from ingot.models.kv_codec import record_form_of


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    passes: list[LaunchedPass]

    @property
    def verifies(self) -> bool:
        """Whether draft tokens are verified: how far its sequences got is known only when it is collected."""
        return any(position.draft for running in self.passes for position in running.positions)


class Runner:
    """Owns the batch state."""

    def __init__(
        self,
        adapter: ModelAdapter,
        budget: MemoryBudget,
        costs: StepCosts,
        cache_bytes: int,
        disk: DiskBackend | None = None,
        codec: PairCodec = RAW_CODEC,
    ) -> None:
        """Raises ConfigError where the model's KV cannot be put into that codec."""
        self._adapter, self._budget, self._costs = adapter, budget, costs
        self.rows: BatchState = adapter.new_batch_state(budget.states, budget.earlier)
        self.batch: list[TokenSequence] = []  # the sequences that have a row
        form = record_form_of(adapter, self.rows) if codec.lossy or disk is not None else None
        self.prefix_cache = PrefixCache(self.rows, budget, costs, cache_bytes, adapter.encoding(self.rows, codec, form))
        if disk is not None and form is not None:
            self.prefix_cache.attach(disk, form)
        self.room = KVReservations(budget, self.prefix_cache.reusable_pages)
        self._passes = PassPlanner(adapter, budget)
        # A CPU gains nothing by working ahead. And KV that is overwritten while an earlier reader, such as a record of
        # it, has not run yet would be copied first.
        self._is_synchronous = adapter.device.kind == "cpu"
        self._sampler = Sampler(adapter.vocab, checked_sampling(adapter.device))
        # On the device: the array that holds a sequence's newest token, and at which index.
        self._newest_tokens: dict[TokenSequence, tuple[mx.array, int]] = {}
        self._unverified: dict[TokenSequence, int] = {}  # lengths without the draft tokens that are being verified
        self._decode_hidden: list[mx.array] = []  # copies of decoding rows' hidden states, to be evaluated
        self.heads: DraftHeadProposer | None = None  # gets the hidden states, where the model has a draft head
        self._free_at = 0.0  # when the device finished the last measured pass
        self._reserved: list[tuple[TokenSequence, int]] = []

    def launch(
        self,
        plan: StepPlan,
        read_early: Callable[[], None],
        drafts: Mapping[TokenSequence, DraftTokens] = NO_DRAFT_TOKENS,
    ) -> LaunchedStep:
        """Queue the plan's work. Afterwards its sequences are as long as if the work were done, except those with draft
        tokens, which keep their length until `collect`.

        `read_early` is called where sampling depends on the tokens of the step before: it appends them to their
        sequences, and changes nothing else.
        """
        self._update_batch(plan)
        passes = self._passes.of(plan.decode, plan.chunks, drafts)
        return LaunchedStep([self._run(parts, drafts, read_early) for parts in passes])

    def collect(self, step: LaunchedStep) -> Iterable[list[list[SequenceResult]]]:
        """Wait for the step's forward passes, one by one, and yield the results of each in waves: each sequence's first
        token, then the second where a draft token was accepted, and so on."""
        for running in step.passes:
            mx.eval(running.arrays())
            if not self._is_synchronous:
                self._measure(running)
            drafts, sampled = running.drafts, read_results(running)
            valid = [self._verify(row, drafts[row], own) if row in drafts else own for row, own in sampled.items()]
            yield [[result for result in wave if result is not None] for wave in zip_longest(*valid)]

    def release(self, sequence: TokenSequence) -> None:
        """Forget a sequence that ended or was cancelled."""
        self._newest_tokens.pop(sequence, None)
        self._sampler.forget(sequence)
        confirmed = self._unverified.pop(sequence, None)
        if confirmed is not None and sequence.row is not None:
            self.rows.rewind(sequence.row, confirmed)  # draft tokens that were never verified
        self._cache_prefix(sequence, last=True)
        if self.heads is not None:
            self.heads.forget(sequence)
        self._leave(sequence)

    def abandon(self) -> None:
        """A step failed: drop all rows, as their KV may be wrong."""
        for sequence in list(self.batch):
            self._leave(sequence)
        self._newest_tokens.clear()
        self._unverified.clear()
        self._sampler.clear()

    def rest(self) -> None:
        """Nothing runs: free the memory of unused pages."""
        # On CPUs mlx waits for all threads' work before it clears its cache, which is small there, and blocks Python.
        if not self.batch and self.rows.trim() and not self._is_synchronous:
            mx.clear_cache()
        self.prefix_cache.rest()

    def free(self) -> None:
        """Free all KV, cached prefixes too, however inconsistent the state is. The last call."""
        for sequence in self.batch:
            sequence.row, sequence.decoding = None, False
        self.batch.clear()
        self._newest_tokens.clear()
        self._sampler.clear()
        self._decode_hidden.clear()
        if self.heads is not None:
            self.heads.free()
        self.prefix_cache.free()
        self.rows.free()
        if not self._is_synchronous:  # see `rest`
            mx.clear_cache()

    def check(self) -> None:
        self.rows.check()
        self.prefix_cache.check()
        assert self.rows.count == len(self.batch), "a row belongs to no sequence"
        for sequence in self.batch:
            assert sequence.row is not None and sequence.row.length == sequence.computed, "a row is not its sequence's"

    # The batch

    def _update_batch(self, plan: StepPlan) -> None:
        for sequence in plan.retired:
            self._cache_prefix(sequence, last=True)
        for sequence in (*plan.preempted, *plan.retired):
            self._leave(sequence)
        if any(map(self.prefix_cache.needs_new_pages, plan.admitted)):
            coming = [(sequence, sequence.reserved) for sequence in (*self.batch, *plan.admitted)]
            self.prefix_cache.make_room_for_running(self.room.needed(coming))
        for sequence in plan.admitted:
            digest = sequence.request.lora_digest
            lora = self._adapter.loras.slot(digest) if digest else 0
            sequence.row = self.rows.new(exact=sequence.request.exact, lora=lora)
            self.batch.append(sequence)
            self.prefix_cache.restore(sequence)
            if self.heads is not None:
                self.heads.begin(sequence)
        reserved = [(sequence, sequence.reserved) for sequence in self.batch]
        if reserved != self._reserved:
            self._reserved = reserved
            self.prefix_cache.make_room_for_running(self.room.needed(reserved))

    def _cache_prefix(self, sequence: TokenSequence, *, last: bool) -> None:
        if self.heads is not None:
            self.heads.catch_up([sequence])  # a sequence that reuses its pages finds the head's KV there
        self.prefix_cache.keep(sequence, last=last)

    def _leave(self, sequence: TokenSequence) -> None:
        if sequence.row is not None:
            self.rows.leave(sequence.row)
            self.batch.remove(sequence)
            sequence.row, sequence.decoding = None, False

    # Forward passes

    def _run(
        self, parts: list[BatchPart], drafts: Mapping[TokenSequence, DraftTokens], read_early: Callable[[], None]
    ) -> LaunchedPass:
        """Start a forward pass and update its sequences as if it were done."""
        if self._is_synchronous:
            mx.synchronize()
        began = time.perf_counter()
        logits = self._forward(parts, drafts)
        sampling = [row for part in parts if part.samples for row in part.sequences]
        positions = tuple(position for row in sampling for position in draft_positions(row, drafts.get(row, ())))
        scored = self._score(parts[0], logits) if parts[0].scoring else None
        sampled = self._sampler.sample(logits[-len(positions) :], positions, read_early) if positions else None
        prefill = not all(part.decoding for part in parts)
        tokens = sum(part.tokens for part in parts)
        marker = mx.sum(logits) if sampled is None and scored is None else None
        running = LaunchedPass(positions, sampled, marker, tokens, prefill, began, scored)
        hidden, self._decode_hidden = self._decode_hidden, []
        mx.async_eval(running.arrays(), self.rows.pending(), hidden)
        if self._is_synchronous:
            mx.synchronize()
            self._measure(running)
        self._advance_sequences(running, parts)
        if self.heads is not None:
            self.heads.catch_up(running.rows, least=MOST_PENDING_TOKENS)
        return running

    def _forward(self, parts: list[BatchPart], drafts: Mapping[TokenSequence, DraftTokens]) -> mx.array:
        """Logits where a token is sampled, or of all tokens of a prompt that is scored."""
        by_part = [self._tokens(part, drafts) for part in parts]
        tokens = by_part[0] if len(by_part) == 1 else mx.concatenate(by_part)
        ends = list(accumulate(part.width for part in parts for _ in part.sequences))
        counts = [part.draft_tokens + 1 if part.samples else 0 for part in parts for _ in part.sequences]
        at = [index for end, count in zip(ends, counts, strict=True) for index in range(end - count, end)]
        # Where nothing is sampled, the last token's logits show that the pass is done: small, and computed last.
        wanted = None if parts[0].scoring else at or [ends[-1] - 1]
        forward_parts = [part.part for part in parts]
        visual = visual_inputs((row, row.computed, part.width) for part in parts for row in part.sequences)
        if self.heads is None:
            return self._adapter.run(self.rows, tokens, forward_parts, wanted, visual=visual)
        logits, hidden = self._adapter.run(self.rows, tokens, forward_parts, wanted, hidden=True, visual=visual)
        self._pass_to_heads(self.heads, parts, hidden)
        return logits

    def _pass_to_heads(self, heads: DraftHeadProposer, parts: list[BatchPart], hidden: mx.array) -> None:
        """Those of decoding rows are copied: they may be kept for long, and would keep a prompt's alive."""
        decoding = sum(part.tokens for part in parts if part.decoding)
        if 0 < decoding < hidden.shape[0]:
            small = mx.take(hidden, mx.arange(decoding), axis=0)
            self._decode_hidden.append(small)
        else:
            small = hidden
        end = 0
        for part in parts:
            for row in part.sequences:
                end += part.width
                heads.observe_hidden(row, small if part.decoding else hidden, end - part.width, end)

    def _tokens(self, part: BatchPart, drafts: Mapping[TokenSequence, DraftTokens]) -> mx.array:
        if part.decoding and part.width == 1:
            return self._next_tokens(part.sequences)
        # A sequence with more than one token to compute, of its prompt or of a draft, has read them all.
        own = part.width - part.draft_tokens
        rows: list[DraftTokens] = []
        for row in part.sequences:
            rows += row.tokens[row.computed : row.computed + own], drafts.get(row, ())[: part.draft_tokens]
        if not any(isinstance(each, DeviceTokens) for each in rows):
            return mx.array([token for each in rows for token in each], dtype=mx.uint32)
        return mx.concatenate(
            [each.array if isinstance(each, DeviceTokens) else mx.array([*each], mx.uint32) for each in rows if each]
        )

    def _next_tokens(self, rows: tuple[TokenSequence, ...]) -> mx.array:
        """The rows' newest tokens, from the device where Python has not seen them yet."""
        if all(row.known for row in rows):
            return mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)
        sources = [None if row.known else self._newest_tokens[row] for row in rows]
        arrays = {id(source[0]): source[0] for source in sources if source is not None}
        if len(arrays) == 1 and None not in sources:
            newest, indices = arrays.popitem()[1], [source[1] for source in sources if source is not None]
            return newest if indices == list(range(newest.shape[0])) else newest[mx.array(indices)]
        return mx.stack(
            [
                mx.array(row.tokens[-1], dtype=mx.uint32) if source is None else source[0][source[1]]
                for row, source in zip(rows, sources, strict=True)
            ]
        )

    def _score(self, part: BatchPart, logits: mx.array) -> tuple[TokenSequence, SampledTokens] | None:
        """Logprobs of the prompt tokens that follow those of the chunk. What was scored before the row was preempted is
        not scored again."""
        row = part.sequences[0]
        done = max(0, row.scored - row.computed)
        targets = row.prompt[row.computed + 1 : row.computed + part.width + 1][done:]
        if not targets:
            return None
        row.scored += len(targets)
        top = row.sampling.prompt_logprobs or 0
        return row, score_tokens(logits[done : done + len(targets)].astype(mx.float32), mx.array(targets), top)

    def _advance_sequences(self, running: LaunchedPass, parts: list[BatchPart]) -> None:
        for index, position in enumerate(running.positions):
            assert running.sampled is not None
            if not position.draft:
                self._newest_tokens[position.sequence] = (running.sampled.tokens, index)
        for part in parts:
            for row in part.sequences:
                row.passes += row.decoding
                if part.draft_tokens:
                    self._unverified[row] = row.total
                    continue  # how many are accepted is not known yet
                row.computed += part.width
                row.sampled += part.samples
                if not row.decoding:
                    self._cache_prefix(row, last=part.samples)
                    row.decoding = part.samples

    def _measure(self, running: LaunchedPass) -> None:
        now = time.perf_counter()
        spent = now - max(self._free_at, running.began)
        self._free_at = now
        if running.prefill:
            self._costs.observe_prefill(running.tokens, 1000 * spent)
        elif running.tokens == len(running.positions) == len(running.rows):
            self._costs.observe_decode(running.tokens, 1000 * spent)

    def _verify(self, row: TokenSequence, draft: DraftTokens, sampled: list[SequenceResult]) -> list[SequenceResult]:
        """Of the sampled tokens those that are valid, to which the sequence is rewound."""
        tokens = [result.token for result in sampled if result.token is not None]
        # A stop token ends the sequence where it was sampled.
        stopped = next((at for at, token in enumerate(tokens) if token in row.stop_tokens), len(draft))
        accepted = min(count_accepted(draft, tokens), stopped)
        if self._unverified.pop(row, None) is None or row.row is None:  # it ended while the pass ran
            return sampled[:1]
        if self.heads is not None:
            self.heads.truncate(row, row.total + accepted)
        row.computed = self.rows.rewind(row.row, row.total + accepted)
        row.sampled += accepted + 1
        row.proposed += len(draft)
        row.accepted += accepted
        row.unread = tokens[: accepted + 1]
        self._sampler.add_to_history(row, row.unread)
        return sampled[: accepted + 1]
