"""Evenly spaced steps between the least and the largest number of a group: 8 or 4 bits a number.

Least and step are kept as bfloat16, whose range is that of whatever is encoded. The least is rounded down and the step
up, and codes are counted in what is kept: so rounding those two costs a little of the resolution, and nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from ingot.cache.codecs.bits import pack, packed_bytes, unpack
from ingot.cache.codecs.codec import Centring, Codec, Parts, marked
from ingot.kernels import native

GROUPS = (64, 32, 16, 8)
"""Numbers that share a least and a step: the most of these that the size is a multiple of."""
SCALE_BYTES = 2
SLACK = 1 / 128
"""What bfloat16 may be off by, twice."""


class Affine(Codec):
    parts = 2  # codes; steps, then leasts

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"affine{bits}"

    def problem(self, size: int) -> str | None:
        return None if size and not size % GROUPS[-1] else f"its head size must be a multiple of 8; not {size}"

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return packed_bytes(size, self.bits) + 2 * SCALE_BYTES * (size // _group(size))

    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> Parts:
        if (kernel := self._kernel(x.shape[-1])) is not None:
            codes, scales = kernel.encode(x, centre, other)
            return codes, scales
        wide, nearer = Centring(centre, other).taken_off(x)
        size = wide.shape[-1]
        grouped = wide.reshape(*wide.shape[:-1], -1, _group(size))
        least, most = grouped.min(axis=-1), grouped.max(axis=-1)
        least = (least - mx.abs(least) * SLACK).astype(mx.bfloat16)
        step = ((most - least) * ((1 + SLACK) / self._last)).astype(mx.bfloat16)
        # All alike: any step will do, and one of zero would not.
        step = mx.where(step > 0, step, mx.ones_like(step))
        codes = mx.round((grouped - least[..., None]) / step[..., None].astype(mx.float32))
        codes = mx.clip(codes, 0, self._last).astype(mx.uint8).reshape(wide.shape)
        kept = codes if self.bits == 8 else pack(codes, self.bits)
        return kept, mx.concatenate([marked(step, nearer), least], axis=-1)

    def decode(
        self, parts: Parts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array:
        kept, scales = parts
        if (kernel := self._kernel(kept.shape[-1] * 8 // self.bits)) is not None:
            decoded: mx.array = kernel.decode(kept, scales, dtype, centre, other)
            return decoded
        codes = kept if self.bits == 8 else unpack(kept, self.bits)
        step, least = (each[..., None] for each in mx.split(scales.astype(mx.float32), 2, axis=-1))
        grouped = codes.reshape(*codes.shape[:-1], step.shape[-2], -1).astype(mx.float32)
        wide = (grouped * mx.abs(step) + least).reshape(codes.shape)
        return Centring(centre, other).put_back(wide, scales).astype(dtype)

    def _kernel(self, size: int) -> Any:
        """The native one, where there is one that takes vectors of this size."""
        return _native(size, self.bits) if native.has_codecs() and size <= native.ROTATED[-1] else None

    @property
    def _last(self) -> int:
        return (1 << self.bits) - 1


def _group(size: int) -> int:
    return next(group for group in GROUPS if not size % group)


@lru_cache(maxsize=16)
def _native(size: int, bits: int) -> Any:
    return native.affine_codec(size, _group(size), bits)
