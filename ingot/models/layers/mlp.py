"""MLPs in fewer operations, and mixtures of experts (MoE).

Gated MLPs: on CPUs the gated activation is one native operation, or the fewest that MLX has for it; on GPUs the gate
and up projections are one matrix product. Experts: mlx-lm sorts the tokens by expert where there are many; here the
kernels do that, and the tokens stay in their order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.cpu import native
from ingot.kernels.decode_graph.kernels import UNGATED, Gate
from ingot.kernels.measured import NATIVE_GATES, NOTHING_SLOWER, SlowerParts
from ingot.kernels.packed_matmul.experts import Curve, ExpertWeights, GroupedExperts
from ingot.kernels.packed_matmul.kernels import PackedFormat
from ingot.kernels.packed_matmul.selfcheck import CheckedExperts
from ingot.models.families.description import MlpSpec
from ingot.models.families.registry import expert_gate_of, mlp_spec_of
from ingot.models.layers.gpu_linear import FEW_ROWS, JoinedLinear, join_linears
from ingot.models.layers.modules import (
    adopt_module,
    extend,
    float_dtype,
    measured_part,
    swap_each,
    temporarily_extended,
)
from ingot.upstream import QuantizedSwitchLinear, SwiGLU, SwigluOAI, SwitchGLU, SwitchLinear


class GatedMLP(nn.Module):
    """Computes what the MLP that it extends computes, float32 in fewer steps."""

    _spec: MlpSpec
    _native: bool

    def __call__(self, x: mx.array) -> Any:
        spec = self._spec
        if x.dtype != mx.float32:
            return super().__call__(x)
        assert spec.gate is not None
        gate = self[spec.gate](x)
        up = None if spec.up is None else self[spec.up](x)
        return self[spec.down](
            native.gated_activation(spec.act, gate, up) if self._native else _silu_by_division(gate, up)
        )


def _silu_by_division(gate: mx.array, up: mx.array | None) -> mx.array:
    """Silu alone: MLX's sigmoid costs half as much again as its exponential and a division."""
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return gate / (1 + mx.exp(-gate)) * up


def swap_gated_mlps(
    model: nn.Module,
    spec_of: Callable[[nn.Module], MlpSpec | None] = mlp_spec_of,
    slower: SlowerParts = NOTHING_SLOWER,
) -> int:
    """Swap every known MLP of the model that can be computed faster; returns how many were."""
    has_native = native.available() and not slower.leave_out(NATIVE_GATES)

    def gated_mlp(module: nn.Module) -> nn.Module | None:
        spec = spec_of(module)
        if spec is None or spec.gate is None or not (has_native or spec.act == "silu"):
            return None
        if slower.leave_out(measured_part("MLP", module)):
            return None
        replacement: Any = extend(module, GatedMLP, "Gated")
        replacement._spec, replacement._native = spec, has_native
        return replacement

    return swap_each(model, gated_mlp)


class JoinedMLP(nn.Module):
    """Computes what the MLP that it extends computes, with its gate and up projections as one product."""

    _activation: Callable[..., mx.array]
    joined_gate_up: JoinedLinear  # or the up projection, where nothing is gated
    joined_down: JoinedLinear

    @property
    def gate(self) -> Gate:
        return next(name for name, activation in _ACTIVATIONS.items() if activation is self._activation)

    def __call__(self, x: mx.array) -> Any:
        rows = x.reshape(-1, x.shape[-1]) if self.joined_gate_up.needs_rows or self.joined_down.needs_rows else x
        inner = self.joined_gate_up(rows)
        parts = [inner] if self.gate in UNGATED else mx.split(inner, 2, axis=-1)
        y = self.joined_down(self._activation(*parts))
        return y if rows is x else y.reshape(*x.shape[:-1], -1)


@partial(mx.compile, shapeless=True)
def _silu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _gelu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu(gate) * up


@partial(mx.compile, shapeless=True)
def _gelu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * up


@partial(mx.compile, shapeless=True)
def _relu2(x: mx.array) -> mx.array:
    squared: mx.array = nn.relu2(x)
    return squared


