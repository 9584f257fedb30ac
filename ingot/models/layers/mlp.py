"""MLPs in fewer operations, and mixtures of experts (MoE).

Gated MLPs: on CPUs the gate is one native operation, or the fewest that MLX has for it; on GPUs what is gated and its
gate are one matrix product. Experts on CPUs: each token meets only the experts chosen for it. mlx-lm sorts the tokens
by expert where there are many; here the kernels do that, and the tokens stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels.cpu import native
from ingot.models.families.description import MlpSpec
from ingot.models.families.registry import mlp_spec_of
from ingot.models.layers.gpu_linear import JoinedLinear, join_linears
from ingot.models.layers.modules import adopt_module, extend, modules_stood_in
from ingot.upstream import QuantizedSwitchLinear, SwiGLU, SwigluOAI, SwitchGLU, SwitchLinear


class GatedMLP(nn.Module):
    """Computes what the MLP that it extends computes, float32 in fewer steps."""

    _gating: MlpSpec
    _native: bool

    def __call__(self, x: mx.array) -> Any:
        gating = self._gating
        if x.dtype != mx.float32:
            return super().__call__(x)
        gate = self[gating.gate](x)
        up = None if gating.up is None else self[gating.up](x)
        return self[gating.down](
            native.gated_activation(gating.act, gate, up) if self._native else _silu_by_division(gate, up)
        )


def _silu_by_division(gate: mx.array, up: mx.array | None) -> mx.array:
    """Silu alone: MLX's sigmoid costs half as much again as its exponential and a division."""
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return gate / (1 + mx.exp(-gate)) * up


def swap_gated_mlps(model: nn.Module, known: Callable[[nn.Module], MlpSpec | None] = mlp_spec_of) -> int:
    """Swap every known MLP of the model that can be computed faster; returns how many were."""
    found = [(path, module, known(module)) for path, module in model.named_modules()]
    quick = native.available()
    swapped = [
        (path, _gated_mlp(module, gating, quick))
        for path, module, gating in found
        if gating is not None and (quick or gating.act == "silu")
    ]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _gated_mlp(module: nn.Module, gating: MlpSpec, quick: bool) -> nn.Module:
    swapped: Any = extend(module, GatedMLP, "Gated")
    swapped._gating, swapped._native = gating, quick
    return swapped


class JoinedMLP(nn.Module):
    """Computes what the MLP that it extends computes, the products in front of its gate as one."""

    _gate: Callable[[mx.array, mx.array], mx.array]
    _into: JoinedLinear
    _out: JoinedLinear

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


def join_gated_mlps(model: nn.Module) -> int:
    """Swap every known MLP of the model whose products can be joined; returns how many were. One layer after another is
    in memory twice, while it is joined."""
    tried = [(path, _joined_mlp(module, mlp_spec_of(module))) for path, module in model.named_modules()]
    swapped = [(path, module) for path, module in tried if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _joined_mlp(module: nn.Module, gating: MlpSpec | None) -> nn.Module | None:
    """None for other modules, and for those whose products are one already, or cannot be."""
    if gating is None or gating.up is None:
        return None
    before = (gating.gate, gating.up)
    into = join_linears(*(module[name] for name in before), names=before)
    out = join_linears(module[gating.down], names=[gating.down])
    if into is None or out is None:
        return None
    swapped: Any = extend(module, JoinedMLP, "Joined")
    swapped._gate, swapped._into, swapped._out = _GATES[gating.act], into, out
    return swapped


def gather_experts(x: mx.array, indices: mx.array, weights: Any) -> mx.array:
    """x [..., n, columns] times the weights of experts, whose indices fit the axes before n: [..., n, rows]."""
    *batch, count, columns = x.shape
    if (*batch, count) == (*indices.shape[:-1], 1, 1):
        tokens = x.reshape(*indices.shape[:-1], columns)
        return native.gather_experts(tokens, indices, weights)[..., None, :]
    shape = mx.broadcast_shapes(tuple(batch), indices.shape)
    rows = mx.broadcast_to(x, (*shape, count, columns))
    chosen = mx.broadcast_to(indices[..., None, None], (*shape, count, 1))
    return native.gather_experts(rows, chosen, weights).squeeze(-2)


class PackedSwitchLinear(QuantizedSwitchLinear):
    """Experts whose packed weights are multiplied as they are."""

    native: Any

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return gather_experts(x, indices, self.native)


class DenseSwitchLinear(SwitchLinear):
    """Experts whose plain weights are multiplied in the number format that they have."""

    native: Any

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return gather_experts(x, indices, self.native)


class GatedExperts(SwitchGLU):
    """Whole MLPs of experts in one operation."""

    _gating: native.GateCurve

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        weights = [self[name].native for name in EXPERT_PROJECTIONS]
        return native.gather_gated_experts(x, indices, weights, self._gating)


class UnsortedExperts(SwitchGLU):
    """MLPs of experts with an activation that the kernels do not know."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        gate, up, down = (self[name].native for name in EXPERT_PROJECTIONS)
        inner = self.activation(native.gather_experts(x, indices, up), native.gather_experts(x, indices, gate))
        return native.gather_experts(inner, indices[..., None], down).squeeze(-2)


EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_EXPERT_GATES: dict[type, Callable[[Any], native.GateCurve]] = {
    SwiGLU: lambda activation: native.GateCurve(),
    SwigluOAI: lambda activation: native.GateCurve(activation._alpha, activation._limit, 1.0),
}


def fuse_experts(model: nn.Module) -> int:
    """Swap the MLPs of experts whose layers the kernels compute; returns how many were swapped."""
    found = [
        (path, _fused_experts(module))
        for path, module in model.named_modules()
        if type(module) is SwitchGLU
        and all(isinstance(module[name], PackedSwitchLinear | DenseSwitchLinear) for name in EXPERT_PROJECTIONS)
    ]
    model.update_modules(tree_unflatten(found))
    return len(found)


def _fused_experts(module: Any) -> nn.Module:
    gating = _EXPERT_GATES.get(type(module.activation))
    if gating is None:
        return adopt_module(module, UnsortedExperts)
    fused: GatedExperts = adopt_module(module, GatedExperts)
    fused._gating = gating(module.activation)
    return fused


class _FirstExpert:
    """Each token meets the first expert as often as it would have met others. What it is weighed by stays the router's:
    that moves little where the router wavers, and in whichever order it chose."""

    def __call__(self, x: mx.array, indices: mx.array, *given: Any, **named: Any) -> mx.array:
        y: mx.array = super().__call__(x, mx.zeros_like(indices), *given, **named)  # type: ignore[misc]
        return y


def fixed_experts(model: nn.Module) -> AbstractContextManager[None] | None:
    """While this is open, the choice of experts is given, the same for all tokens: rounding that makes a router waver
    between two of them then changes next to nothing. None where the model has no experts."""
    found = [(path, module) for path, module in model.named_modules() if _takes_expert_indices(module)]
    outermost = [
        (path, module) for path, module in found if not any(path.startswith(f"{other}.") for other, _ in found)
    ]
    return modules_stood_in(model, outermost, _FirstExpert) if outermost else None


def _takes_expert_indices(module: nn.Module) -> bool:
    asked = [*inspect.signature(type(module).__call__).parameters]
    return asked[1:3] == ["x", "indices"]
