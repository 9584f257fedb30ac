"""All layers of a model as one graph, on GPUs: a step of few tokens asks MLX for a dozen launches, not for hundreds.

The first layer is swapped for a module that runs all of them, the others for ones that hand on what they are given.
Lengths, tables and positions of rows are data, so that a step over as many rows is the same graph again. Covers the
layers of Llama and its relatives; prompts, and what it does not cover, are run by the layers' own modules.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.launch import Masks, Mixed
from ingot.cache.layers import AppendState
from ingot.cache.slabs import KernelStorage
from ingot.kernels.dense.kernels import MOST_ROWS
from ingot.kernels.device import Device
from ingot.kernels.gpu.driver import CudaError
from ingot.kernels.gpu.scores import Score
from ingot.kernels.paged.kernels import MOST_QUERIES, PagedAttention
from ingot.kernels.paged.kernels import Rows as KernelRows
from ingot.kernels.paged.turning import Turning
from ingot.kernels.stack.kernels import Norm, add, gate, shift
from ingot.kernels.stack.replays import Replay, Stage, stage
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.dense_linear import DenseKernelLinear
from ingot.models.layers.fused import layers_of, run_by_first
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.norms import factor, is_rms
from ingot.models.layers.packed_linear import FEW, KernelLinear
from ingot.models.layers.products import Product

log = logging.getLogger("ingot.models")
MOST_KEPT = 128
"""Graphs: for as many numbers of rows, and lengths of them."""
TRIALS = 2
"""Steps at which a graph's result is compared with the layers' own."""
APART = 0.05
"""How far that may be off, as a share of the largest number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What the graph needs of one."""

    attention: MixedAttention
    mlp: JoinedMLP
    norms: tuple[Norm, Norm]

    @property
    def linears(self) -> list[Any]:
        """What it multiplies by."""
        products = (self.attention._into, self.attention._out, self.mlp._into, self.mlp._out)
        return [product.linear for product in products if product is not None]


@dataclass(frozen=True, slots=True, eq=False)
class _Settled:
    """What all steps over the same states have in common."""

    first: weakref.ref[AppendState]
    asked: tuple[int | None, mx.Dtype]  # the window, and what is computed in
    storages: Sequence[KernelStorage]
    attention: PagedAttention
    turnings: Sequence[Turning]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a step is computed with and from."""

    settled: _Settled
    tokens: int
    rows: KernelRows
    places: mx.array
    angles: mx.array

    @property
    def bound(self) -> object:
        """All that its graph depends on, apart from data. Storages of one group have other slabs at the same time."""
        sizes = (self.tokens, self.places.size, self.rows.table.size, self.rows.rows.size)
        return (*sizes, *self.settled.attention.bound(self.rows), id(self.settled.storages[0].addresses))


