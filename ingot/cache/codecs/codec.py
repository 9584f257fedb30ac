"""The interface of a KV codec, which quantises vectors and restores them; the raw codec; and the affine codec.

The affine codec has evenly spaced steps between the minimum and the maximum of a group of numbers, 8 or 4 bits a
number. Minimum and step are stored as bfloat16. The minimum is rounded down and the step up, and codes are computed
from the stored values, so rounding these two costs only a little resolution.

Codes of 1 to 4 bits are packed into bytes without waste. Of n bytes, byte j has the codes j, j + n, j + 2n and so on,
so that packing and unpacking work on whole vectors. Three bits are a plane of two bits, then a plane of one. Only the
engine thread may call what takes or returns arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar

import mlx.core as mx

from ingot.cache.arrays import concatenate, copy_array
from ingot.kernels.cpu import native

EncodedParts = tuple[mx.array, ...]
"""Encoded vectors [..., tokens, size]: arrays [..., tokens, n], which can be cut by tokens like the vectors."""


class VectorCodec(ABC):
    """Each vector is encoded by itself, so any run of tokens can be decoded alone. A `centre` [..., 1, size] is
    subtracted before and added afterwards; the caller stores it. With an `other` centre, each vector uses the nearer of
    both, and the sign of its first scale, which is never negative, says which."""

    name: str
    version: ClassVar[int] = 1
    """Bytes of another version cannot be read."""
    parts: ClassVar[int]
    """How many arrays it makes."""

    def problem(self, size: int) -> str | None:
        """Why vectors of a size cannot be encoded, if so."""
        return None

    @abstractmethod
    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        """The size of an encoded vector of `size` numbers, scales included."""

    @abstractmethod
    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> EncodedParts: ...

    @abstractmethod
    def decode(
        self, parts: EncodedParts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array: ...


class RawCodec(VectorCodec):
    """Vectors as they are."""

    name = "raw"
    parts = 1

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return size * dtype.size

    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> EncodedParts:
        return (copy_array(x),)  # it may be a view of pages, which are written in place

    def decode(
        self, parts: EncodedParts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array:
        return parts[0].astype(dtype)


SIGN_BIT = 0x8000
"""Of a scale."""


class VectorCentring:
    """Subtracts and adds the centre of vectors, by plain operations."""

    def __init__(self, centre: mx.array | None, other: mx.array | None) -> None:
        self._centre, self._other = (None if each is None else each.astype(mx.float32) for each in (centre, other))

    def subtract(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Vectors in float32 relative to their centre, and which of them [..., tokens, 1] are nearer to the other
        one."""
        wide = x.astype(mx.float32)
        if self._centre is None:
            return wide, None
        if self._other is None:
            return wide - self._centre, None
        far, farther = (mx.square(wide - each).sum(axis=-1, keepdims=True) for each in (self._other, self._centre))
        nearer = far < farther
        return wide - mx.where(nearer, self._other, self._centre), nearer

    def add(self, wide: mx.array, scales: mx.array) -> mx.array:
        """`scales` are the stored ones, with their signs."""
        if self._centre is None:
            return wide
        if self._other is None:
            return wide + self._centre
        return wide + mx.where(scales[..., :1].view(mx.uint16) >= SIGN_BIT, self._other, self._centre)


def mark_other_centre(scales: mx.array, nearer: mx.array | None) -> mx.array:
    """The scales, the first one negative where a vector uses the other centre."""
    if nearer is None:
        return scales
    first = mx.where(nearer, -scales[..., :1], scales[..., :1])
    return first if scales.shape[-1] == 1 else mx.concatenate([first, scales[..., 1:]], axis=-1)


AFFINE_GROUPS = (64, 32, 16, 8)
"""Numbers that share a minimum and a step: the largest of these that divides the size."""
SCALE_BYTES = 2
ROUNDING_SLACK = 1 / 128
"""Twice the rounding error of bfloat16."""


