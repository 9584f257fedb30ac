"""The codecs of kept keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.kernels.native.extension import available, extension

ROTATED = (16, 32, 64, 128, 256, 512)
"""Sizes of vectors that the codecs of kept keys and values rotate."""


def has_codecs() -> bool:
    """Whether the codecs of kept keys and values are there."""
    return available()


def turbo_codec(
    signs: Sequence[float], borders: Sequence[float], levels: Sequence[float], *, keeps_length: bool
) -> Any:
    """See `ingot.cache.codecs.turbo`; the borders are the positive ones. Sizes are those that are `ROTATED`."""
    return extension().Codec.turbo(list(signs), list(borders), list(levels), keeps_length)


def affine_codec(size: int, group: int, bits: int) -> Any:
    """See `ingot.cache.codecs.affine`."""
    return extension().Codec.affine(size, group, bits)
