"""RoPE: modules that take explicit positions, and rotations whose angles are computed once a batch for all layers.

Where MLX does not fuse RoPE (CPUs), queries and keys of a mixed batch are rotated together. On GPUs one kernel norms
queries and keys, rotates them and writes keys and values to the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import CacheOffset, MixedBatch, TokenPositions
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.pages import PAGE
from ingot.errors import ModelError
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.paged_attention.rope import (
    HeadRmsNorm,
    LatentRopeKernel,
    LatentRopeShape,
    RopeKernel,
    RopeShape,
    rope_angles,
)
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.models.families.registry import rope_spec_of
from ingot.models.layers.modules import extend, swap_each
from ingot.upstream import rope_utils


@dataclass(frozen=True)
class RopeRotation:
    """A RoPE module as data: `x[..., :dims] * gain` is rotated by position * scale / periods."""

    dims: int
    traditional: bool
    periods: mx.array
    scale: float = 1.0
    gain: float = 1.0
    axes: mx.array | None = None  # which of three axes of positions each period rotates by, where there are three

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for modules that rotate alike by positions of one axis."""
        return self.dims, self.traditional, self.scale, self.gain, tuple(self.periods.tolist())  # type: ignore[arg-type]

    def angles(self, at: mx.array, *, three: bool) -> mx.array:
        """The angles [..., periods] of tokens at these positions; of `three` axes where `at` is [3, ...]."""
        positions = at.astype(mx.float32) * self.scale
        if not three:
            return positions[..., None] / self.periods
        assert self.axes is not None, "this RoPE has positions of one axis"
        return mx.moveaxis(positions[self.axes], 0, -1) / self.periods

    def __call__(self, x: mx.array, at: mx.array) -> mx.array:
        """Rotate x [rows, heads, width, size] to the positions `at` [rows, width] or [3, rows, width]."""
        angles = self.angles(at, three=at.ndim == 3)[:, None]
        cos, sin = mx.cos(angles), mx.sin(angles)
        plain, unrotated = x[..., : self.dims].astype(mx.float32) * self.gain, x[..., self.dims :]
        if self.traditional:
            one, two = plain[..., 0::2], plain[..., 1::2]
        else:
            one, two = mx.split(plain, 2, axis=-1)
        pair = [one * cos - two * sin, one * sin + two * cos]
        if self.traditional:
            rotated = mx.stack(pair, axis=-1).reshape(plain.shape)
        else:
            rotated = mx.concatenate(pair, axis=-1)
        return mx.concatenate([rotated.astype(x.dtype), unrotated], axis=-1)


class PositionedRope(nn.Module):
    """Takes the offsets that the RoPE that it extends takes, and explicit positions too."""

    rotation: RopeRotation

    def __call__(self, x: mx.array, offset: CacheOffset = 0, **options: Any) -> mx.array:
        if isinstance(offset, TokenPositions):
            assert not options, "explicit positions with options that this RoPE does not know"
            return self.rotation(x, offset.at)
        return super().__call__(x, offset=offset, **options)


def _plain_rotation(rope: Any) -> RopeRotation:
    periods = rope.base ** (mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims)
    return RopeRotation(rope.dims, rope.traditional, periods, scale=rope.scale)


_ROTATIONS: dict[type, Any] = {
    nn.RoPE: _plain_rotation,
    rope_utils.Llama3RoPE: lambda rope: RopeRotation(rope.dims, rope.traditional, rope._freqs),
    rope_utils.ProportionalRoPE: lambda rope: RopeRotation(rope.dims, rope.traditional, rope._freqs),
    rope_utils.YarnRoPE: lambda rope: RopeRotation(rope.dims, rope.traditional, rope._freqs, gain=rope.mscale),
    rope_utils.SuScaledRoPE: lambda rope: RopeRotation(rope.dim, False, rope._freqs, gain=rope._scale),
}


class PeriodsRope(nn.Module):
    """A RoPE that families compute by a function: each pair of numbers has a period, or a negative one where it is
    rotated backwards."""

    def __init__(self, periods: mx.array) -> None:
        super().__init__()
        self._periods = periods

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        dims = 2 * self._periods.size
        return mx.fast.rope(x, dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods)


_ROTATIONS[PeriodsRope] = lambda rope: RopeRotation(2 * rope._periods.size, False, rope._periods)


