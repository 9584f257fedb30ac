"""A draft model: a smaller model next to the target, with rows, pages and a prefix cache of its own.

`DraftModelProposer` speculates with it; SpecPrefill's scorer shares it. Each sequence that it proposes for has a row,
whose tokens are the sequence's known ones and, behind them, its last draft. A long prompt is prefilled in chunks, one
in each step, before the first draft, and cached like the target's prefixes, so that the next turn of a conversation
does not begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from ingot.cache.footprint import Footprint, round_up_capacity
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.engine.forward_pass import BatchPart, PassPlanner
from ingot.engine.memory_budget import KVReservations, MemoryBudget
from ingot.engine.prefix_cache import PrefixCache
from ingot.engine.sampling import count_accepted
from ingot.engine.scheduler import PromptChunk
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import DraftOffer, Proposal, transpose_depths
from ingot.engine.step_costs import StepCosts
from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter

LONGEST_MODEL_DRAFT = 16
"""Most draft tokens at once."""


@dataclass(eq=False, slots=True)
class _DraftReader:
    """The draft model's state of a sequence. `own` is the sequence as the draft model has it: with the same tokens, but
    a row and computed tokens of its own."""

    own: TokenSequence
    known: int = 0  # tokens that were known when the draft was made
    draft: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()

    @property
    def row(self) -> Row:
        assert self.own.row is not None
        return self.own.row

    @property
    def reserved(self) -> ReservedTokens:
        return self.own, round_up_capacity(self.own.total + LONGEST_MODEL_DRAFT)

    @property
    def current(self) -> bool:
        """No token came since the draft was made."""
        return bool(self.draft) and self.known == len(self.own.tokens)


class DraftModelProposer:
    name = "draft"

    def __init__(self, model: DraftModel, *, vocab: int) -> None:
        """`vocab` is the target's. Raises ModelError where the model cannot be a draft model."""
        self.model, self.rows, self.prefix_cache = model, model.rows, model.prefix_cache
        if "recurrent" in self.rows.kinds:
            raise ModelError(
                f"A model of type {model.adapter.family} cannot be a draft: its recurrent layers cannot rewind to the "
                "first rejected token. Choose one with attention in all its layers."
            )
        self._adapter, self._vocab = model.adapter, vocab
        self._readers: dict[TokenSequence, _DraftReader] = {}
        model.add_holder(self._with_rows, self._leave_all)

    def offers(self, rows: Many[TokenSequence]) -> list[DraftOffer | None]:
        readers = [self._reader(row) for row in rows]
        fitting = self._fitting(readers)
        for reader in readers:
            if reader not in fitting:
                self._leave(reader)
        return [DraftOffer(self.name, LONGEST_MODEL_DRAFT) if reader in fitting else None for reader in readers]

    def propose(self, rows: Many[TokenSequence], counts: Many[int]) -> list[Proposal]:
        readers = [self._reader(row) for row in rows]
        behind = {
            reader: count for reader, count in zip(readers, counts, strict=True) if count > 0 and not reader.current
        }
        for reader in behind:
            self._prepare_row(reader)
        self.model.make_room_for_running()
        self._make_drafts(behind)
        return [
            Proposal(reader.draft[:count], self.name, reader.confidences[:count])
            for reader, count in zip(readers, counts, strict=True)
        ]

    def forget(self, sequence: TokenSequence) -> None:
        reader = self._readers.pop(sequence, None)
        if reader is not None:
            self._leave(reader)

    @property
    def follows(self) -> Collection[TokenSequence]:
        return self._readers.keys()

    def rest(self) -> None:
        self.check()
        self.rows.trim()

    def check(self) -> None:
        self.model.check()

    # Rows

    def _reader(self, sequence: TokenSequence) -> _DraftReader:
        reader = self._readers.get(sequence)
        if reader is None:
            reader = self._readers[sequence] = _DraftReader(draft_view_of(sequence))
        own = reader.own
        if sequence.thinned is not None:
            own.tokens += sequence.generated[own.produced :]
        own.sampled = sequence.produced
        return reader

    def _fitting(self, readers: Many[_DraftReader]) -> set[_DraftReader]:
        """Those that fit into memory and the context, first those that have a row already."""
        able = [reader for reader in readers if reader.own.total + LONGEST_MODEL_DRAFT <= self._adapter.context]
        among = {reader.own for reader in readers}
        if self.model.fits([reader.reserved for reader in able], among):
            return set(able)
        fitting: list[_DraftReader] = []
        for reader in sorted(able, key=lambda reader: reader.own.row is None):
            if self.model.fits([each.reserved for each in (*fitting, reader)], among):
                fitting.append(reader)
        return set(fitting)

    def _prepare_row(self, reader: _DraftReader) -> None:
        """Give it a row without rejected tokens, and with something left to compute."""
        own = reader.own
        if own.row is None:
            self.prefix_cache.admit(own)
            own.row = self.rows.new()
            self.prefix_cache.restore(own)
        self._rewind(reader, own.total - 1)
        own.computed = reader.row.length

    def _leave(self, reader: _DraftReader) -> None:
        """Cache what it computed, and give back its row, if it has one."""
        own = reader.own
        if own.row is not None:
            self._rewind(reader, len(own.tokens))
            self.prefix_cache.keep(own, last=True)
            self.rows.leave(own.row)
            own.row, own.decoding, own.computed, own.kept = None, False, 0, 0

    def _with_rows(self) -> list[ReservedTokens]:
        return [reader.reserved for reader in self._readers.values() if reader.own.row is not None]

    def _leave_all(self) -> None:
        for reader in self._readers.values():
            self._leave(reader)

    def _rewind(self, reader: _DraftReader, most: int) -> None:
        """Drop draft tokens that were not accepted from the row, and all tokens behind so many."""
        row, tokens = reader.row, reader.own.tokens
        stored = reader.draft[: max(0, row.length - reader.known)]
        sampled = tokens[reader.known : reader.known + len(stored)]
        accepted = count_accepted(stored[: len(sampled)], sampled)
        self.rows.rewind(row, min(most, row.length - len(stored) + accepted))
        reader.draft = reader.confidences = ()

    # Forward passes

    def _make_drafts(self, counts: dict[_DraftReader, int]) -> None:
        ready, chunks = _split_due(list(counts))
        ready.sort(key=lambda reader: -counts[reader])
        if not (ready or chunks):
            return
        logits = self._prefill(ready, chunks)
        depths = [counts[reader] for reader in ready]
        tokens, confidences = self._chain(ready, depths, logits) if ready else ([], [])
        mx.eval(logits, tokens, confidences, self.rows.pending())
        drafts, certainties = transpose_depths(tokens, len(ready)), transpose_depths(confidences, len(ready))
        for number, reader in enumerate(ready):
            reader.known = reader.own.total
            reader.draft, reader.confidences = tuple(map(int, drafts[number])), tuple(certainties[number])

    def _prefill(self, ready: list[_DraftReader], chunks: dict[_DraftReader, int]) -> mx.array:
        """Compute known tokens; the logits behind the last token of those that are ready, in order."""
        readers = {reader.own: reader for reader in ready}
        pieces = [PromptChunk(reader.own, count, final=False) for reader, count in chunks.items()]
        outputs: list[mx.array] = []
        order: list[_DraftReader] = []
        for parts in self.model.passes.of(list(readers), pieces):
            outputs.append(self._run(parts))
            order += [readers[own] for part in parts if part.samples for own in part.sequences]
            mx.async_eval(outputs[-1], self.rows.pending())
        logits = mx.concatenate(outputs)
        return logits[mx.array([order.index(reader) for reader in ready])] if ready else logits

    def _run(self, parts: list[BatchPart]) -> mx.array:
        """A pass over known tokens; the logits that drafts begin with, or of one token to evaluate the pass by."""
        rows = [(part, own) for part in parts for own in part.sequences]
        tokens = [token for part, own in rows for token in own.tokens[own.computed : own.computed + part.width]]
        ends = list(accumulate(part.width for part, _ in rows))
        at = [end - 1 for end, (part, _) in zip(ends, rows, strict=True) if part.samples]
        launched = [part.part for part in parts]
        logits = self._adapter.run(self.rows, mx.array(tokens, dtype=mx.uint32), launched, at or [ends[-1] - 1])
        for part, own in rows:
            own.computed += part.width
            if not own.decoding:
                self.prefix_cache.keep(own, last=part.samples)  # now: draft tokens behind it may be rejected
                own.decoding = part.samples
        return logits if at else logits[:0]

    def _chain(
        self, readers: list[_DraftReader], depths: list[int], logits: mx.array
    ) -> tuple[list[mx.array], list[mx.array]]:
        """The likeliest tokens and their probabilities, by depth: each for as many of the first as go that deep."""
        tokens: list[mx.array] = []
        confidences: list[mx.array] = []
        for depth in range(depths[0]):
            going = [reader.row for reader, most in zip(readers, depths, strict=True) if most > depth]
            if depth:
                logits = self._step(going, tokens[-1][: len(going)], depth)
            likelihoods = mx.softmax(logits[:, : self._vocab].astype(mx.float32), axis=-1)
            tokens.append(mx.argmax(likelihoods, axis=-1).astype(mx.uint32))
            confidences.append(mx.max(likelihoods, axis=-1))
            mx.async_eval(tokens[-1], confidences[-1], self.rows.pending())
        return tokens, confidences

    def _step(self, rows: list[Row], tokens: mx.array, tentative: int) -> mx.array:
        """One more token of each row."""
        if self._adapter.ragged:
            return self._adapter.run(self.rows, tokens, [ForwardPart(tuple(rows), 1, tentative=tentative)])
        each = [
            self._adapter.run(self.rows, tokens[number : number + 1], [ForwardPart((row,), 1, tentative=tentative)])
            for number, row in enumerate(rows)
        ]
        return mx.concatenate(each)


