"""What a codec is: vectors in fewer bits, and back.

Only the engine thread may call what takes or gives arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import mlx.core as mx

from ingot.cache.arrays import copied

Parts = tuple[mx.array, ...]
"""What vectors [..., tokens, size] became: arrays [..., tokens, some], which can be cut by tokens like the vectors."""


class Codec(ABC):
    """Each vector is encoded by itself: what it becomes does not depend on its neighbours, and any run of tokens can be
    decoded alone. A `centre` [..., 1, size] is taken off before and added afterwards, and is the caller's to keep."""

    name: str
    version: ClassVar[int] = 1
    """Another one's bytes cannot be read."""
    parts: ClassVar[int]
    """How many arrays it makes."""

    def problem(self, size: int) -> str | None:
        """Why vectors of a size cannot be encoded, if so."""
        return None

    @abstractmethod
    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        """What a vector of `size` numbers takes, everything counted."""

    @abstractmethod
    def encode(self, x: mx.array, centre: mx.array | None = None) -> Parts: ...

    @abstractmethod
    def decode(self, parts: Parts, dtype: mx.Dtype, centre: mx.array | None = None) -> mx.array: ...


class Raw(Codec):
    """As they are."""

    name = "raw"
    parts = 1

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return size * dtype.size

    def encode(self, x: mx.array, centre: mx.array | None = None) -> Parts:
        return (copied(x),)  # it may be a view of pages, which others will write to

    def decode(self, parts: Parts, dtype: mx.Dtype, centre: mx.array | None = None) -> mx.array:
        return parts[0].astype(dtype)


def widened(x: mx.array, centre: mx.array | None) -> mx.array:
    """In float32, around the centre."""
    wide = x.astype(mx.float32)
    return wide if centre is None else wide - centre.astype(mx.float32)
