"""RoPE in mixed batches: the angles of a batch are computed once for all layers that share a rotation.

Where MLX does not fuse it (CPUs), queries and keys are rotated together. On GPUs one kernel norms queries and keys,
rotates them and writes keys and values to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import MixedBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.pages import PAGE
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.paged_attention.rope import HeadRmsNorm, RopeKernel, RopeShape, rope_angles
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.models.layers.modules import PositionedRope, RopeRotation
from ingot.models.layers.norms import is_rms_norm, norm_factor


class SharedRope:
    """A rotation that layers share. Turns float32 alone."""

    def __init__(self, rotation: RopeRotation) -> None:
        self._rotation = rotation
        self._launch: MixedBatch | None = None
        self._cos = self._sin = mx.array(0.0)

    def __call__(self, queries: mx.array, keys: mx.array, mixed: MixedBatch) -> tuple[mx.array, mx.array]:
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

    def _prepare(self, mixed: MixedBatch) -> None:
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


class RopeAngles:
    """A rotation that layers share: how it turns the tokens of a launch is found once for all of them."""

    def __init__(self, rotation: RopeRotation | None) -> None:
        self.dims = 0 if rotation is None else rotation.dims
        self.neighbours = rotation is not None and rotation.traditional
        self._gain = 1.0 if rotation is None else rotation.gain
        self._speeds = mx.zeros(0) if rotation is None else rotation.scale / rotation.periods
        self._axes = None if rotation is None else rotation.axes

    def turns(self, mixed: MixedBatch) -> bool:
        """Whether it is known how the tokens of a launch turn."""
        return not mixed.three_axes or self._axes is not None or not self.dims

    def of(self, mixed: MixedBatch) -> mx.array:
        if self not in mixed.memo:
            positions = mixed.positions
            if mixed.three_axes and self._axes is not None:
                positions = positions[self._axes].T
            mixed.memo[self] = rope_angles(positions, self._speeds, self._gain)
        angles: mx.array = mixed.memo[self]
        return angles


class KernelRopes:
    """What turns queries and keys of a model's layers, where kernels do."""

    def __init__(self, kernels: CheckedKernels) -> None:
        self._kernels = kernels
        self._known: dict[tuple[object, ...], RopeAngles] = {}

    def of(
        self, *, heads: int, kv_heads: int, rope: nn.Module | None, norms: Sequence[nn.Module], gated: bool
    ) -> KernelRope | None:
        """None for rotations and norms that the kernel does not know."""
        if not (rope is None or isinstance(rope, PositionedRope)) or not all(map(is_rms_norm, norms)):
            return None
        known = [(norm_factor(norm), float(norm.eps)) for norm in norms]
        return KernelRope(self._kernels, heads, kv_heads, known, self._angles(rope), gated=gated)

    def _angles(self, rope: PositionedRope | None) -> RopeAngles:
        rotation = None if rope is None else rope._rotation
        if rotation is None:
            return self._known.setdefault((), RopeAngles(None))
        periods = tuple(rotation.periods.tolist())  # type: ignore[arg-type]
        key = (rotation.dims, rotation.traditional, rotation.scale, rotation.gain, periods)
        return self._known.setdefault(key, RopeAngles(rotation))


class KernelRope:
    """One layer's."""

    def __init__(
        self,
        kernels: CheckedKernels,
        heads: int,
        kv_heads: int,
        norms: list[HeadRmsNorm],
        angles: RopeAngles,
        *,
        gated: bool,
    ) -> None:
        self._kernels, self._heads, self._kv_heads, self._norms = kernels, heads, kv_heads, norms
        self._angles, self._gated = angles, gated
        self._made: dict[tuple[tuple[int, int], mx.Dtype], RopeKernel | None] = {}

    def of(self, sizes: tuple[int, int], dtype: mx.Dtype) -> RopeKernel | None:
        """The kernel for heads of keys and values of these sizes; None where there is none that is right."""
        if (sizes, dtype) not in self._made:
            shape = RopeShape(
                AttentionShape(self._heads, self._kv_heads, *sizes, PAGE),
                self._angles.dims,
                self._angles.neighbours,
                bool(self._norms),
                self._gated,
            )
            self._made[sizes, dtype] = self._kernels.turning(shape, dtype, self._norms)
        return self._made[sizes, dtype]

    def __call__(
        self, projected: mx.array, sizes: tuple[int, int], state: AppendState, mixed: MixedBatch
    ) -> mx.array | None:
        """The queries [tokens, heads, size] of what was projected [tokens, ...]; keys and values are written. None, and
        nothing is, where that is not the kernel's."""
        kernel = self.of(sizes, projected.dtype) if self._angles.turns(mixed) else None
        storage = None if kernel is None else state.provided(self._kv_heads, sizes, projected.dtype)
        if kernel is None or not isinstance(storage, KernelStorage) or storage.dtype != projected.dtype:
            return None
        return storage.turn(kernel, projected, self._angles.of(mixed), state.places(storage))
