"""Rotary positions where MLX does not fuse them: the angles of a launch are computed once for all layers, and queries
and keys are turned together."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.forward_batch import Mixed
from ingot.models.layers.modules import PositionedRope, Rotation


class SharedRope:
    """A rotation that layers share. Turns float32 alone."""

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._launch: Mixed | None = None
        self._cos = self._sin = mx.array(0.0)

    def __call__(self, queries: mx.array, keys: mx.array, mixed: Mixed) -> tuple[mx.array, mx.array]:
        """Queries and keys [tokens, heads, 1, size] of a mixed launch, turned to its positions."""
        if mixed is not self._launch:
            self._prepare(mixed)
        dims, heads = self._rotation.dims, queries.shape[1]
        both = mx.concatenate([queries, keys], axis=1)
        turned = self._turned(both[..., :dims])
        if dims < both.shape[-1]:
            turned = mx.concatenate([turned, both[..., dims:]], axis=-1)
        return turned[:, :heads], turned[:, heads:]

    def _turned(self, x: mx.array) -> mx.array:
        half = self._rotation.dims // 2
        if self._rotation.traditional:
            pairs = x.reshape(*x.shape[:2], half, 2)
            crossed = pairs[..., ::-1]
        else:
            pairs = x.reshape(*x.shape[:2], 2, half)
            crossed = pairs[..., ::-1, :]
        return (pairs * self._cos + crossed * self._sin).reshape(x.shape)

    def _prepare(self, mixed: Mixed) -> None:
        rotation = self._rotation
        angles = rotation.angles(mixed.positions, three=mixed.three_axes)
        cos, sin = mx.cos(angles) * rotation.gain, mx.sin(angles) * rotation.gain
        axis = -1 if rotation.traditional else -2
        self._cos = mx.stack([cos, cos], axis=axis)[:, None]
        self._sin = mx.stack([-sin, sin], axis=axis)[:, None]
        self._launch = mixed


class SharedRopes:
    """The different rotations of one model."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], SharedRope] = {}

    def of(self, rope: nn.Module | None) -> SharedRope | None:
        """The rotation that does what this module does; None where that is not known."""
        if not isinstance(rope, PositionedRope):
            return None
        rotation = rope._rotation
        periods = tuple(rotation.periods.tolist())  # type: ignore[arg-type]
        key = (rotation.dims, rotation.traditional, rotation.scale, rotation.gain, periods)
        return self._known.setdefault(key, SharedRope(rotation))
