"""Decode graphs: on GPUs, all layers of a model as one captured graph, so that a step of few tokens takes a dozen
launches instead of hundreds.

The first layer is swapped for a module that runs all of them, the others for ones that pass their input on. Lengths,
block tables, positions and the addresses of pages are data; the numbers of rows and tokens are rounded up to a few
sizes, so that most steps find their graph captured. This covers the layers of Llama and its relatives; prompts, and
what is not covered, are run by the layers' own modules. A graph is compared with those before it is used. Only the
engine thread may call any of it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import BatchMasks, MixedBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.kernels.decode_graph.capture import GraphCapture, GraphReplay, ReplayStage, replay_stage
from ingot.kernels.decode_graph.kernels import RmsNormKernel, add_bias, add_residual, gate_states, store_addresses
from ingot.kernels.dense_matmul.kernels import MOST_ROWS
from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda_graph import CudaError
from ingot.kernels.gpu.kernel_source import LaunchRehearsal
from ingot.kernels.gpu.launcher import Launcher
from ingot.kernels.lora import LoraMatrices, add_lora_products
from ingot.kernels.paged_attention.inputs import (
    MOST_QUERIES,
    ROOM_SIZES,
    WIDTHS,
    KernelRows,
    RowBounds,
    padded_count,
    token_slots,
)
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import RopeKernel
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.fused_layers import LayerStandIn, fusible_layers_of, is_mlx_lm_cache, run_all_in_first
from ingot.models.layers.gpu_linear import FEW_ROWS, DenseKernelLinear, JoinedLinear, QuantizedKernelLinear
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.norms import is_rms_norm, norm_factor
from ingot.models.lora.layers import LoraMapping

log = logging.getLogger("ingot.models")
MOST_GRAPHS = 128
"""Graphs that are kept, for as many numbers of rows and lengths."""
LEAST_TABLE = 1024
"""Pages that a graph's block table has room for."""
LEAST_ADDRESSES = 256
"""Numbers that a graph's slab addresses have room for, four a slab."""
AHEAD_SPLITS = (1, 2, 4)
"""KV splits of the longest row for which graphs are captured ahead."""
GRAPH_TRIALS = 2
"""Steps at which a graph's result is compared with the layers' own."""
MOST_APART = 0.05
"""The largest difference allowed, as a share of the largest number."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayer:
    """The parts of a layer that the graph computes."""

    attention: MixedAttention
    mlp: JoinedMLP
    norms: tuple[RmsNormKernel, RmsNormKernel]

    @property
    def products(self) -> list[JoinedLinear]:
        products = _joined_products(self.attention, self.mlp)
        return [product for product in products if product is not None]


@dataclass(frozen=True, slots=True, eq=False)
class _StepContext:
    """What all steps over the same KV states have in common."""

    first: weakref.ref[AppendState]
    requested: tuple[int | None, mx.Dtype]  # the window, and the activations' format
    storages: Sequence[KernelStorage]
    attention: PagedAttention
    ropes: Sequence[RopeKernel]
    kernel_ids: tuple[int, ...]  # of attention and ropes


@dataclass(frozen=True, slots=True, eq=False)
class _GraphStep:
    """The data of a step."""

    context: _StepContext
    tokens: int
    rows: KernelRows
    slots: mx.array
    angles: mx.array
    token_loras: mx.array | None  # each token's adapter, where some have one
    lora_version: int

    @property
    def inputs(self) -> list[mx.array]:
        """What its graph reads besides hidden states."""
        data = [self.angles, self.slots, self.rows.table, self.rows.rows]
        return data if self.token_loras is None else [*data, self.token_loras]

    @property
    def key(self) -> _GraphKey:
        tokens, rows = padded_count(self.tokens), self.context.attention.bound(self.rows)
        angles = (tokens, self.angles.shape[1]) if self.angles.ndim == 2 else self.angles.shape
        table = max(LEAST_TABLE, self.rows.table.size)
        return _GraphKey(tokens, rows, table, angles, self.rows.coded, self.lora_version)


class _GraphKey(NamedTuple):
    """All that a graph depends on, apart from data: sizes that a step must fit in."""

    tokens: int
    rows: RowBounds
    table: int
    angles: tuple[int, ...]
    coded: bool = False  # whether some pages are in fewer bits
    lora_version: int = 0  # of the adapters; 0: no token has one

    def resized(self, tokens: int, rows: RowBounds) -> _GraphKey:
        return self._replace(tokens=tokens, rows=rows, angles=(tokens, *self.angles[1:]))


class _SlabAddresses:
    """The buffers in which graphs find the addresses of slabs. Slabs come and go; then the buffers are written anew."""

    def __init__(self, layers: int, addresses_of: Callable[[KernelStorage], mx.array]) -> None:
        self._layers, self._addresses_of, self._stored = layers, addresses_of, mx.zeros(0)
        self.buffers: list[mx.array] = []

    def has_room(self, storages: Sequence[KernelStorage]) -> bool:
        return bool(self.buffers) and self._addresses_of(storages[0]).size <= self.buffers[0].size

    def make_room(self, storages: Sequence[KernelStorage]) -> None:
        """Graphs that read the smaller buffers must not be replayed any more."""
        size = max(LEAST_ADDRESSES, 1 << self._addresses_of(storages[0]).size.bit_length())
        self.buffers = [mx.zeros(size, mx.int32) for _ in range(self._layers)]
        self._stored = mx.zeros(0)
        mx.eval(self.buffers)

    def store(self, run: Launcher, storages: Sequence[KernelStorage], after: mx.array) -> mx.array:
        """A token for a replay: `after`, or a later one. Storages of one group change their slabs at the same time."""
        addresses = self._addresses_of(storages[0])
        if addresses is not self._stored:
            for storage, buffer in zip(storages, self.buffers, strict=True):
                after = store_addresses(run, self._addresses_of(storage), buffer, after)
            self._stored = addresses
        return after


class DecodeGraphs:
    """The layers of one model. Only the engine thread may call it."""

    def __init__(self, layers: Sequence[nn.Module], graph_layers: Sequence[GraphLayer], stage: ReplayStage) -> None:
        self.layers, self._graph_layers, self._stage = layers, graph_layers, stage
        products = [product for layer in graph_layers for product in layer.products]
        self.most_tokens = min(
            MOST_ROWS if isinstance(each.linear, DenseKernelLinear) else FEW_ROWS for each in products
        )
        """Tokens that a graph is captured for."""
        self.loras = LoraGraphs(products, stage)
        self._replays: OrderedDict[tuple[object, _GraphKey], tuple[GraphReplay, object]] = OrderedDict()
        self._addresses = _SlabAddresses(len(graph_layers), lambda storage: storage.addresses)
        self._coded_addresses = _SlabAddresses(len(graph_layers), lambda storage: storage.coded_pages.addresses)
        self._context: _StepContext | None = None
        self._trials = 0
        self.graph_count = 0
        """Graphs captured so far."""
        self.refusal: str | None = None
        """Why no graphs are used."""
        rehearsal, words = LaunchRehearsal(), mx.zeros(0, mx.int32)
        store_addresses(rehearsal, words, words, words)
        stage.prepare(rehearsal.kinds)

    @property
    def slower(self) -> str | None:
        """Why graphs are slower here than they could be; None where they are not."""
        return self._stage.slower

    def __call__(self, x: mx.array, mask: Any, states: Sequence[Any]) -> mx.array:
        step = None if self.refusal is not None else self._step(x, mask, states)
        if step is None:
            return self._run_layers(x, mask, states)
        if self._trials < GRAPH_TRIALS or step.lora_version not in (0, self.loras.compared_version):
            return self._run_and_compare(x, mask, states, step)
        return self._replay(x, step)

    def _run_layers(self, x: mx.array, mask: Any, states: Sequence[Any]) -> mx.array:
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, mask, state)
        return x

    def _run_and_compare(self, x: mx.array, mask: Any, states: Sequence[Any], step: _GraphStep) -> mx.array:
        """The result of the layers' own modules. The graph writes nearly the same KV to the same slots once more."""
        y = self._run_layers(x, mask, states)
        try:
            replayed = self._replay(x, step)
            mx.eval(y, replayed)
        except (RuntimeError, ValueError) as error:
            self._refuse(" ".join(str(error).split())[:300], step)
            return y
        apart, largest = float(mx.abs(y - replayed).max()), float(mx.abs(y).max())
        if not apart <= MOST_APART * max(largest, 1e-6):  # nor if one of them is no number
            self._refuse(f"they differ by {apart:.2g}, where numbers are up to {largest:.2g}", step)
        if step.lora_version:
            self.loras.compared_version = step.lora_version
        else:
            self._trials += 1
        return y

    def _refuse(self, reason: str, step: _GraphStep) -> None:
        if step.lora_version:
            self.loras.refusal = reason
        else:
            self.refusal = reason
        what = "adapters" if step.lora_version else "layers"
        log.warning("%s are not run as graphs, which is slower: %s", what, reason)

    def _step(self, x: mx.array, mask: Any, states: Sequence[Any]) -> _GraphStep | None:
        """None where the graph does not cover the open forward batch."""
        if not self.loras.covers(x.dtype):
            return None
        first = states[0]
        mixed = first.whole if isinstance(first, AppendState) else None
        if (
            mixed is None
            or mixed.tokens > self.most_tokens
            or mixed.bidirectional
            or mixed.has_stated_positions
            or mixed.positions.ndim != 1
        ):
            return None
        if any(part.width > MOST_QUERIES for part in mixed.parts) or not isinstance(mask, BatchMasks | None):
            return None
        requested, context = (first.window if mask is None else mask.window, x.dtype), self._context
        if context is None or context.first() is not first or context.requested != requested:
            context = self._context = self._find_context(states, *requested)
        return None if context is None else self._step_of(mixed, first, context)

    def _find_context(self, states: Sequence[Any], window: int | None, dtype: mx.Dtype) -> _StepContext | None:
        first, paged = states[0], self._graph_layers[0].attention.paged_attention
        assert paged is not None
        storages: list[KernelStorage] = []
        ropes: list[RopeKernel] = []
        for state, layer in zip(states, self._graph_layers, strict=True):
            storage = _kernel_storage_of(state, layer.attention, first, dtype)
            if storage is None:
                return None
            assert layer.attention.kernel_rope is not None
            rope = layer.attention.kernel_rope.kernel_for(storage.sizes, dtype)
            if rope is None:
                return None
            storages.append(storage)
            ropes.append(rope)
        kernel = paged.kernel_for(storages[0], window, dtype)
        if kernel is None:
            return None
        kernel_ids = (id(kernel), *map(id, ropes))
        return _StepContext(weakref.ref(first), (window, dtype), storages, kernel, ropes, kernel_ids)

    def _step_of(self, mixed: MixedBatch, first: AppendState, context: _StepContext) -> _GraphStep | None:
        storage, rope = context.storages[0], self._graph_layers[0].attention.kernel_rope
        assert rope is not None
        rows = first.kernel_rows(storage, mixed, range(len(mixed.parts)))
        if not storage.reads(rows):
            return None
        data = (rows, first.places(storage), rope.angles.of_batch(mixed), self.loras.token_loras(mixed.tokens))
        return _GraphStep(context, mixed.tokens, *data, self.loras.version)

    def _replay(self, x: mx.array, step: _GraphStep) -> mx.array:
        key, storages = step.key, step.context.storages
        replay = self._replay_for(step.context, key)
        before = [*{id(token): token for token in (storage.token for storage in storages)}.values()]
        after = before[0] if len(before) == 1 else mx.concatenate(before)
        for addresses in self._addresses_for(key):
            after = addresses.store(self._stage.run, storages, after)
        y, done = replay([mx.contiguous(x), *step.inputs], after)
        for storage in storages:
            storage.go_on(done)
        return y.reshape(x.shape)

    def _replay_for(self, context: _StepContext, key: _GraphKey) -> GraphReplay:
        for addresses in self._addresses_for(key):
            if not addresses.has_room(context.storages):
                if addresses.buffers:
                    self._replays.clear()
                addresses.make_room(context.storages)
        if key.lora_version not in (0, self.loras.captured_version):
            for other in [other for other in self._replays if other[1].lora_version]:
                del self._replays[other]
            self.loras.take_version(key.lora_version)
        replay_key = (context.kernel_ids, key)
        if replay_key not in self._replays:
            self.graph_count += 1
            kernels = (context.attention, context.ropes)  # held, as they are known by their ids
            self._replays[replay_key] = (self._stage.ready(self._capture(context, key)), kernels)
            if len(self._replays) > MOST_GRAPHS:
                self._replays.popitem(last=False)
        self._replays.move_to_end(replay_key)
        return self._replays[replay_key][0]

    def _addresses_for(self, key: _GraphKey) -> list[_SlabAddresses]:
        return [self._addresses, self._coded_addresses] if key.coded else [self._addresses]

    def capture_ahead(self) -> None:
        """Capture the graphs that most requests need, of single tokens and of one row's draft tokens, where steps run
        as graphs and would have to wait for the capture."""
        if self._context is None or not self._replays or self.refusal is not None or not self._stage.takes_time:
            return
        usual = next(reversed(self._replays))[1]._replace(lora_version=0)
        singles, drafts = [(room, room, 1) for room in ROOM_SIZES], [(width, 1, width) for width in WIDTHS[1:]]
        keys = [
            usual.resized(tokens, RowBounds(rows, most, splits))
            for splits in AHEAD_SPLITS
            for tokens, rows, most in (*singles, *drafts)
            if tokens <= self.most_tokens
        ]
        began = time.monotonic()
        self._stage.prepare(kind for key in keys for kind in self._capture(self._context, key).kinds)
        for key in reversed(keys):  # those that need most memory first: the others share it
            self._replay_for(self._context, key)
        log.info("%d decode graphs were captured ahead, in %.1f s", len(keys), time.monotonic() - began)

    def _capture(self, context: _StepContext, key: _GraphKey) -> GraphCapture:
        capture, tokens, count = GraphCapture(), key.tokens, key.rows.rows
        states = capture.give((tokens, self._graph_layers[0].norms[0].weight.size), context.requested[1])
        angles = capture.give(key.angles, mx.float32)
        slots = capture.give(token_slots([(-1, 0)] * tokens).shape, mx.int32)
        table = capture.give((key.table,), mx.int32)
        rows = capture.give(KernelRows.of([[0]] * count, [1] * count).rows.shape, mx.int32)
        loras = capture.give((tokens,), mx.int32) if key.lora_version else None
        seen, token = context.attention.standing_for(key.rows, table, rows), mx.zeros(1, mx.int32)
        attention, added = context.attention.by(capture), None
        coded_buffers = self._coded_addresses.buffers if key.coded else [None] * len(self._graph_layers)
        for layer, rope, storage, buffer, coded_buffer in zip(
            self._graph_layers, context.ropes, context.storages, self._addresses.buffers, coded_buffers, strict=True
        ):
            qkv, out = layer.attention.joined_qkv, layer.attention.joined_out
            assert qkv is not None and out is not None
            states, normed = layer.norms[0](capture, states, added)
            projected = multiply_with_lora(capture, qkv, normed, loras)
            with storage.slabs.standing_for(buffer):
                queries, token = rope.by(capture)(projected, angles, slots, storage.slabs, token)
                pages = None if coded_buffer is None else storage.coded_pages._replace(addresses=coded_buffer)
                attended = attention.attend(queries, seen, storage.slabs, token, pages)
            added = multiply_with_lora(capture, out, capture.shaped(attended, (tokens, attended.size // tokens)), loras)
            states, normed = layer.norms[1](capture, states, added)
            gated = gated_mlp_in_graph(capture, layer.mlp.joined_gate_up, normed, loras)
            added = multiply_with_lora(capture, layer.mlp.joined_down, gated, loras)
        assert added is not None
        capture.result = add_residual(capture, states, added, self._graph_layers[0].norms[0])
        return capture


def _kernel_storage_of(
    state: Any, attention: MixedAttention, first: AppendState, dtype: mx.Dtype
) -> KernelStorage | None:
    """The storage of a layer's KV, if the graph can address it as it addresses the first layer's."""
    if not isinstance(state, AppendState) or state.group is not first.group or state.window != first.window:
        return None
    qkv = attention.joined_qkv
    assert qkv is not None
    size = qkv.linear.weight.shape[0] // (attention._heads + 2 * attention._kv_heads)
    storage = state.provided(attention._kv_heads, (size, size), dtype)
    if not isinstance(storage, KernelStorage) or not storage.by_address or storage.dtype != dtype:
        return None
    return storage


class CapturedLayers(LayerStandIn):
    """Replaces a model's first layer, which it extends, and runs all of them."""

    _stack: DecodeGraphs

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if is_mlx_lm_cache(cache):
            return self.by_itself(x, mask, cache)
        return self._stack(x, mask, [None] * len(self._stack.layers) if cache is None else cache.neighbours)


def capture_layers(model: Any, device: Device) -> DecodeGraphs | None:
    """Swap the layers of a model whose modules were swapped, if graphs cover all of them; returns what runs them."""
    layers = [*fusible_layers_of(model)]
    graph_layers = [each for each in map(graph_layer_of, layers) if each is not None]
    if not layers or len(graph_layers) < len(layers) or not are_layers_alike(graph_layers):
        return None
    try:
        stage = replay_stage(device)
    except (CudaError, RuntimeError) as error:
        log.warning("layers are not run as graphs, which is slower: %s", error)
        return None
    stack = DecodeGraphs(layers, graph_layers, stage)
    captured: CapturedLayers = run_all_in_first(model, layers, CapturedLayers)
    captured._stack = stack
    return stack


def decode_graphs_of(model: Any) -> DecodeGraphs | None:
    """The graphs that run the layers of a model, where there are any."""
    inner = model.get("model")
    layers = inner.get("layers") if isinstance(inner, nn.Module) else None
    first = layers[0] if isinstance(layers, list) and layers else None
    return first._stack if isinstance(first, CapturedLayers) else None


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


def _joined_products(attention: MixedAttention, mlp: JoinedMLP) -> tuple[JoinedLinear | None, ...]:
    return attention.joined_qkv, attention.joined_out, mlp.joined_gate_up, mlp.joined_down


def graph_layer_of(layer: Any) -> GraphLayer | None:
    """None where it holds something that the graph has no kernel for."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    if not isinstance(attention, MixedAttention) or not isinstance(mlp, JoinedMLP) or not all(map(is_rms_norm, norms)):
        return None
    if attention.paged_attention is None or attention.kernel_rope is None or attention._spec.gated or not mlp.is_silu:
        return None
    for product in _joined_products(attention, mlp):
        if product is None or not isinstance(product.linear, DenseKernelLinear | QuantizedKernelLinear):
            return None
    factors = [(norm_factor(norm), norm.eps) for norm in norms]
    kernels = [RmsNormKernel(weight, eps) for weight, eps in factors if weight is not None]
    return GraphLayer(attention, mlp, (kernels[0], kernels[1])) if len(kernels) == 2 else None


def are_layers_alike(layers: Sequence[GraphLayer]) -> bool:
    """Whether all attend to their rows alike, and rotate by the same angles."""
    first = layers[0].attention
    return all(
        (other._heads, other._kv_heads, other._scale, other._cap)
        == (first._heads, first._kv_heads, first._scale, first._cap)
        and other._spec.sinks is None
        and other.kernel_rope is not None
        and first.kernel_rope is not None
        and other.kernel_rope.angles is first.kernel_rope.angles
        for other in (layer.attention for layer in layers)
    )


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


def gated_mlp_in_graph(
    capture: GraphCapture, product: JoinedLinear, x: mx.array, token_loras: mx.array | None
) -> mx.array:
    """The gated activation of a joint gate and up projection, with what the tokens' adapters add."""
    linear, matrices = product.linear, lora_matrices_of(product)
    if token_loras is not None and matrices is not None:
        return add_lora_products(capture, x, multiply_in_graph(capture, product, x), matrices, token_loras, gated=True)
    if "bias" in linear:
        return gate_states(capture, multiply_in_graph(capture, product, x))
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(capture).gated(x, linear.weight)
    assert isinstance(linear, QuantizedKernelLinear)
    return linear._product.by(capture).gated(x, linear._packed)
