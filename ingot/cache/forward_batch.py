"""Forward batches: which rows a forward pass computes, the positions of their tokens, and their masks.

A row is a running sequence. The *index* of a token counts what is stored of its row; its *position* is what RoPE uses,
and may differ. A forward batch has several rows with the same number of new tokens each. A mixed batch is several of
these in one forward pass: their tokens are concatenated, so that everything that treats tokens one by one (norms,
linear layers, experts) computes all of them at once.

Every layer state hands its batch's positions to the model as `cache.offset`. Consecutive positions travel as what
`mx.fast.rope` takes, an int or an array with an entry per row, so that any model understands them. Positions that are
not consecutive travel as a `TokenPositions` object, which only the swapped RoPE modules understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ingot.cache.arrays import concatenate
from ingot.cache.pages import PageTable

TokenSpan = tuple[int, int, int, int]
"""A row's tokens in a forward pass: the first one's index in the pass, how many, the row's slot, the first one's index
in the row."""


@dataclass(eq=False, slots=True)
class Row:
    """A running sequence: `length` tokens are stored in the pages of `tables` (one for each group of layers) and in
    `slot` of the recurrent states. The next token has the position `position`."""

    slot: int
    tables: tuple[PageTable, ...]
    length: int = 0
    position: int = 0
    before: RewindPoint | None = None  # its state before tokens that may be taken back
    target: int | None = None  # the slot that the open forward pass writes to, where that is another
    exact: bool = False  # its pages are never coded
    lora: int = 0  # the slot of its adapter; 0: none

    @property
    def slot_after(self) -> int:
        """Where its recurrent states are after the open forward pass."""
        return self.slot if self.target is None else self.target


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """The states of a row's recurrent layers before its last forward pass, in a slot of their own or as copies; or
    without the last token of that, without the last two, and so on."""

    length: int
    position: int
    slot: int | None = None
    states: tuple[list[mx.array | None], ...] = ()  # of each such layer
    earlier: tuple[tuple[Sequence[mx.array], int], ...] = ()
    """The latter: parts [tokens taken back - 1, rows of the batch, ...], and the row's index there."""


@dataclass(frozen=True)
class ForwardPart:
    """Rows to compute, each with its next `width` tokens. Their positions continue the rows' own, unless `positions`
    are explicit: [width] for one row, or [3, width] for three-axis RoPE."""

    rows: tuple[Row, ...]
    width: int
    positions: mx.array | None = None
    following: int | None = None  # the next token's position, where positions are explicit
    tentative: int = 0  # how many of the last tokens may be taken back (`BatchState.rewind`)
    bidirectional: tuple[tuple[int, int], ...] = ()  # of a single row: tokens [begin, end) that all see each other


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """A part that is being computed. `starts` are the rows' lengths before it."""

    rows: tuple[Row, ...]
    width: int
    starts: tuple[int, ...]
    positions: tuple[int, ...]  # of each row's first token, where they are not explicit
    stated: mx.array | None = None
    tentative: int = 0
    """Tokens that may be taken back. Where there are any, each token is computed as it would be alone."""
    bidirectional: tuple[tuple[int, int], ...] = ()
    memo: dict[object, Any] = field(default_factory=dict)
    """What is computed once for all layers."""

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return self.count * self.width

    @cached_property
    def offset(self) -> CacheOffset:
        """The positions as models take them."""
        if self.stated is not None:
            return TokenPositions(self.stated[..., None, :], self.memo)
        return consecutive_offset(self.positions)

    @cached_property
    def slots(self) -> mx.array:
        return mx.array([row.slot for row in self.rows], dtype=mx.int32)

    @property
    def ragged(self) -> bool:
        return len(set(self.starts)) > 1

    @cached_property
    def pieces(self) -> tuple[TokenSpan, ...]:
        rows = enumerate(zip(self.rows, self.starts, strict=True))
        return tuple((number * self.width, self.width, row.slot, start) for number, (row, start) in rows)

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The slots that the rows' recurrent states are written to."""
        return tuple(row.slot_after for row in self.rows)

    @property
    def has_stated_positions(self) -> bool:
        return self.stated is not None

    @property
    def three_axes(self) -> bool:
        return self.stated is not None and self.stated.ndim == 2

    @cached_property
    def explicit(self) -> mx.array:
        """[tokens] or [3, tokens]: the position of each token."""
        if self.stated is not None:
            return self.stated
        return mx.array([first + number for first in self.positions for number in range(self.width)], dtype=mx.int32)

    def every(self, step: int) -> ForwardBatch:
        """Each `step`-th token of its only row, as a batch that computes queries and stores nothing."""
        stated = self.explicit[..., step - 1 :: step]
        return ForwardBatch(self.rows, stated.shape[-1], self.starts, self.positions, stated)

    def within(self, begin: int, end: int) -> ForwardBatch:
        """Tokens [begin, end) of its only row, as a batch."""
        stated = None if self.stated is None else self.stated[..., begin:end]
        return ForwardBatch(self.rows, end - begin, (self.starts[0] + begin,), (self.positions[0] + begin,), stated)


AttentionMask = mx.array | str | None


