"""A full page of a layer in fewer bits, as bytes: by head, what its keys have in common, their codes and scales, then
those of its values.

Keys are encoded around their mean in the page, so that a page can be read by itself. Each part begins at a multiple of
16 bytes. Pages are decoded some at a time: what is computed on the way takes several times the memory of what comes of
it. Only the engine thread may call what takes or gives arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.cache import footprint
from ingot.cache.codecs.codec import AffineCodec, VectorCodec
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.codecs.turbo import TurboCodec, lloyd_max_codebook, sign_bits
from ingot.cache.pages import PAGE
from ingot.kernels.cpu import native
from ingot.kernels.paged_attention.selfcheck import SAMPLED_PAGES, CodedSample
from ingot.kernels.paged_attention.shapes import CodedShape, CodedSide

ALIGNMENT: Final = 16
"""Bytes."""
PAGE_LAYOUT_VERSION: Final = 1
"""Of how pages are laid out: another one's bytes cannot be read."""


@dataclass(frozen=True, slots=True)
class PagePiece:
    """Some of a head's bytes: from `begin` on, [rows, each] numbers."""

    begin: int
    rows: int
    each: int
    dtype: mx.Dtype

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.each * self.dtype.size


@dataclass(frozen=True)
class CodedPageLayout:
    codec: PairCodec
    heads: int
    sizes: tuple[int, int]
    dtype: mx.Dtype
    """Of the keys and values, and of what keys have in common."""

    @classmethod
    def of(cls, codec: PairCodec, keys: mx.array, values: mx.array) -> CodedPageLayout:
        """For a layer that has such keys and values [1, heads, tokens, size]."""
        return cls(codec, keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)

    @cached_property
    def pieces(self) -> tuple[PagePiece, ...]:
        """The centre of the keys, where there is one, their parts, and the values' parts."""
        blank = mx.zeros((1, 1, PAGE, 1), self.dtype)
        found: list[PagePiece] = []
        for array in self.codec.encode(*(mx.broadcast_to(blank, (1, 1, PAGE, size)) for size in self.sizes)):
            begin = -(-found[-1].end // ALIGNMENT) * ALIGNMENT if found else 0
            found.append(PagePiece(begin, array.shape[2], array.shape[3], array.dtype))
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

    @cached_property
    def native(self) -> Any:
        """As the native kernels read it; None where there are none, or none for such heads."""
        if not native.available() or self.sizes[0] != self.sizes[1] or self.dtype not in (mx.float16, mx.float32):
            return None
        centred = len(self.pieces) - self.codec.keys.parts - self.codec.values.parts
        keys = self.pieces[centred : centred + self.codec.keys.parts]
        try:
            return native.native_coded_layout(
                size=self.sizes[0],
                halves=self.dtype == mx.float16,
                centre=self.pieces[0].begin if centred else None,
                head_bytes=self.head_bytes,
                keys=_native_side(self.codec.keys, self.sizes[0], keys),
                values=_native_side(self.codec.values, self.sizes[1], self.pieces[centred + len(keys) :]),
            )
        except ValueError:
            return None

    @property
    def kernel_shape(self) -> CodedShape | None:
        """As a GPU's kernels read it; None where no kernel could."""
        if self.dtype.size != 2 or not isinstance(self.codec.keys, AffineCodec):
            return None
        centre, keys, values = self.pieces[0], self.pieces[1:3], self.pieces[3:]
        size = self.sizes[1]
        if isinstance(self.codec.values, TurboCodec):
            side = CodedSide(self.codec.values.bits, 0, values[0].begin, values[1].begin)
            levels, signs = lloyd_max_codebook(size, side.bits).levels, sign_bits(size)
            return CodedShape(_kernel_side(self.codec.keys, keys), side, centre.begin, self.head_bytes, levels, signs)
        if not isinstance(self.codec.values, AffineCodec):
            return None
        sides = _kernel_side(self.codec.keys, keys), _kernel_side(self.codec.values, values)
        return CodedShape(*sides, centre.begin, self.head_bytes)

    def sample(self, shape: CodedShape) -> CodedSample:
        """Pages that kernels are compared over, in which keys have something in common."""
        random = np.random.default_rng(5)
        keys, values = (
            random.standard_normal((SAMPLED_PAGES, self.heads, PAGE, size), np.float32) for size in self.sizes
        )
        keys += 3 * random.standard_normal((1, self.heads, 1, self.sizes[0]), np.float32)
        pages = self.encode(mx.array(keys).astype(self.dtype), mx.array(values).astype(self.dtype))
        return CodedSample(shape, pages.view(mx.int32), *self.decode(pages))

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


def join_pages(pages: mx.array) -> mx.array:
    """Pages [pages, heads, PAGE, size] one behind another: [1, heads, pages * PAGE, size]."""
    return pages.swapaxes(0, 1).reshape(1, pages.shape[1], -1, pages.shape[3])


def _kernel_side(codec: AffineCodec, pieces: Sequence[PagePiece]) -> CodedSide:
    codes, scales = pieces
    return CodedSide(codec.bits, scales.each // 2, codes.begin, scales.begin)


def _native_side(codec: VectorCodec, size: int, pieces: Sequence[PagePiece]) -> native.NativeCodedSide:
    codes, scales = pieces[0], pieces[-1]
    if isinstance(codec, AffineCodec):
        return codec.bits, size * 2 // scales.each, codes.begin, scales.begin, (), ()
    if isinstance(codec, TurboCodec):
        return codec.bits, 0, codes.begin, scales.begin, lloyd_max_codebook(size, codec.bits).levels, sign_bits(size)
    return 0, 0, codes.begin, codes.begin, (), ()


UNPACK_PAGES = 32
"""Pages."""
NUMBER_BYTES: Final = 16
"""What a number takes at most while it is unpacked by plain operations, in whatever codec."""
ENCODED_NUMBER_BYTES: Final = 32
"""The same while it is encoded."""

KVPair = tuple[mx.array, mx.array]


def unpack_scratch_bytes(form: CodedPageLayout) -> int:
    """What is held on the way, beside what comes of it: that of pages that are computed, and of those before them."""
    return 2 * UNPACK_PAGES * PAGE * form.heads * sum(form.sizes) * NUMBER_BYTES


def encode_scratch_bytes(form: CodedPageLayout) -> int:
    """What is held while the pages of a layer are put into fewer bits, all that are at once."""
    return footprint.ENCODE_STEP_TOKENS * form.heads * sum(form.sizes) * ENCODED_NUMBER_BYTES


def unpacked_token_bytes(form: CodedPageLayout) -> int:
    """What comes of a token."""
    return form.heads * sum(form.sizes) * form.dtype.size


def page_slices(pages: int) -> Iterator[slice]:
    """Of so many, those that are unpacked at once."""
    return (slice(begin, begin + UNPACK_PAGES) for begin in range(0, pages, UNPACK_PAGES))


def pace_evaluation(pieces: Iterable[KVPair]) -> Iterator[KVPair]:
    """The same keys and values: each is on its way before the next are, and no more than two of them at a time."""
    before: KVPair | tuple[()] = ()
    for piece in pieces:
        mx.async_eval(*piece)
        mx.eval(*before)
        yield piece
        before = piece