def _rotation_of(rope: Any) -> RopeRotation | None:
    """None for RoPE modules that are not known."""
    if type(rope) in _ROTATIONS:
        rotation: RopeRotation = _ROTATIONS[type(rope)](rope)
        return rotation
    spec = rope_spec_of(rope)
    return (
        None
        if spec is None or spec.dims is None
        else RopeRotation(getattr(rope, spec.dims), False, getattr(rope, spec.periods))
    )


def positioned_rope(rope: nn.Module, axes: Sequence[int] | None = None) -> PositionedRope:
    """The same RoPE for explicit positions too; with `axes`, which say which of three axes each period rotates by, also
    for positions of three axes. KeyError for RoPE modules that are not known."""
    rotation = _rotation_of(rope)
    if rotation is None:
        raise KeyError(type(rope))
    replacement: PositionedRope = extend(rope, PositionedRope, "Positioned")
    if axes is not None:
        if len(axes) != rotation.periods.size:
            raise ModelError(f"mrope_section has {len(axes)} frequencies, but the model's RoPE {rotation.periods.size}")
        rotation = replace(rotation, axes=mx.array(list(axes), dtype=mx.int32))
    replacement.rotation = rotation
    return replacement


def rotate_parts(rope: nn.Module, x: mx.array, mixed: MixedBatch) -> mx.array:
    """x [tokens, heads, 1, size] of a mixed batch, each part rotated as a model's own code would: a prompt's tokens are
    one row, not many."""
    rotated = []
    for number, part in enumerate(mixed.parts):
        own: mx.array = rope(mixed.split_batch_heads(number, x), offset=part.offset)
        rotated.append(own if part.width == 1 else own.swapaxes(1, 2).reshape(part.tokens, x.shape[1], 1, -1))
    return rotated[0] if len(rotated) == 1 else mx.concatenate(rotated)


def swap_ropes(model: nn.Module, axes: Sequence[int] | None = None) -> int:
    """Swap every known RoPE module of the model; returns how many were swapped."""
    return swap_each(model, lambda module: None if _rotation_of(module) is None else positioned_rope(module, axes))


class SharedRope:
    """A rotation that layers share, of float32 alone."""

    def __init__(self, rotation: RopeRotation) -> None:
        self._rotation = rotation
        self._batch: MixedBatch | None = None
        self._cos = self._sin = mx.array(0.0)

    def __call__(self, queries: mx.array, keys: mx.array, mixed: MixedBatch) -> tuple[mx.array, mx.array]:
        """Queries and keys [tokens, heads, 1, size] of a mixed batch, rotated to its positions."""
        if mixed is not self._batch:
            self._prepare(mixed)
        dims, heads = self._rotation.dims, queries.shape[1]
        both = mx.concatenate([queries, keys], axis=1)
        rotated = self._rotate(both[..., :dims])
        if dims < both.shape[-1]:
            rotated = mx.concatenate([rotated, both[..., dims:]], axis=-1)
        return rotated[:, :heads], rotated[:, heads:]

    def _rotate(self, x: mx.array) -> mx.array:
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
        self._batch = mixed


class SharedRopes:
    """The different rotations of one model."""

    def __init__(self) -> None:
        self._ropes: dict[tuple[object, ...], SharedRope] = {}

    def rope_for(self, rope: nn.Module | None) -> SharedRope | None:
        """The rotation of this module; None where it is not known."""
        if not isinstance(rope, PositionedRope):
            return None
        return self._ropes.setdefault(rope.rotation.key, SharedRope(rope.rotation))


class RopeAngles:
    """A rotation that layers share: the angles of a batch are computed once for all of them."""

    def __init__(self, rotation: RopeRotation | None) -> None:
        self.dims = 0 if rotation is None else rotation.dims
        self.neighbours = rotation is not None and rotation.traditional
        self._gain = 1.0 if rotation is None else rotation.gain
        self._speeds = mx.zeros(0) if rotation is None else rotation.scale / rotation.periods
        self._axes = None if rotation is None else rotation.axes

    def supports(self, mixed: MixedBatch) -> bool:
        """Whether the batch's positions have as many axes as this rotation."""
        return not mixed.three_axes or self._axes is not None or not self.dims

    def of_batch(self, mixed: MixedBatch) -> mx.array:
        if self not in mixed.memo:
            positions = mixed.positions
            if mixed.three_axes and self._axes is not None:
                positions = positions[self._axes].T
            mixed.memo[self] = rope_angles(positions, self._speeds, self._gain)
        angles: mx.array = mixed.memo[self]
        return angles


