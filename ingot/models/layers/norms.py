"""Norms on CPUs as one operation each, where MLX computes them in half a dozen."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.models.families.registry import norm_of
from ingot.models.layers.modules import adopt


def factor(norm: nn.Module) -> mx.array | None:
    """What a norm multiplies by; None if by nothing."""
    if "weight" not in norm:
        return None
    weight: mx.array = norm.weight
    described = norm_of(norm)
    return 1.0 + weight if described is not None and described.one_more else weight


def is_rms(norm: nn.Module) -> bool:
    """Whether it is an RMS norm that is known."""
    return type(norm) is nn.RMSNorm or _is_described(norm, "rms")


def is_layer(norm: nn.Module) -> bool:
    """Whether it is a layer norm that is known."""
    return type(norm) is nn.LayerNorm or _is_described(norm, "layer")


def _is_described(norm: nn.Module, kind: str) -> bool:
    described = norm_of(norm)
    return described is not None and described.kind == kind and not described.of_heads


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


@cache
def _extended(ours: type, theirs: type) -> type:
    return type(f"Native{theirs.__name__}", (ours, theirs), {})


def swap_norms(model: nn.Module) -> int:
    """Swap every known norm of a float32 model for a native one; returns how many were swapped."""
    found = [(path, module) for path, module in model.named_modules() if _known(module)]
    model.update_modules(tree_unflatten([(path, _swapped(module)) for path, module in found]))
    return len(found)


def _known(module: nn.Module) -> bool:
    weight = factor(module) if is_rms(module) or is_layer(module) else None
    if weight is None:
        return is_layer(module)
    return weight.dtype == mx.float32


def _swapped(module: nn.Module) -> nn.Module:
    swapped: Any = adopt(module, _extended(NativeRMSNorm if is_rms(module) else NativeLayerNorm, type(module)))
    swapped._factor = factor(module)
    return swapped
