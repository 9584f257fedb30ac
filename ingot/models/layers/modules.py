"""Modules that stand in for a loaded model's own, with its weights: MLX's idiom for changing a model.

`adopt` makes such a module, `restored` gives back the one that it stands in for. Linear layers and embeddings are
multiplied by the native kernels on CPUs, and RoPE modules learn to read explicit positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ingot.cache.forward_batch import CacheOffset, TokenPositions
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.upstream import rope_utils


class PackedLinear(nn.QuantizedLinear):
    """Multiplies packed weights as they are, on CPUs, which holds them in an order of its own."""

    native: Any

    def __call__(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


class PackedEmbedding(nn.QuantizedEmbedding):
    """Looks up rows of weights that a `PackedLinear` could multiply; as an output head it is one."""

    native: Any

    def __call__(self, ids: mx.array) -> mx.array:
        return native.lookup_rows(ids, self.native)

    def as_linear(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


class DenseLinear(nn.Linear):
    """Multiplies plain weights on CPUs, in the number format that they have: float32, or one of 16 bits."""

    native: Any

    def __call__(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


class DenseEmbedding(nn.Embedding):
    """Looks up rows of weights that a `DenseLinear` could multiply, as float32; as an output head it is one."""

    native: Any

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids].astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return native.linear(x, self.native)


def native_quantized(module: Any, cls: type) -> Any:
    """A packed layer as the class `cls`, which the native kernels compute, with its weights in their order."""
    taken = adopt_module(module, cls)
    bias = module.bias if "bias" in module else None
    biases = module.get("biases")
    weights = native.packed_weights(module.weight, module.scales, biases, bias, module.group_size, module.bits)
    taken.native = weights
    taken.weight, taken.scales, taken.biases = weights.arrays[:3]
    return taken


def native_dense(module: Any, cls: type) -> Any:
    """A plain layer as the class `cls`, which the native kernels compute."""
    taken = adopt_module(module, cls)
    taken.native = native.plain_weights(module.weight, module.bias if "bias" in module else None)
    taken.weight = taken.native.arrays[0]
    if "bias" in module:
        taken.bias = taken.native.arrays[1]
    return taken


def native_weights_of(module: Any) -> Any:
    """A linear layer as the native kernels take it; None where they do not know its form."""
    if isinstance(module, PackedLinear | DenseLinear):
        return module.native
    bias = module.bias if "bias" in module else None
    return native.plain_weights(module.weight, bias) if type(module) is nn.Linear else None


def named_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Every weight with its path."""
    flat: Any = tree_flatten(model.parameters())
    return list(flat)


def adopt_module(module: nn.Module, cls: type) -> Any:
    """A module of class `cls` that owns what `module` owns. `cls` must be a subclass of `module`'s class."""
    assert issubclass(cls, type(module))
    taken = cls.__new__(cls)
    nn.Module.__init__(taken)
    dict.update(taken, module)
    taken.__dict__.update(vars(module))
    return taken


def extend(module: nn.Module, ours: type, prefix: str) -> Any:
    """A module that owns what `module` owns, of a class that puts `ours` before its own."""
    return adopt_module(module, _extended(ours, type(module), prefix))


@cache
def _extended(ours: type, theirs: type, prefix: str) -> type:
    return type(f"{prefix}{theirs.__name__}", (ours, theirs), {})


