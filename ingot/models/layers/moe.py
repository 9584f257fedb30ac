"""Mixtures of experts (MoE) on GPUs: what graphs multiply and launch for one of them, found at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ConfigError
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.moe.kernels import ROUTER_SCORES, ExpertRouter, RouterShape, SharedOutput, combine_experts
from ingot.kernels.packed_matmul.experts import GroupedExperts
from ingot.kernels.packed_matmul.kernels import ExpertCurve, GatedExpertWeights, PackedProduct, PackedWeights
from ingot.models.experts.streaming import StreamedExperts
from ingot.models.families.description import MoeSpec
from ingot.models.families.registry import expert_gate_of, moe_spec_of
from ingot.models.layers.gpu_linear import FEW_ROWS, JoinedLinear, QuantizedKernelSwitchLinear, join_linears
from ingot.models.layers.layer_program import LayerMoe, decoder_layers_of, layer_program_of
from ingot.models.layers.mlp import EXPERT_PROJECTIONS, GroupedSwitchGLU
from ingot.models.layers.modules import extend, own_class, swap_each
from ingot.upstream import SwiGLU, SwigluOAI, SwitchGLU, SwitchMLP


@dataclass(frozen=True, slots=True, eq=False)
class MoeKernels:
    """What chooses a mixture's experts and multiplies by them."""

    router: ExpertRouter
    inner_product: PackedProduct
    inner: GatedExpertWeights | PackedWeights
    """Of gated experts, or of those that square what is above zero."""
    down_product: PackedProduct
    down: PackedWeights
    down_bias: mx.array | None  # [experts, outputs]
    grouped: GroupedExperts | None  # multiplies the tokens of each expert at once, in other bits

    def multiply(self, states: mx.array, chosen: mx.array, run: Launcher | None = None) -> mx.array:
        """What the chosen experts [tokens * top] of few tokens give, without their bias: [tokens * top, size]."""
        product = self.inner_product if run is None else self.inner_product.by(run)
        if isinstance(self.inner, GatedExpertWeights):
            inner = product.gather_gated(states, self.inner, chosen)
        else:
            inner = product.gather_squared(states, self.inner, chosen)
        return (self.down_product if run is None else self.down_product.by(run)).launched_gather(
            inner, self.down, chosen
        )

    def products(self, states: mx.array, places: mx.array) -> mx.array:
        """The same of the experts in these slots [tokens, top]: [tokens, top, size]."""
        return self.multiply(states, mx.contiguous(places.reshape(-1))).reshape(*places.shape, -1)


class JoinedMoe(nn.Module):
    """Computes what the mixture that it extends computes; graphs find here what they launch for it."""

    _spec: MoeSpec
    joined_router: JoinedLinear | None
    """Gives logits of experts, and behind them the gate of the expert that all tokens have, where these are alike."""
    joined_gate: JoinedLinear | None
    """Of that expert, where it is not."""
    kernels: MoeKernels | None
    streamed: MoeKernels | None
    """Of experts that are read when they are needed: where layers are no graphs, few tokens are launched one kernel
    after another."""
    lacking: str
    """What there are no kernels for, where there are none."""

    def __call__(self, x: mx.array) -> Any:
        kernels = self.streamed
        rows = x.reshape(-1, x.shape[-1])
        if kernels is None or len(rows) * kernels.router.shape.top > FEW_ROWS or x.dtype != kernels.down.dtype:
            return super().__call__(x)
        y = self._launch(kernels, mx.contiguous(rows))
        return y.reshape(x.shape)

    def _launch(self, kernels: MoeKernels, rows: mx.array) -> mx.array:
        """Of few tokens [tokens, size]."""
        spec, top = self._spec, kernels.router.shape.top
        assert self.router_product is not None
        logits = self.router_product(rows)
        chosen, weights = kernels.router(logits, _all_there())

        given = attrgetter(spec.experts)(self)(rows, chosen.reshape(-1, top), kernels.products)
        shared = None
        if spec.shared is not None and (expert := self.get(spec.shared)) is not None:
            gates = None if spec.shared_gate is None else self._shared_gates(rows, logits, kernels)
            shared = SharedOutput(expert(rows), *(gates or ()))
        run = kernels.router.launcher
        return combine_experts(run, given.reshape(-1, given.shape[-1]), chosen, weights, top, shared=shared)

    def _shared_gates(self, rows: mx.array, logits: mx.array, kernels: MoeKernels) -> tuple[mx.array, int]:
        """Of the expert that all tokens have, and where they are."""
        return (logits, kernels.router.shape.experts) if self.joined_gate is None else (self.joined_gate(rows), 0)

    @property
    def router_product(self) -> JoinedLinear | None:
        """It is where adapters look for it: in the module that has the router."""
        owner = self._spec.router.rpartition(".")[0]
        product: JoinedLinear | None = (attrgetter(owner)(self) if owner else self).joined_router
        return product


