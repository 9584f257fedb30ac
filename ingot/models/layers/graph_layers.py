"""The parts of a layer's program as launches of a decode graph: each of them records its kernels. `graph_plan` says in
which graphs they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.decode_graph.capture import GraphCapture
from ingot.kernels.decode_graph.kernels import (
    JointNorm,
    ResidualNorm,
    RmsNormWeights,
    add_bias,
    gate_heads,
    gate_input,
    gate_states,
    scale_tokens,
    split_heads,
)
from ingot.kernels.lora import add_lora_products
from ingot.kernels.moe.kernels import SharedOutput, combine_experts
from ingot.kernels.paged_attention.rope import LatentRopeKernel, RopeKernel
from ingot.kernels.recurrent.kernels import RecurrentKernels
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import PagedKernelAttention
from ingot.models.layers.gpu_linear import (
    DenseKernelLinear,
    JoinedLinear,
    QuantizedKernelLinear,
    QuantizedKernelMultiLinear,
    join_linears,
)
from ingot.models.layers.graph_inputs import GraphAttentionInputs, RecurrentInputs, StepInputs, lora_matrices_of
from ingot.models.layers.latent_attention import LatentAttention
from ingot.models.layers.layer_program import (
    LayerInputBlock,
    decoder_layers_of,
    layer_program_of,
)
from ingot.models.layers.mlp import FirstExpert, JoinedMLP
from ingot.models.layers.modules import own_class
from ingot.models.layers.moe import JoinedMoe, MoeKernels
from ingot.models.layers.norms import is_rms_norm, norm_factor
from ingot.models.layers.recurrent import KernelRecurrence
from ingot.models.layers.rope import KernelLatentRope, KernelRope, RopeAngles


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
    rope: KernelRope
    paged: PagedKernelAttention
    norm: JointNorm | None  # of all heads of a token as one
    qkv: JoinedLinear
    out: JoinedLinear

    @classmethod
    def of(cls, module: MixedAttention) -> AttentionPart:
        if not module.is_plain_around_attention:
            raise UncoveredPartError(f"attention by {own_class(module).__name__}")
        if module.kernel_rope is None:
            raise UncoveredPartError("the norms or rotary positions of queries and keys")
        if module.paged_attention is None:
            raise UncoveredPartError("attention over pages")
        qkv, out = _covered_product(module.joined_qkv), _covered_product(module.joined_out)
        return cls(module, module.kernel_rope, module.paged_attention, _joint_norm(module), qkv, out)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, self.out

    @property
    def angles(self) -> RopeAngles:
        return self.rope.angles

    @property
    def token_scale(self) -> str | None:
        """The argument of a layer with what each token's queries are multiplied by."""
        return self.module._spec.token_scale

    def storage_of(self, state: AppendState, dtype: mx.Dtype) -> Any:
        """Where keys and values are."""
        return state.provided(self.module._kv_heads, self._kv_sizes(state), dtype)

    def _kv_sizes(self, state: AppendState) -> tuple[int, int]:
        """The sizes of heads of keys and values, as they are stored."""
        module = self.module
        if module.reads_stored_kv:
            return state.stored.sizes
        parts = (
            module._heads * (2 if module._spec.gated else 1) + (1 if module.keys_as_values else 2) * module._kv_heads
        )
        size = self.qkv.linear.weight.shape[0] // parts
        return size, size

    def rope_kernel_for(self, sizes: tuple[int, int], dtype: mx.Dtype) -> RopeKernel | None:
        return self.rope.kernel_for(sizes, dtype)

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
            attended = gate_heads(capture, attended, projected)
        flat = capture.shaped(attended, (states.shape[0], attended.size // states.shape[0]))
        return multiply_with_lora(capture, self.out, flat, loras)


def _attend(capture: GraphCapture, queries: mx.array, own: GraphAttentionInputs) -> mx.array:
    """The attention of queries [tokens, heads, size], once keys and values are written."""
    scaled = queries if own.token_scales is None else scale_tokens(capture, queries, own.token_scales)
    return own.attention.by(capture).attend(scaled, own.rows, own.storage.slabs, capture.token, own.coded)


@dataclass(frozen=True, slots=True, eq=False)
class LatentPart:
    """Latent attention over pages of latents: queries are multiplied into the space of latents, and what heads attended
    to out of it."""

    module: LatentAttention
    rope: KernelLatentRope
    paged: PagedKernelAttention
    latents: JoinedLinear
    query_norm: ResidualNorm | None
    queries: JoinedLinear | None  # those that are made from normed latents of their own
    into: QuantizedKernelMultiLinear
    out_of: QuantizedKernelMultiLinear
    out: JoinedLinear

    @classmethod
    def of(cls, module: LatentAttention) -> LatentPart:
        spec = module._latent_spec
        if module.latent_rope is None or module.paged_attention is None:
            raise UncoveredPartError(f"attention by {own_class(module).__name__}")
        into, out_of = module[spec.into_latent], module[spec.out_of_latent]
        for each in (into, out_of):
            if not isinstance(each, QuantizedKernelMultiLinear):
                kind = getattr(each, "mode", each.weight.dtype)
                raise UncoveredPartError(f"latents of heads in {kind}".replace("mlx.core.", ""))
        norm = queries = None
        if spec.query not in module:
            if spec.query_scale is not None:
                raise UncoveredPartError(f"queries of {own_class(module).__name__}")
            norm = ResidualNorm(norm_weights(module[spec.query_latent[1]]))
            queries = _covered_product(module.joined_queries)
        latents, out = _covered_product(module.joined_latents), _covered_product(module.joined_out)
        return cls(module, module.latent_rope, module.paged_attention, latents, norm, queries, into, out_of, out)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return (self.latents, self.out) if self.queries is None else (self.latents, self.queries, self.out)

    @property
    def angles(self) -> RopeAngles:
        return self.rope.angles

    @property
    def token_scale(self) -> str | None:
        """The argument of a layer with what each token's queries are multiplied by."""
        return self.module._spec.token_scale

    def storage_of(self, state: AppendState, dtype: mx.Dtype) -> Any:
        """Where latents, and what is rotated, are."""
        return state.provided(1, self.rope.sizes, dtype)

    def rope_kernel_for(self, sizes: tuple[int, int], dtype: mx.Dtype) -> LatentRopeKernel | None:
        row = self.latents.linear.weight.shape[0]
        queries = row if self.queries is None else self.queries.linear.weight.shape[0]
        return self.rope.kernel_for(queries, row, row - sum(sizes), dtype)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        own, loras, heads, tokens = inputs.mixer, inputs.loras, self.module._heads, states.shape[0]
        assert isinstance(own, GraphAttentionInputs) and isinstance(own.rope, LatentRopeKernel)
        slabs = own.storage.slabs
        latents = queries = multiply_with_lora(capture, self.latents, states, loras)
        if self.queries is not None and self.query_norm is not None:
            normed = self.query_norm.of_first(capture, latents)
            queries = multiply_with_lora(capture, self.queries, normed, loras)
        size = self.into._packed.columns
        plain = split_heads(capture, queries, heads, size + self.rope.sizes[1], size)
        embedded = self._by_head(capture, self.into, plain, _repeated(heads, tokens))
        embedded = capture.shaped(embedded, (heads, tokens, embedded.shape[1]))
        with slabs.standing_for(own.addresses):
            turned, capture.token = own.rope.by(capture)(
                queries, latents, embedded, own.angles, own.slots, slabs, capture.token
            )
            attended = _attend(capture, turned, own)
        values = self._by_head(capture, self.out_of, attended, _in_turn(heads, tokens))
        flat = capture.shaped(values, (tokens, values.size // tokens))
        return multiply_with_lora(capture, self.out, flat, loras)

    def _by_head(
        self, capture: GraphCapture, linear: QuantizedKernelMultiLinear, states: mx.array, heads: mx.array
    ) -> mx.array:
        """The products of as many rows of states as there are `heads`, by the weights of these."""
        rows = capture.shaped(states, (heads.size, linear._packed.columns))
        return linear._product.by(capture).launched_gather(rows, linear._packed, heads)


@cache
def _repeated(heads: int, tokens: int) -> mx.array:
    """The numbers of heads, each for all tokens."""
    return mx.repeat(mx.arange(heads, dtype=mx.int32), tokens)


@cache
def _in_turn(heads: int, tokens: int) -> mx.array:
    """The numbers of all heads, for one token after another."""
    return mx.tile(mx.arange(heads, dtype=mx.int32), tokens)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPart:
    """A recurrent mixer: a gated delta net, Mamba 2's or a short convolution."""

    kernels: RecurrentKernels
    joint: JoinedLinear
    out: JoinedLinear

    @classmethod
    def of(cls, module: KernelRecurrence) -> RecurrentPart:
        return cls(module._kernels, _covered_product(module.joined_in), _covered_product(module.joined_out))

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.joint, self.out

    def states_of(self, state: RecurrentState) -> list[mx.array]:
        """A layer's tails and states, which are written in place."""
        return state.in_place(*self.kernels.state_shapes)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        own, loras = inputs.mixer, inputs.loras
        assert isinstance(own, RecurrentInputs)
        joint = multiply_with_lora(capture, self.joint, states, loras)
        mixed, _ = self.kernels.by(capture).mix(joint, own.spans, [own.addresses])
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

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        gated = self._gated(capture, states, inputs.loras)
        return multiply_with_lora(capture, self.down, gated, inputs.loras)

    def _gated(self, capture: GraphCapture, states: mx.array, loras: mx.array | None) -> mx.array:
        """The gated activation, with what the tokens' adapters add to the gate and to what it gates."""
        linear, matrices, gate = self.gate_up.linear, lora_matrices_of(self.gate_up), self.module.gate
        if gate == "silu" and loras is not None and matrices is not None:
            product = multiply_in_graph(capture, self.gate_up, states)
            return add_lora_products(capture, states, product, matrices, loras, gated=True)
        if gate != "silu" or "bias" in linear:
            return gate_states(capture, multiply_with_lora(capture, self.gate_up, states, loras), gate)
        if isinstance(linear, DenseKernelLinear):
            return linear._product.by(capture).gated(states, linear.weight)
        assert isinstance(linear, QuantizedKernelLinear)
        return linear._product.by(capture).gated(states, linear._packed)


@dataclass(frozen=True, slots=True, eq=False)
class MoePart:
    """A mixture of experts, and the expert that all tokens have."""

    module: JoinedMoe
    kernels: MoeKernels
    router: JoinedLinear
    shared: MlpPart | None
    gate: JoinedLinear | None  # of what that gives

    @classmethod
    def of(cls, module: JoinedMoe) -> MoePart:
        name, spec = own_class(module).__name__, module._spec
        if module.kernels is None:
            raise UncoveredPartError(f"{module.lacking} of {name}")
        shared = None if spec.shared is None else module.get(spec.shared)
        if shared is not None and not isinstance(shared, JoinedMLP):
            raise UncoveredPartError(f"{own_class(shared).__name__} of {name}")
        router, gate = _covered_product(module.router_product), None
        if shared is not None and spec.shared_gate is not None:
            gate = router if module.joined_gate is None else _covered_product(module.joined_gate)
        return cls(module, module.kernels, router, None if shared is None else MlpPart.of(shared), gate)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        own = (self.router,) if self.gate is None or self.gate is self.router else (self.router, self.gate)
        return own if self.shared is None else (*own, *self.shared.products)

    @property
    def has_fixed_experts(self) -> bool:
        """Whether all tokens are to go to the same expert now."""
        return isinstance(attrgetter(self.module._spec.experts)(self.module), FirstExpert)

    def capture(self, capture: GraphCapture, states: mx.array, inputs: StepInputs) -> mx.array:
        kernels = self.kernels
        logits = multiply_with_lora(capture, self.router, states, inputs.loras)
        chosen, weights = kernels.router.by(capture)(logits, inputs.slots)
        chosen = mx.zeros_like(chosen) if inputs.has_fixed_experts else chosen
        gated = kernels.gated_product.by(capture).gather_gated(states, kernels.gated, chosen)
        given = kernels.down_product.by(capture).launched_gather(gated, kernels.down, chosen)
        shared = self._shared(capture, states, logits, inputs)
        top, bias = kernels.router.shape.top, kernels.down_bias
        return combine_experts(capture, given, chosen, weights, top, bias=bias, shared=shared)

    def _shared(
        self, capture: GraphCapture, states: mx.array, logits: mx.array, inputs: StepInputs
    ) -> SharedOutput | None:
        if self.shared is None:
            return None
        output = self.shared.capture(capture, states, inputs)
        if self.gate is None:
            return SharedOutput(output)
        if self.gate is self.router:
            return SharedOutput(output, logits, self.kernels.router.shape.experts)
        return SharedOutput(output, multiply_with_lora(capture, self.gate, states, inputs.loras))


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
    queries, keys = (norm_weights(module[name]) for name in module._spec.norms)
    assert queries is not None and keys is not None
    return JointNorm(queries, keys)


def join_layer_inputs(model: Any) -> None:
    """Give layers with inputs of their own the products that graphs multiply by. They are layers of one product each,
    which adapters find as they find joined ones."""
    for layer in decoder_layers_of(model):
        program = layer_program_of(layer)
        for block in () if program is None else program.blocks:
            if isinstance(block.part, LayerInputBlock):
                for name, own in zip(
                    _LAYER_INPUT_PRODUCTS, (block.part.spec.gate, block.part.spec.projection), strict=True
                ):
                    setattr(layer, name, join_linears(layer[own], names=[own]))


_LAYER_INPUT_PRODUCTS = ("joined_input_gate", "joined_input_projection")


def norm_weights(norm: nn.Module | None) -> RmsNormWeights | None:
    if norm is None:
        return None
    weight = norm_factor(norm) if is_rms_norm(norm) else None
    if weight is None:
        raise UncoveredPartError(f"norms of {own_class(norm).__name__}")
    return RmsNormWeights(weight, float(norm.eps))


def _covered_product(product: JoinedLinear | None) -> JoinedLinear:
    if product is None:
        raise UncoveredPartError("projections that are not alike")
    if not isinstance(product.linear, DenseKernelLinear | QuantizedKernelLinear):
        kind = own_class(product.linear).__name__
        raise UncoveredPartError(f"products of {kind} in {product.linear.weight.dtype}".replace("mlx.core.", ""))
    return product


def multiply_in_graph(capture: GraphCapture, product: JoinedLinear, x: mx.array) -> mx.array:
    """Of contiguous states [tokens, size]."""
    linear = product.linear
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(capture).launched(x, linear.weight, bias=linear.get("bias"))
    assert isinstance(linear, QuantizedKernelLinear)
    y = linear._product.by(capture).launched(x, linear._packed)
    return add_bias(capture, y, linear.bias) if "bias" in linear else y


def multiply_with_lora(
    capture: GraphCapture, product: JoinedLinear, x: mx.array, token_loras: mx.array | None
) -> mx.array:
    """The same, with what the tokens' adapters add."""
    y, matrices = multiply_in_graph(capture, product, x), lora_matrices_of(product)
    return y if token_loras is None or matrices is None else add_lora_products(capture, x, y, matrices, token_loras)
