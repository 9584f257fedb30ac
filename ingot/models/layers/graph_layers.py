"""Decoder layers as launches of a decode graph: the parts of a layer's program, each of which records its kernels.

`graph_layers_of` finds the parts of all layers of a model whose modules were swapped. Parts that no kernels cover are
computed by their own modules, between two graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple, Protocol

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
)
from ingot.kernels.dense_matmul.kernels import MOST_ROWS
from ingot.kernels.lora import add_lora_products
from ingot.kernels.moe.kernels import SharedOutput, combine_experts
from ingot.kernels.recurrent.kernels import RecurrentKernels
from ingot.models.families.description import SharedKvSpec
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import PagedKernelAttention
from ingot.models.layers.gpu_linear import (
    FEW_ROWS,
    DenseKernelLinear,
    JoinedLinear,
    QuantizedKernelLinear,
    join_linears,
)
from ingot.models.layers.graph_inputs import GraphAttentionInputs, RecurrentInputs, StepInputs, lora_matrices_of
from ingot.models.layers.layer_program import (
    LayerInputBlock,
    LayerProgram,
    ResidualBlock,
    decoder_layers_of,
    layer_program_of,
)
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.modules import own_class
from ingot.models.layers.moe import JoinedMoe, MoeKernels
from ingot.models.layers.norms import is_rms_norm, norm_factor
from ingot.models.layers.recurrent import KernelRecurrence
from ingot.models.layers.rope import KernelRope


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
        assert isinstance(own, GraphAttentionInputs)
        slabs = own.storage.slabs
        projected = multiply_with_lora(capture, self.qkv, states, loras)
        if self.norm is not None:
            projected = self.norm(capture, projected)
        with slabs.standing_for(own.addresses):
            rope, attention = own.rope.by(capture), own.attention.by(capture)
            queries, capture.token = rope(projected, own.angles, own.slots, slabs, capture.token)
            attended = attention.attend(queries, own.rows, slabs, capture.token, own.coded)
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
        return cls(module.kernels, router, None if shared is None else MlpPart.of(shared), gate)

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        own = (self.router,) if self.gate is None or self.gate is self.router else (self.router, self.gate)
        return own if self.shared is None else (*own, *self.shared.products)

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


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayer:
    """The parts of a layer's residual blocks."""

    parts: tuple[GraphPart, ...]

    @property
    def shared_kv(self) -> SharedKvSpec | None:
        """How its KV is passed on to later layers."""
        shared = self.mixer.module._spec.shared_kv if isinstance(self.mixer, AttentionPart) else None
        return None if shared is None or shared.argument is None else shared

    @property
    def mixer(self) -> AttentionPart | RecurrentPart | None:
        """The part that has a state, if there is one."""
        return next((part for part in self.parts if isinstance(part, AttentionPart | RecurrentPart)), None)


@dataclass(frozen=True, slots=True, eq=False)
class GraphRun:
    """Residual blocks, one after another, that are one graph."""

    parts: Sequence[tuple[int, GraphPart]]
    """With the numbers of their layers."""
    residuals: Sequence[ResidualNorm]
    """What is between parts: one before each of them, and one behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnBlock:
    """A residual block whose part has no kernels: its own module computes it, between two graphs."""

    program: LayerProgram
    block: ResidualBlock

    def __call__(self, x: mx.array) -> mx.array:
        block, program = self.block, self.program
        y = block.part(x if block.norm_before is None else block.norm_before(x))
        y = y if block.norm_after is None else block.norm_after(y)
        x = x + (y if program.multiplier is None else y * program.multiplier)
        return x if program.scale is None or block is not program.blocks[-1] else x * program.scale


@dataclass(frozen=True, slots=True, eq=False)
class OwnLayer:
    """A layer that its own module computes, between two graphs."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayers:
    """The parts of all layers that have kernels, and in which graphs they are."""

    layers: Sequence[GraphLayer]
    runs: Sequence[GraphRun | OwnBlock | OwnLayer]
    """What is computed one after another."""
    size: int
    """Of hidden states."""
    lacking: str | None
    """Which part is computed by its own module, if one is."""

    @property
    def graph_count(self) -> int:
        """How many graphs a step is."""
        return sum(isinstance(run, GraphRun) for run in self.runs)

    @property
    def most_tokens(self) -> int:
        """Tokens that a graph is captured for."""
        return min(MOST_ROWS if isinstance(each.linear, DenseKernelLinear) else FEW_ROWS for each in self.products)

    @property
    def has_experts(self) -> bool:
        return self.lacking is not None or any(isinstance(part, MoePart) for part in self._parts)

    @property
    def takes_layer_inputs(self) -> bool:
        """Whether layers are given something besides hidden states."""
        return any(isinstance(part, LayerInputPart) for part in self._parts)

    @property
    def products(self) -> list[JoinedLinear]:
        return [product for part in self._parts for product in part.products]

    @property
    def _parts(self) -> list[GraphPart]:
        return [part for layer in self.layers for part in layer.parts]


