"""All layers of a model as one graph, on GPUs: a step of few tokens asks MLX for a dozen launches, not for hundreds.

The first layer is swapped for a module that runs all of them, the others for ones that hand on what they are given.
Lengths, tables and positions of rows are data, and where their pages lie is, too. How many rows and tokens there are is
rounded up to a few numbers, so that most steps find their graph made. Covers the layers of Llama and its relatives;
prompts, and what it does not cover, are run by the layers' own modules.
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
from ingot.cache.forward_batch import Masks, Mixed
from ingot.cache.kv_storage import KernelStorage
from ingot.kernels.decode_graph.capture import Replay, Stage, stage
from ingot.kernels.decode_graph.kernels import add, lay
from ingot.kernels.dense_matmul.kernels import MOST_ROWS
from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda_graph import CudaError
from ingot.kernels.gpu.kernel_source import Rehearsal
from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.gpu.scores import Score
from ingot.kernels.paged_attention.inputs import MOST_QUERIES, ROOMS, WIDTHS, Bound, room_of, token_slots
from ingot.kernels.paged_attention.inputs import Rows as KernelRows
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.rope import Turning
from ingot.models.layers.adapted_graphs import AdaptedGraphs
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.covered import CoveredLayer, adapted, alike, covered, gated
from ingot.models.layers.dense_linear import DenseKernelLinear
from ingot.models.layers.fused_layers import OwnLayer, is_foreign, layers_of, run_by_first
from ingot.models.layers.gpu_linear import FEW

log = logging.getLogger("ingot.models")
MOST_KEPT = 128
"""Graphs: for as many numbers of rows, and lengths of them."""
LEAST_TABLE = 1024
"""Pages that a graph has room for the numbers of."""
LEAST_ADDRESSES = 256
"""Numbers that tell where slabs lie, four of each, that it has room for."""
AHEAD = (1, 2, 4)
"""Stretches of the longest row, for which graphs are made ahead."""
TRIALS = 2
"""Steps at which a graph's result is compared with the layers' own."""
APART = 0.05
"""How far that may be off, as a share of the largest number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Settled:
    """What all steps over the same states have in common."""

    first: weakref.ref[AppendState]
    asked: tuple[int | None, mx.Dtype]  # the window, and what is computed in
    storages: Sequence[KernelStorage]
    attention: PagedAttention
    turnings: Sequence[Turning]
    kernels: object  # which these are


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a step is computed with and from."""

    settled: _Settled
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
    def bound(self) -> _Bound:
        tokens, rows = room_of(self.tokens), self.settled.attention.bound(self.rows)
        angles = (tokens, self.angles.shape[1]) if self.angles.ndim == 2 else self.angles.shape
        table = max(LEAST_TABLE, self.rows.table.size)
        return _Bound(tokens, rows, table, angles, self.rows.coded, self.version)


class _Bound(NamedTuple):
    """All that a graph depends on, apart from data: rooms for what a step has."""

    tokens: int
    rows: Bound
    table: int
    angles: tuple[int, ...]
    coded: bool = False  # whether some pages are in fewer bits
    adapters: int = 0  # which stand beside the layers; 0: no token has one

    def like(self, tokens: int, rows: Bound) -> _Bound:
        """With room for others."""
        return self._replace(tokens=tokens, rows=rows, angles=(tokens, *self.angles[1:]))


class _Addresses:
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
                after = lay(run, self._of(storage), place, after)
            self._laid = found
        return after


class Stack:
    """The layers of one model. Only the engine thread may call it."""

    def __init__(self, layers: Sequence[nn.Module], known: Sequence[CoveredLayer], where: Stage) -> None:
        self.layers, self._known, self._stage = layers, known, where
        products = [product for layer in known for product in layer.products]
        self._most = min(MOST_ROWS if isinstance(each.linear, DenseKernelLinear) else FEW for each in products)
        self.adapted = AdaptedGraphs(products, where)
        self._replays: OrderedDict[tuple[object, _Bound], tuple[Replay, object]] = OrderedDict()
        self._addresses = _Addresses(len(known), lambda storage: storage.addresses)
        self._coded = _Addresses(len(known), lambda storage: storage.coded_pages.addresses)
        self._settled: _Settled | None = None
        self._agreed = 0
        self.made = 0
        """Graphs, so far."""
        self.refused: str | None = None
        """Why no graphs are used."""
        rehearsal, words = Rehearsal(), mx.zeros(0, mx.int32)
        lay(rehearsal, words, words, words)
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
        if self._agreed < TRIALS or not self.adapted.agrees(step.version):
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
            self._refuse(" ".join(str(error).split())[:300], step)
            return y
        apart, largest = float(mx.abs(y - again).max()), float(mx.abs(y).max())
        if not apart <= APART * max(largest, 1e-6):  # nor if one of them is no number
            self._refuse(f"they differ by {apart:.2g}, where numbers are up to {largest:.2g}", step)
        self._agreed += not step.version
        self.adapted.agree(step.version)
        return y

    def _refuse(self, reason: str, step: _Step) -> None:
        if step.version:
            self.adapted.refused = reason
        else:
            self.refused = reason
        log.warning("%s are not run as graphs, which is slower: %s", "adapters" if step.version else "layers", reason)

    def _step(self, x: mx.array, mask: Any, states: Sequence[Any]) -> _Step | None:
        """None where the graph does not cover what is open."""
        if not self.adapted.takes(x.dtype):
            return None
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
        which = (id(kernel), *map(id, turning))
        return _Settled(weakref.ref(first), (window, dtype), known, kernel, turning, which)

    def _found(self, mixed: Mixed, first: AppendState, settled: _Settled) -> _Step | None:
        storage, turning = settled.storages[0], self._known[0].attention._turning
        assert turning is not None
        rows = first.kernel_rows(storage, mixed, range(len(mixed.parts)))
        if not storage.reads(rows):
            return None
        given = (rows, first.places(storage), turning._angles.of(mixed), self.adapted.places(mixed.tokens))
        return _Step(settled, mixed.tokens, *given, self.adapted.version)

    def _replayed(self, x: mx.array, step: _Step) -> mx.array:
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

    def _ready(self, settled: _Settled, bound: _Bound) -> Replay:
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
            if len(self._replays) > MOST_KEPT:
                self._replays.popitem(last=False)
        self._replays.move_to_end(key)
        return self._replays[key][0]

    def _read(self, coded: bool) -> list[_Addresses]:
        return [self._addresses, self._coded] if coded else [self._addresses]

    def make_ahead(self) -> None:
        """Make graphs of steps that most requests come to, of single tokens and of one row's guesses, where steps were
        computed by graphs and would have to wait for one that is made."""
        if self._settled is None or not self._replays or self.refused is not None or not self._stage.takes_time:
            return
        usual = next(reversed(self._replays))[1]._replace(adapters=0)
        singles, guesses = [(room, room, 1) for room in ROOMS], [(width, 1, width) for width in WIDTHS[1:]]
        bounds = [
            usual.like(tokens, Bound(rows, most, stretches))
            for stretches in AHEAD
            for tokens, rows, most in (*singles, *guesses)
            if tokens <= self._most
        ]
        began = time.monotonic()
        self._stage.prepare(kind for bound in bounds for kind in self._score(self._settled, bound).kinds)
        for bound in reversed(bounds):  # those that need most memory first: the others share it
            self._ready(self._settled, bound)
        log.info("%d graphs of steps were made ahead, in %.1f s", len(bounds), time.monotonic() - began)

    def _score(self, settled: _Settled, bound: _Bound) -> Score:
        score, tokens, count = Score(), bound.tokens, bound.rows.rows
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
            projected = adapted(score, into, normed, adapters)
            with storage.slabs.standing_for(lies):
                queries, token = turning.by(score)(projected, angles, places, storage.slabs, token)
                pages = None if coded_lie is None else storage.coded_pages._replace(addresses=coded_lie)
                attended = attention.attend(queries, seen, storage.slabs, token, pages)
            added = adapted(score, out, score.shaped(attended, (tokens, attended.size // tokens)), adapters)
            states, normed = layer.norms[1](score, states, added)
            added = adapted(score, layer.mlp._out, gated(score, layer.mlp._into, normed, adapters), adapters)
        assert added is not None
        score.result = add(score, states, added, self._known[0].norms[0])
        return score


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


class CapturedLayers(OwnLayer):
    """Stands in for a model's first layer, which it extends, and runs all of them."""

    _stack: Stack

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if is_foreign(cache):
            return self.by_itself(x, mask, cache)
        return self._stack(x, mask, [None] * len(self._stack.layers) if cache is None else cache.neighbours)


def capture_layers(model: Any, device: Device) -> Stack | None:
    """Swap the layers of a model whose modules were swapped, if it is covered; what runs them then."""
    layers = [*layers_of(model)]
    known = [covered(layer) for layer in layers]
    if not layers or None in known or not alike([layer for layer in known if layer is not None]):
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
