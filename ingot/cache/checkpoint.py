"""Copies of recurrent states, from which a sequence can be resumed."""

from __future__ import annotations

import mlx.core as mx


class Checkpoint(tuple[tuple[mx.array | None, ...], ...]):
    """The parts of each layer's state; empty for layers that are not recurrent."""

    __slots__ = ()

    def arrays(self) -> list[mx.array]:
        return [array for layer in self for array in layer if array is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())