_ACTIVATIONS: dict[Gate, Callable[..., mx.array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


def join_gated_mlps(model: nn.Module, slower: SlowerParts = NOTHING_SLOWER) -> int:
    """Swap every known MLP of the model whose products can be joined; returns how many were. One layer after another is
    in memory twice, while it is joined."""
    return swap_each(model, lambda module: _joined_mlp(module, slower))


def _joined_mlp(module: nn.Module, slower: SlowerParts) -> nn.Module | None:
    """None for other modules, and for those whose products cannot be one."""
    spec = mlp_spec_of(module)
    if spec is None or slower.leave_out(measured_part("MLP", module)):
        return None
    names = [name for name in (spec.gate, spec.up) if name is not None]
    gate_up = join_linears(*(module[name] for name in names), names=names)
    down = join_linears(module[spec.down], names=[spec.down])
    if gate_up is None or down is None:
        return None
    replacement: Any = extend(module, JoinedMLP, "Joined")
    replacement._activation = _ACTIVATIONS[spec.act]
    replacement.joined_gate_up, replacement.joined_down = gate_up, down
    return replacement


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


class _NativeExperts:
    """Multiplies by the weights of experts as they are."""

    native: Any

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return gather_experts(x, indices, self.native)


class PackedSwitchLinear(_NativeExperts, QuantizedSwitchLinear): ...


class DenseSwitchLinear(_NativeExperts, SwitchLinear): ...


class GatedExperts(SwitchGLU):
    """Whole MLPs of experts in one operation."""

    _gate_curve: native.GateCurve

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        weights = [self[name].native for name in EXPERT_PROJECTIONS]
        return native.gather_gated_experts(x, indices, weights, self._gate_curve)


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
    return swap_each(model, _fused_experts)


def _fused_experts(module: Any) -> Any:
    if type(module) is not SwitchGLU or not all(
        isinstance(module[name], PackedSwitchLinear | DenseSwitchLinear) for name in EXPERT_PROJECTIONS
    ):
        return None
    gate_curve = _EXPERT_GATES.get(type(module.activation))
    if gate_curve is None:
        return adopt_module(module, UnsortedExperts)
    fused: GatedExperts = adopt_module(module, GatedExperts)
    fused._gate_curve = gate_curve(module.activation)
    return fused


class GroupedSwitchGLU(SwitchGLU):
    """Experts of many tokens on GPUs: the tokens of each expert are one product."""

    _grouped: GroupedExperts

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if indices.size <= FEW_ROWS or x.dtype != self._grouped.dtype:
            own: mx.array = super().__call__(x, indices)
            return own
        chosen = indices.reshape(-1, indices.shape[-1]).view(mx.int32)
        y = self._grouped(x.reshape(-1, x.shape[-1]), chosen)
        return y.reshape(*indices.shape, -1)


def swap_switch_mlps(model: nn.Module, kernels: CheckedExperts) -> int:
    """Swap the MLPs of quantised experts that our kernels multiply faster for many tokens; returns how many were."""
    main = float_dtype(model)
    return swap_each(model, lambda module: _grouped_experts(module, kernels, main))


def _grouped_experts(module: Any, kernels: CheckedExperts, main: mx.Dtype) -> nn.Module | None:
    """`main` is the activations' dtype where weights do not say it."""
    if type(module) is not SwitchGLU or not all(
        isinstance(module[name], QuantizedSwitchLinear) for name in EXPERT_PROJECTIONS
    ):
        return None
    gate, up, down = (_expert_weights(module[name]) for name in EXPERT_PROJECTIONS)
    dtype = main if gate.biases is None else gate.scales.dtype

    def plainly(gate: mx.array, up: mx.array) -> mx.array:
        y: mx.array = module.activation(up, gate)
        return y

    activation = _expert_curve(module.activation) or plainly
    grouped = kernels.of((gate, up, down), dtype, activation, plainly)
    if grouped is None:
        return None
    replacement: GroupedSwitchGLU = adopt_module(module, GroupedSwitchGLU)
    replacement._grouped = grouped
    return replacement


def _expert_weights(linear: QuantizedSwitchLinear) -> ExpertWeights:
    packing = PackedFormat(linear.bits, linear.group_size, linear.mode)
    return ExpertWeights(packing, linear.weight, linear.scales, linear.get("biases"), linear.get("bias"))


def _expert_curve(activation: Any) -> Curve | None:
    """None for activations that the kernels do not know."""
    kind = type(activation)
    if kind is SwigluOAI:
        return "swiglu_oai" if (activation._alpha, activation._limit) == (1.702, 7.0) else None
    return "silu" if kind is SwiGLU else expert_gate_of(activation)


class FirstExpert:
    """Sends each token to the first expert, as often as it would have gone to others. The weights stay the router's:
    they change little where the router wavers, whichever order it chose."""

    def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        y: mx.array = super().__call__(x, mx.zeros_like(indices), *args, **kwargs)  # type: ignore[misc]
        return y


def fixed_experts(model: nn.Module) -> AbstractContextManager[None] | None:
    """While this is open, all tokens go to the same expert: rounding that makes a router waver between two of them then
    changes next to nothing. None where the model has no experts."""
    found = [(path, module) for path, module in model.named_modules() if _takes_expert_indices(module)]
    outermost = [
        (path, module) for path, module in found if not any(path.startswith(f"{other}.") for other, _ in found)
    ]
    return temporarily_extended(model, outermost, FirstExpert) if outermost else None


@contextmanager
def all_fixed_experts(layers: Iterable[nn.Module]) -> Iterator[None]:
    """The same of several modules, where they have experts."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(fixed_experts(layer) or nullcontext())
        yield


def _takes_expert_indices(module: nn.Module) -> bool:
    return [*inspect.signature(type(module).__call__).parameters][1:3] == ["x", "indices"]