class AffineCodec(VectorCodec):
    parts = 2  # codes; steps, then minima

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"affine{bits}"

    def problem(self, size: int) -> str | None:
        return None if size and not size % AFFINE_GROUPS[-1] else f"its head size must be a multiple of 8; not {size}"

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return packed_bytes(size, self.bits) + 2 * SCALE_BYTES * (size // _group_size(size))

    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> EncodedParts:
        if (kernel := self._kernel(x.shape[-1])) is not None:
            codes, scales = kernel.encode(x, centre, other)
            return codes, scales
        wide, nearer = VectorCentring(centre, other).subtract(x)
        size = wide.shape[-1]
        grouped = wide.reshape(*wide.shape[:-1], -1, _group_size(size))
        least, most = grouped.min(axis=-1), grouped.max(axis=-1)
        least = (least - mx.abs(least) * ROUNDING_SLACK).astype(mx.bfloat16)
        step = ((most - least) * ((1 + ROUNDING_SLACK) / self._last)).astype(mx.bfloat16)
        # If all are equal, any step but zero will do.
        step = mx.where(step > 0, step, mx.ones_like(step))
        codes = mx.round((grouped - least[..., None]) / step[..., None].astype(mx.float32))
        codes = mx.clip(codes, 0, self._last).astype(mx.uint8).reshape(wide.shape)
        packed = codes if self.bits == 8 else pack_bits(codes, self.bits)
        return packed, mx.concatenate([mark_other_centre(step, nearer), least], axis=-1)

    def decode(
        self, parts: EncodedParts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array:
        packed, scales = parts
        if (kernel := self._kernel(packed.shape[-1] * 8 // self.bits)) is not None:
            decoded: mx.array = kernel.decode(packed, scales, dtype, centre, other)
            return decoded
        codes = packed if self.bits == 8 else unpack_bits(packed, self.bits)
        step, least = (each[..., None] for each in mx.split(scales.astype(mx.float32), 2, axis=-1))
        grouped = codes.reshape(*codes.shape[:-1], step.shape[-2], -1).astype(mx.float32)
        wide = (grouped * mx.abs(step) + least).reshape(codes.shape)
        return VectorCentring(centre, other).add(wide, scales).astype(dtype)

    def _kernel(self, size: int) -> Any:
        """The native codec, where there is one for vectors of this size."""
        return _native_affine(size, self.bits) if native.available() and size <= native.ROTATED_SIZES[-1] else None

    @property
    def _last(self) -> int:
        return (1 << self.bits) - 1


def _group_size(size: int) -> int:
    return next(group for group in AFFINE_GROUPS if not size % group)


@lru_cache(maxsize=16)
def _native_affine(size: int, bits: int) -> Any:
    return native.native_extension().Codec.affine(size, _group_size(size), bits)


PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""The widths of the planes that hold codes of so many bits, the lowest bits first."""


def packed_bytes(size: int, bits: int) -> int:
    """Bytes of `size` codes, a multiple of eight."""
    return size * bits // 8


def pack_bits(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., size], uint8, as bytes [..., size * bits / 8]."""
    planes, below = [], 0
    for width in PLANES[bits]:
        planes.append(_pack_plane((codes >> below) & ((1 << width) - 1), width))
        below += width
    return concatenate(planes, axis=-1)


def unpack_bits(packed: mx.array, bits: int) -> mx.array:
    """The reverse of `pack_bits`."""
    size = packed.shape[-1] * 8 // bits
    codes, at, below = mx.zeros((*packed.shape[:-1], size), mx.uint8), 0, 0
    for width in PLANES[bits]:
        end = at + packed_bytes(size, width)
        codes = codes | (_unpack_plane(packed[..., at:end], width) << below)
        at, below = end, below + width
    return codes


def _pack_plane(codes: mx.array, width: int) -> mx.array:
    strided = codes.reshape(*codes.shape[:-1], 8 // width, -1)
    packed = strided[..., 0, :]
    for index in range(1, 8 // width):
        packed = packed | (strided[..., index, :] << (index * width))
    return packed


def _unpack_plane(plane: mx.array, width: int) -> mx.array:
    strided = [(plane >> (index * width)) & ((1 << width) - 1) for index in range(8 // width)]
    return mx.concatenate(strided, axis=-1)