class KernelRopes:
    """The RoPE of a model's layers, by kernels of a GPU."""

    def __init__(self, kernels: CheckedKernels) -> None:
        self.kernels = kernels
        self._angles: dict[tuple[object, ...], RopeAngles] = {}

    def angles_for(self, rope: nn.Module | None) -> RopeAngles | None:
        """None for rotations that the kernels do not know."""
        if not (rope is None or isinstance(rope, PositionedRope)):
            return None
        rotation = None if rope is None else rope.rotation
        return self._angles.setdefault(() if rotation is None else rotation.key, RopeAngles(rotation))

    def rope_for(
        self,
        *,
        heads: int,
        kv_heads: int,
        rope: nn.Module | None,
        norms: Sequence[HeadRmsNorm],
        value_norm: HeadRmsNorm | None = None,
        **form: bool,
    ) -> KernelRope | None:
        """None for rotations that the kernel does not know. `form` is that of a `RopeShape`."""
        angles = self.angles_for(rope)
        if angles is None:
            return None
        form |= {"normed": bool(norms), "values_normed": value_norm is not None}
        all_norms = [*norms, *([] if value_norm is None else [value_norm])]
        return KernelRope(self.kernels, heads, kv_heads, all_norms, angles, form)


class KernelLatentRope:
    """One latent layer's norm of latents, RoPE and writes, as one kernel."""

    def __init__(
        self,
        kernels: CheckedKernels,
        heads: int,
        unrotated: int,
        sizes: tuple[int, int],
        norm: HeadRmsNorm,
        angles: RopeAngles,
    ) -> None:
        """`sizes` are those of latents and of what is rotated."""
        self._kernels, self._norm, self.angles, self._unrotated = kernels, norm, angles, unrotated
        self._heads = AttentionShape(heads, 1, *sizes, PAGE, latent=True)
        self._by_shape: dict[tuple[LatentRopeShape, mx.Dtype], LatentRopeKernel | None] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        return self._heads.key_size, self._heads.value_size

    def kernel_for(self, query_row: int, latent_row: int, latent_at: int, dtype: mx.Dtype) -> LatentRopeKernel | None:
        """The kernel for tokens with so many numbers where their queries and latents are, the latter from a place on;
        None where none is correct."""
        angles = self.angles
        shape = LatentRopeShape(
            self._heads, self._unrotated, query_row, latent_row, latent_at, angles.dims, angles.neighbours
        )
        if (shape, dtype) not in self._by_shape:
            self._by_shape[shape, dtype] = self._kernels.turning_latents(shape, dtype, self._norm)
        return self._by_shape[shape, dtype]


class KernelRope:
    """One layer's norms of queries and keys, RoPE and KV writes, as one kernel."""

    def __init__(
        self,
        kernels: CheckedKernels,
        heads: int,
        kv_heads: int,
        norms: Sequence[HeadRmsNorm],
        angles: RopeAngles,
        form: Mapping[str, bool],
    ) -> None:
        self._kernels, self._heads, self._kv_heads, self._norms = kernels, heads, kv_heads, norms
        self.angles, self._form = angles, form
        self._by_shape: dict[tuple[tuple[int, int], mx.Dtype], RopeKernel | None] = {}

    def kernel_for(self, sizes: tuple[int, int], dtype: mx.Dtype) -> RopeKernel | None:
        """The kernel for heads of keys and values of these sizes; None where none is correct."""
        if (sizes, dtype) not in self._by_shape:
            heads = AttentionShape(self._heads, self._kv_heads, *sizes, PAGE)
            shape = RopeShape(heads, self.angles.dims, self.angles.neighbours, **self._form)
            self._by_shape[sizes, dtype] = self._kernels.turning(shape, dtype, self._norms)
        return self._by_shape[sizes, dtype]

    def __call__(
        self, projected: mx.array, sizes: tuple[int, int], state: AppendState, mixed: MixedBatch
    ) -> mx.array | None:
        """The queries [tokens, heads, size] of joint projections [tokens, ...]; keys and values are written. None where
        the kernel does not support the batch: then nothing is written."""
        kernel = self.kernel_for(sizes, projected.dtype) if self.angles.supports(mixed) else None
        storage = None if kernel is None else state.provided(self._kv_heads, sizes, projected.dtype)
        if kernel is None or not isinstance(storage, KernelStorage) or storage.dtype != projected.dtype:
            return None
        return storage.turn(kernel, projected, self.angles.of_batch(mixed), state.places(storage))
