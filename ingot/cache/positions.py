"""Where the tokens of a launch stand in their sequences.

Every live layer state hands its launch's positions to the model as `cache.offset`. Consecutive positions travel as
what `mx.fast.rope` takes, an int or an array with an entry per row, so that any model understands them. Positions
that are not consecutive travel as a `Positions` object, which only the swapped RoPE modules understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Positions:
    """An explicit position for every token: shape [rows, width], or [3, rows, width] for three-axis RoPE."""

    at: mx.array


Offset = int | mx.array | Positions


def consecutive(starts: Sequence[int]) -> int | mx.array:
    """The offset of rows whose tokens stand at consecutive positions from `starts`."""
    if len(set(starts)) == 1:
        return starts[0]
    return mx.array(list(starts), dtype=mx.int32)
