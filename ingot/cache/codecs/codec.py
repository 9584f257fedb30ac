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
    decoded alone. A `centre` [..., 1, size] is taken off before and added afterwards, and is the caller's to keep. With
    an `other` one, too, each vector goes by the nearer of both, and the sign of its first scale, none of which is below
    nought, says by which."""

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
    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> Parts: ...

    @abstractmethod
    def decode(
        self, parts: Parts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array: ...


class Raw(Codec):
    """As they are."""

    name = "raw"
    parts = 1

    def vector_bytes(self, size: int, dtype: mx.Dtype) -> int:
        return size * dtype.size

    def encode(self, x: mx.array, centre: mx.array | None = None, other: mx.array | None = None) -> Parts:
        return (copied(x),)  # it may be a view of pages, which others will write to

    def decode(
        self, parts: Parts, dtype: mx.Dtype, centre: mx.array | None = None, other: mx.array | None = None
    ) -> mx.array:
        return parts[0].astype(dtype)


SIGN = 0x8000
"""Of a scale."""


class Centring:
    """What vectors are encoded around, by plain operations."""

    def __init__(self, centre: mx.array | None, other: mx.array | None) -> None:
        self._centre, self._other = (None if each is None else each.astype(mx.float32) for each in (centre, other))

    def taken_off(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Vectors in float32 around their centre, and which of them [..., tokens, 1] are nearer to the other one."""
        wide = x.astype(mx.float32)
        if self._centre is None:
            return wide, None
        if self._other is None:
            return wide - self._centre, None
        far, farther = (mx.square(wide - each).sum(axis=-1, keepdims=True) for each in (self._other, self._centre))
        nearer = far < farther
        return wide - mx.where(nearer, self._other, self._centre), nearer

    def put_back(self, wide: mx.array, scales: mx.array) -> mx.array:
        """`scales` are those that were kept."""
        if self._centre is None:
            return wide
        if self._other is None:
            return wide + self._centre
        return wide + mx.where(scales[..., :1].view(mx.uint16) >= SIGN, self._other, self._centre)


def marked(scales: mx.array, nearer: mx.array | None) -> mx.array:
    """With a sign at the first of them where a vector goes by the other centre."""
    if nearer is None:
        return scales
    first = mx.where(nearer, -scales[..., :1], scales[..., :1])
    return first if scales.shape[-1] == 1 else mx.concatenate([first, scales[..., 1:]], axis=-1)