def use_fewer_experts(model: nn.Module, experts: int) -> str:
    """Have every mixture of a model choose that many experts for a token; its modules are not swapped yet. Returns what
    its answers lose by it. Raises ConfigError where it has no mixture, or has no more experts for a token."""
    mixtures = [(module, spec) for module in model.modules() if (spec := moe_spec_of(module)) is not None]
    known = {id(attrgetter(spec.experts)(module)) for module, spec in mixtures}
    others = [each for each in model.modules() if isinstance(each, SwitchGLU | SwitchMLP) and id(each) not in known]
    if not mixtures and not others:
        raise ConfigError(f"{_FEWER}: the model has no mixture of experts: leave it out", param=_FEWER)
    if others:
        raise ConfigError(f"{_FEWER}: how this model's family chooses experts is not known here", param=_FEWER)
    usual = sorted({int(_found(module, spec.top)) for module, spec in mixtures})
    if experts > usual[0]:
        raise ConfigError(f"{_FEWER}: {experts} is more than the model's own {usual[0]} experts a token", param=_FEWER)
    for module, spec in mixtures:
        owner, _, name = spec.top.rpartition(".")
        setattr(attrgetter(owner)(module) if owner else module, name, experts)
    return f"{experts} of {'/'.join(map(str, usual))} experts a token"


_FEWER: Final = "moe_top_k"


def join_moes(model: nn.Module) -> int:
    """Swap every known mixture of the model for one that graphs can take; returns how many were swapped."""
    return swap_each(model, _joined_moe)


def _joined_moe(module: nn.Module) -> nn.Module | None:
    spec = moe_spec_of(module)
    if spec is None:
        return None
    replacement: Any = extend(module, JoinedMoe, "Joined")
    replacement._spec, replacement.kernels, replacement.streamed = spec, None, None
    replacement.lacking = "experts"
    replacement.joined_gate = None
    path, _, name = spec.router.rpartition(".")
    owner = attrgetter(path)(replacement) if path else replacement
    router, gate_name = owner[name], spec.shared_gate or ""
    gate = module.get(gate_name)
    joined = None if gate is None or path else join_linears(router, gate, names=(name, gate_name), apart=True)
    if joined is None and gate is not None:
        replacement.joined_gate = join_linears(gate, names=(gate_name,), apart=True)
    if not isinstance(router, nn.Linear | nn.QuantizedLinear):
        router, name = _linear_of(router.weight), ""  # which adapters cannot be for
    owner.joined_router = joined or join_linears(router, names=(name,), apart=True)
    return replacement


def _linear_of(weight: mx.array) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = weight
    return linear


def find_moe_kernels(model: nn.Module, kernels: CheckedKernels) -> None:
    """Find the kernels of all mixtures of a model whose products were swapped."""
    for program in filter(None, map(layer_program_of, decoder_layers_of(model))):
        for part in program.parts:
            if not isinstance(part, LayerMoe):
                continue
            if isinstance(attrgetter(part.spec.moe.experts)(part.layer), StreamedExperts):
                part.layer.moe_kernels = "experts that are read when they are needed"
            else:
                part.layer.moe_kernels = _moe_kernels(part.layer, part.spec.moe, kernels)
    for module in model.modules():
        if isinstance(module, JoinedMoe):
            found = _moe_kernels(module, module._spec, kernels)
            if isinstance(found, str):
                module.lacking = found
            elif isinstance(attrgetter(module._spec.experts)(module), StreamedExperts):
                module.streamed = found
            else:
                module.kernels = found


@cache
def _all_there() -> mx.array:
    """Slots of tokens none of which is missing."""
    there = mx.zeros((FEW_ROWS, 2), mx.int32)
    mx.eval(there)
    return there


