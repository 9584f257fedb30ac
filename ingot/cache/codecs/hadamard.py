"""Rotating vectors so that all of their coordinates look alike: random signs, then a Hadamard transform.

mlx's transform corrupts memory for sizes that it has no matrix for, without raising; so sizes are checked here, before
it is called. For some that it has, it is not its own inverse.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import shake_256

import mlx.core as mx

ODD_PARTS = (1, 12, 20, 28)
"""A size must be one of these times a power of two."""
OWN_INVERSE = (1, 12)
"""Those for which the transform is."""


def size_problem(size: int) -> str | None:
    """Why vectors of a size cannot be rotated, if so."""
    if size % 8 or _part(size) is None:
        return f"its head size must be 1, 12, 20 or 28 times a power of two, and at least 8, to be rotated; not {size}"
    return None


def rotate(x: mx.array) -> mx.array:
    """Vectors [..., size] of float32, as long as before."""
    return mx.hadamard_transform(x * signs(x.shape[-1]))


def rotate_back(y: mx.array) -> mx.array:
    size = y.shape[-1]
    straight = mx.hadamard_transform(y) if _part(size) in OWN_INVERSE else y @ _matrix(size).T
    return straight * signs(size)


@lru_cache(maxsize=16)
def sign_bits(size: int) -> tuple[float, ...]:
    # A part of the format: what was written with other signs could not be read.
    drawn = shake_256(f"ingot turbo signs, version 1, size {size}".encode()).digest(size)
    return tuple(1.0 if byte & 1 else -1.0 for byte in drawn)


def signs(size: int) -> mx.array:
    return mx.array(sign_bits(size), dtype=mx.float32)


def _matrix(size: int) -> mx.array:
    """Its rows are what becomes of the unit vectors."""
    return mx.hadamard_transform(mx.eye(size))


def _part(size: int) -> int | None:
    """Which of the odd parts a size is a multiple of, by a power of two."""
    for part in ODD_PARTS:
        times, rest = divmod(size, part)
        if not rest and times and not times & (times - 1):
            return part
    return None