def own_class(module: nn.Module) -> type:
    """Another project's class, which the class of a module that stands in for one extends."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("ingot."))


def restored_module(module: nn.Module) -> Any:
    """What a module stands in for: one of its own class, with all that it owns but what that class knows nothing of."""
    kind: Any = own_class(module)
    ours = {
        name
        for each in type(module).__mro__
        if each.__module__.startswith("ingot.")
        for name in vars(each).get("__annotations__", ())
    }
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    dict.update(plain, module)
    plain.__dict__.update({name: value for name, value in vars(module).items() if name not in ours})
    return plain


@contextmanager
def modules_stood_in(model: nn.Module, found: Sequence[tuple[str, nn.Module]], ours: type) -> Iterator[None]:
    """While this is open, modules of a model are of classes that put `ours` before their own."""
    extended = [
        (path, adopt_module(each, type(f"{ours.__name__}{type(each).__name__}", (ours, type(each)), {})))
        for path, each in found
    ]
    model.update_modules(tree_unflatten(extended))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten([*found]))


@dataclass(frozen=True)
class RopeRotation:
    """A RoPE module as data: `x[..., :dims] * gain` is rotated by position * scale / periods."""

    dims: int
    traditional: bool
    periods: mx.array
    scale: float = 1.0
    gain: float = 1.0
    axes: mx.array | None = None  # by which of three axes of positions each period turns, where there are three

    def angles(self, at: mx.array, *, three: bool) -> mx.array:
        """How far tokens at these positions turn, [..., periods]; of `three` axes where `at` is [3, ...]."""
        positions = at.astype(mx.float32) * self.scale
        if not three:
            return positions[..., None] / self.periods
        assert self.axes is not None, "this RoPE turns by one axis"
        return mx.moveaxis(positions[self.axes], 0, -1) / self.periods

    def __call__(self, x: mx.array, at: mx.array) -> mx.array:
        """Rotate x [rows, heads, width, size] to the positions `at` [rows, width] or [3, rows, width]."""
        angles = self.angles(at, three=at.ndim == 3)[:, None]
        cos, sin = mx.cos(angles), mx.sin(angles)
        rotated, rest = x[..., : self.dims].astype(mx.float32) * self.gain, x[..., self.dims :]
        if self.traditional:
            one, two = rotated[..., 0::2], rotated[..., 1::2]
        else:
            one, two = mx.split(rotated, 2, axis=-1)
        pair = [one * cos - two * sin, one * sin + two * cos]
        if self.traditional:
            turned = mx.stack(pair, axis=-1).reshape(rotated.shape)
        else:
            turned = mx.concatenate(pair, axis=-1)
        return mx.concatenate([turned.astype(x.dtype), rest], axis=-1)


class PositionedRope(nn.Module):
    """Takes what the RoPE that it extends takes as offset, and explicit positions too."""

    _rotation: RopeRotation

    def __call__(self, x: mx.array, offset: CacheOffset = 0, **options: Any) -> mx.array:
        if isinstance(offset, TokenPositions):
            assert not options, "explicit positions with options that this RoPE does not know"
            return self._rotation(x, offset.at)
        return super().__call__(x, offset=offset, **options)


def rotation_of(rope: nn.Module) -> RopeRotation:
    """Describe one of the known RoPE modules; KeyError for others."""
    return _ROTATIONS[type(rope)](rope)


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


_POSITIONED = {kind: type(f"Positioned{kind.__name__}", (PositionedRope, kind), {}) for kind in _ROTATIONS}


def positioned_rope(rope: nn.Module, axes: Sequence[int] | None = None) -> PositionedRope:
    """The same RoPE, with all that models read of it, for explicit positions too, also of three axes where it is said
    which of them each period turns by; KeyError for unknown ones."""
    replacement: PositionedRope = adopt_module(rope, _POSITIONED[type(rope)])
    rotation = rotation_of(rope)
    if axes is not None:
        if len(axes) != rotation.periods.size:
            raise ModelError(
                f"mrope_section is of {len(axes)} frequencies, but the model turns {rotation.periods.size}"
            )
        rotation = replace(rotation, axes=mx.array(list(axes), dtype=mx.int32))
    replacement._rotation = rotation
    return replacement


def swap_ropes(model: nn.Module, axes: Sequence[int] | None = None) -> int:
    """Swap every known RoPE module of the model; returns how many were swapped."""
    found = [(path, module) for path, module in model.named_modules() if type(module) in _ROTATIONS]
    model.update_modules(tree_unflatten([(path, positioned_rope(module, axes)) for path, module in found]))
    return len(found)
