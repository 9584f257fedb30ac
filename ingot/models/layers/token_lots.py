"""Prompts by decode graphs, in lots of tokens.

Where a token's bits are to depend on nothing but its row, prompts are computed by the kernels of decode steps: each of
them has one order for the sums of a number, whatever the batch. A pass is cut into lots of as many tokens as there is
memory for, and the tokens of a row into pieces of as many queries as attention takes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import MixedBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.kernels.paged_attention.inputs import MOST_QUERIES, PROMPT_ROOMS, KernelRows, padded_count, token_slots
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.models.layers.graph_inputs import GraphStep, StepContext

PARTIAL_BYTES = 600 << 20
"""What a lot's attention may keep of KV splits until they are merged."""


class RowPiece(NamedTuple):
    """Consecutive tokens of a row."""

    first: int  # its first token in the pass
    tokens: int
    row: int  # its number in the pass
    slot: int  # of recurrent states
    target: int  # where those are afterwards
    start: int  # the first token's index in its row

    @property
    def end(self) -> int:
        return self.first + self.tokens


@dataclass(frozen=True, slots=True)
class TokenLot:
    """Consecutive tokens of a pass."""

    pieces: tuple[RowPiece, ...]

    @property
    def begin(self) -> int:
        return self.pieces[0].first

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    def kernel_rows(self, state: AppendState, storage: KernelStorage, mixed: MixedBatch) -> KernelRows:
        """Its pieces as rows: each sees what came before it, and itself."""
        tables = [table for part in mixed.parts for table in state.tables(part)]
        lengths = [piece.start + piece.tokens for piece in self.pieces]
        return storage.rows([tables[each.row] for each in self.pieces], lengths, [each.tokens for each in self.pieces])

    def recurrent_spans(self) -> RecurrentSpans:
        """Its tokens of each row, one after another."""
        rows = [[*pieces] for _, pieces in groupby(self.pieces, key=lambda piece: piece.row)]
        spans = [(own[0].first - self.begin, own[-1].end - own[0].first, own[0].slot, own[0].start) for own in rows]
        return RecurrentSpans.of(spans, [own[0].target for own in rows])

    def cut(self, data: mx.array, room: int = 0) -> mx.array:
        """What a pass has for its tokens, of these alone; padded with zeros to so many."""
        own = data[self.begin : self.end]
        return own if own.shape[0] >= room else mx.pad(own, [(0, room - own.shape[0])] + [(0, 0)] * (own.ndim - 1))

    def slots(self, places: mx.array) -> mx.array:
        """Likewise, where keys and values are written; padding is written nowhere."""
        own, room = self.cut(places), token_slots([(0, 0)] * (self.end - self.begin)).shape[0]
        return mx.concatenate([own, mx.full((room - own.shape[0], 2), -1, mx.int32)])


def token_lots(mixed: MixedBatch, most: int) -> list[TokenLot]:
    """The tokens of a pass in lots of at most so many."""
    lots: list[list[RowPiece]] = [[]]
    for piece in _pieces(mixed):
        if lots[-1] and piece.end - lots[-1][0].first > most:
            lots.append([])
        lots[-1].append(piece)
    return [TokenLot(tuple(pieces)) for pieces in lots]


def _pieces(mixed: MixedBatch) -> Iterator[RowPiece]:
    rows = zip(mixed.pieces, mixed.targets, strict=True)
    for number, ((first, count, slot, start), target) in enumerate(rows):
        for at in range(0, count, MOST_QUERIES):
            read = target if at else slot
            yield RowPiece(first + at, min(MOST_QUERIES, count - at), number, read, target, start + at)


def lot_tokens(context: StepContext, mixed: MixedBatch) -> int:
    """The most tokens of a lot of this pass."""
    longest = max(start + count for _, count, _, start in mixed.pieces)
    token_bytes = 0
    for layer in context.layers.values():
        kind, shape = context.kinds[layer.kind], layer.attention.shape
        splits = kind.bounded(1 << kind.splits.number_at(longest - 1).bit_length(), MOST_QUERIES)
        token_bytes = max(token_bytes, 4 * shape.heads * splits * (shape.output_size + 4))
    return next((room for room in reversed(PROMPT_ROOMS) if room * token_bytes <= PARTIAL_BYTES), PROMPT_ROOMS[0])


def lot_step(
    step: GraphStep, lot: TokenLot, mixed: MixedBatch, states: Sequence[AppendState], *, with_recurrent: bool
) -> GraphStep:
    """The step of a lot, of that of the whole pass; `states` has one of each group of pages."""
    context, tokens = step.context, lot.end - lot.begin
    storages = [context.layers[numbers[0]].storage for numbers in context.groups]
    spans = lot.recurrent_spans() if with_recurrent else None
    return replace(
        step,
        begin=lot.begin,
        tokens=tokens,
        rows=[lot.kernel_rows(state, storage, mixed) for state, storage in zip(states, storages, strict=True)],
        slots=[lot.slots(places) for places in step.slots],
        angles=[lot.cut(each) if each.ndim == 2 else each for each in step.angles],
        layer_inputs=None if step.layer_inputs is None else lot.cut(step.layer_inputs),
        spans=None if spans is None else spans.spans,
        span_bounds=(0, 0) if spans is None else (padded_count(spans.rows), 1 << (spans.most - 1).bit_length()),
        token_loras=None if step.token_loras is None else lot.cut(step.token_loras, padded_count(tokens)),
    )