@dataclass(frozen=True, eq=False)
class MixedBatch:
    """Batches of different rows whose tokens are concatenated: batch by batch, row by row."""

    parts: tuple[ForwardBatch, ...]
    memo: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each batch's tokens begin and end."""
        ends = list(accumulate(part.tokens for part in self.parts))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def tokens(self) -> int:
        return self.bounds[-1][1]

    @cached_property
    def pieces(self) -> tuple[TokenSpan, ...]:
        return tuple(
            (begin + first, count, slot, start)
            for (begin, _), part in zip(self.bounds, self.parts, strict=True)
            for first, count, slot, start in part.pieces
        )

    @cached_property
    def targets(self) -> tuple[int, ...]:
        return tuple(slot for part in self.parts for slot in part.targets)

    @property
    def has_stated_positions(self) -> bool:
        return any(part.has_stated_positions for part in self.parts)

    @cached_property
    def three_axes(self) -> bool:
        """Whether some batch has three-axis positions."""
        return any(part.three_axes for part in self.parts)

    @property
    def explicit(self) -> mx.array:
        return self.positions

    @cached_property
    def positions(self) -> mx.array:
        """[tokens], or [3, tokens] where some batch has three-axis positions."""
        if not self.has_stated_positions:
            firsts = [(first, part.width) for part in self.parts for first in part.positions]
            return mx.array([at for first, width in firsts for at in range(first, first + width)], dtype=mx.int32)
        stated = [part.explicit for part in self.parts]
        if self.three_axes:
            stated = [each if each.ndim == 2 else mx.broadcast_to(each, (3, *each.shape)) for each in stated]
        return mx.concatenate(stated, axis=-1)

    @cached_property
    def offset(self) -> TokenPositions:
        return TokenPositions(self.positions[..., None, :], self.memo)

    @cached_property
    def bidirectional(self) -> tuple[tuple[int, int, MixedBatch], ...]:
        """Tokens [begin, end) that all see each other, and the same as a batch of their own."""
        return tuple(
            (first + begin, first + end, MixedBatch((part.within(begin, end),)))
            for (first, _), part in zip(self.bounds, self.parts, strict=True)
            for begin, end in part.bidirectional
        )

    def taken(self, number: int, x: mx.array) -> mx.array:
        """The part of x [1, tokens, ...] that belongs to a batch, as [rows, width, ...]."""
        (begin, end), part = self.bounds[number], self.parts[number]
        own = x if len(self.parts) == 1 else x[:, begin:end]
        return own.reshape(part.count, part.width, *x.shape[2:])

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """The batches' outputs, each [rows, width, ...], concatenated to [1, tokens, ...]."""
        return concatenate([output.reshape(1, -1, *output.shape[2:]) for output in outputs], axis=1)

    def split_batch_heads(self, number: int, x: mx.array) -> mx.array:
        """The part of x [tokens, heads, 1, size] that belongs to a batch, as [rows, heads, width, size]."""
        (begin, end), part = self.bounds[number], self.parts[number]
        own = x if len(self.parts) == 1 else x[begin:end]
        if part.width == 1:
            return own
        if part.count == 1:
            return own.swapaxes(0, 2)
        return own.reshape(part.count, part.width, *x.shape[1::2]).swapaxes(1, 2)

    def join_batch_heads(self, outputs: Sequence[mx.array]) -> mx.array:
        """The batches' outputs, each [rows, heads, width, size], as [1, tokens, heads * size]."""
        flat = []
        for output in outputs:
            rows, heads, width, size = output.shape
            by_tokens = output if width == 1 else output.swapaxes(1, 2)
            flat.append(by_tokens.reshape(1, rows * width, heads * size))
        return concatenate(flat, axis=1)


@dataclass(frozen=True)
class PerBatch:
    """A value for each part of a mixed batch, such as its mask. Only modules that split a mixed batch understand it."""

    mixed: MixedBatch
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class BatchMasks(PerBatch):
    """Causal masks, by which each token sees the newest `window` tokens up to itself, or all."""

    window: int | None


@dataclass(frozen=True)
class TokenPositions:
    """An explicit position for every token: shape [rows, width], or [3, rows, width] for three-axis RoPE."""

    at: mx.array
    memo: dict[object, Any] | None = field(default=None, compare=False)
    """That of the batch, which tells whether a model's own code has computed with its positions."""

    def __mlx_array__(self) -> mx.array:
        """[rows, width]: what a token's number in its row of the batch differs from its position by, so that models
        whose code adds an offset to `mx.arange(width)` get positions."""
        assert self.at.ndim == 2, "positions of three axes are no offset"
        if self.memo is not None:
            self.memo["positions in a model's own code"] = True
        return self.at - mx.arange(self.at.shape[1])


CacheOffset = int | mx.array | TokenPositions


def consecutive_offset(starts: Sequence[int]) -> int | mx.array:
    """The offset of rows whose tokens have consecutive positions from `starts` on."""
    if len(set(starts)) == 1:
        return starts[0]
    return mx.array(list(starts), dtype=mx.int32)


def causal_mask(starts: Sequence[int], firsts: Sequence[int], width: int, end: int, window: int | None) -> mx.array:
    """[rows, 1, width, end]: True where a token may see a key. Key j of row i has the index firsts[i] + j.

    If all rows have the same mask, there is one of it, as some models can only broadcast a mask without rows.
    """
    if len(set(zip(starts, firsts, strict=True))) == 1:
        starts, firsts = starts[:1], firsts[:1]
    token = (mx.array(list(starts))[:, None] + mx.arange(width))[:, None, :, None]
    key = (mx.array(list(firsts))[:, None] + mx.arange(end))[:, None, None, :]
    mask = key <= token
    return mask if window is None else mask & (key > token - window)


def bidirectional_mask(start: int, first: int, width: int, end: int, window: int | None) -> mx.array | None:
    """[1, 1, width, end]: the same for the last `width` tokens, from index `start` on, which also see later ones; None:
    each of them sees every key."""
    if window is None or end <= window:
        return None
    token, key = mx.arange(start, start + width)[:, None], first + mx.arange(end)
    return (key > token - window)[None, None]