def _moe_kernels(module: Any, spec: MoeSpec, kernels: CheckedKernels) -> MoeKernels | str:
    """Or what they are lacking."""
    if getattr(module, "sharding_group", None) is not None:
        return "experts of several ranks"
    if spec.latent is not None and _found(module, spec.latent) is not None:
        return "experts over latents"
    experts = attrgetter(spec.experts)(module)
    streamed = experts if isinstance(experts, StreamedExperts) else None
    experts = experts if streamed is None else streamed.products
    names = _PROJECTIONS.get(own_class(experts))
    if names is None:
        return f"experts of {own_class(experts).__name__}"
    *inner, down = [experts[name] for name in names]
    for each in (*inner, down):
        if not isinstance(each, QuantizedKernelSwitchLinear):
            mode = getattr(each, "mode", None)
            return f"experts in {each.weight.dtype}".replace("mlx.core.", "") if mode is None else f"{mode} experts"
    weights = _inner_weights(inner, experts.activation)
    if isinstance(weights, str):
        return weights
    packed, router = kernels.packed, _router_of(module, spec, kernels, inner[0]._packed, streamed)
    if isinstance(weights, GatedExpertWeights):
        product = packed.gated_experts(weights)
    else:
        product = packed.squared_experts(weights)
    if product is None or router is None:
        return "its experts" if product is None else "its choice of experts"
    bias = _bias_of(down) if "bias" in down else None
    if streamed is not None and bias is not None:  # they would change with the experts in slots
        return "experts with biases that are read when they are needed"
    grouped = experts._grouped if isinstance(experts, GroupedSwitchGLU) else None
    grouped = grouped if grouped is not None and grouped.is_launched_alone else None
    return MoeKernels(router, product, weights, down._product, down._packed, bias, grouped)


_PROJECTIONS: dict[type, tuple[str, ...]] = {SwitchGLU: EXPERT_PROJECTIONS, SwitchMLP: ("fc1", "fc2")}


def _inner_weights(
    projections: Sequence[QuantizedKernelSwitchLinear], activation: nn.Module
) -> GatedExpertWeights | PackedWeights | str:
    """Or what they are lacking."""
    if len(projections) == 1:
        [inner] = projections
        return inner._packed if type(activation) is nn.ReLU2 and "bias" not in inner else "experts without gates"
    gate, up = projections
    if (gate._packed.packing, gate.weight.shape) != (up._packed.packing, up.weight.shape):
        return "experts whose gates are packed otherwise"
    curve = _curve_of(activation)
    if curve is None:
        return f"experts gated by {type(activation).__name__}"
    biases = None if "bias" not in gate else (_bias_of(gate), _bias_of(up))
    return GatedExpertWeights(gate._packed, up._packed, *curve, biases)


def _curve_of(activation: nn.Module) -> tuple[ExpertCurve, mx.array] | None:
    """How gates are curved, and the numbers of the curve."""
    if type(activation) is SwiGLU:
        return "silu", mx.zeros(2)
    if type(activation) is SwigluOAI:
        return "clipped", mx.array([activation._alpha, activation._limit], mx.float32)
    gate = expert_gate_of(activation)
    return None if gate is None else (gate, mx.zeros(2))


def _bias_of(linear: QuantizedKernelSwitchLinear) -> mx.array:
    bias: mx.array = mx.contiguous(linear.bias.astype(linear._packed.dtype))
    return bias


def _found(module: Any, path: str) -> Any:
    """None where the module does not have it."""
    owner, _, name = path.rpartition(".")
    return getattr(attrgetter(owner)(module) if owner else module, name, None)


def _router_of(
    module: Any, spec: MoeSpec, kernels: CheckedKernels, weights: PackedWeights, streamed: StreamedExperts | None
) -> ExpertRouter | None:
    def number(path: str | None, otherwise: Any) -> Any:
        value = None if path is None else _found(module, path)
        return otherwise if value is None else value

    top = int(number(spec.top, None))
    normed = spec.normed if isinstance(spec.normed, bool) else bool(number(spec.normed, False))
    scores = spec.scores if spec.scores in ROUTER_SCORES else number(spec.scores, None)
    if scores not in ROUTER_SCORES:
        return None
    if scores == "sigmoid" and top == 1:
        normed = False  # as the families with such scores do
    groups, top_groups = (1, 1) if spec.groups is None else (number(path, 1) for path in spec.groups)
    shape = RouterShape(
        weights.scales.shape[0] if streamed is None else streamed.count,
        top,
        scores,
        "softmax" if scores == "logits" else "sum" if normed else "none",
        groups,
        top_groups,
        spec.later,
        spec.factors is not None,
    )
    bias, factors = (None if path is None else _found(module, path) for path in (spec.bias, spec.factors))
    scale = float(number(spec.scale, 1.0))
    return kernels.moe.of(shape, weights.dtype, bias=bias, factors=factors, eps=spec.eps, scale=scale)
