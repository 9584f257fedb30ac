"""Layers of experts as the native kernels compute them, on CPUs: each token meets only the experts chosen for it.

mlx-lm sorts the tokens by expert where there are many; here the kernels do that, and the tokens stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.models.layers.modules import adopt, stood_in
from ingot.upstream import QuantizedSwitchLinear, SwiGLU, SwigluOAI, SwitchGLU, SwitchLinear


def gathered(x: mx.array, indices: mx.array, weights: Any) -> mx.array:
    """x [..., n, columns] times the weights of experts, whose indices fit the axes before n: [..., n, rows]."""
    *batch, count, columns = x.shape
    if (*batch, count) == (*indices.shape[:-1], 1, 1):
        tokens = x.reshape(*indices.shape[:-1], columns)
        return native.gather(tokens, indices, weights)[..., None, :]
    shape = mx.broadcast_shapes(tuple(batch), indices.shape)
    rows = mx.broadcast_to(x, (*shape, count, columns))
    chosen = mx.broadcast_to(indices[..., None, None], (*shape, count, 1))
    return native.gather(rows, chosen, weights).squeeze(-2)


class PackedSwitchLinear(QuantizedSwitchLinear):
    """Experts whose packed weights are multiplied as they are."""

    native: Any

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return gathered(x, indices, self.native)


class DenseSwitchLinear(SwitchLinear):
    """Experts whose plain weights are multiplied in the number format that they have."""

    native: Any

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return gathered(x, indices, self.native)


class GatedExperts(SwitchGLU):
    """Whole MLPs of experts in one operation."""

    _gating: native.GateCurve

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        weights = [self[name].native for name in PROJECTIONS]
        return native.gather_gated(x, indices, weights, self._gating)


class UnsortedExperts(SwitchGLU):
    """MLPs of experts with an activation that the kernels do not know."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        gate, up, down = (self[name].native for name in PROJECTIONS)
        inner = self.activation(native.gather(x, indices, up), native.gather(x, indices, gate))
        return native.gather(inner, indices[..., None], down).squeeze(-2)


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_GATINGS: dict[type, Callable[[Any], native.GateCurve]] = {
    SwiGLU: lambda activation: native.GateCurve(),
    SwigluOAI: lambda activation: native.GateCurve(activation._alpha, activation._limit, 1.0),
}


def fuse_experts(model: nn.Module) -> int:
    """Swap the MLPs of experts whose layers the kernels compute; returns how many were swapped."""
    found = [
        (path, _fused(module))
        for path, module in model.named_modules()
        if type(module) is SwitchGLU
        and all(isinstance(module[name], PackedSwitchLinear | DenseSwitchLinear) for name in PROJECTIONS)
    ]
    model.update_modules(tree_unflatten(found))
    return len(found)


def _fused(module: Any) -> nn.Module:
    gating = _GATINGS.get(type(module.activation))
    if gating is None:
        return adopt(module, UnsortedExperts)
    fused: GatedExperts = adopt(module, GatedExperts)
    fused._gating = gating(module.activation)
    return fused


class _FirstExpert:
    """Each token meets the first expert as often as it would have met others. What it is weighed by stays the router's:
    that moves little where the router wavers, and in whichever order it chose."""

    def __call__(self, x: mx.array, indices: mx.array, *given: Any, **named: Any) -> mx.array:
        y: mx.array = super().__call__(x, mx.zeros_like(indices), *given, **named)  # type: ignore[misc]
        return y


def given_experts(model: nn.Module) -> AbstractContextManager[None] | None:
    """While this is open, the choice of experts is given, the same for all tokens: rounding that makes a router waver
    between two of them then changes next to nothing. None where the model has no experts."""
    found = [(path, module) for path, module in model.named_modules() if _is_chosen_from(module)]
    outermost = [
        (path, module) for path, module in found if not any(path.startswith(f"{other}.") for other, _ in found)
    ]
    return stood_in(model, outermost, _FirstExpert) if outermost else None


def _is_chosen_from(module: nn.Module) -> bool:
    asked = [*inspect.signature(type(module).__call__).parameters]
    return asked[1:3] == ["x", "indices"]
