"""Decoder layers as launches of a decode graph: the parts of a layer's program, each of which records its kernels.

`graph_layers_of` finds the parts of all layers of a model whose modules were swapped, or says which one no kernel
covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.kv_storage import KernelStorage
from ingot.kernels.decode_graph.capture import GraphCapture
from ingot.kernels.decode_graph.kernels import ResidualNorm, RmsNormWeights, add_bias, gate_states
from ingot.kernels.lora import LoraMatrices, add_lora_products
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import RopeKernel
from ingot.kernels.paged_attention.shapes import CodedPages
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import PagedKernelAttention
from ingot.models.layers.gpu_linear import DenseKernelLinear, JoinedLinear, QuantizedKernelLinear
from ingot.models.layers.layer_program import LayerProgram, decoder_layers_of, layer_program_of
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.modules import own_class
from ingot.models.layers.norms import is_rms_norm, norm_factor
from ingot.models.layers.rope import KernelRope


class UncoveredPartError(Exception):
    """Which part of a model's layers has no kernels that a graph could launch."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """What an attention layer of a graph reads and writes besides hidden states."""

    attention: PagedAttention
    rope: RopeKernel
    storage: KernelStorage
    rows: KernelRows
    slots: mx.array
    angles: mx.array
    addresses: mx.array
    """A buffer with the addresses of the storage's slabs."""
    coded: CodedPages | None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPart:
    """Norms of queries and keys, RoPE, attention over pages, and the projections around them."""

    module: MixedAttention
    rope: KernelRope
    paged: PagedKernelAttention
    qkv: JoinedLinear
    out: JoinedLinear

    @classmethod
    def of(cls, module: Any) -> AttentionPart:
        if not isinstance(module, MixedAttention) or module._spec.gated or not module.is_plain_around_attention:
            raise UncoveredPartError(f"attention by {own_class(module).__name__}")
        if module.kernel_rope is None:
            raise UncoveredPartError("the norms or rotary positions of queries and keys")
        if module.paged_attention is None:
            raise UncoveredPartError("attention over pages")
        qkv, out = _covered_product(module.joined_qkv), _covered_product(module.joined_out)
        return cls(module, module.kernel_rope, module.paged_attention, qkv, out)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, self.out

    @property
    def head_size(self) -> int:
        outputs: int = self.qkv.linear.weight.shape[0]
        return outputs // (self.module._heads + 2 * self.module._kv_heads)

    def capture(
        self, capture: GraphCapture, states: mx.array, inputs: AttentionInputs, token: mx.array, loras: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """What is added to the hidden states, of normed ones; and a token for the next access to pages."""
        slabs = inputs.storage.slabs
        projected = multiply_with_lora(capture, self.qkv, states, loras)
        with slabs.standing_for(inputs.addresses):
            rope, attention = inputs.rope.by(capture), inputs.attention.by(capture)
            queries, token = rope(projected, inputs.angles, inputs.slots, slabs, token)
            attended = attention.attend(queries, inputs.rows, slabs, token, inputs.coded)
        flat = capture.shaped(attended, (states.shape[0], attended.size // states.shape[0]))
        return multiply_with_lora(capture, self.out, flat, loras), token


@dataclass(frozen=True, slots=True, eq=False)
class MlpPart:
    """A gated MLP."""

    module: JoinedMLP
    gate_up: JoinedLinear
    down: JoinedLinear

    @classmethod
    def of(cls, module: Any) -> MlpPart:
        if not isinstance(module, JoinedMLP):
            raise UncoveredPartError(f"MLPs of {own_class(module).__name__}")
        return cls(module, _covered_product(module.joined_gate_up), _covered_product(module.joined_down))

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.gate_up, self.down

    def capture(self, capture: GraphCapture, states: mx.array, loras: mx.array | None) -> mx.array:
        """What is added to the hidden states, of normed ones."""
        return multiply_with_lora(capture, self.down, self._gated(capture, states, loras), loras)

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
class GraphLayer:
    """The parts of a layer."""

    mixer: AttentionPart
    mlp: MlpPart

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return *self.mixer.products, *self.mlp.products


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayers:
    """The parts of all layers, and what is between these parts: two for each layer, and one behind the last."""

    layers: Sequence[GraphLayer]
    residuals: Sequence[ResidualNorm]
    size: int
    """Of hidden states."""

    @property
    def products(self) -> list[JoinedLinear]:
        return [product for layer in self.layers for product in layer.products]


def graph_layers_of(model: Any) -> GraphLayers:
    """Raises UncoveredPartError."""
    programs = []
    for layer in decoder_layers_of(model):
        program = layer_program_of(layer)
        if program is None:
            raise UncoveredPartError(f"layers of {own_class(layer).__name__}")
        programs.append(program)
    if not programs:
        raise UncoveredPartError("layers of this model, which are not where others have theirs")
    layers = [GraphLayer(AttentionPart.of(program.mixer), MlpPart.of(program.mlp)) for program in programs]
    size = layers[0].mlp.down.linear.weight.shape[0]
    return GraphLayers(layers, _residual_norms(programs), size)


def _residual_norms(programs: Sequence[LayerProgram]) -> list[ResidualNorm]:
    norms = [_norm_weights(norm) for program in programs for norm in program.norms]
    befores, afters = [*norms[::2], None], [None, *norms[1::2]]
    added = [None, *(program for program in programs for _ in range(2))]  # whose part is added
    return [
        ResidualNorm(
            before,
            after,
            multiplier=None if program is None else program.multiplier,
            clipped=program is not None and program.clipped,
        )
        for before, after, program in zip(befores, afters, added, strict=True)
    ]


def _norm_weights(norm: nn.Module | None) -> RmsNormWeights | None:
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


def lora_matrices_of(product: JoinedLinear) -> LoraMatrices | None:
    return None if product.added is None else product.added.matrices
