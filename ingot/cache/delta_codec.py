"""Keys and values outside of pages in fewer bits: a codec, and what it meets in each layer. Only the engine thread may
call what takes or gives arrays."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.deltas import Deltas, KVDelta
from ingot.cache.layer_state import LayerState

Size = tuple[int, int]
"""Bytes of any tokens, and of each more."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    heads: int
    sizes: tuple[int, int]
    dtype: mx.Dtype

    @classmethod
    def of(cls, delta: KVDelta) -> LayerShape:
        keys, values = delta.arrays
        return cls(keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)


class DeltaCodec:
    def __init__(self, codec: PairCodec, sample: Deltas) -> None:
        """`sample` is what some tokens have, raw."""
        self._codec = codec
        self._shapes = tuple(None if delta is None else LayerShape.of(delta) for delta in sample)

    @property
    def is_idle(self) -> bool:
        """No layer keeps keys and values."""
        return not any(self._shapes)

    @property
    def problem(self) -> str | None:
        """Why some layer's keys and values cannot be encoded, if so."""
        found = (self._codec.problem(shape.sizes) for shape in self._shapes if shape is not None)
        return next((problem for problem in found if problem is not None), None)

    def sizes(self, states: Sequence[LayerState]) -> dict[int | None, Size]:
        """By window, what the layers take that forget alike."""
        found: dict[int | None, Size] = {}
        for shape, state in zip(self._shapes, states, strict=True):
            if shape is not None and isinstance(state, AppendState):
                none, one = (self._codec.nbytes(count, shape.heads, shape.sizes, shape.dtype) for count in (0, 1))
                fixed, each = found.get(state.window, (0, 0))
                found[state.window] = fixed + none, each + one - none
        return found

    def encode(self, deltas: Deltas) -> Deltas:
        return Deltas(
            delta if delta is None or not delta.arrays else replace(delta, arrays=self._codec.encode(*delta.arrays))
            for delta in deltas
        )

    def decode(self, deltas: Deltas, layers: Container[int]) -> Deltas:
        """Of some layers, by number; None of the others."""
        numbered = enumerate(zip(deltas, self._shapes, strict=True))
        return Deltas(
            None
            if delta is None or shape is None or number not in layers
            else replace(delta, arrays=self._codec.decode(delta.arrays, shape.dtype))
            for number, (delta, shape) in numbered
        )
