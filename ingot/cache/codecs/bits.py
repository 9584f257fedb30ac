"""Codes of 1 to 4 bits in bytes, without waste.

A byte holds codes that lie far apart: of n bytes, byte j has those of places j, j + n, j + 2n and so on, so that
reading and writing take whole vectors at a time. Three bits are a plane of two, then a plane of one.
"""

from __future__ import annotations

import mlx.core as mx

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""The widths of the planes that hold codes of so many bits, the lowest bits first."""


def packed_bytes(size: int, bits: int) -> int:
    """What `size` codes take; a multiple of eight of them leaves no bit unused."""
    return size * bits // 8


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., size], uint8, as bytes [..., size * bits / 8]."""
    planes, below = [], 0
    for width in PLANES[bits]:
        planes.append(_plane((codes >> below) & ((1 << width) - 1), width))
        below += width
    return planes[0] if len(planes) == 1 else mx.concatenate(planes, axis=-1)


def unpack(packed: mx.array, bits: int) -> mx.array:
    """The codes [..., size] again."""
    size = packed.shape[-1] * 8 // bits
    codes, at, below = mx.zeros((*packed.shape[:-1], size), mx.uint8), 0, 0
    for width in PLANES[bits]:
        end = at + packed_bytes(size, width)
        codes = codes | (_codes(packed[..., at:end], width) << below)
        at, below = end, below + width
    return codes


def _plane(codes: mx.array, width: int) -> mx.array:
    apart = codes.reshape(*codes.shape[:-1], 8 // width, -1)
    byte = apart[..., 0, :]
    for place in range(1, 8 // width):
        byte = byte | (apart[..., place, :] << (place * width))
    return byte


def _codes(plane: mx.array, width: int) -> mx.array:
    apart = [(plane >> (place * width)) & ((1 << width) - 1) for place in range(8 // width)]
    return mx.concatenate(apart, axis=-1)
