"""Which rows a forward pass computes, and how their tokens lie in it.

A launch runs consecutive slots, each with the same number of tokens. A mixed launch runs several of them in one
forward pass: their tokens stand one behind another in a single row, so that everything that treats tokens one by one
(norms, products with weights, experts) sees all of them at once. Only what looks at other tokens of a sequence takes
the launches one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ingot.cache.positions import Offset, Positions

LaunchSpan = tuple[int, int, int, int]
"""A sequence's tokens in a forward pass: the first one's place, how many, the slot, the position of the first."""


@dataclass(frozen=True)
class Launch:
    """Which rows run and how: slots [first, first + rows), `width` tokens each, of which `valid[i]` are real."""

    first: int
    starts: tuple[int, ...]
    width: int
    valid: tuple[int, ...]
    offset: Offset

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def last(self) -> int:
        return self.first + self.rows

    @cached_property
    def row_index(self) -> mx.array:
        """The rows' slots; made once for all layers."""
        return mx.arange(self.first, self.last)

    @cached_property
    def start_index(self) -> mx.array:
        return mx.array(self.starts)

    @property
    def ragged(self) -> bool:
        return len(set(self.starts)) > 1

    @cached_property
    def pieces(self) -> tuple[LaunchSpan, ...]:
        rows = enumerate(zip(self.starts, self.valid, strict=True))
        return tuple((row * self.width, count, self.first + row, start) for row, (start, count) in rows)


Mask = mx.array | str | None


@dataclass(frozen=True)
class Mixed:
    """Launches of different slots, without padding, whose tokens stand in one row: launch by launch, slot by slot."""

    parts: tuple[Launch, ...]

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each launch's tokens begin and end."""
        ends = list(accumulate(part.rows * part.width for part in self.parts))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def tokens(self) -> int:
        return self.bounds[-1][1]

    @cached_property
    def pieces(self) -> tuple[LaunchSpan, ...]:
        return tuple(
            (begin + first, count, slot, start)
            for (begin, _), part in zip(self.bounds, self.parts, strict=True)
            for first, count, slot, start in part.pieces
        )

    @cached_property
    def positions(self) -> mx.array:
        """[tokens]: where each token stands in its sequence."""
        return mx.array(
            [start + number for part in self.parts for start in part.starts for number in range(part.width)],
            dtype=mx.int32,
        )

    @cached_property
    def offset(self) -> Positions:
        return Positions(self.positions[None])

    def taken(self, number: int, x: mx.array) -> mx.array:
        """The part of x [1, tokens, ...] that belongs to a launch, as [rows, width, ...]."""
        (begin, end), part = self.bounds[number], self.parts[number]
        own = x if len(self.parts) == 1 else x[:, begin:end]
        return own.reshape(part.rows, part.width, *x.shape[2:])

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """What the launches gave, each [rows, width, ...], as one row of tokens again."""
        return _in_one_row([output.reshape(1, -1, *output.shape[2:]) for output in outputs])

    def taken_heads(self, number: int, x: mx.array) -> mx.array:
        """The part of x [tokens, heads, 1, size] that belongs to a launch, as [rows, heads, width, size]."""
        (begin, end), part = self.bounds[number], self.parts[number]
        own = x if len(self.parts) == 1 else x[begin:end]
        if part.width == 1:
            return own
        if part.rows == 1:
            return own.swapaxes(0, 2)
        return own.reshape(part.rows, part.width, *x.shape[1::2]).swapaxes(1, 2)

    def joined_heads(self, outputs: Sequence[mx.array]) -> mx.array:
        """What the launches gave, each [rows, heads, width, size], as [1, tokens, heads * size]."""
        flat = []
        for output in outputs:
            rows, heads, width, size = output.shape
            by_tokens = output if width == 1 else output.swapaxes(1, 2)
            flat.append(by_tokens.reshape(1, rows * width, heads * size))
        return _in_one_row(flat)


def _in_one_row(outputs: list[mx.array]) -> mx.array:
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


@dataclass(frozen=True)
class Parted:
    """A value for each launch of a mixed one, such as its mask. Only modules that take launches apart understand it."""

    mixed: Mixed
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Masks(Parted):
    """Masks that show each token the tokens up to itself: the newest `window` of them, or all."""

    window: int | None
