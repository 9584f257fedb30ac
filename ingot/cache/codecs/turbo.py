"""The turbo codec (after TurboQuant, arXiv 2504.19874): a vector as its length and its direction. The direction is
rotated, so that its coordinates have a known distribution, and each is quantised by the optimal codebook for that
distribution. The paper's sketch of the residual is left out: it raises the variance of dot products, which softmax
amplifies.

The rotation is random signs, then a Hadamard transform. mlx's transform corrupts memory, without an error, for sizes
that it has no matrix for; so sizes are checked here first. For some sizes it is not its own inverse.

The codebook (Lloyd 1957, Max 1960): a coordinate of a random unit vector, times the square root of its size, has the
density (1 - x²/size)^((size - 3)/2), close to a normal distribution and a little narrower. The levels are found by
Lloyd's iteration, once for each size and number of bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.cache.codecs.codec import (
    EncodedParts,
    VectorCentring,
    VectorCodec,
    mark_other_centre,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from ingot.kernels.cpu import native

LENGTH_BYTES = 2
KEEPS_LENGTH = 3
"""From so many bits on, the decoded vector has the length of the original, which costs almost nothing. With fewer bits
it has the length with the least error."""
TINY_SPREAD = 1e-30


class TurboCodec(VectorCodec):
    parts = 2  # codes; the factor of the levels

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"turbo{bits}"

    def problem(self, size: int) -> str | None:
        return rotation_problem(size)

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return packed_bytes(size, self.bits) + LENGTH_BYTES

    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> EncodedParts:
        if (kernel := self._kernel(x.shape[-1])) is not None:
            codes, lengths = kernel.encode(x, centre, other)
            return codes, lengths
        centred, nearer = VectorCentring(centre, other).subtract(x)
        rotated = rotate_vectors(centred)
        codebook = lloyd_max_codebook(rotated.shape[-1], self.bits)
        spread = mx.sqrt(mx.mean(rotated * rotated, axis=-1, keepdims=True))
        unit = rotated / mx.maximum(spread, TINY_SPREAD)
        codes = mx.zeros(unit.shape, mx.uint8)
        for border in codebook.borders:
            codes = codes + (unit > border).astype(mx.uint8)
        levels = mx.array(codebook.levels, dtype=mx.float32)[codes]
        square = mx.mean(levels * levels, axis=-1, keepdims=True)
        gain = mx.sqrt(square) if self.bits >= KEEPS_LENGTH else mx.mean(levels * unit, axis=-1, keepdims=True)
        return pack_bits(codes, self.bits), mark_other_centre((spread * gain / square).astype(mx.bfloat16), nearer)

    def decode(
        self, parts: EncodedParts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array:
        packed, lengths = parts
        if (kernel := self._kernel(packed.shape[-1] * 8 // self.bits)) is not None:
            decoded: mx.array = kernel.decode(packed, lengths, dtype, centre, other)
            return decoded
        codes = unpack_bits(packed, self.bits)
        levels = mx.array(lloyd_max_codebook(codes.shape[-1], self.bits).levels, dtype=mx.float32)[codes]
        wide = rotate_vectors_back(levels * mx.abs(lengths.astype(mx.float32)))
        return VectorCentring(centre, other).add(wide, lengths).astype(dtype)

    def _kernel(self, size: int) -> Any:
        """The native codec, where there is one for vectors of this size."""
        if not native.available() or size not in native.ROTATED_SIZES:
            return None
        return _native_turbo_codec(size, self.bits)


@lru_cache(maxsize=16)
def _native_turbo_codec(size: int, bits: int) -> Any:
    codebook = lloyd_max_codebook(size, bits)
    positive = [border for border in codebook.borders if border > 1e-6]
    return native.native_extension().Codec.turbo(
        list(sign_bits(size)), positive, list(codebook.levels), bits >= KEEPS_LENGTH
    )


ODD_PARTS = (1, 12, 20, 28)
"""A size must be one of these times a power of two."""
OWN_INVERSE = (1, 12)
"""Those for which the transform is its own inverse."""


def rotation_problem(size: int) -> str | None:
    """Why vectors of a size cannot be rotated, if so."""
    if size % 8 or _odd_part(size) is None:
        return f"its head size must be 1, 12, 20 or 28 times a power of two, and at least 8, to be rotated; not {size}"
    return None


def rotate_vectors(x: mx.array) -> mx.array:
    """Rotate float32 vectors [..., size]."""
    return mx.hadamard_transform(x * sign_array(x.shape[-1]))


def rotate_vectors_back(y: mx.array) -> mx.array:
    size = y.shape[-1]
    straight = mx.hadamard_transform(y) if _odd_part(size) in OWN_INVERSE else y @ mx.hadamard_transform(mx.eye(size)).T
    return straight * sign_array(size)


@lru_cache(maxsize=16)
def sign_bits(size: int) -> tuple[float, ...]:
    # Part of the format: what was written with other signs could not be read.
    random = shake_256(f"ingot turbo signs, version 1, size {size}".encode()).digest(size)
    return tuple(1.0 if byte & 1 else -1.0 for byte in random)


def sign_array(size: int) -> mx.array:
    return mx.array(sign_bits(size), dtype=mx.float32)


def _odd_part(size: int) -> int | None:
    """The odd part of which a size is a power of two multiple, if there is one."""
    for part in ODD_PARTS:
        factor, remainder = divmod(size, part)
        if not remainder and factor and not factor & (factor - 1):
            return part
    return None


Float64Array = np.ndarray[Any, np.dtype[np.float64]]

GRID_STEPS = 1 << 16
"""Of the grid on which the density is integrated."""
MOST_ROUNDS = 4000
CONVERGED = 1e-9


@dataclass(frozen=True, slots=True)
class Codebook:
    """Ascending `levels`, the borders between them, and the mean squared error for a variance of 1."""

    levels: tuple[float, ...]
    borders: tuple[float, ...]
    distortion: float


@lru_cache(maxsize=64)
def lloyd_max_codebook(size: int, bits: int) -> Codebook:
    edges = np.linspace(-np.sqrt(size), np.sqrt(size), GRID_STEPS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    density = np.maximum(1 - middles**2 / size, 0) ** ((size - 3) / 2)
    density /= density.sum()
    mass, moment = (np.concatenate([[0.0], np.cumsum(each)]) for each in (density, density * middles))
    levels = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass, edges)  # quantiles
    for _ in range(MOST_ROUNDS):
        previous = levels
        inner = (levels[1:] + levels[:-1]) / 2
        borders = np.concatenate([[edges[0]], inner, [edges[-1]]])
        weights, moments = (np.diff(np.interp(borders, edges, each)) for each in (mass, moment))
        levels = moments / weights
        levels = (levels - levels[::-1]) / 2  # the distribution is symmetric
        if np.abs(levels - previous).max() < CONVERGED:
            break
    inner = (levels[1:] + levels[:-1]) / 2
    errors = (middles - levels[np.searchsorted(inner, middles)]) ** 2
    return Codebook(tuple(levels.tolist()), tuple(inner.tolist()), float((density * errors).sum()))
