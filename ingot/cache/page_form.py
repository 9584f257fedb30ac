"""A full page of a layer in fewer bits, as bytes: by head, what its keys have in common, their codes and scales, then
those of its values.

Keys are encoded around their mean in the page, so that a page can be read by itself. Each part begins at a multiple of
16 bytes. Only the engine thread may call what takes or gives arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import mlx.core as mx

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.pages import PAGE

ALIGNMENT: Final = 16
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a head's bytes: from `begin` on, [rows, each] numbers."""

    begin: int
    rows: int
    each: int
    dtype: mx.Dtype

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.each * self.dtype.size


@dataclass(frozen=True)
class PageForm:
    codec: PairCodec
    heads: int
    sizes: tuple[int, int]
    dtype: mx.Dtype
    """Of the keys and values, and of what keys have in common."""

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The centre of the keys, where there is one, their parts, and the values' parts."""
        blank = mx.zeros((1, 1, PAGE, 1), self.dtype)
        found: list[Piece] = []
        for array in self.codec.encode(*(mx.broadcast_to(blank, (1, 1, PAGE, size)) for size in self.sizes)):
            begin = -(-found[-1].end // ALIGNMENT) * ALIGNMENT if found else 0
            found.append(Piece(begin, array.shape[2], array.shape[3], array.dtype))
        return tuple(found)

    @cached_property
    def head_bytes(self) -> int:
        return -(-self.pieces[-1].end // ALIGNMENT) * ALIGNMENT

    @property
    def page_bytes(self) -> int:
        return self.heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        return -(-self.page_bytes // PAGE)

    def encode(self, keys: mx.array, values: mx.array) -> mx.array:
        """Keys and values [pages, heads, PAGE, size] as bytes [pages, heads, head_bytes]."""
        made, at = [], 0
        pages = keys.shape[0]
        for piece, array in zip(self.pieces, self.codec.encode(keys, values), strict=True):
            if piece.begin > at:
                made.append(mx.zeros((pages, self.heads, piece.begin - at), mx.uint8))
            made.append(mx.contiguous(array).view(mx.uint8).reshape(pages, self.heads, -1))
            at = piece.end
        if self.head_bytes > at:
            made.append(mx.zeros((pages, self.heads, self.head_bytes - at), mx.uint8))
        return mx.concatenate(made, axis=-1)

    def decode(self, pages: mx.array) -> tuple[mx.array, mx.array]:
        """The keys and values [pages, heads, PAGE, size] of bytes, as near as they come."""
        parts = tuple(
            mx.contiguous(pages[..., piece.begin : piece.end])
            .view(piece.dtype)
            .reshape(*pages.shape[:2], piece.rows, piece.each)
            for piece in self.pieces
        )
        return self.codec.decode(parts, self.dtype)

    def problem(self) -> str | None:
        """Why there is no such form, if so."""
        return self.codec.problem(self.sizes)
