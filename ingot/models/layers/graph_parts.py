"""The parts of decoder layers as launches of a decode graph: each records its kernels.

`part_of` finds the part of a module that was swapped, or says that no kernels cover it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.decode_graph.capture import GraphCapture
from ingot.kernels.decode_graph.kernels import (
    JointNorm,
    NormWeights,
    ResidualNorm,
    add_bias,
    gate_heads,
    gate_input,
    gate_states,
    scale_tokens,
    take_heads,
)
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.lora import add_lora_products
from ingot.kernels.moe.kernels import SharedOutput, combine_experts, place_experts
from ingot.kernels.paged_attention.rope import LatentRopeKernel, RopeKernel
from ingot.kernels.recurrent.kernels import RecurrentKernels
from ingot.models.experts.streaming import LayerExperts, StreamedExperts
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import PagedKernelAttention
from ingot.models.layers.gpu_linear import (
    DenseKernel,
    DenseKernelLinear,
    JoinedLinear,
    QuantizedKernel,
    QuantizedKernelLinear,
    join_linears,
)
from ingot.models.layers.graph_inputs import GraphAttentionInputs, RecurrentInputs, StepInputs, lora_matrices_of
from ingot.models.layers.latent_attention import HeadProducts, LatentAttention
from ingot.models.layers.layer_program import (
    Branches,
    LayerInputBlock,
    LayerMoe,
    decoder_layers_of,
    layer_program_of,
)
from ingot.models.layers.mlp import FirstExpert, JoinedMLP
from ingot.models.layers.modules import own_class
from ingot.models.layers.moe import JoinedMoe, MoeKernels
from ingot.models.layers.norms import is_layer_norm, is_rms_norm, norm_factor
from ingot.models.layers.recurrent import KernelRecurrence
from ingot.models.layers.rope import KernelLatentRope, KernelRope


class UncoveredPartError(Exception):
    """Which part of a model's layers has no kernels that a graph could launch."""


