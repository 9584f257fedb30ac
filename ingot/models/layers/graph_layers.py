"""Decoder layers as launches of a decode graph: the parts of a layer's program, each of which records its kernels.

`graph_layers_of` finds the parts of all layers of a model whose modules were swapped, or says which one no kernel
covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.decode_graph.capture import GraphCapture, ReplayStage
from ingot.kernels.decode_graph.kernels import (
    JointNorm,
    ResidualNorm,
    RmsNormWeights,
    add_bias,
    gate_heads,
    gate_states,
)
from ingot.kernels.lora import LoraMatrices, add_lora_products
from ingot.kernels.paged_attention.inputs import KernelRows, padded_count
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import RopeKernel
from ingot.kernels.paged_attention.shapes import CodedPages
from ingot.kernels.recurrent.kernels import RecurrentKernels, RecurrentSpans
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import PagedKernelAttention
from ingot.models.layers.gpu_linear import DenseKernelLinear, JoinedLinear, QuantizedKernelLinear
from ingot.models.layers.layer_program import LayerProgram, decoder_layers_of, layer_program_of
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.modules import own_class
from ingot.models.layers.norms import is_rms_norm, norm_factor
from ingot.models.layers.recurrent import KernelRecurrence
from ingot.models.layers.rope import KernelRope
from ingot.models.lora.layers import LoraMapping


class UncoveredPartError(Exception):
    """Which part of a model's layers has no kernels that a graph could launch."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphAttentionInputs:
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
class RecurrentInputs:
    """What a recurrent layer of a graph reads and writes besides hidden states."""

    spans: RecurrentSpans
    addresses: mx.array
    """A buffer with the addresses of its tails and states."""


MixerInputs = GraphAttentionInputs | RecurrentInputs


