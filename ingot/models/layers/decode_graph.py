"""Decode graphs: on GPUs, all layers of a model as one captured graph, so that a step of few tokens takes a dozen
launches instead of hundreds.

Every layer is swapped for a module that passes its input on and notes its mask and its state; the last one runs all of
them. Lengths, block tables, positions and the addresses of pages are data; the numbers of rows and tokens are rounded
up to a few sizes, so that most steps find their graph captured. `graph_layers` says which layers have kernels for all
of their parts; prompts, and what is not covered, are run by the layers' own modules. A graph is compared with those
before it is used. Only the engine thread may call any of it.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.arrays import copy_array
from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import BatchMasks, MixedBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.decode_graph.capture import GraphCapture, GraphReplay, ReplayStage, replay_stage
from ingot.kernels.decode_graph.kernels import store_addresses
from ingot.kernels.device import Device
from ingot.kernels.gpu.cuda_graph import CudaError
from ingot.kernels.gpu.kernel_source import LaunchRehearsal
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
from ingot.kernels.paged_attention.shapes import KVSplits
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.selfcheck import first_wrong
from ingot.models.families.description import SharedKvSpec
from ingot.models.layers.fused_layers import LayerStandIn, is_mlx_lm_cache, replace_layers
from ingot.models.layers.graph_inputs import (
    GraphAttentionInputs,
    LoraGraphs,
    MixerInputs,
    RecurrentInputs,
    SlabAddresses,
    StateAddresses,
    StepInputs,
    coded_addresses_of,
    slab_addresses_of,
)
from ingot.models.layers.graph_layers import (
    AttentionPart,
    GraphLayers,
    RecurrentPart,
    UncoveredPartError,
    graph_layers_of,
)
from ingot.models.layers.layer_program import decoder_layers_of, decoder_of
from ingot.models.layers.lm_head import nudged_states
from ingot.models.layers.mlp import all_fixed_experts
from ingot.models.layers.modules import extend
from ingot.models.layers.recurrent import recurrent_spans
from ingot.models.layers.rope import RopeAngles

log = logging.getLogger("ingot.models")
MOST_GRAPHS = 128
"""Graphs that are kept, for as many numbers of rows and lengths."""
LEAST_TABLE = 1024
"""Pages that a graph's block table has room for."""
LEAST_SPLITS = 8
"""KV splits that any graph has room for: those that a short row does not have cost next to nothing."""
AHEAD_SPLITS = (8, 16, 32)
"""KV splits of the longest row for which graphs are captured ahead."""
GRAPH_TRIALS = 2
"""Steps at which a graph's result is compared with the layers' own."""
MOST_APART = 0.05
"""The largest difference allowed, as a share of the largest number."""
MOST_ROUNDING = 0.5
"""The same for deep models whose own numbers move by more than that when their input is off by its last bit."""


class LayerCall(NamedTuple):
    """What a layer was called with besides hidden states."""

    mask: Any
    cache: Any
    given: Mapping[str, Any]
    shared: str | None  # the argument with an earlier layer's state

    @property
    def state(self) -> Any:
        """Its own KV state, or the earlier layer's whose KV it reads."""
        return self.given.get(self.shared) if self.cache is None and self.shared is not None else self.cache