LEAST_RUN = 2
"""Residual blocks: launching a graph of fewer costs as much as launching their kernels."""


class _PlannedBlock(NamedTuple):
    """A residual block of a layer, and its part, if there are kernels for it."""

    layer: int
    program: LayerProgram
    block: ResidualBlock
    part: GraphPart | None


def graph_layers_of(model: Any) -> GraphLayers:
    """Raises UncoveredPartError where too few parts have kernels for graphs to be worth it."""
    modules, planned, lacking = decoder_layers_of(model), list[list[_PlannedBlock]](), list[str]()
    if not modules:
        raise UncoveredPartError("layers of this model, which are not where others have theirs")
    for number, layer in enumerate(modules):
        try:
            planned.append(_planned_blocks(layer, number, lacking))
        except UncoveredPartError as error:
            planned.append([])
            lacking.append(str(error))
    planned = _without_short_runs(planned)
    layers = [GraphLayer(tuple(each.part for each in blocks if each.part is not None)) for blocks in planned]
    attention = next((layer.mixer for layer in layers if isinstance(layer.mixer, AttentionPart)), None)
    passes_kv = any(layer.shared_kv is not None for layer in layers)
    if attention is None or (passes_kv and not all(planned)):
        raise UncoveredPartError(lacking[0] if lacking else "layers without attention")
    size = attention.out.linear.weight.shape[0]
    return GraphLayers(layers, _runs_of(planned), size, lacking[0] if lacking else None)


def _planned_blocks(layer: Any, number: int, lacking: list[str]) -> list[_PlannedBlock]:
    """Of the layer with this number; adds what has no kernels to what is `lacking`. Raises UncoveredPartError if all of
    the layer has to be computed by its own module."""
    program = layer_program_of(layer)
    if program is None:
        raise UncoveredPartError(f"layers of {own_class(layer).__name__}")
    blocks = []
    for block in program.blocks:
        part: GraphPart | None = None
        try:
            part = _part_of(block.part, number)
            for norm in (block.norm_before, block.norm_after):
                _norm_weights(norm)
        except UncoveredPartError as error:
            if program.clipped or not _takes_states_alone(block.part):
                raise
            lacking.append(str(error))
            part = None
        blocks.append(_PlannedBlock(number, program, block, part))
    return blocks


def _takes_states_alone(module: Any) -> bool:
    """Whether a part is called with hidden states and nothing else."""
    return isinstance(module, nn.Module) and len(inspect.signature(own_class(module).__call__).parameters) == 2


def _without_short_runs(planned: list[list[_PlannedBlock]]) -> list[list[_PlannedBlock]]:
    """Without the blocks of layers that have none in a run of enough blocks."""
    blocks = list[_PlannedBlock | None]()
    for own in planned:
        blocks += own or [None]
    enough = set[int]()
    for covered, run in groupby(blocks, key=lambda each: each is not None and each.part is not None):
        found = [each.layer for each in run if each is not None]
        if covered and len(found) >= LEAST_RUN:
            enough.update(found)
    return [own if number in enough else [] for number, own in enumerate(planned)]


def _runs_of(planned: list[list[_PlannedBlock]]) -> list[GraphRun | OwnBlock | OwnLayer]:
    runs, open_run = list[GraphRun | OwnBlock | OwnLayer](), list[_PlannedBlock]()

    def close() -> None:
        if open_run:
            runs.append(GraphRun([(each.layer, each.part) for each in open_run if each.part], _residuals_of(open_run)))
            open_run.clear()

    for number, blocks in enumerate(planned):
        if not blocks:
            close()
            runs.append(OwnLayer(number))
        for each in blocks:
            if each.part is None:
                close()
                runs.append(OwnBlock(each.program, each.block))
            else:
                open_run.append(each)
    close()
    return runs


def _joint_norm(module: MixedAttention) -> JointNorm | None:
    if not module._spec.joint_head_norms or module._spec.norms is None or module._spec.norms[0] not in module:
        return None
    queries, keys = (_norm_weights(module[name]) for name in module._spec.norms)
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


def _part_of(module: Any, number: int) -> GraphPart:
    """Of the layer with this number. Raises UncoveredPartError."""
    if isinstance(module, LayerInputBlock):
        return LayerInputPart.of(module, number)
    if isinstance(module, JoinedMLP):
        return MlpPart.of(module)
    if isinstance(module, JoinedMoe):
        return MoePart.of(module)
    if isinstance(module, KernelRecurrence):
        return RecurrentPart.of(module)
    if isinstance(module, MixedAttention):
        return AttentionPart.of(module)
    raise UncoveredPartError(own_class(module).__name__)


def _residuals_of(blocks: Sequence[_PlannedBlock]) -> list[ResidualNorm]:
    """Each adds what one block gave, and norms the sums for the next block."""
    norms = [ResidualNorm(_norm_weights(blocks[0].block.norm_before))]
    for (_, program, block, _), following in zip_longest(blocks, blocks[1:]):
        norms.append(
            ResidualNorm(
                None if following is None else _norm_weights(following.block.norm_before),
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