class GraphPart(Protocol):
    """What a residual block computes."""

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        """Those that adapters may add to."""

    def capture(
        self, capture: GraphCapture, states: mx.array, inputs: MixerInputs | None, loras: mx.array | None
    ) -> mx.array:
        """What is added to the hidden states, of normed ones. `inputs`: what a mixer reads and writes besides."""


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
    def head_size(self) -> int:
        outputs: int = self.qkv.linear.weight.shape[0]
        return outputs // (self.module._heads * (2 if self.module._spec.gated else 1) + 2 * self.module._kv_heads)

    def capture(
        self, capture: GraphCapture, states: mx.array, inputs: MixerInputs | None, loras: mx.array | None
    ) -> mx.array:
        assert isinstance(inputs, GraphAttentionInputs)
        slabs = inputs.storage.slabs
        projected = multiply_with_lora(capture, self.qkv, states, loras)
        if self.norm is not None:
            projected = self.norm(capture, projected)
        with slabs.standing_for(inputs.addresses):
            rope, attention = inputs.rope.by(capture), inputs.attention.by(capture)
            queries, capture.token = rope(projected, inputs.angles, inputs.slots, slabs, capture.token)
            attended = attention.attend(queries, inputs.rows, slabs, capture.token, inputs.coded)
        if self.module._spec.gated:
            attended = gate_heads(capture, attended, projected)
        flat = capture.shaped(attended, (states.shape[0], attended.size // states.shape[0]))
        return multiply_with_lora(capture, self.out, flat, loras)


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

    def capture(
        self, capture: GraphCapture, states: mx.array, inputs: MixerInputs | None, loras: mx.array | None
    ) -> mx.array:
        assert isinstance(inputs, RecurrentInputs)
        joint = multiply_with_lora(capture, self.joint, states, loras)
        mixed, _ = self.kernels.by(capture).mix(joint, inputs.spans, [inputs.addresses])
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

    def capture(
        self, capture: GraphCapture, states: mx.array, inputs: MixerInputs | None, loras: mx.array | None
    ) -> mx.array:
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
    """The parts of a layer's residual blocks."""

    parts: tuple[GraphPart, ...]

    @property
    def mixer(self) -> AttentionPart | RecurrentPart | None:
        """The part that has a state, if there is one."""
        return next((part for part in self.parts if isinstance(part, AttentionPart | RecurrentPart)), None)


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayers:
    """The parts of all layers, and what is between these parts: one before each of them, and one behind the last."""

    layers: Sequence[GraphLayer]
    residuals: Sequence[ResidualNorm]
    size: int
    """Of hidden states."""

    @property
    def products(self) -> list[JoinedLinear]:
        return [product for layer in self.layers for part in layer.parts for product in part.products]


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
    layers = [GraphLayer(tuple(_part_of(block.part) for block in program.blocks)) for program in programs]
    if not any(isinstance(layer.mixer, AttentionPart) for layer in layers):
        raise UncoveredPartError("layers without attention")
    size = layers[0].parts[-1].products[-1].linear.weight.shape[0]
    return GraphLayers(layers, _residual_norms(programs), size)


def _joint_norm(module: MixedAttention) -> JointNorm | None:
    if not module._spec.joint_head_norms or module._spec.norms is None or module._spec.norms[0] not in module:
        return None
    queries, keys = (_norm_weights(module[name]) for name in module._spec.norms)
    assert queries is not None and keys is not None
    return JointNorm(queries, keys)


def _part_of(module: Any) -> GraphPart:
    """Raises UncoveredPartError."""
    if isinstance(module, JoinedMLP):
        return MlpPart.of(module)
    if isinstance(module, KernelRecurrence):
        return RecurrentPart.of(module)
    if isinstance(module, MixedAttention):
        return AttentionPart.of(module)
    raise UncoveredPartError(own_class(module).__name__)


def _residual_norms(programs: Sequence[LayerProgram]) -> list[ResidualNorm]:
    """Each adds what one block gave, and norms the sums for the next block."""
    blocks = [(program, block) for program in programs for block in program.blocks]
    norms, last = [ResidualNorm(_norm_weights(blocks[0][1].norm_before))], len(blocks) - 1
    for number, (program, block) in enumerate(blocks):
        following = None if number == last else blocks[number + 1][1].norm_before
        norms.append(
            ResidualNorm(
                _norm_weights(following),
                _norm_weights(block.norm_after),
                multiplier=program.multiplier,
                clipped=program.clipped,
                scale=program.scale if block is program.blocks[-1] else None,
            )
        )
    return norms


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


class LoraGraphs:
    """The adapters of a model whose layers multiply by these products."""

    def __init__(self, products: Sequence[JoinedLinear], stage: ReplayStage) -> None:
        self._products, self._stage = products, stage
        self.mapping: LoraMapping | None = None
        """Which adapters passes go through, where there are some."""
        self.refusal: str | None = None
        """Why such steps are not graphs."""
        self.compared_version = 0
        """The adapters whose graph was compared with the layers' own modules."""
        self.captured_version = 0
        """The adapters that there are graphs of."""
        self._arrays: list[mx.array] = []  # which those graphs read

    @property
    def version(self) -> int:
        """Which adapters the open pass has; 0: none."""
        return 0 if self.mapping is None or self.mapping.opened is None else self.mapping.version

    @property
    def are_possible(self) -> bool:
        return self.refusal is None and all(each.is_covered for each in self._matrices())

    def covers(self, dtype: mx.Dtype) -> bool:
        """Whether the open pass, in that number format, can be a graph."""
        if not self.version:
            return True
        return self.are_possible and all(each.into.dtype == dtype for each in self._matrices())

    def token_loras(self, tokens: int) -> mx.array | None:
        """The number of each token's adapter, and 0 for as many more as a graph has room for."""
        if self.mapping is None or self.mapping.opened is None:
            return None
        numbers = self.mapping.opened.numbers_in(self.mapping.order).view(mx.int32)
        return mx.pad(numbers, (0, padded_count(tokens) - tokens))

    def take_version(self, version: int) -> None:
        """Capture graphs of these adapters from now on; graphs of others are not replayed any more."""
        self._stage.forget(self._arrays)
        self._arrays = [array for each in self._matrices() for array in (each.into, each.out)]
        self.captured_version = version

    def _matrices(self) -> list[LoraMatrices]:
        found = map(lora_matrices_of, self._products)
        return [each for each in found if each is not None]
