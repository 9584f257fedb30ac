"""A vector as its length and a direction: the direction is rotated, so that its coordinates follow a law that is known,
and each becomes one of the few numbers that stand best for that law (after TurboQuant, arXiv 2504.19874).

The paper's sketch of what is left over is not here: it raises the variance of products, which softmax makes worse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from ingot.cache.codecs.bits import pack, packed_bytes, unpack
from ingot.cache.codecs.codec import Centring, Codec, Parts, marked
from ingot.cache.codecs.hadamard import rotate, rotate_back, sign_bits, size_problem
from ingot.cache.codecs.lloyd_max import codebook
from ingot.kernels import native

LENGTH_BYTES = 2
KEEPS_LENGTH = 3
"""From so many bits on the decoded vector is as long as the one that was encoded, which costs next to nothing there.
With fewer its length is what leaves the least error."""
TINY = 1e-30


class Turbo(Codec):
    parts = 2  # codes; what the levels are to be multiplied with

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"turbo{bits}"

    def problem(self, size: int) -> str | None:
        return size_problem(size)

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return packed_bytes(size, self.bits) + LENGTH_BYTES

    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> Parts:
        if (kernel := self._kernel(x.shape[-1])) is not None:
            codes, lengths = kernel.encode(x, centre, other)
            return codes, lengths
        around, nearer = Centring(centre, other).taken_off(x)
        turned = rotate(around)
        size = turned.shape[-1]
        book = codebook(size, self.bits)
        spread = mx.sqrt(mx.mean(turned * turned, axis=-1, keepdims=True))
        even = turned / mx.maximum(spread, TINY)
        codes = mx.zeros(even.shape, mx.uint8)
        for border in book.borders:
            codes = codes + (even > border).astype(mx.uint8)
        levels = mx.array(book.levels, dtype=mx.float32)[codes]
        square = mx.mean(levels * levels, axis=-1, keepdims=True)
        met = mx.sqrt(square) if self.bits >= KEEPS_LENGTH else mx.mean(levels * even, axis=-1, keepdims=True)
        return pack(codes, self.bits), marked((spread * met / square).astype(mx.bfloat16), nearer)

    def decode(
        self, parts: Parts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array:
        packed, lengths = parts
        if (kernel := self._kernel(packed.shape[-1] * 8 // self.bits)) is not None:
            decoded: mx.array = kernel.decode(packed, lengths, dtype, centre, other)
            return decoded
        codes = unpack(packed, self.bits)
        levels = mx.array(codebook(codes.shape[-1], self.bits).levels, dtype=mx.float32)[codes]
        wide = rotate_back(levels * mx.abs(lengths.astype(mx.float32)))
        return Centring(centre, other).put_back(wide, lengths).astype(dtype)

    def _kernel(self, size: int) -> Any:
        """The native one, where there is one that takes vectors of this size."""
        if not native.has_codecs() or size not in native.ROTATED:
            return None
        return _native(size, self.bits)


@lru_cache(maxsize=16)
def _native(size: int, bits: int) -> Any:
    book = codebook(size, bits)
    positive = [border for border in book.borders if border > 1e-6]
    return native.turbo_codec(sign_bits(size), positive, book.levels, keeps_length=bits >= KEEPS_LENGTH)
