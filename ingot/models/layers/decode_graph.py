"""Decode graphs: all layers of a model as one captured graph, on GPUs. A step of few tokens asks MLX for a dozen
launches, not for hundreds.

The first layer is swapped for a module that runs all of them, the others for ones that hand on what they are given.
Lengths, block tables and positions of rows are data, and where their pages lie is, too. How many rows and tokens there
are is rounded up to a few numbers, so that most steps find their graph made. Covers the layers of Llama and its
relatives; prompts, and what it does not cover, are run by the layers' own modules. A graph is compared with those
before it is used. Only the engine thread may call any of it.
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
"""Graphs: for as many numbers of rows, and lengths of them."""
LEAST_TABLE = 1024
"""Pages that a graph has room for the numbers of."""
LEAST_ADDRESSES = 256
"""Numbers that tell where slabs lie, four of each, that it has room for."""
AHEAD_SPLITS = (1, 2, 4)
"""Stretches of the longest row, for which graphs are made ahead."""
GRAPH_TRIALS = 2
"""Steps at which a graph's result is compared with the layers' own."""
MOST_APART = 0.05
"""How far that may be off, as a share of the largest number."""


@dataclass(frozen=True, slots=True, eq=False)
class _GraphStates:
    """What all steps over the same states have in common."""

    first: weakref.ref[AppendState]
    asked: tuple[int | None, mx.Dtype]  # the window, and what is computed in
    storages: Sequence[KernelStorage]
    attention: PagedAttention
    turnings: Sequence[RopeKernel]
    kernels: object  # which these are


@dataclass(frozen=True, slots=True, eq=False)
class _GraphStep:
    """What a step is computed with and from."""

    settled: _GraphStates
    tokens: int
    rows: KernelRows
    places: mx.array
    angles: mx.array
    adapters: mx.array | None  # where each token's is, where some have one
    version: int  # which adapters these are

    @property
    def given(self) -> list[mx.array]:
        """What its graph reads, behind states."""
        data = [self.angles, self.places, self.rows.table, self.rows.rows]
        return data if self.adapters is None else [*data, self.adapters]

    @property
    def bound(self) -> _GraphKey:
        tokens, rows = padded_count(self.tokens), self.settled.attention.bound(self.rows)
        angles = (tokens, self.angles.shape[1]) if self.angles.ndim == 2 else self.angles.shape
        table = max(LEAST_TABLE, self.rows.table.size)
        return _GraphKey(tokens, rows, table, angles, self.rows.coded, self.version)


class _GraphKey(NamedTuple):
    """All that a graph depends on, apart from data: rooms for what a step has."""

    tokens: int
    rows: RowBounds
    table: int
    angles: tuple[int, ...]
    coded: bool = False  # whether some pages are in fewer bits
    adapters: int = 0  # which stand beside the layers; 0: no token has one

    def like(self, tokens: int, rows: RowBounds) -> _GraphKey:
        """With room for others."""
        return self._replace(tokens=tokens, rows=rows, angles=(tokens, *self.angles[1:]))


class _SlabAddresses:
    """Where graphs read where slabs lie. Those come and go; what tells of them is laid there anew when they did."""

    def __init__(self, layers: int, of: Callable[[KernelStorage], mx.array]) -> None:
        self._layers, self._of, self._laid = layers, of, mx.zeros(0)
        self.places: list[mx.array] = []

    def has_room(self, storages: Sequence[KernelStorage]) -> bool:
        return bool(self.places) and self._of(storages[0]).size <= self.places[0].size

    def make_room(self, storages: Sequence[KernelStorage]) -> None:
        """Graphs that read from where there was less must not be replayed any more."""
        size = max(LEAST_ADDRESSES, 1 << self._of(storages[0]).size.bit_length())
        self.places = [mx.zeros(size, mx.int32) for _ in range(self._layers)]
        self._laid = mx.zeros(0)
        mx.eval(self.places)

    def lay(self, run: Launcher, storages: Sequence[KernelStorage], after: mx.array) -> mx.array:
        """A token for a replay: `after`, or another one behind it. Storages of one group have other slabs at the same
        time."""
        found = self._of(storages[0])
        if found is not self._laid:
            for storage, place in zip(storages, self.places, strict=True):
                after = store_addresses(run, self._of(storage), place, after)
            self._laid = found
        return after


class DecodeGraphs:
    """The layers of one model. Only the engine thread may call it."""

    def __init__(self, layers: Sequence[nn.Module], known: Sequence[GraphLayer], where: ReplayStage) -> None:
        self.layers, self._known, self._stage = layers, known, where
        products = [product for layer in known for product in layer.products]
        self._most = min(MOST_ROWS if isinstance(each.linear, DenseKernelLinear) else FEW_ROWS for each in products)
        self.adapted = LoraGraphs(products, where)
        self._replays: OrderedDict[tuple[object, _GraphKey], tuple[GraphReplay, object]] = OrderedDict()
        self._addresses = _SlabAddresses(len(known), lambda storage: storage.addresses)
        self._coded = _SlabAddresses(len(known), lambda storage: storage.coded_pages.addresses)
        self._settled: _GraphStates | None = None
        self._agreed = 0
        self.made = 0
        """Graphs, so far."""
        self.refused: str | None = None
        """Why no graphs are used."""
        rehearsal, words = LaunchRehearsal(), mx.zeros(0, mx.int32)
        store_addresses(rehearsal, words, words, words)
        where.prepare(rehearsal.kinds)

    @property
    def most(self) -> int:
        """Tokens that a graph is made for."""
        return self._most

    @property
    def slower(self) -> str | None:
        """Why graphs are slower here than they could be; None where they are not."""
        return self._stage.slower

    def __call__(self, x: mx.array, mask: Any, states: Sequence[Any]) -> mx.array:
        step = None if self.refused is not None else self._step(x, mask, states)
        if step is None:
            return self._plain(x, mask, states)
        if self._agreed < GRAPH_TRIALS or not self.adapted.agrees(step.version):
            return self._compared(x, mask, states, step)
        return self._replayed(x, step)

    def _plain(self, x: mx.array, mask: Any, states: Sequence[Any]) -> mx.array:
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, mask, state)
        return x

    def _compared(self, x: mx.array, mask: Any, states: Sequence[Any], step: _GraphStep) -> mx.array:
        """What the layers' own modules say. The graph writes nearly the same to the same places once more."""
        y = self._plain(x, mask, states)
        try:
            again = self._replayed(x, step)
            mx.eval(y, again)
        except (RuntimeError, ValueError) as error:
            self._refuse(" ".join(str(error).split())[:300], step)
            return y
        apart, largest = float(mx.abs(y - again).max()), float(mx.abs(y).max())
        if not apart <= MOST_APART * max(largest, 1e-6):  # nor if one of them is no number
            self._refuse(f"they differ by {apart:.2g}, where numbers are up to {largest:.2g}", step)
        self._agreed += not step.version
        self.adapted.agree(step.version)
        return y

    def _refuse(self, reason: str, step: _GraphStep) -> None:
        if step.version:
            self.adapted.refused = reason
        else:
            self.refused = reason
        log.warning("%s are not run as graphs, which is slower: %s", "adapters" if step.version else "layers", reason)

    def _step(self, x: mx.array, mask: Any, states: Sequence[Any]) -> _GraphStep | None:
        """None where the graph does not cover what is open."""
        if not self.adapted.takes(x.dtype):
            return None
        first = states[0]
        mixed = first.whole if isinstance(first, AppendState) else None
        if (
            mixed is None
            or mixed.tokens > self._most
            or mixed.bidirectional
            or mixed.has_stated_positions
            or mixed.positions.ndim != 1
        ):
            return None
        if any(part.width > MOST_QUERIES for part in mixed.parts) or not isinstance(mask, BatchMasks | None):
            return None
        asked, settled = (first.window if mask is None else mask.window, x.dtype), self._settled
        if settled is None or settled.first() is not first or settled.asked != asked:
            settled = self._settled = self._settle(states, *asked)
        return None if settled is None else self._found(mixed, first, settled)

    def _settle(self, states: Sequence[Any], window: int | None, dtype: mx.Dtype) -> _GraphStates | None:
        first, attention = states[0], self._known[0].attention._paged
        assert attention is not None
        pairs = [*zip(states, self._known, strict=True)]
        storages = [_kernel_storage_of(state, layer.attention, first, dtype) for state, layer in pairs]
        known = [storage for storage in storages if storage is not None]
        if len(known) < len(storages):
            return None
        kernel = attention._of(known[0], window, dtype)
        turnings = [_rope_kernel_of(layer.attention, own, dtype) for layer, own in zip(self._known, known, strict=True)]
        if kernel is None or None in turnings:
            return None
        turning = [each for each in turnings if each is not None]
        which = (id(kernel), *map(id, turning))
        return _GraphStates(weakref.ref(first), (window, dtype), known, kernel, turning, which)

    def _found(self, mixed: MixedBatch, first: AppendState, settled: _GraphStates) -> _GraphStep | None:
        storage, turning = settled.storages[0], self._known[0].attention._turning
        assert turning is not None
        rows = first.kernel_rows(storage, mixed, range(len(mixed.parts)))
        if not storage.reads(rows):
            return None
        given = (rows, first.places(storage), turning._angles.of(mixed), self.adapted.places(mixed.tokens))
        return _GraphStep(settled, mixed.tokens, *given, self.adapted.version)

    def _replayed(self, x: mx.array, step: _GraphStep) -> mx.array:
        settled, storages = step.settled, step.settled.storages
        replay = self._ready(settled, step.bound)
        before = [*{id(token): token for token in (storage.token for storage in storages)}.values()]
        after = before[0] if len(before) == 1 else mx.concatenate(before)
        for addresses in self._read(step.bound.coded):
            after = addresses.lay(self._stage.run, storages, after)
        y, done = replay([mx.contiguous(x), *step.given], after)
        for storage in storages:
            storage.go_on(done)
        return y.reshape(x.shape)

    def _ready(self, settled: _GraphStates, bound: _GraphKey) -> GraphReplay:
        for addresses in self._read(bound.coded):
            if not addresses.has_room(settled.storages):
                if addresses.places:
                    self._replays.clear()
                addresses.make_room(settled.storages)
        if self.adapted.is_new(bound.adapters):
            for other in [other for other in self._replays if other[1].adapters]:
                del self._replays[other]
            self.adapted.meet(bound.adapters)
        key = (settled.kernels, bound)
        if key not in self._replays:
            self.made += 1
            known = (settled.attention, settled.turnings)  # by their ids, as long as they are kept
            self._replays[key] = (self._stage.ready(self._score(settled, bound)), known)
            if len(self._replays) > MOST_GRAPHS:
                self._replays.popitem(last=False)
        self._replays.move_to_end(key)
        return self._replays[key][0]

    def _read(self, coded: bool) -> list[_SlabAddresses]:
        return [self._addresses, self._coded] if coded else [self._addresses]

    def capture_ahead(self) -> None:
        """Make graphs of steps that most requests come to, of single tokens and of one row's guesses, where steps were
        computed by graphs and would have to wait for one that is made."""
        if self._settled is None or not self._replays or self.refused is not None or not self._stage.takes_time:
            return
        usual = next(reversed(self._replays))[1]._replace(adapters=0)
        singles, drafts = [(room, room, 1) for room in ROOM_SIZES], [(width, 1, width) for width in WIDTHS[1:]]
        bounds = [
            usual.like(tokens, RowBounds(rows, most, stretches))
            for stretches in AHEAD_SPLITS
            for tokens, rows, most in (*singles, *drafts)
            if tokens <= self._most
        ]
        began = time.monotonic()
        self._stage.prepare(kind for bound in bounds for kind in self._score(self._settled, bound).kinds)
        for bound in reversed(bounds):  # those that need most memory first: the others share it
            self._ready(self._settled, bound)
        log.info("%d graphs of steps were made ahead, in %.1f s", len(bounds), time.monotonic() - began)

    def _score(self, settled: _GraphStates, bound: _GraphKey) -> GraphCapture:
        score, tokens, count = GraphCapture(), bound.tokens, bound.rows.rows
        states = score.give((tokens, self._known[0].norms[0].weight.size), settled.asked[1])
        angles = score.give(bound.angles, mx.float32)
        places = score.give(token_slots([(-1, 0)] * tokens).shape, mx.int32)
        table = score.give((bound.table,), mx.int32)
        rows = score.give(KernelRows.of([[0]] * count, [1] * count).rows.shape, mx.int32)
        adapters = score.give((tokens,), mx.int32) if bound.adapters else None
        seen, token = settled.attention.standing_for(bound.rows, table, rows), mx.zeros(1, mx.int32)
        attention, added = settled.attention.by(score), None
        coded = self._coded.places if bound.coded else [None] * len(self._known)
        for layer, turning, storage, lies, coded_lie in zip(
            self._known, settled.turnings, settled.storages, self._addresses.places, coded, strict=True
        ):
            into, out = layer.attention._into, layer.attention._out
            assert into is not None and out is not None
            states, normed = layer.norms[0](score, states, added)
            projected = multiply_with_lora(score, into, normed, adapters)
            with storage.slabs.standing_for(lies):
                queries, token = turning.by(score)(projected, angles, places, storage.slabs, token)
                pages = None if coded_lie is None else storage.coded_pages._replace(addresses=coded_lie)
                attended = attention.attend(queries, seen, storage.slabs, token, pages)
            added = multiply_with_lora(score, out, score.shaped(attended, (tokens, attended.size // tokens)), adapters)
            states, normed = layer.norms[1](score, states, added)
            added = multiply_with_lora(
                score, layer.mlp._out, gated_mlp_in_graph(score, layer.mlp._into, normed, adapters), adapters
            )
        assert added is not None
        score.result = add_residual(score, states, added, self._known[0].norms[0])
        return score


def _kernel_storage_of(
    state: Any, attention: MixedAttention, first: AppendState, dtype: mx.Dtype
) -> KernelStorage | None:
    """What a layer's keys and values are in, if the graph finds them there as it finds the first layer's."""
    if not isinstance(state, AppendState) or state.group is not first.group or state.window != first.window:
        return None
    into = attention._into
    assert into is not None
    size = _output_size(into.linear) // (attention._heads + 2 * attention._kv_heads)
    storage = state.provided(attention._kv_heads, (size, size), dtype)
    if not isinstance(storage, KernelStorage) or not storage.by_address or storage.dtype != dtype:
        return None
    return storage


def _rope_kernel_of(attention: MixedAttention, storage: KernelStorage, dtype: mx.Dtype) -> RopeKernel | None:
    assert attention._turning is not None
    return attention._turning.of(storage.sizes, dtype)


def _output_size(linear: Any) -> int:
    outputs: int = linear.weight.shape[0]
    return outputs


class CapturedLayers(LayerStandIn):
    """Stands in for a model's first layer, which it extends, and runs all of them."""

    _stack: DecodeGraphs

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if is_mlx_lm_cache(cache):
            return self.by_itself(x, mask, cache)
        return self._stack(x, mask, [None] * len(self._stack.layers) if cache is None else cache.neighbours)


def capture_layers(model: Any, device: Device) -> DecodeGraphs | None:
    """Swap the layers of a model whose modules were swapped, if it is covered; what runs them then."""
    layers = [*fusible_layers_of(model)]
    known = [graph_layer_of(layer) for layer in layers]
    if not layers or None in known or not are_layers_alike([layer for layer in known if layer is not None]):
        return None
    try:
        where = replay_stage(device)
    except (CudaError, RuntimeError) as error:
        log.warning("layers are not run as graphs, which is slower: %s", error)
        return None
    stack = DecodeGraphs(layers, [layer for layer in known if layer is not None], where)
    captured: CapturedLayers = run_all_in_first(model, layers, CapturedLayers)
    captured._stack = stack
    return stack


def decode_graphs_of(model: Any) -> DecodeGraphs | None:
    """What runs the layers of a model, where they are graphs."""
    inner = model.get("model")
    layers = inner.get("layers") if isinstance(inner, nn.Module) else None
    first = layers[0] if isinstance(layers, list) and layers else None
    return first._stack if isinstance(first, CapturedLayers) else None


class LoraGraphs:
    """Of one model, whose layers multiply by these products."""

    def __init__(self, products: Sequence[JoinedLinear], stage: ReplayStage) -> None:
        self._products, self._stage = products, stage
        self.blend: LoraMapping | None = None
        """Which adapters passes go through, where there are some."""
        self.refused: str | None = None
        """Why such steps are not graphs."""
        self._agreed = 0  # the version whose graph was compared with the layers' own modules
        self._known = 0  # the version that there are graphs of
        self._arrays: list[mx.array] = []  # which they read

    @property
    def version(self) -> int:
        """Which adapters the open pass has; 0: none."""
        return 0 if self.blend is None or self.blend.opened is None else self.blend.version

    @property
    def are_possible(self) -> bool:
        return self.refused is None and all(each.is_covered for each in self._matrices())

    def takes(self, dtype: mx.Dtype) -> bool:
        """Whether the open pass, in that number format, can be a graph."""
        if not self.version:
            return True
        return self.are_possible and all(each.into.dtype == dtype for each in self._matrices())

    def places(self, tokens: int) -> mx.array | None:
        """Where each token's adapter is, 0 for as many more as a graph has room for."""
        if self.blend is None or self.blend.opened is None:
            return None
        found = self.blend.opened.placed(self.blend.order).view(mx.int32)
        return mx.pad(found, (0, padded_count(tokens) - tokens))

    def agrees(self, version: int) -> bool:
        """Whether these adapters' graphs were compared."""
        return version in (0, self._agreed)

    def agree(self, version: int) -> None:
        self._agreed = version or self._agreed

    def is_new(self, version: int) -> bool:
        return version not in (0, self._known)

    def meet(self, version: int) -> None:
        """Graphs of others are not replayed any more."""
        self._stage.forget(self._arrays)
        self._arrays = [array for each in self._matrices() for array in (each.into, each.out)]
        self._known = version

    def _matrices(self) -> list[LoraMatrices]:
        found = map(lora_matrices_of, self._products)
        return [each for each in found if each is not None]


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayer:
    """What the graph needs of one."""

    attention: MixedAttention
    mlp: JoinedMLP
    norms: tuple[RmsNormKernel, RmsNormKernel]

    @property
    def products(self) -> list[JoinedLinear]:
        """What it multiplies by."""
        products = (self.attention._into, self.attention._out, self.mlp._into, self.mlp._out)
        return [product for product in products if product is not None]


def graph_layer_of(layer: Any) -> GraphLayer | None:
    """None where it holds something that the graph has no kernel for."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    if not isinstance(attention, MixedAttention) or not isinstance(mlp, JoinedMLP) or not all(map(is_rms_norm, norms)):
        return None
    if attention._paged is None or attention._turning is None or attention._wiring.gated or not mlp.is_silu:
        return None
    products = (attention._into, attention._out, mlp._into, mlp._out)
    factors = [norm_factor(norm) for norm in norms]
    if not all(map(_is_known_product, products)):
        return None
    made = [RmsNormKernel(weight, norm.eps) for weight, norm in zip(factors, norms, strict=True) if weight is not None]
    return GraphLayer(attention, mlp, (made[0], made[1])) if len(made) == 2 else None


def are_layers_alike(layers: Sequence[GraphLayer]) -> bool:
    """Whether all see their rows alike, and turn by the same angles."""
    first = layers[0].attention
    return all(
        (other._heads, other._kv_heads, other._scale, other._cap, other._rotates)
        == (first._heads, first._kv_heads, first._scale, first._cap, first._rotates)
        and other._wiring.sinks is None
        and other._turning is not None
        and first._turning is not None
        and other._turning._angles is first._turning._angles
        for other in (layer.attention for layer in layers)
    )


def multiply_in_graph(score: GraphCapture, product: JoinedLinear, x: mx.array) -> mx.array:
    """Of states of which each token's are one behind another."""
    linear = product.linear
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(score).launched(x, linear.weight, bias=linear.get("bias"))
    assert isinstance(linear, QuantizedKernelLinear)
    y = linear._product.by(score).launched(x, linear._packed)
    return add_bias(score, y, linear.bias) if "bias" in linear else y


def multiply_with_lora(score: GraphCapture, product: JoinedLinear, x: mx.array, places: mx.array | None) -> mx.array:
    """The same, with what the adapters at tokens' places add."""
    y, matrices = multiply_in_graph(score, product, x), lora_matrices_of(product)
    return y if places is None or matrices is None else add_lora_products(score, x, y, matrices, places)


def lora_matrices_of(product: JoinedLinear) -> LoraMatrices | None:
    """Of the adapters beside it."""
    return None if product.added is None else product.added.matrices


def gated_mlp_in_graph(score: GraphCapture, product: JoinedLinear, x: mx.array, places: mx.array | None) -> mx.array:
    """What an MLP gates, by its gate: of weights of both, the gate's first; with what adapters add."""
    linear, matrices = product.linear, lora_matrices_of(product)
    if places is not None and matrices is not None:
        return add_lora_products(score, x, multiply_in_graph(score, product, x), matrices, places, gated=True)
    if "bias" in linear:
        return gate_states(score, multiply_in_graph(score, product, x))
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(score).gated(x, linear.weight)
    assert isinstance(linear, QuantizedKernelLinear)
    return linear._product.by(score).gated(x, linear._packed)


def _is_known_product(product: JoinedLinear | None) -> bool:
    return product is not None and isinstance(product.linear, DenseKernelLinear | QuantizedKernelLinear)