def _split_due(readers: list[_DraftReader]) -> tuple[list[_DraftReader], dict[_DraftReader, int]]:
    """Which can prefill all that is left in this step, and which a chunk of it: those with little left first."""
    ready: list[_DraftReader] = []
    pieces: dict[_DraftReader, int] = {}
    left = CATCH_UP_TOKENS
    for reader in sorted(readers, key=lambda reader: reader.own.remaining):
        count = min(left, reader.own.remaining)
        left -= count
        if count == reader.own.remaining:
            ready.append(reader)
        elif count:
            pieces[reader] = count
    return ready, pieces


CATCH_UP_TOKENS = 512
"""Tokens that are prefilled in one step, of all sequences together."""
LONGEST_DRAFT_PASS = 2048
"""The most tokens of a prompt in one pass, where nothing waits for its end."""
ReservedTokens = tuple[TokenSequence, int]
"""A sequence, as the draft model has it, and the tokens to reserve memory for."""


class DraftModel:
    def __init__(self, adapter: ModelAdapter, budget: MemoryBudget, *, cache_bytes: int = 0) -> None:
        """Cached prefixes may take so many bytes of the budget for KV."""
        self.adapter, self.budget = adapter, budget
        self.rows = adapter.new_batch_state(budget.states)
        costs = StepCosts()
        costs.observe_prefill(1, 1.0)  # any cost will do: cached prefixes are compared only with each other
        self.prefix_cache = PrefixCache(self.rows, budget, costs, cache_bytes)
        self.passes = PassPlanner(adapter, budget)
        self._room = KVReservations(budget, self.prefix_cache.reusable_pages)
        self._holders: list[tuple[Callable[[], Many[ReservedTokens]], Callable[[], None]]] = []

    def add_holder(self, reserved: Callable[[], Many[ReservedTokens]], give_way: Callable[[], None]) -> None:
        """A user of rows: what is `reserved` for its sequences, and how it gives them up."""
        self._holders.append((reserved, give_way))

    def fits(self, reserved: Many[ReservedTokens], among: Collection[TokenSequence] = ()) -> bool:
        """Whether these fit next to all that have rows, except those that they are chosen `among`."""
        others = [each for each in self._reserved() if each[0] not in among]
        return self._room.fits([*others, *reserved])

    def release_all_rows(self) -> None:
        """Take all rows back. What was computed is cached, as far as there is room."""
        for _, give_way in self._holders:
            give_way()

    def make_room_for_running(self) -> None:
        """Evict cached prefixes that rows leave no room for."""
        self.prefix_cache.make_room_for_running(self._room.needed(self._reserved()))

    def _reserved(self) -> list[ReservedTokens]:
        return [each for reserved, _ in self._holders for each in reserved()]

    def check(self) -> None:
        self.rows.check()
        self.prefix_cache.check()
        assert self.rows.count == len(self._reserved()), "a row of the draft model was lost"


def draft_view_of(sequence: TokenSequence) -> TokenSequence:
    """A sequence as the draft model has it, which reads the whole prompt: with a row and computed tokens of its own."""
    prompt = sequence.whole_prompt
    own = TokenSequence(sequence.request, sequence.index, sequence.ticket, prompt, sequence.limit, sequence.seed)
    if sequence.thinned is None:
        own.tokens, own.marks = sequence.tokens, sequence.marks
    return own


def draft_budget(draft: ModelAdapter, target: Footprint, free: int, *, context: int, rows: int) -> MemoryBudget:
    """The draft model's part of the memory that both models' weights leave free, so that both hold as many tokens. Its
    `total` is what the draft model takes in all, weights included."""
    own, theirs = _sequence_bytes(draft.footprint, context), _sequence_bytes(target, context)
    share = free * own // max(1, own + theirs)
    weights = draft.weight_bytes
    return MemoryBudget(
        weights + share, weights, draft.footprint, context=context, widest=LONGEST_DRAFT_PASS, rows=rows
    )


def _sequence_bytes(footprint: Footprint, context: int) -> int:
    kv = sum(size * min(context, window or context) for window, size in footprint.groups)
    return kv + footprint.recurrent