class Stack:
    """The layers of one model. Only the engine thread may call it."""

    def __init__(self, layers: Sequence[nn.Module], known: Sequence[_Layer], where: Stage) -> None:
        self.layers, self._known, self._stage = layers, known, where
        linears = [linear for layer in known for linear in layer.linears]
        self._most = min(MOST_ROWS if isinstance(linear, DenseKernelLinear) else FEW for linear in linears)
        self._replays: OrderedDict[object, tuple[Replay, list[mx.array]]] = OrderedDict()
        self._settled: _Settled | None = None
        self._agreed = 0
        self.made = 0
        """Graphs, so far."""
        self.refused: str | None = None
        """Why no graphs are used."""

    def __call__(self, x: mx.array, mask: Any, states: Sequence[Any]) -> mx.array:
        step = None if self.refused is not None else self._step(x, mask, states)
        if step is None:
            return self._plain(x, mask, states)
        if self._agreed < TRIALS:
            return self._compared(x, mask, states, step)
        return self._replayed(x, step)

    def _plain(self, x: mx.array, mask: Any, states: Sequence[Any]) -> mx.array:
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, mask, state)
        return x

    def _compared(self, x: mx.array, mask: Any, states: Sequence[Any], step: _Step) -> mx.array:
        """What the layers' own modules say. The graph writes nearly the same to the same places once more."""
        y = self._plain(x, mask, states)
        try:
            again = self._replayed(x, step)
            mx.eval(y, again)
        except (RuntimeError, ValueError) as error:
            self._refuse(" ".join(str(error).split())[:300])
            return y
        apart, largest = float(mx.abs(y - again).max()), float(mx.abs(y).max())
        if not apart <= APART * max(largest, 1e-6):  # nor if one of them is no number
            self._refuse(f"they differ by {apart:.2g}, where numbers are up to {largest:.2g}")
        self._agreed += 1
        return y

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.warning("layers are not run as graphs, which is slower: %s", reason)

    def _step(self, x: mx.array, mask: Any, states: Sequence[Any]) -> _Step | None:
        """None where the graph does not cover what is open."""
        first = states[0]
        mixed = first.whole if isinstance(first, AppendState) else None
        if mixed is None or mixed.tokens > self._most or mixed.mutual or mixed.is_stated or mixed.positions.ndim != 1:
            return None
        if any(part.width > MOST_QUERIES for part in mixed.parts) or not isinstance(mask, Masks | None):
            return None
        asked, settled = (first.window if mask is None else mask.window, x.dtype), self._settled
        if settled is None or settled.first() is not first or settled.asked != asked:
            settled = self._settled = self._settle(states, *asked)
        return None if settled is None else self._found(mixed, first, settled)

    def _settle(self, states: Sequence[Any], window: int | None, dtype: mx.Dtype) -> _Settled | None:
        first, attention = states[0], self._known[0].attention._paged
        assert attention is not None
        pairs = [*zip(states, self._known, strict=True)]
        storages = [_storage(state, layer.attention, first, dtype) for state, layer in pairs]
        known = [storage for storage in storages if storage is not None]
        if len(known) < len(storages):
            return None
        kernel = attention._of(known[0], window, dtype)
        turnings = [_turning(layer.attention, own, dtype) for layer, own in zip(self._known, known, strict=True)]
        if kernel is None or None in turnings:
            return None
        turning = [each for each in turnings if each is not None]
        return _Settled(weakref.ref(first), (window, dtype), known, kernel, turning)

    def _found(self, mixed: Mixed, first: AppendState, settled: _Settled) -> _Step | None:
        storage, turning = settled.storages[0], self._known[0].attention._turning
        assert turning is not None
        rows = first.kernel_rows(storage, mixed, range(len(mixed.parts)))
        if rows.coded:  # in fewer bits: another kernel's
            return None
        return _Step(settled, mixed.tokens, rows, first.places(storage), turning._angles.of(mixed))

    def _replayed(self, x: mx.array, step: _Step) -> mx.array:
        key = step.bound
        if key not in self._replays:
            self.made += 1
            kept = [storage.addresses for storage in step.settled.storages]  # as long as they are known by their ids
            self._replays[key] = (self._stage.ready(self._score(x, step)), kept)
            if len(self._replays) > MOST_KEPT:
                self._replays.popitem(last=False)
        self._replays.move_to_end(key)
        replay, _ = self._replays[key]
        before = [*{id(token): token for token in (storage.token for storage in step.settled.storages)}.values()]
        after = before[0] if len(before) == 1 else mx.concatenate(before)
        given = [mx.contiguous(x), step.angles, step.places, step.rows.table, step.rows.rows]
        y, done = replay(given, after)
        for storage in step.settled.storages:
            storage.go_on(done)
        return y.reshape(x.shape)

    def _score(self, x: mx.array, step: _Step) -> Score:
        score, tokens, settled = Score(), step.tokens, step.settled
        states, angles = score.give((tokens, x.shape[-1]), x.dtype), score.give(step.angles.shape, mx.float32)
        places, table, rows = (
            score.give(each.shape, mx.int32) for each in (step.places, step.rows.table, step.rows.rows)
        )
        seen, token = step.rows.standing_for(table, rows), mx.zeros(1, mx.int32)
        attention, added = settled.attention.by(score), None
        for layer, turning, storage in zip(self._known, settled.turnings, settled.storages, strict=True):
            into, out = layer.attention._into, layer.attention._out
            assert into is not None and out is not None
            states, normed = layer.norms[0](score, states, added)
            projected = multiply(score, into, normed)
            queries, token = turning.by(score)(projected, angles, places, storage.slabs, token)
            attended = attention.attend(queries, seen, storage.slabs, token)
            added = multiply(score, out, score.shaped(attended, (tokens, attended.size // tokens)))
            states, normed = layer.norms[1](score, states, added)
            added = multiply(score, layer.mlp._out, gated(score, layer.mlp._into, normed))
        assert added is not None
        score.result = add(score, states, added, self._known[0].norms[0])
        return score


def multiply(score: Score, product: Product, x: mx.array) -> mx.array:
    """Of states of which each token's are one behind another."""
    linear = product.linear
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(score).launched(x, linear.weight, bias=linear.get("bias"))
    assert isinstance(linear, KernelLinear)
    y = linear._product.by(score).launched(x, linear._packed)
    return shift(score, y, linear.bias) if "bias" in linear else y


def gated(score: Score, product: Product, x: mx.array) -> mx.array:
    """What an MLP gates, by its gate: of weights of both, the gate's first."""
    linear = product.linear
    if "bias" in linear:
        return gate(score, multiply(score, product, x))
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(score).gated(x, linear.weight)
    assert isinstance(linear, KernelLinear)
    return linear._product.by(score).gated(x, linear._packed)


def _is_known(product: Product | None) -> bool:
    return product is not None and isinstance(product.linear, DenseKernelLinear | KernelLinear)


def _storage(state: Any, attention: MixedAttention, first: AppendState, dtype: mx.Dtype) -> KernelStorage | None:
    """What a layer's keys and values are in, if the graph finds them there as it finds the first layer's."""
    if not isinstance(state, AppendState) or state.group is not first.group or state.window != first.window:
        return None
    into = attention._into
    assert into is not None
    size = _outputs(into.linear) // (attention._heads + 2 * attention._kv_heads)
    storage = state.provided(attention._kv_heads, (size, size), dtype)
    if not isinstance(storage, KernelStorage) or not storage.by_address or storage.dtype != dtype:
        return None
    return storage


def _turning(attention: MixedAttention, storage: KernelStorage, dtype: mx.Dtype) -> Turning | None:
    assert attention._turning is not None
    return attention._turning.of(storage.sizes, dtype)


def _outputs(linear: Any) -> int:
    outputs: int = linear.weight.shape[0]
    return outputs


class CapturedLayers(nn.Module):
    """Stands in for a model's first layer, which it extends, and runs all of them."""

    _stack: Stack

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self._stack(x, mask, [None] * len(self._stack.layers) if cache is None else cache.neighbours)


def capture_layers(model: Any, device: Device) -> Stack | None:
    """Swap the layers of a model whose modules were swapped, if it is covered; what runs them then."""
    layers = [*layers_of(model)]
    known = [_known(layer) for layer in layers]
    if not layers or None in known or not _alike([layer for layer in known if layer is not None]):
        return None
    try:
        where = stage(device)
    except (CudaError, RuntimeError) as error:
        log.warning("layers are not run as graphs, which is slower: %s", error)
        return None
    stack = Stack(layers, [layer for layer in known if layer is not None], where)
    captured: CapturedLayers = run_by_first(model, layers, CapturedLayers)
    captured._stack = stack
    return stack


def stack_of(model: Any) -> Stack | None:
    """What runs the layers of a model, where they are graphs."""
    inner = model.get("model")
    layers = inner.get("layers") if isinstance(inner, nn.Module) else None
    first = layers[0] if isinstance(layers, list) and layers else None
    return first._stack if isinstance(first, CapturedLayers) else None


def _known(layer: Any) -> _Layer | None:
    """None where it holds something that the graph has no kernel for."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    if not isinstance(attention, MixedAttention) or not isinstance(mlp, JoinedMLP) or not all(map(is_rms, norms)):
        return None
    if attention._paged is None or attention._turning is None or attention._wiring.gated or not mlp.is_silu:
        return None
    products = (attention._into, attention._out, mlp._into, mlp._out)
    factors = [factor(norm) for norm in norms]
    if not all(map(_is_known, products)):
        return None
    made = [Norm(weight, norm.eps) for weight, norm in zip(factors, norms, strict=True) if weight is not None]
    return _Layer(attention, mlp, (made[0], made[1])) if len(made) == 2 else None


def _alike(layers: Sequence[_Layer]) -> bool:
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
