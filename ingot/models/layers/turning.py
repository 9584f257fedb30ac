"""Norms of queries and keys, rotary positions and the write to the pages by one kernel of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import Mixed
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.paged_attention.rope import Norm, Turning, TurnShape, turns
from ingot.kernels.paged_attention.shapes import Shape
from ingot.models.layers.modules import PositionedRope, Rotation
from ingot.models.layers.norms import factor, is_rms


class Angles:
    """A rotation that layers share: how it turns the tokens of a launch is found once for all of them."""

    def __init__(self, rotation: Rotation | None) -> None:
        self.dims = 0 if rotation is None else rotation.dims
        self.neighbours = rotation is not None and rotation.traditional
        self._gain = 1.0 if rotation is None else rotation.gain
        self._speeds = mx.zeros(0) if rotation is None else rotation.scale / rotation.periods
        self._axes = None if rotation is None else rotation.axes

    def turns(self, mixed: Mixed) -> bool:
        """Whether it is known how the tokens of a launch turn."""
        return not mixed.three_axes or self._axes is not None or not self.dims

    def of(self, mixed: Mixed) -> mx.array:
        if self not in mixed.memo:
            positions = mixed.positions
            if mixed.three_axes and self._axes is not None:
                positions = positions[self._axes].T
            mixed.memo[self] = turns(positions, self._speeds, self._gain)
        angles: mx.array = mixed.memo[self]
        return angles


class Turns:
    """What turns queries and keys of a model's layers, where kernels do."""

    def __init__(self, kernels: CheckedKernels) -> None:
        self._kernels = kernels
        self._known: dict[tuple[object, ...], Angles] = {}

    def of(
        self, *, heads: int, kv_heads: int, rope: nn.Module | None, norms: Sequence[nn.Module], gated: bool
    ) -> KernelTurning | None:
        """None for rotations and norms that the kernel does not know."""
        if not (rope is None or isinstance(rope, PositionedRope)) or not all(map(is_rms, norms)):
            return None
        known = [(factor(norm), float(norm.eps)) for norm in norms]
        return KernelTurning(self._kernels, heads, kv_heads, known, self._angles(rope), gated=gated)

    def _angles(self, rope: PositionedRope | None) -> Angles:
        rotation = None if rope is None else rope._rotation
        if rotation is None:
            return self._known.setdefault((), Angles(None))
        periods = tuple(rotation.periods.tolist())  # type: ignore[arg-type]
        key = (rotation.dims, rotation.traditional, rotation.scale, rotation.gain, periods)
        return self._known.setdefault(key, Angles(rotation))


class KernelTurning:
    """One layer's."""

    def __init__(
        self, kernels: CheckedKernels, heads: int, kv_heads: int, norms: list[Norm], angles: Angles, *, gated: bool
    ) -> None:
        self._kernels, self._heads, self._kv_heads, self._norms = kernels, heads, kv_heads, norms
        self._angles, self._gated = angles, gated
        self._made: dict[tuple[tuple[int, int], mx.Dtype], Turning | None] = {}

    def of(self, sizes: tuple[int, int], dtype: mx.Dtype) -> Turning | None:
        """The kernel for heads of keys and values of these sizes; None where there is none that is right."""
        if (sizes, dtype) not in self._made:
            shape = TurnShape(
                Shape(self._heads, self._kv_heads, *sizes, PAGE),
                self._angles.dims,
                self._angles.neighbours,
                bool(self._norms),
                self._gated,
            )
            self._made[sizes, dtype] = self._kernels.turning(shape, dtype, self._norms)
        return self._made[sizes, dtype]

    def __call__(
        self, projected: mx.array, sizes: tuple[int, int], state: AppendState, mixed: Mixed
    ) -> mx.array | None:
        """The queries [tokens, heads, size] of what was projected [tokens, ...]; keys and values are written. None, and
        nothing is, where that is not the kernel's."""
        kernel = self.of(sizes, projected.dtype) if self._angles.turns(mixed) else None
        storage = None if kernel is None else state.provided(self._kv_heads, sizes, projected.dtype)
        if kernel is None or not isinstance(storage, KernelStorage) or storage.dtype != projected.dtype:
            return None
        return storage.turn(kernel, projected, self._angles.of(mixed), state.places(storage))
