"""Coded pages: a full page of a layer in fewer bits, as bytes. By head: the centre of the keys, their codes and scales,
then those of the values.

Keys are encoded around their mean in the page, so that a page can be decoded by itself. Each part begins at a multiple
of 16 bytes. Pages are decoded in batches, as decoding takes several times the memory of its result. Only the engine
thread may call what takes or returns arrays.
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
"""Bytes of another version cannot be read."""


@dataclass(frozen=True, slots=True)
class PagePiece:
    """A part of a head's bytes: [rows, each] numbers from `begin` on."""

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
    """Of the keys and values, and of the centre."""

    @classmethod
    def of(cls, codec: PairCodec, keys: mx.array, values: mx.array) -> CodedPageLayout:
        """For a layer that has such keys and values [1, heads, tokens, size]."""
        return cls(codec, keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)

    @cached_property
    def pieces(self) -> tuple[PagePiece, ...]:
        """The keys' centre, where there is one, their parts, and the values' parts."""
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
        """The native kernels' layout; None where there are no such kernels."""
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
                keys=_native_part(self.codec.keys, self.sizes[0], keys),
                values=_native_part(self.codec.values, self.sizes[1], self.pieces[centred + len(keys) :]),
            )
        except ValueError:
            return None

    @property
    def kernel_shape(self) -> CodedShape | None:
        """The GPU kernels' layout; None where there are no such kernels."""
        if self.dtype.size != 2 or not isinstance(self.codec.keys, AffineCodec):
            return None
        centre, keys, values = self.pieces[0], self.pieces[1:3], self.pieces[3:]
        key_part, size = _kernel_part(self.codec.keys, keys), self.sizes[1]
        if isinstance(self.codec.values, TurboCodec):
            part = CodedSide(self.codec.values.bits, 0, values[0].begin, values[1].begin)
            levels, signs = lloyd_max_codebook(size, part.bits).levels, sign_bits(size)
            return CodedShape(key_part, part, centre.begin, self.head_bytes, levels, signs)
        if not isinstance(self.codec.values, AffineCodec):
            return None
        return CodedShape(key_part, _kernel_part(self.codec.values, values), centre.begin, self.head_bytes)

    def sample(self, shape: CodedShape) -> CodedSample:
        """Pages for comparing kernels, whose keys have a large mean."""
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
        """The decoded keys and values [pages, heads, PAGE, size]."""
        parts = tuple(
            mx.contiguous(pages[..., piece.begin : piece.end])
            .view(piece.dtype)
            .reshape(*pages.shape[:2], piece.rows, piece.each)
            for piece in self.pieces
        )
        return self.codec.decode(parts, self.dtype)

    def problem(self) -> str | None:
        """Why such pages cannot be encoded, if so."""
        return self.codec.problem(self.sizes)


def join_pages(pages: mx.array) -> mx.array:
    """Pages [pages, heads, PAGE, size] concatenated to [1, heads, pages * PAGE, size]."""
    return pages.swapaxes(0, 1).reshape(1, pages.shape[1], -1, pages.shape[3])


def _kernel_part(codec: AffineCodec, pieces: Sequence[PagePiece]) -> CodedSide:
    codes, scales = pieces
    return CodedSide(codec.bits, scales.each // 2, codes.begin, scales.begin)


def _native_part(codec: VectorCodec, size: int, pieces: Sequence[PagePiece]) -> native.NativeCodedSide:
    codes, scales = pieces[0], pieces[-1]
    if isinstance(codec, AffineCodec):
        return codec.bits, size * 2 // scales.each, codes.begin, scales.begin, (), ()
    if isinstance(codec, TurboCodec):
        return codec.bits, 0, codes.begin, scales.begin, lloyd_max_codebook(size, codec.bits).levels, sign_bits(size)
    return 0, 0, codes.begin, codes.begin, (), ()


UNPACK_PAGES = 32
"""Pages that are decoded at once."""
NUMBER_BYTES: Final = 16
"""The most bytes that a number takes while it is decoded by plain operations, in any codec."""
ENCODED_NUMBER_BYTES: Final = 32
"""The same while it is encoded."""

KVPair = tuple[mx.array, mx.array]


def unpack_scratch_bytes(form: CodedPageLayout) -> int:
    """Temporary memory while pages are decoded: that of two batches of pages."""
    return 2 * UNPACK_PAGES * PAGE * form.heads * sum(form.sizes) * NUMBER_BYTES


def encode_scratch_bytes(form: CodedPageLayout) -> int:
    """Temporary memory while the pages of a layer are encoded."""
    return footprint.ENCODE_STEP_TOKENS * form.heads * sum(form.sizes) * ENCODED_NUMBER_BYTES


def unpacked_token_bytes(form: CodedPageLayout) -> int:
    """Bytes of a decoded token."""
    return form.heads * sum(form.sizes) * form.dtype.size


def page_slices(pages: int) -> Iterator[slice]:
    """The batches in which so many pages are decoded."""
    return (slice(begin, begin + UNPACK_PAGES) for begin in range(0, pages, UNPACK_PAGES))


def pace_evaluation(pieces: Iterable[KVPair]) -> Iterator[KVPair]:
    """The same keys and values, evaluated so that at most two pairs are computed at a time."""
    previous: KVPair | tuple[()] = ()
    for piece in pieces:
        mx.async_eval(*piece)
        mx.eval(*previous)
        yield piece
        previous = piece