class AttentionKind(NamedTuple):
    """Attention of layers whose pages are the same and are split alike."""

    group: int  # its number among the page groups of the context
    splits: KVSplits
    window: int

    def bounded(self, splits: int, most: int) -> int:
        """KV splits enough for `most` queries of a row that has so many without a window: how the window happens to lie
        in them is data of a step."""
        spanned = -(-(self.window + most - 2) // self.splits.size) + 1
        return min(splits, 1 << (spanned - 1).bit_length()) if self.window else splits


class _AttentionContext(NamedTuple):
    """An attention layer at all steps over the same KV states."""

    storage: KernelStorage
    attention: PagedAttention
    rope: RopeKernel
    kind: int  # the numbers of its kind of attention and of its angles
    angles: int


@dataclass(frozen=True, slots=True, eq=False)
class _StepContext:
    """What all steps over the same KV states have in common."""

    first: weakref.ref[AppendState]
    windows: tuple[int | None, ...]
    dtype: mx.Dtype
    layers: Mapping[int, _AttentionContext]  # those with attention, by their numbers
    groups: Sequence[tuple[int, ...]]  # the layers of each group of pages
    kinds: Sequence[AttentionKind]
    angles: Sequence[RopeAngles]
    kernel_ids: tuple[int, ...]  # of attention and ropes

    def storages(self, group: int) -> list[KernelStorage]:
        return [self.layers[number].storage for number in self.groups[group]]


@dataclass(frozen=True, slots=True, eq=False)
class _GraphStep:
    """The data of a step."""

    context: _StepContext
    tokens: int
    rows: Sequence[KernelRows]  # of each group of pages
    slots: Sequence[mx.array]  # likewise
    angles: Sequence[mx.array]
    layer_inputs: mx.array | None  # what each layer is given, where they are given something
    spans: mx.array | None  # of the rows of recurrent layers, if there are any
    token_loras: mx.array | None  # each token's adapter, where some have one
    lora_version: int
    has_fixed_experts: bool = False  # each token has the first one alone, whichever its router chooses

    @property
    def inputs(self) -> list[mx.array]:
        """What its graph reads besides hidden states."""
        data = [*self.angles] if self.layer_inputs is None else [self.layer_inputs, *self.angles]
        for slots, rows in zip(self.slots, self.rows, strict=True):
            data += [slots, rows.table, rows.rows]
        if self.spans is not None:
            data.append(self.spans)
        return data if self.token_loras is None else [*data, self.token_loras]

    @property
    def key(self) -> _GraphKey:
        tokens, kinds = padded_count(self.tokens), self.context.kinds
        return _GraphKey(
            tokens,
            tuple(
                RowBounds(
                    padded_count(len(rows.spans)),
                    rows.most,
                    kind.bounded(max(LEAST_SPLITS, rows.splits(kind.splits, 0)), rows.most),
                )
                for kind in kinds
                for rows in (self.rows[kind.group],)
            ),
            tuple(max(LEAST_TABLE, rows.table.size) for rows in self.rows),
            tuple((tokens, each.shape[1]) if each.ndim == 2 else each.shape for each in self.angles),
            tuple(rows.coded for rows in self.rows),
            0 if self.layer_inputs is None else self.layer_inputs.shape[1],
            self.lora_version,
            self.has_fixed_experts,
        )


class _GraphKey(NamedTuple):
    """All that a graph depends on, apart from data: sizes that a step must fit in."""

    tokens: int
    rows: tuple[RowBounds, ...]  # for each kind of attention
    tables: tuple[int, ...]  # of each group of pages
    angles: tuple[tuple[int, ...], ...]
    coded: tuple[bool, ...]  # whether some pages of a group are in fewer bits
    layer_inputs: int  # numbers that the layers of a token are given besides hidden states
    lora_version: int = 0  # of the adapters; 0: no token has one
    has_fixed_experts: bool = False

    def resized(self, tokens: int, rows: tuple[RowBounds, ...]) -> _GraphKey:
        angles = tuple((tokens, *shape[1:]) if len(shape) == 2 else shape for shape in self.angles)
        return self._replace(tokens=tokens, rows=rows, angles=angles)


class DecodeGraphs:
    """The layers of one model. Only the engine thread may call it."""

    def __init__(self, layers: Sequence[nn.Module], parts: GraphLayers, stage: ReplayStage) -> None:
        self.layers, self._parts, self._stage = layers, parts, stage
        self.most_tokens = parts.most_tokens
        self.loras = LoraGraphs(parts.products, stage)
        self._replays: OrderedDict[tuple[object, _GraphKey], tuple[GraphReplay, object]] = OrderedDict()
        self._addresses: dict[tuple[int, bool], SlabAddresses] = {}  # by group, and whether of coded pages
        self._attention = [n for n, layer in enumerate(parts.layers) if isinstance(layer.mixer, AttentionPart)]
        self._recurrent = {
            n: layer.mixer for n, layer in enumerate(parts.layers) if isinstance(layer.mixer, RecurrentPart)
        }
        self._states = StateAddresses(len(self._recurrent))
        self._context: _StepContext | None = None
        self._opened: list[LayerCall] = []  # of the layers that were called in the open pass
        self.layer_inputs: mx.array | None = None
        """What the layers of the open pass are given [1, tokens, layers, size], where they are given something."""
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

    def follows(self, number: int) -> bool:
        """Whether all layers before this one were called in the open pass."""
        return number in (0, len(self._opened))

    def call_layer(self, number: int, x: mx.array, call: LayerCall) -> mx.array:
        """What a layer returns: its input, but the last one what all of them make of the first one's input."""
        if number == 0:
            self._opened = []
        self._opened.append(call)
        if number < len(self.layers) - 1:
            return x
        opened, self._opened = self._opened, []
        return self(x, opened)

    def __call__(self, x: mx.array, calls: Sequence[LayerCall]) -> mx.array:
        states = [call.state for call in calls]
        step = None if self.refusal is not None else self._step(x, [call.mask for call in calls], states)
        if step is None:
            return self._run_layers(x, calls)
        if self._trials < GRAPH_TRIALS or step.lora_version not in (0, self.loras.compared_version):
            return self._run_and_compare(x, calls, states, step)
        return self._replay(x, states, step)

    def _run_layers(self, x: mx.array, calls: Sequence[LayerCall]) -> mx.array:
        for layer, call in zip(self.layers, calls, strict=True):
            y = layer(x, call.mask, call.cache, **call.given)
            x = y[0] if isinstance(y, tuple) else y
        return x

    def _run_and_compare(
        self, x: mx.array, calls: Sequence[LayerCall], states: Sequence[Any], step: _GraphStep
    ) -> mx.array:
        """The result of the layers' own modules. Before, the graph writes nearly the same KV to the same slots."""
        try:
            reason = self._difference_from_layers(x, calls, states, step)
            if reason is not None and self._parts.has_experts:  # routers may waver between them
                with all_fixed_experts(self.layers):
                    reason = self._difference_from_layers(x, calls, states, replace(step, has_fixed_experts=True))
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
        if reason is not None:
            self._refuse(reason, step)
        elif step.lora_version:
            self.loras.compared_version = step.lora_version
        else:
            self._trials += 1
        return self._run_layers(x, calls)

    def _difference_from_layers(
        self, x: mx.array, calls: Sequence[LayerCall], states: Sequence[Any], step: _GraphStep
    ) -> str | None:
        """How a graph's results, and the states that it leaves, differ from those of the layers' own modules."""
        nudged = nudged_states(x, float(mx.finfo(x.dtype).eps))
        moved = self._run_on_copies(states, lambda: self._run_layers(nudged, calls))
        found = self._run_on_copies(states, lambda: self._replay(x, states, step))
        right = self._run_on_copies(states, lambda: self._run_layers(x, calls))
        return first_wrong(_difference(*each) for each in zip(right, found, moved, strict=True))

    def _run_on_copies(self, states: Sequence[Any], run: Callable[[], mx.array]) -> list[Sequence[mx.array]]:
        """What it returns, and the tails and the states that it would leave of all recurrent layers."""
        recurrent = [states[number] for number in self._recurrent]
        copies = [[copy_array(part) for part in arrays] for arrays in self._recurrent_arrays(states)]
        mx.eval(copies)
        kept = [state.exchange(parts) for state, parts in zip(recurrent, copies, strict=True)]
        try:
            y = run()
            mx.eval(y)
        finally:
            for state, parts in zip(recurrent, kept, strict=True):
                state.exchange(parts)
        return [[y], *zip(*copies, strict=True)]

    def _refuse(self, reason: str, step: _GraphStep) -> None:
        if step.lora_version:
            self.loras.refusal = reason
        else:
            self.refusal = reason
        what = "adapters" if step.lora_version else "layers"
        log.warning("%s are not run as graphs, which is slower: %s", what, reason)

    def _step(self, x: mx.array, masks: Sequence[Any], states: Sequence[Any]) -> _GraphStep | None:
        """None where the graph does not cover the open forward batch."""
        if not self.loras.covers(x.dtype):
            return None
        first = states[self._attention[0]]
        mixed = first.whole if isinstance(first, AppendState) else None
        if (
            mixed is None
            or mixed.tokens > self.most_tokens
            or mixed.bidirectional
            or mixed.has_stated_positions
            or mixed.positions.ndim != 1
            or any(part.width > MOST_QUERIES for part in mixed.parts)
            or not all(isinstance(states[number], AppendState) for number in self._attention)
            or not all(isinstance(masks[number], BatchMasks | None) for number in self._attention)
            or not all(isinstance(states[n], RecurrentState) and masks[n] is None for n in self._recurrent)
        ):
            return None
        windows = tuple(
            states[number].window if masks[number] is None else masks[number].window for number in self._attention
        )
        context = self._context
        if context is None or context.first() is not first or (context.windows, context.dtype) != (windows, x.dtype):
            context = self._context = self._find_context(states, windows, x.dtype)
        return None if context is None else self._step_of(mixed, states, context)

    def _find_context(
        self, states: Sequence[Any], windows: tuple[int | None, ...], dtype: mx.Dtype
    ) -> _StepContext | None:
        layers: dict[int, _AttentionContext] = {}
        groups: dict[int, list[int]] = {}
        kinds: dict[AttentionKind, int] = {}
        angles: dict[RopeAngles, int] = {}
        for number, window in zip(self._attention, windows, strict=True):
            state, part = states[number], self._parts.layers[number].mixer
            assert isinstance(part, AttentionPart)
            storage = _kernel_storage_of(state, part, dtype)
            attention = None if storage is None else part.paged.kernel_for(storage, window, dtype)
            rope = None if storage is None else part.rope.kernel_for(storage.sizes, dtype)
            if storage is None or attention is None or rope is None:
                return None
            groups.setdefault(state.group.number, []).append(number)
            kind = AttentionKind([*groups].index(state.group.number), attention.splits, window or 0)
            known = kinds.setdefault(kind, len(kinds)), angles.setdefault(part.rope.angles, len(angles))
            layers[number] = _AttentionContext(storage, attention, rope, *known)
        kernel_ids = tuple(id(kernel) for layer in layers.values() for kernel in (layer.attention, layer.rope))
        members = [tuple(numbers) for numbers in groups.values()]
        return _StepContext(
            weakref.ref(states[self._attention[0]]), windows, dtype, layers, members, [*kinds], [*angles], kernel_ids
        )

    def _step_of(self, mixed: MixedBatch, states: Sequence[Any], context: _StepContext) -> _GraphStep | None:
        rows, slots = [], []
        for numbers in context.groups:
            state, storage = states[numbers[0]], context.layers[numbers[0]].storage
            rows.append(state.kernel_rows(storage, mixed, range(len(mixed.parts))))
            slots.append(state.places(storage))
            if not all(context.layers[number].storage.reads(rows[-1]) for number in numbers):
                return None
        angles = [each.of_batch(mixed) for each in context.angles]
        spans = recurrent_spans(mixed).spans if self._recurrent else None
        loras, layer_inputs = self.loras.token_loras(mixed.tokens), None
        if self._parts.takes_layer_inputs:
            assert self.layer_inputs is not None
            layer_inputs = mx.contiguous(self.layer_inputs.reshape(mixed.tokens, -1).astype(context.dtype))
        return _GraphStep(context, mixed.tokens, rows, slots, angles, layer_inputs, spans, loras, self.loras.version)

    def _recurrent_arrays(self, states: Sequence[Any]) -> list[list[mx.array]]:
        return [part.states_of(states[number]) for number, part in self._recurrent.items()]

    def _replay(self, x: mx.array, states: Sequence[Any], step: _GraphStep) -> mx.array:
        key, context = step.key, step.context
        replay = self._replay_for(context, key)
        storages = [layer.storage for layer in context.layers.values()]
        before = [*{id(token): token for token in (storage.token for storage in storages)}.values()]
        after = before[0] if len(before) == 1 else mx.concatenate(before)
        for group, addresses in self._addresses_for(key):
            after = addresses.store(self._stage.run, context.storages(group), after)
        recurrent = [states[number] for number in self._recurrent]
        arrays_of = [part.states_of for part in self._recurrent.values()]
        after = self._states.store(self._stage.run, recurrent, arrays_of, after)
        y, done = replay([mx.contiguous(x), *step.inputs], after)
        for storage in storages:
            storage.go_on(done)
        return y.reshape(x.shape)

    def _replay_for(self, context: _StepContext, key: _GraphKey) -> GraphReplay:
        for group, addresses in self._addresses_for(key):
            if not addresses.has_room(context.storages(group)):
                if addresses.buffers:
                    self._replays.clear()
                addresses.make_room(context.storages(group))
        if key.lora_version not in (0, self.loras.captured_version):
            for other in [other for other in self._replays if other[1].lora_version]:
                del self._replays[other]
            self.loras.take_version(key.lora_version)
        replay_key = (context.kernel_ids, key)
        if replay_key not in self._replays:
            self.graph_count += 1
            kernels = [
                (layer.attention, layer.rope) for layer in context.layers.values()
            ]  # held: they are known by their ids
            self._replays[replay_key] = (self._stage.ready(self._capture(context, key)), kernels)
            if len(self._replays) > MOST_GRAPHS:
                self._replays.popitem(last=False)
        self._replays.move_to_end(replay_key)
        return self._replays[replay_key][0]

    def _addresses_for(self, key: _GraphKey) -> Iterable[tuple[int, SlabAddresses]]:
        """The address buffers that a graph reads, with their groups."""
        for group, coded in enumerate(key.coded):
            for of_coded in (False, True)[: 1 + coded]:
                yield group, self._addresses_of(group, of_coded=of_coded)

    def _addresses_of(self, group: int, *, of_coded: bool) -> SlabAddresses:
        if (group, of_coded) not in self._addresses:
            self._addresses[group, of_coded] = SlabAddresses(coded_addresses_of if of_coded else slab_addresses_of)
        return self._addresses[group, of_coded]

    def capture_ahead(self) -> None:
        """Once the model was probed: capture the graphs that most requests need, of single tokens and of one row's
        draft tokens, where steps run as graphs and would have to wait for the capture."""
        if self._context is None or not self._replays:
            self.refusal = self.refusal or "they would find keys and values where no kernel reads them"
        if self._context is None or self.refusal is not None or not self._stage.takes_time:
            return
        usual = next(reversed(self._replays))[1]._replace(lora_version=0, has_fixed_experts=False)
        singles, drafts = [(room, room, 1) for room in ROOM_SIZES], [(width, 1, width) for width in WIDTHS[1:]]
        keys = [
            usual.resized(
                tokens,
                tuple(RowBounds(rows, most, kind.bounded(splits, most)) for kind in self._context.kinds),
            )
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
        capture, tokens, parts = GraphCapture(), key.tokens, self._parts
        states = capture.give((tokens, parts.size), context.dtype)
        layers = None if not key.layer_inputs else capture.give((tokens, key.layer_inputs), context.dtype)
        inputs = self._give_inputs(capture, context, key)
        loras = capture.give((tokens,), mx.int32) if key.lora_version else None
        slots = next(each.slots for each in inputs.values() if isinstance(each, GraphAttentionInputs))
        added, residuals = None, iter(parts.residuals)
        for number, layer in enumerate(parts.layers):
            for part in layer.parts:
                states, normed = next(residuals)(capture, states, added)
                added = part.capture(
                    capture, normed, StepInputs(inputs.get(number), slots, loras, layers, key.has_fixed_experts)
                )
        capture.result, _ = next(residuals)(capture, states, added)
        return capture

    def _give_inputs(self, capture: GraphCapture, context: _StepContext, key: _GraphKey) -> dict[int, MixerInputs]:
        """Placeholders for a step's inputs (`_GraphStep.inputs`), as each layer's mixer takes them, by its number."""
        angles = [capture.give(shape, mx.float32) for shape in key.angles]
        slots, tables, rows = [], [], []
        bounds = {kind.group: bound for kind, bound in zip(context.kinds, key.rows, strict=True)}
        for group, table in enumerate(key.tables):
            count = bounds[group].rows
            slots.append(capture.give(token_slots([(-1, 0)] * key.tokens).shape, mx.int32))
            tables.append(capture.give((table,), mx.int32))
            rows.append(capture.give(KernelRows.of([[0]] * count, [1] * count).rows.shape, mx.int32))
        inputs: dict[int, MixerInputs] = {}
        if self._recurrent:
            spans = RecurrentSpans.of([(0, key.rows[0].most, 0, 0)] * key.rows[0].rows)
            spans = replace(spans, spans=capture.give(spans.spans.shape, mx.int32))
            inputs |= {
                number: RecurrentInputs(spans, buffer)
                for number, buffer in zip(self._recurrent, self._states.buffers, strict=True)
            }
        for number, layer in context.layers.items():
            kind, bound = context.kinds[layer.kind], key.rows[layer.kind]
            at, coded = context.groups[kind.group].index(number), None
            if key.coded[kind.group]:
                buffers = self._addresses_of(kind.group, of_coded=True).buffers
                coded = layer.storage.coded_pages._replace(addresses=buffers[at])
            inputs[number] = GraphAttentionInputs(
                layer.attention,
                layer.rope,
                layer.storage,
                layer.attention.standing_for(bound, tables[kind.group], rows[kind.group]),
                slots[kind.group],
                angles[layer.angles],
                self._addresses_of(kind.group, of_coded=False).buffers[at],
                coded,
            )
        return inputs


def _difference(right: Sequence[mx.array], found: Sequence[mx.array], moved: Sequence[mx.array]) -> str | None:
    """How a graph's numbers differ from the right ones by more than rounding explains, which has moved those."""
    apart, rounding = (max(map(_distance, right, others)) for others in (found, moved))
    largest = max(float(mx.abs(each).max()) for each in right)
    bound = max(MOST_APART * largest, min(rounding, MOST_ROUNDING * largest), MOST_APART * 1e-6)
    if apart <= bound:
        return None
    return f"they differ by {apart:.2g}, where numbers are up to {largest:.2g}"


def _distance(one: mx.array, other: mx.array) -> float:
    """The largest difference; infinite if some number is none."""
    largest = float(mx.abs(one - other).max())
    return largest if math.isfinite(largest) else math.inf


def _kernel_storage_of(state: AppendState, part: AttentionPart, dtype: mx.Dtype) -> KernelStorage | None:
    """The storage of a layer's KV, if the graph can address it."""
    storage = state.provided(part.module._kv_heads, part.kv_sizes(state), dtype)
    if not isinstance(storage, KernelStorage) or not storage.by_address or storage.dtype != dtype:
        return None
    return storage


class GraphedLayer(LayerStandIn):
    """Replaces a layer, which it extends, that is computed with the others."""

    _stack: DecodeGraphs
    _number: int
    _shared_kv: SharedKvSpec | None  # what it returns for later layers

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, **given: Any) -> Any:
        shared = self._shared_kv
        call = LayerCall(mask, cache, given, None if shared is None else shared.argument)
        # What it returns for later layers is a state only in mixed batches.
        passes_state = isinstance(call.state, AppendState) and call.state.whole is not None
        if is_mlx_lm_cache(cache) or not self._stack.follows(self._number) or not (shared is None or passes_state):
            return self.by_itself(x, mask, cache, **given)
        y = self._stack.call_layer(self._number, x, call)
        return y if shared is None else (y, call.state, *map(given.get, shared.returned))


class LayerInputsDecoder(nn.Module):
    """Replaces a decoder, which it extends and whose layers are given something besides hidden states."""

    _stack: DecodeGraphs

    def _project_per_layer_inputs(self, *args: Any, **options: Any) -> mx.array:
        made: mx.array = super()._project_per_layer_inputs(*args, **options)  # type: ignore[misc]
        self._stack.layer_inputs = made
        return made


def capture_layers(model: Any, device: Device) -> DecodeGraphs | None:
    """Swap the layers of a model whose modules were swapped, if graphs cover all of them; returns what runs them."""
    layers = decoder_layers_of(model)
    try:
        parts = graph_layers_of(model)
        stack = DecodeGraphs(layers, parts, replay_stage(device))
    except UncoveredPartError:
        return None
    except (CudaError, RuntimeError) as error:
        log.warning("layers are not run as graphs, which is slower: %s", error)
        return None
    for number, layer in enumerate(replace_layers(model, dict.fromkeys(range(len(layers)), GraphedLayer))):
        layer._stack, layer._number, layer._shared_kv = stack, number, parts.layers[number].shared_kv
    if parts.takes_layer_inputs:
        decoder = extend(decoder_of(model), LayerInputsDecoder, "Keeping")
        decoder._stack = stack
        model.get("language_model", model).update_modules({"model": decoder})
    return stack


def why_uncovered(model: Any) -> str | None:
    """Which part of its layers keeps a model, whose modules were swapped, from being run as graphs."""
    try:
        graph_layers_of(model)
    except UncoveredPartError as error:
        return str(error)
    return None


def decode_graphs_of(model: Any) -> DecodeGraphs | None:
    """The graphs that run the layers of a model, where there are any."""
    layers = decoder_layers_of(model)
    return layers[0]._stack if layers and isinstance(layers[0], GraphedLayer) else None
