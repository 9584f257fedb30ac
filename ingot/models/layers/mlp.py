"""Gated MLPs in fewer operations: on CPUs the gate as one native operation, or in the fewest that MLX has for it; on
GPUs what is gated and its gate as one product."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.models.families.description import MLPWiring
from ingot.models.families.registry import gating_of
from ingot.models.layers.modules import adopt
from ingot.models.layers.products import Product, product_of


class GatedMLP(nn.Module):
    """Computes what the MLP that it extends computes, float32 in fewer steps."""

    _gating: MLPWiring
    _native: bool

    def __call__(self, x: mx.array) -> Any:
        gating = self._gating
        if x.dtype != mx.float32:
            return super().__call__(x)
        gate = self[gating.gate](x)
        up = None if gating.up is None else self[gating.up](x)
        return self[gating.down](native.gated(gating.act, gate, up) if self._native else _divided(gate, up))


def _divided(gate: mx.array, up: mx.array | None) -> mx.array:
    """Silu alone: MLX's sigmoid costs half as much again as its exponential and a division."""
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return gate / (1 + mx.exp(-gate)) * up


@cache
def _extended(kind: type) -> type:
    return type(f"Gated{kind.__name__}", (GatedMLP, kind), {})


def swap_gates(model: nn.Module, known: Callable[[nn.Module], MLPWiring | None] = gating_of) -> int:
    """Swap every known MLP of the model that can be computed faster; returns how many were."""
    found = [(path, module, known(module)) for path, module in model.named_modules()]
    quick = native.available()
    swapped = [
        (path, _swapped(module, gating, quick))
        for path, module, gating in found
        if gating is not None and (quick or gating.act == "silu")
    ]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _swapped(module: nn.Module, gating: MLPWiring, quick: bool) -> nn.Module:
    swapped: Any = adopt(module, _extended(type(module)))
    swapped._gating, swapped._native = gating, quick
    return swapped


class JoinedMLP(nn.Module):
    """Computes what the MLP that it extends computes, the products in front of its gate as one."""

    _gate: Callable[[mx.array, mx.array], mx.array]
    _into: Product
    _out: Product

    @property
    def is_silu(self) -> bool:
        return self._gate is _silu

    def __call__(self, x: mx.array) -> Any:
        gate, up = mx.split(self._into(x.reshape(-1, x.shape[-1])), 2, axis=-1)
        return self._out(self._gate(gate, up)).reshape(*x.shape[:-1], -1)


@partial(mx.compile, shapeless=True)
def _silu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _gelu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu(gate) * up


@partial(mx.compile, shapeless=True)
def _gelu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * up


_GATES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


@cache
def _joining(kind: type) -> type:
    return type(f"Joined{kind.__name__}", (JoinedMLP, kind), {})


def join_gates(model: nn.Module) -> int:
    """Swap every known MLP of the model whose products can be joined; returns how many were. One layer after another is
    in memory twice, while it is joined."""
    tried = [(path, _with_one_product(module, gating_of(module))) for path, module in model.named_modules()]
    swapped = [(path, module) for path, module in tried if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _with_one_product(module: nn.Module, gating: MLPWiring | None) -> nn.Module | None:
    """None for other modules, and for those whose products are one already, or cannot be."""
    if gating is None or gating.up is None:
        return None
    before = (gating.gate, gating.up)
    into = product_of(*(module[name] for name in before), names=before)
    out = product_of(module[gating.down], names=[gating.down])
    if into is None or out is None:
        return None
    swapped: Any = adopt(module, _joining(type(module)))
    swapped._gate, swapped._into, swapped._out = _GATES[gating.act], into, out
    return swapped
