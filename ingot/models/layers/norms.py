"""Norms and GELU on CPUs, each as one native operation, where MLX computes them in half a dozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.cpu import native
from ingot.models.families.registry import norm_spec_of
from ingot.models.layers.modules import adopt_module, extend, swap_each


def norm_factor(norm: nn.Module) -> mx.array | None:
    """What a norm multiplies by; None if by nothing."""
    if "weight" not in norm:
        return None
    weight: mx.array = norm.weight
    spec = norm_spec_of(norm)
    return 1.0 + weight if spec is not None and spec.one_more else weight


def is_rms_norm(norm: nn.Module) -> bool:
    """Whether it is an RMS norm that is known."""
    return type(norm) is nn.RMSNorm or _is_described_norm(norm, "rms")


def is_layer_norm(norm: nn.Module) -> bool:
    """Whether it is a layer norm that is known."""
    return type(norm) is nn.LayerNorm or _is_described_norm(norm, "layer")


def _is_described_norm(norm: nn.Module, kind: str) -> bool:
    spec = norm_spec_of(norm)
    return spec is not None and spec.kind == kind and not spec.of_heads


class NativeRMSNorm(nn.Module):
    """Computes what the norm that it extends computes, float32 natively."""

    _factor: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().__call__(x)
        return native.rms_norm(x, self._factor, self.eps)


class NativeLayerNorm(nn.Module):
    """Computes what the norm that it extends computes, float32 natively."""

    _factor: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().__call__(x)
        return native.layer_norm(x, self._factor, self.get("bias"), self.eps)


def swap_norms(model: nn.Module) -> int:
    """Swap every known norm of a float32 model for a native one; returns how many were swapped."""
    return swap_each(model, _native_norm)


def _native_norm(module: nn.Module) -> nn.Module | None:
    is_rms, is_layer = is_rms_norm(module), is_layer_norm(module)
    factor = norm_factor(module) if is_rms or is_layer else None
    if not is_layer if factor is None else factor.dtype != mx.float32:
        return None
    replacement: Any = extend(module, NativeRMSNorm if is_rms else NativeLayerNorm, "Native")
    replacement._factor = factor
    return replacement


_GELU_KINDS: Final = {"none": "gelu", "precise": "gelu_tanh", "tanh": "gelu_tanh"}
_FAST_GELU: Final = 1.702


class NativeGELU(nn.GELU):
    """Computes what MLX's computes, float32 natively."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            plain: mx.array = super().__call__(x)
            return plain
        if self._approx == "fast":
            return native.gated_activation("sigmoid", _FAST_GELU * x, x)
        return native.gated_activation(_GELU_KINDS[self._approx], x, mx.ones_like(x))


def swap_gelus(model: nn.Module) -> int:
    """Swap every GELU of a model for a native one; returns how many were swapped. Only where they are available."""
    return swap_each(model, lambda module: adopt_module(module, NativeGELU) if type(module) is nn.GELU else None)


@dataclass(frozen=True, slots=True)
class PlainNorm:
    """An RMS norm that is no module, without weights."""

    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, self.eps)