class GraphPart(Protocol):
    """What a residual block computes."""

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        """Those that adapters may add to."""

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        """What is added to the hidden states, of normed ones."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPart:
    """Norms of queries and keys, RoPE, attention over pages, and the projections around them."""

    module: MixedAttention
    rope: KernelRope | KernelLatentRope
    paged: PagedKernelAttention
    norm: JointNorm | None  # of all heads of a token as one
    qkv: JoinedLinear
    gate: JoinedLinear | None  # of the output, where no projection of queries gives it
    out: JoinedLinear

    @classmethod
    def of(cls, module: MixedAttention) -> AttentionPart:
        if module.token_indexer is not None:
            raise UncoveredPartError(f"the indexer of {own_class(module).__name__}")
        if isinstance(module, LatentAttention):
            return LatentPart.of_latent(module)
        if not module.is_plain_around_attention:
            raise UncoveredPartError(f"attention by {own_class(module).__name__}")
        if module.kernel_rope is None:
            raise UncoveredPartError("the norms or rotary positions of queries and keys")
        if module.paged_attention is None:
            raise UncoveredPartError("attention over pages")
        qkv, out = _covered_product(module.joined_qkv), _covered_product(module.joined_out)
        norm, gate = _joint_norm(module), _gate_product(module)
        return cls(module, module.kernel_rope, module.paged_attention, norm, qkv, gate, out)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, *(() if self.gate is None else (self.gate,)), self.out

    @property
    def token_scale(self) -> str | None:
        """The argument of a layer with what each token's queries are multiplied by."""
        return self.module._spec.token_scale

    def rope_kernel(self, sizes: tuple[int, int], dtype: mx.Dtype) -> RopeKernel | LatentRopeKernel | None:
        """For heads of keys and values of these sizes; None where none is correct."""
        assert isinstance(self.rope, KernelRope)
        return self.rope.kernel_for(sizes, dtype)

    def kv_sizes(self, state: AppendState) -> tuple[int, int]:
        """The sizes of heads of keys and values, as they are stored."""
        module = self.module
        if module.reads_stored_kv:
            return state.stored.sizes
        parts = (
            module._heads * (2 if module._spec.gated else 1) + (1 if module.keys_as_values else 2) * module._kv_heads
        )
        size = self.qkv.linear.weight.shape[0] // parts
        return size, size

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        own, loras = inputs.mixer, inputs.loras
        assert isinstance(own, GraphAttentionInputs) and isinstance(own.rope, RopeKernel)
        slabs = own.storage.slabs
        projected = multiply_with_lora(capture, self.qkv, states, loras)
        if self.norm is not None:
            projected = self.norm(capture, projected)
        with slabs.standing_for(own.addresses):
            queries, capture.token = own.rope.by(capture)(projected, own.angles, own.slots, slabs, capture.token)
            attended = _attend(capture, queries, own)
        if self.module._spec.gated:
            attended = gate_heads(capture, attended, projected, behind_queries=True)
        return self._project_out(capture, attended, states, loras)

    def _project_out(
        self, capture: GraphCapture, attended: mx.array, states: mx.array, loras: mx.array | None
    ) -> mx.array:
        """Of what was attended to [tokens, heads, size] for hidden states."""
        if self.gate is not None:
            gates = multiply_with_lora(capture, self.gate, states, loras)
            attended = gate_heads(capture, attended, gates, self.module._spec.gate_act)
        flat = capture.shaped(attended, (states.shape[0], attended.size // states.shape[0]))
        return multiply_with_lora(capture, self.out, flat, loras)


def _gate_product(module: MixedAttention) -> JoinedLinear | None:
    gated = module._spec.gate is not None and module._spec.gate in module
    return _covered_product(module.joined_gate) if gated else None


def _attend(capture: GraphCapture, queries: mx.array, own: GraphAttentionInputs) -> mx.array:
    """The attention of queries [tokens, heads, size], once keys and values are written."""
    scaled = queries if own.token_scales is None else scale_tokens(capture, queries, own.token_scales)
    return own.attention.by(capture).attend(scaled, own.rows, own.storage.slabs, capture.token, own.coded)


@dataclass(frozen=True, slots=True, eq=False)
class LatentPart(AttentionPart):
    """The same over latents, which are one KV head."""

    heads: HeadProducts
    latent_queries: tuple[ResidualNorm, JoinedLinear] | None
    """The norm of the latents that queries are made from, and that projection."""

    @classmethod
    def of_latent(cls, module: LatentAttention) -> LatentPart:
        spec, rope, paged, norm = module._latent_spec, module.latent_rope, module.paged_attention, None
        if spec.query_scale is not None:
            raise UncoveredPartError(f"attention by {own_class(module).__name__}")
        if rope is None or paged is None:
            raise UncoveredPartError("the norm or rotary positions of latents" if rope is None else "latent attention")
        if module.head_products is None:
            raise UncoveredPartError(f"products of {own_class(module[spec.into_latent]).__name__} for each head")
        qkv, out, latent_queries = _covered_product(module.joined_latents), _covered_product(module.joined_out), None
        if spec.query not in module:
            norm = ResidualNorm(norm_weights(module[spec.query_latent[1]]))
            latent_queries = norm, _covered_product(module.joined_queries)
        gate = _gate_product(module)
        return cls(module, rope, paged, None, qkv, gate, out, module.head_products, latent_queries)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        further = () if self.latent_queries is None else self.latent_queries[1:]
        return self.qkv, *further, *(() if self.gate is None else (self.gate,)), self.out

    def rope_kernel(self, sizes: tuple[int, int], dtype: mx.Dtype) -> RopeKernel | LatentRopeKernel | None:
        assert isinstance(self.rope, KernelLatentRope)
        row = self.qkv.linear.weight.shape[0]
        queries = row if self.latent_queries is None else self.latent_queries[1].linear.weight.shape[0]
        return self.rope.kernel_for(queries, row, row - sum(sizes), dtype)

    def kv_sizes(self, state: AppendState) -> tuple[int, int]:
        assert isinstance(self.rope, KernelLatentRope)
        return self.rope.sizes

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        own, loras = inputs.mixer, inputs.loras
        assert isinstance(own, GraphAttentionInputs) and isinstance(own.rope, LatentRopeKernel)
        tokens, heads, slabs = states.shape[0], self.module._heads, own.storage.slabs
        joint = queries = multiply_with_lora(capture, self.qkv, states, loras)
        if self.latent_queries is not None:
            norm, up = self.latent_queries
            rank = joint.shape[1] - sum(own.storage.sizes)
            latents = capture.shaped(take_heads(capture, joint, 1, rank, rank), (tokens, rank))
            queries = multiply_with_lora(capture, up, norm(capture, latents, None)[1], loras)
        (into, into_weights), (out_of, out_weights) = self.heads.into, self.heads.out_of
        step = into_weights.columns + own.storage.sizes[1]
        plain = take_heads(capture, queries, heads, step, into_weights.columns)
        plain = capture.shaped(plain, (heads * tokens, into_weights.columns))
        embedded = into.by(capture).launched_gather(plain, into_weights, heads_of_rows(heads, tokens, by_head=True))
        embedded = capture.shaped(embedded, (heads, tokens, into_weights.outputs))
        with slabs.standing_for(own.addresses):
            rope = own.rope.by(capture)
            turned, capture.token = rope(queries, joint, embedded, own.angles, own.slots, slabs, capture.token)
            attended = _attend(capture, turned, own)
        attended = capture.shaped(attended, (tokens * heads, out_weights.columns))
        y = out_of.by(capture).launched_gather(attended, out_weights, heads_of_rows(heads, tokens, by_head=False))
        return self._project_out(capture, capture.shaped(y, (tokens, heads, out_weights.outputs)), states, loras)


@cache
def heads_of_rows(heads: int, tokens: int, *, by_head: bool) -> mx.array:
    """The head of each row, where rows are those of heads, one behind another, or of tokens."""
    numbers = mx.arange(heads, dtype=mx.int32)
    rows = mx.repeat(numbers, tokens) if by_head else mx.tile(numbers, tokens)
    mx.eval(rows)
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPart:
    """A recurrent mixer: a gated delta net, Mamba 2's or a short convolution."""

    kernels: RecurrentKernels
    joint: JoinedLinear
    apart: tuple[tuple[JoinedLinear, ...], ...]  # further inputs, each of products behind one another
    out: JoinedLinear

    @classmethod
    def of(cls, module: KernelRecurrence) -> RecurrentPart:
        apart = tuple(tuple(_covered_product(each) for each in chain) for chain in module.joined_apart)
        return cls(module._kernels, _covered_product(module.joined_in), apart, _covered_product(module.joined_out))

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.joint, *(each for chain in self.apart for each in chain), self.out

    def states_of(self, state: RecurrentState) -> list[mx.array]:
        """A layer's tails and states, which are written in place."""
        return state.in_place(*self.kernels.state_shapes)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        own, loras = inputs.mixer, inputs.loras
        assert isinstance(own, RecurrentInputs)
        joint = multiply_with_lora(capture, self.joint, states, loras)
        apart = []
        for chain in self.apart:
            apart.append(states)
            for product in chain:
                apart[-1] = multiply_with_lora(capture, product, apart[-1], loras)
        mixed, _ = self.kernels.by(capture).mix(joint, own.spans, [own.addresses], *apart)
        return multiply_with_lora(capture, self.out, mixed, loras)


@dataclass(frozen=True, slots=True, eq=False)
class MlpPart:
    """A gated MLP."""

    module: JoinedMLP
    gate_up: JoinedLinear
    down: JoinedLinear

    @classmethod
    def of(cls, module: JoinedMLP) -> MlpPart:
        return cls(module, _covered_product(module.joined_gate_up), _covered_product(module.joined_down))

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.gate_up, self.down

    def capture(self, capture: Launcher, states: mx.array, inputs: StepInputs) -> mx.array:
        gated = self._gated(capture, states, inputs.loras)
        return multiply_with_lora(capture, self.down, gated, inputs.loras)

    def _gated(self, capture: Launcher, states: mx.array, loras: mx.array | None) -> mx.array:
        """The gated activation, with what the tokens' adapters add to the gate and to what it gates."""
        linear, matrices, gate = self.gate_up.linear, lora_matrices_of(self.gate_up), self.module.gate
        if gate == "silu" and loras is not None and matrices is not None:
            product = multiply_in_graph(capture, self.gate_up.linear, states)
            return add_lora_products(capture, states, product, matrices, loras, gated=True)
        if gate != "silu" or "bias" in linear:
            return gate_states(capture, multiply_with_lora(capture, self.gate_up, states, loras), gate)
        if isinstance(linear, DenseKernelLinear):
            return linear._product.by(capture).gated(states, linear.weight)
        assert isinstance(linear, QuantizedKernelLinear)
        return linear._product.by(capture).gated(states, linear._packed)


class ExpertChoice(NamedTuple):
    """Each token's experts and their weights, and what all tokens are given."""

    experts: mx.array
    weights: mx.array
    shared: SharedOutput | None


@dataclass(frozen=True, slots=True, eq=False)
class MoePart:
    """A mixture of experts, and the expert that all tokens have."""

    experts: Callable[[], Any]
    """What computes them where no graph does."""
    kernels: MoeKernels
    router: JoinedLinear
    shared: MlpPart | None
    gate: JoinedLinear | None  # of what that gives
    streamed: LayerExperts | None
    """Its experts, where they are read when they are needed."""

    @classmethod
    def of(cls, module: JoinedMoe) -> MoePart:
        name, spec = own_class(module).__name__, module._spec
        kernels = module.kernels or module.streamed
        if kernels is None:
            raise UncoveredPartError(f"{module.lacking} of {name}")
        shared = None if spec.shared is None else module.get(spec.shared)
        if shared is not None and not isinstance(shared, JoinedMLP):
            raise UncoveredPartError(f"{own_class(shared).__name__} of {name}")
        router, gate = _covered_product(module.router_product), None
        if shared is not None and spec.shared_gate is not None:
            gate = router if module.joined_gate is None else _covered_product(module.joined_gate)
        experts = attrgetter(spec.experts)(module)
        streamed = experts.layer if isinstance(experts, StreamedExperts) else None
        shared_part = None if shared is None else MlpPart.of(shared)
        return cls(lambda: attrgetter(spec.experts)(module), kernels, router, shared_part, gate, streamed)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        own = (self.router,) if self.gate is None or self.gate is self.router else (self.router, self.gate)
        return own if self.shared is None else (*own, *self.shared.products)

    @property
    def has_fixed_experts(self) -> bool:
        """Whether all tokens are to go to the same expert now."""
        return isinstance(self.experts(), FirstExpert)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        return self._combined(capture, states, self._choice(capture, states, inputs), inputs)

    def _combined(self, capture: GraphCapture, states: mx.array, choice: ExpertChoice, inputs: StepInputs) -> mx.array:
        """What the chosen experts give."""
        kernels, (chosen, weights, shared) = self.kernels, choice
        if inputs.places is not None:
            chosen, weights = place_experts(capture, chosen, weights, inputs.places)
        top, bias = kernels.router.shape.top, kernels.down_bias
        if kernels.grouped is not None and inputs.computes_prompts:
            given = kernels.grouped.by(capture).launched(states, chosen)
            return combine_experts(capture, given, chosen, weights, top, shared=shared)
        given = kernels.multiply(states, chosen, capture)
        return combine_experts(capture, given, chosen, weights, top, bias=bias, shared=shared)

    def compute(self, run: Launcher, states: mx.array, inputs: StepInputs, *, are_there: bool) -> mx.array:
        """The same bits at once, of states [tokens, size]: experts are read that are in no slot, unless all of them
        `are_there`. They may be more than there are slots."""
        kernels, layer, top = self.kernels, self.streamed, self.kernels.router.shape.top
        assert layer is not None
        chosen, weights, shared = self._choice(run, states, inputs)
        experts = self.experts()
        multiply = layer.launch_there if are_there else layer.compute
        given = multiply(states, chosen.reshape(-1, top), experts.products, kernels.products)
        return combine_experts(run, given.reshape(-1, given.shape[-1]), chosen, weights, top, shared=shared)

    def _choice(self, run: Launcher, states: mx.array, inputs: StepInputs) -> ExpertChoice:
        logits = multiply_with_lora(run, self.router, states, inputs.loras)
        chosen, weights = self.kernels.router.by(run)(logits, inputs.slots)
        chosen = mx.zeros_like(chosen) if inputs.has_fixed_experts else chosen
        return ExpertChoice(chosen, weights, self._shared(run, states, logits, inputs))

    def _shared(self, capture: Launcher, states: mx.array, logits: mx.array, inputs: StepInputs) -> SharedOutput | None:
        if self.shared is None:
            return None
        output = self.shared.capture(capture, states, inputs)
        if self.gate is None:
            return SharedOutput(output)
        if self.gate is self.router:
            return SharedOutput(output, logits, self.kernels.router.shape.experts)
        return SharedOutput(output, multiply_with_lora(capture, self.gate, states, inputs.loras))


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoePart(MoePart):
    """A mixture that norms the hidden states twice: for its router, and for its experts."""

    router_norm: ResidualNorm
    norm: ResidualNorm

    @classmethod
    def of_layer(cls, part: LayerMoe) -> LayerMoePart:
        layer, spec, kernels = part.layer, part.spec, part.layer.moe_kernels
        if isinstance(kernels, str):
            raise UncoveredPartError(f"{kernels} of {own_class(layer).__name__}")
        weight, factor, eps = (attrgetter(name)(layer) for name in spec.router_norm)
        router_norm = ResidualNorm(NormWeights(weight * factor, float(eps)))
        router = _covered_product(attrgetter(spec.moe.router.rpartition(".")[0])(layer).joined_router)
        norm = ResidualNorm(norm_weights(layer[spec.norm]))
        return cls(lambda: attrgetter(spec.moe.experts)(layer), kernels, router, None, None, None, router_norm, norm)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        _, for_router = self.router_norm(capture, states, None)
        _, normed = self.norm(capture, states, None)
        return self._combined(capture, normed, self._choice(capture, for_router, inputs), inputs)


class Branch(NamedTuple):
    """One of several parts that are added, and the norms around it."""

    part: GraphPart
    before: ResidualNorm | None
    after: ResidualNorm
    """Adds it to the others."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchesPart:
    """The sum of several parts."""

    branches: tuple[Branch, ...]

    @classmethod
    def of(cls, module: Branches, number: int) -> BranchesPart:
        branches = list[Branch]()
        for block in module.blocks:
            before, after = norm_weights(block.norm_before), rms_norm_weights(block.norm_after)
            # The first is normed, the others are added to it.
            added = ResidualNorm(None, after) if branches else ResidualNorm(after)
            part = part_of(block.part, number)
            if isinstance(part, MoePart) and part.streamed is not None:
                raise UncoveredPartError("experts that are read when they are needed, beside another part")
            branches.append(Branch(part, None if before is None else ResidualNorm(before), added))
        return cls(tuple(branches))

    @property
    def parts(self) -> list[GraphPart]:
        return [branch.part for branch in self.branches]

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return tuple(product for part in self.parts for product in part.products)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        whole: mx.array | None = None
        for branch in self.branches:
            given = states if branch.before is None else branch.before(capture, states, None)[1]
            output = branch.part.capture(capture, given, inputs)
            if whole is None:
                _, whole = branch.after(capture, output, None)
            else:
                whole, _ = branch.after(capture, whole, output)
        assert whole is not None
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputPart:
    """What a layer is given besides hidden states, gated and projected."""

    gate: JoinedLinear
    projection: JoinedLinear
    number: int
    """Of the layer."""

    @classmethod
    def of(cls, block: LayerInputBlock, number: int) -> LayerInputPart:
        gate, projection = (_covered_product(vars(block.layer).get(name)) for name in _LAYER_INPUT_PRODUCTS)
        return cls(gate, projection, number)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.gate, self.projection

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        assert inputs.layers is not None
        gate = multiply_with_lora(capture, self.gate, states, inputs.loras)
        gated = gate_input(capture, gate, inputs.layers, self.number * gate.shape[1])
        return multiply_with_lora(capture, self.projection, gated, inputs.loras)


def _joint_norm(module: MixedAttention) -> JointNorm | None:
    if not module._spec.joint_head_norms or module._spec.norms is None or module._spec.norms[0] not in module:
        return None
    queries, keys = (rms_norm_weights(module[name]) for name in module._spec.norms)
    assert queries is not None and keys is not None
    return JointNorm(queries, keys)


def join_layer_products(model: Any) -> None:
    """Give layers with inputs or mixtures of their own the products that graphs multiply by. They are layers of one
    product each, which adapters find as they find joined ones."""
    for layer in decoder_layers_of(model):
        program = layer_program_of(layer)
        for part in () if program is None else program.parts:
            if isinstance(part, LayerInputBlock):
                for name, own in zip(_LAYER_INPUT_PRODUCTS, (part.spec.gate, part.spec.projection), strict=True):
                    setattr(layer, name, join_linears(layer[own], names=[own]))
            if isinstance(part, LayerMoe):
                owner, _, name = part.spec.moe.router.rpartition(".")
                router = attrgetter(owner)(layer)
                router.joined_router = join_linears(router[name], names=[name], apart=True)


_LAYER_INPUT_PRODUCTS = ("joined_input_gate", "joined_input_projection")


def part_of(module: Any, number: int) -> GraphPart:
    """Of the layer with this number. Raises UncoveredPartError."""
    if isinstance(module, LayerInputBlock):
        return LayerInputPart.of(module, number)
    if isinstance(module, LayerMoe):
        return LayerMoePart.of_layer(module)
    if isinstance(module, Branches):
        return BranchesPart.of(module, number)
    if isinstance(module, JoinedMLP):
        return MlpPart.of(module)
    if isinstance(module, JoinedMoe):
        return MoePart.of(module)
    if isinstance(module, KernelRecurrence):
        return RecurrentPart.of(module)
    if isinstance(module, MixedAttention):
        return AttentionPart.of(module)
    raise UncoveredPartError(own_class(module).__name__)


def norm_weights(norm: nn.Module | None) -> NormWeights | None:
    if norm is None:
        return None
    centred = is_layer_norm(norm)
    weight = norm_factor(norm) if centred or is_rms_norm(norm) else None
    if weight is None:
        raise UncoveredPartError(f"norms of {own_class(norm).__name__}")
    return NormWeights(weight, float(norm.eps), centred, norm.get("bias") if centred else None)


def rms_norm_weights(norm: nn.Module | None) -> NormWeights | None:
    """Where kernels have no other norms."""
    weights = norm_weights(norm)
    if weights is not None and weights.centred:
        raise UncoveredPartError("layer norms behind parts, or of queries and keys")
    return weights


def _covered_product(product: JoinedLinear | None) -> JoinedLinear:
    if product is None:
        raise UncoveredPartError("projections that are not alike")
    if not isinstance(product.linear, DenseKernelLinear | QuantizedKernelLinear):
        kind = own_class(product.linear).__name__
        raise UncoveredPartError(f"products of {kind} in {product.linear.weight.dtype}".replace("mlx.core.", ""))
    return product


def multiply_in_graph(capture: Launcher, linear: Any, x: mx.array) -> mx.array:
    """By a layer, or an embedding as an output head, that our kernels multiply by. Of contiguous states [tokens,
    size]."""
    if isinstance(linear, DenseKernel):
        return linear._product.by(capture).launched(x, linear.weight, bias=linear.get("bias"))
    assert isinstance(linear, QuantizedKernel)
    y = linear._product.by(capture).launched(x, linear._packed)
    return add_bias(capture, y, linear.bias) if "bias" in linear else y


def multiply_with_lora(capture: Launcher, product: JoinedLinear, x: mx.array, token_loras: mx.array | None) -> mx.array:
    """The same, with what the tokens' adapters add."""
    y, matrices = multiply_in_graph(capture, product.linear, x), lora_matrices_of(product)
    return y if token_loras is None or matrices is None else add_lora_products(capture, x, y, matrices, token_loras)
