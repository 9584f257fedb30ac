"""Decode graphs: on GPUs, all layers of a model as one captured graph, so that a step of few tokens takes a dozen
launches instead of hundreds. Parts that have no kernels are computed by their own modules, between two graphs.

Every layer is swapped for a module that passes its input on and notes its mask and its state; the last one runs all of
them. Lengths, block tables, positions and the addresses of pages are data; the numbers of rows and tokens are rounded
up to a few sizes, so that most steps find their graphs captured. `graph_layers` says which parts have kernels; prompts
are run by the layers' own modules, or, where a token's bits are to depend on its row alone, by graphs in lots
(`token_lots`). Graphs are compared with those modules before they are used. Only the engine thread may call any of it.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.arrays import copy_array
from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import BatchMasks, MixedBatch
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
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.selfcheck import first_wrong
from ingot.models.families.description import SharedKvSpec
from ingot.models.layers.fused_layers import LayerStandIn, is_mlx_lm_cache, replace_layers
from ingot.models.layers.graph_inputs import (
    AttentionContext,
    AttentionKind,
    GraphAttentionInputs,
    GraphKey,
    GraphStep,
    LayerCall,
    LoraGraphs,
    MixerInputs,
    RecurrentInputs,
    SlabAddresses,
    StateAddresses,
    StepContext,
    StepInputs,
    coded_addresses_of,
    kernel_storage_of,
    slab_addresses_of,
)
from ingot.models.layers.graph_layers import (
    GraphLayers,
    OwnBlock,
    difference_beyond_rounding,
    graph_layers_of,
)
from ingot.models.layers.graph_parts import AttentionPart, MoePart, RecurrentPart, UncoveredPartError
from ingot.models.layers.layer_program import decoder_layers_of, decoder_of
from ingot.models.layers.lm_head import nudged_states
from ingot.models.layers.mlp import all_fixed_experts
from ingot.models.layers.modules import extend, own_class
from ingot.models.layers.recurrent import recurrent_spans
from ingot.models.layers.rope import RopeAngles
from ingot.models.layers.streamed_runs import GraphRun, StreamedRuns
from ingot.models.layers.token_lots import lot_step, lot_tokens, token_lots

log = logging.getLogger("ingot.models")
MOST_GRAPHS = 128
"""Graphs that are kept, for as many numbers of rows and lengths."""
AHEAD_SPLITS = (8, 16, 32)
"""KV splits of the longest row for which graphs are captured ahead."""
GRAPH_TRIALS = 2
"""Steps at which a graph's result is compared with the layers' own."""


class DecodeGraphs:
    """The layers of one model. Only the engine thread may call it."""

    def __init__(self, layers: Sequence[nn.Module], parts: GraphLayers, stage: ReplayStage) -> None:
        self.layers, self.parts, self.stage = layers, parts, stage
        self.most_tokens = parts.most_tokens
        self.computes_prompts = False
        """Whether passes of any number of tokens are graphs, if their kernels cover all layers."""
        self.loras = LoraGraphs(parts.products, stage)
        # By the ids of kernels, by what a step's graphs depend on, and by the number of a graph among these, or by what
        # else it depends on.
        self._replays: OrderedDict[tuple[object, GraphKey, Hashable], tuple[GraphReplay, object]] = OrderedDict()
        self._addresses: dict[tuple[int, bool], SlabAddresses] = {}  # by group, and whether of coded pages
        mixers = {number: layer.mixer for number, layer in enumerate(parts.layers) if layer.mixer is not None}
        self._attention = {n: part for n, part in mixers.items() if isinstance(part, AttentionPart)}
        self._recurrent = {n: part for n, part in mixers.items() if isinstance(part, RecurrentPart)}
        # The first layer whose queries are multiplied by a number for each token, which is the same for all layers, and
        # the argument with it.
        scales = ((n, part.token_scale) for n, part in self._attention.items() if part.token_scale is not None)
        self._token_scale = next(scales, None)
        self._states = StateAddresses(len(self._recurrent))
        self._context: StepContext | None = None
        self._opened: list[LayerCall] = []  # of the layers that were called in the open pass
        self.layer_inputs: mx.array | None = None
        """What the layers of the open pass are given [1, tokens, layers, size], where they are given something."""
        self._trials = 0
        self.lost_bits: str | None = None
        """What keeps graphs from computing prompts, where they were to."""
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
        if self.parts.lacking is not None:
            return (
                f"{self.parts.lacking} run by their own modules between graphs, slower: there are no kernels for them"
            )
        return self.stage.slower

    @property
    def lacking(self) -> str | None:
        """Which part of prompts is computed by its own module, if one is."""
        return "experts that are read when they are needed" if self.parts.streams_experts else self.parts.lacking

    @property
    def covers_prompts(self) -> bool:
        """Whether passes of any number of tokens are graphs."""
        return self.computes_prompts and self.refusal is None and self.lacking is None

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
        steps = [] if self.refusal is not None else self._steps(x.dtype, calls, states)
        if not steps:
            return self._run_layers(x, calls)
        if self._trials < GRAPH_TRIALS or steps[0].lora_version not in (0, self.loras.compared_version):
            return self._run_and_compare(x, calls, states, steps)
        return self._replay_steps(x, calls, steps)

    def _run_layers(self, x: mx.array, calls: Sequence[LayerCall]) -> mx.array:
        for number in range(len(self.layers)):
            x = self._run_layer(number, x, calls)
        return x

    def _run_layer(self, number: int, x: mx.array, calls: Sequence[LayerCall]) -> mx.array:
        y = self.layers[number](x, **calls[number].given)
        first: mx.array = y[0] if isinstance(y, tuple) else y
        return first

    def _run_and_compare(
        self, x: mx.array, calls: Sequence[LayerCall], states: Sequence[Any], steps: Sequence[GraphStep]
    ) -> mx.array:
        """The result of the layers' own modules, unless graphs compute prompts, too. Before, the graph writes nearly
        the same KV to the same slots."""
        step = steps[0]
        try:
            reason = self._difference_from_layers(x, calls, states, steps)
            if reason is not None and self.parts.has_experts:  # routers may waver between them
                with all_fixed_experts(self.layers):
                    fixed = [replace(each, has_fixed_experts=True) for each in steps]
                    reason = self._difference_from_layers(x, calls, states, fixed)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
        if reason is not None:
            self._refuse(reason, step)
        elif step.lora_version:
            self.loras.compared_version = step.lora_version
        else:
            self._trials += 1
        if self.computes_prompts and reason is None:
            return self._replay_steps(x, calls, steps)
        return self._run_layers(x, calls)

    def _difference_from_layers(
        self, x: mx.array, calls: Sequence[LayerCall], states: Sequence[Any], steps: Sequence[GraphStep]
    ) -> str | None:
        """How a graph's results, and the states that it leaves, differ from those of the layers' own modules."""
        nudged = nudged_states(x, float(mx.finfo(x.dtype).eps))
        moved = self._run_on_copies(states, lambda: self._run_layers(nudged, calls))
        found = self._run_on_copies(states, lambda: self._replay_steps(x, calls, steps))
        right = self._run_on_copies(states, lambda: self._run_layers(x, calls))
        return first_wrong(difference_beyond_rounding(*each) for each in zip(right, found, moved, strict=True))

    def _run_on_copies(self, states: Sequence[Any], run: Callable[[], mx.array]) -> list[Sequence[mx.array]]:
        """What it returns, and the tails and the states that it would leave of all recurrent layers of graphs."""
        for number, part in self._recurrent.items():
            part.states_of(states[number])
        recurrent = {number: state for number, state in enumerate(states) if isinstance(state, RecurrentState)}
        copied = {
            number: [None if part is None else copy_array(part) for part in state.cache]
            for number, state in recurrent.items()
        }
        copies = [[part for part in copied[number] if part is not None] for number in self._recurrent]
        mx.eval(list(copied.values()))
        kept = {number: state.exchange(copied[number]) for number, state in recurrent.items()}
        try:
            y = run()
            mx.eval(y)
        finally:
            for number, state in recurrent.items():
                state.exchange(kept[number])
        return [[y], *zip(*copies, strict=True)]

    def _refuse(self, reason: str, step: GraphStep) -> None:
        if step.lora_version:
            self.loras.refusal = reason
        else:
            self.refusal = reason
        what = "adapters" if step.lora_version else "layers"
        log.warning("%s are not run as graphs, which is slower: %s", what, reason)

    def _steps(self, dtype: mx.Dtype, calls: Sequence[LayerCall], states: Sequence[Any]) -> list[GraphStep]:
        """One, or those of its lots; none where graphs do not cover the open forward batch."""
        if not self.loras.covers(dtype):
            return []
        masks = [call.mask for call in calls]
        first = states[next(iter(self._attention))]
        mixed = first.whole if isinstance(first, AppendState) else None
        if (
            mixed is None
            or mixed.bidirectional
            or mixed.has_stated_positions
            or mixed.positions.ndim != 1
            or not all(isinstance(states[number], AppendState) for number in self._attention)
            or not all(isinstance(masks[number], BatchMasks | None) for number in self._attention)
            or not all(isinstance(states[n], RecurrentState) and masks[n] is None for n in self._recurrent)
        ):
            return []
        is_large = mixed.tokens > self.most_tokens or any(part.width > MOST_QUERIES for part in mixed.parts)
        if is_large and not self.covers_prompts:
            return []
        windows = tuple(
            states[number].window if masks[number] is None else masks[number].window for number in self._attention
        )
        context = self._context
        if context is None or context.first() is not first or (context.windows, context.dtype) != (windows, dtype):
            context = self._context = self._find_context(states, windows, dtype)
        step = None if context is None else self._step_of(mixed, calls, states, context)
        if step is None or not is_large:
            return [] if step is None else [step]
        groups, with_recurrent = [states[numbers[0]] for numbers in step.context.groups], bool(self._recurrent)
        lots = token_lots(mixed, lot_tokens(step.context, mixed))
        return [lot_step(step, lot, mixed, groups, with_recurrent=with_recurrent) for lot in lots]

    def step_over(self, states: Sequence[Any], dtype: mx.Dtype) -> GraphStep | None:
        """The data of the open forward batch, for a graph in which others capture these layers; None where no graph
        covers it."""
        is_plain = self._token_scale is None and not self.parts.streams_experts
        if self.refusal is not None or self.loras.version or not is_plain:
            return None
        steps = self._steps(dtype, [LayerCall({"cache": state}) for state in states], states)
        return steps[0] if len(steps) == 1 else None

    def _find_context(
        self, states: Sequence[Any], windows: tuple[int | None, ...], dtype: mx.Dtype
    ) -> StepContext | None:
        layers: dict[int, AttentionContext] = {}
        groups: dict[int, list[int]] = {}
        kinds: dict[AttentionKind, int] = {}
        angles: dict[RopeAngles, int] = {}
        for number, window in zip(self._attention, windows, strict=True):
            state, part = states[number], self._attention[number]
            storage = kernel_storage_of(state, part.module._kv_heads, part.kv_sizes(state), dtype)
            attention = None if storage is None else part.paged.kernel_for(storage, window, dtype)
            rope = None if storage is None else part.rope_kernel(storage.sizes, dtype)
            if storage is None or attention is None or rope is None:
                return None
            groups.setdefault(state.group.number, []).append(number)
            kind = AttentionKind([*groups].index(state.group.number), attention.splits, window or 0)
            known = kinds.setdefault(kind, len(kinds)), angles.setdefault(part.rope.angles, len(angles))
            layers[number] = AttentionContext(storage, attention, rope, *known)
        kernel_ids = tuple(id(kernel) for layer in layers.values() for kernel in (layer.attention, layer.rope))
        members = [tuple(numbers) for numbers in groups.values()]
        return StepContext(
            weakref.ref(states[next(iter(self._attention))]),
            windows,
            dtype,
            layers,
            members,
            [*kinds],
            [*angles],
            kernel_ids,
        )

    def _step_of(
        self, mixed: MixedBatch, calls: Sequence[LayerCall], states: Sequence[Any], context: StepContext
    ) -> GraphStep | None:
        rows, slots = [], []
        for numbers in context.groups:
            state, storage = states[numbers[0]], context.layers[numbers[0]].storage
            rows.append(state.kernel_rows(storage, mixed, range(len(mixed.parts))))
            slots.append(state.places(storage))
            if not all(context.layers[number].storage.reads(rows[-1]) for number in numbers):
                return None
        angles = [each.of_batch(mixed) for each in context.angles]
        if self._token_scale is not None:
            number, argument = self._token_scale
            angles.append(calls[number].given[argument].reshape(mixed.tokens, 1).astype(mx.float32))
        spans = recurrent_spans(mixed).spans if self._recurrent else None
        bounds = (padded_count(len(rows[0].spans)), rows[0].most) if self._recurrent else (0, 0)
        loras, layer_inputs = self.loras.token_loras(mixed.tokens), None
        if self.parts.takes_layer_inputs:
            assert self.layer_inputs is not None
            layer_inputs = mx.contiguous(self.layer_inputs.reshape(mixed.tokens, -1).astype(context.dtype))
        version, fixed = self.loras.version, self.parts.has_fixed_experts
        return GraphStep(context, mixed.tokens, rows, slots, angles, layer_inputs, spans, bounds, loras, version, fixed)

    def _replay_steps(self, x: mx.array, calls: Sequence[LayerCall], steps: Sequence[GraphStep]) -> mx.array:
        if len(steps) == 1:
            return self._replay(x, calls, steps[0])
        flat, found = x.reshape(-1, x.shape[-1]), list[mx.array]()
        for each in steps:
            found.append(self._replay(flat[each.begin : each.begin + each.tokens], calls, each))
            mx.async_eval(found[-1])  # the next graph's memory is the same
        return mx.concatenate(found).reshape(x.shape)

    def _replay(self, x: mx.array, calls: Sequence[LayerCall], step: GraphStep) -> mx.array:
        key, context, shape = step.key, step.context, x.shape
        after = self.open_pages(context, [key])
        recurrent = [calls[number].state for number in self._recurrent]
        arrays_of = [part.states_of for part in self._recurrent.values()]
        after = self._states.store(self.stage.run, recurrent, arrays_of, after)

        def replay(number: Hashable, run: GraphRun, states: mx.array, *more: mx.array) -> tuple[mx.array, mx.array]:
            nonlocal after
            y, after = self._replay_for(context, key, number, run)([mx.contiguous(states), *step.inputs, *more], after)
            return y, after

        try:
            for number, run in self.parts.steps:
                if isinstance(run, GraphRun):
                    x = replay(number, run, x)[0].reshape(shape)
                elif isinstance(run, StreamedRuns):
                    x = run.compute(x.reshape(step.tokens, -1), step, self.stage.run, replay).reshape(shape)
                else:
                    x = run(x) if isinstance(run, OwnBlock) else self._run_layer(run.number, x, calls)
        finally:  # an expert may be unreadable
            self.close_pages(context, after)
        return x

    def open_pages(self, context: StepContext, keys: Sequence[GraphKey]) -> mx.array:
        """A token for the replay of a graph that reads and writes the pages of steps."""
        for key in keys:
            self.make_room(context, key)
        storages = [layer.storage for layer in context.layers.values()]
        before = [*{id(token): token for token in (storage.token for storage in storages)}.values()]
        after = before[0] if len(before) == 1 else mx.concatenate(before)
        for group, addresses in dict.fromkeys(each for key in keys for each in self._addresses_for(key)):
            after = addresses.store(self.stage.run, context.storages(group), after)
        return after

    def close_pages(self, context: StepContext, after: mx.array) -> None:
        for layer in context.layers.values():
            layer.storage.go_on(after)

    def make_room(self, context: StepContext, key: GraphKey) -> None:
        """For what the graphs of a step read besides its data."""
        for group, addresses in self._addresses_for(key):
            if not addresses.has_room(context.storages(group)):
                if addresses.buffers:
                    self._replays.clear()
                addresses.make_room(context.storages(group))
        if key.lora_version not in (0, self.loras.captured_version):
            for other in [other for other in self._replays if other[1].lora_version]:
                del self._replays[other]
            self.loras.take_version(key.lora_version)

    def _replay_for(self, context: StepContext, key: GraphKey, number: Hashable, run: GraphRun) -> GraphReplay:
        """The graph of the run with this number."""
        return self.replay_of(context, key, number, lambda: self._capture(context, key, run))

    def replay_of(
        self, context: StepContext, key: GraphKey, further: Hashable, capture: Callable[[], GraphCapture]
    ) -> GraphReplay:
        replay_key = (context.kernel_ids, key, further)
        if replay_key not in self._replays:
            self.graph_count += 1
            kernels = [
                (layer.attention, layer.rope) for layer in context.layers.values()
            ]  # held: they are known by their ids
            self._replays[replay_key] = (self.stage.ready(capture()), kernels)
            if len(self._replays) > MOST_GRAPHS * self.parts.graph_count:
                self._replays.popitem(last=False)
        self._replays.move_to_end(replay_key)
        return self._replays[replay_key][0]

    def _addresses_for(self, key: GraphKey) -> Iterable[tuple[int, SlabAddresses]]:
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
        if self._context is None or self.refusal is not None or not self.stage.takes_time:
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
        began, before = time.monotonic(), self.graph_count
        runs = {number: run for number, run in enumerate(self.parts.runs) if isinstance(run, GraphRun)}
        self.stage.prepare(
            kind for key in keys for run in runs.values() for kind in self._capture(self._context, key, run).kinds
        )
        for key in reversed(keys):  # those that need most memory first: the others share it
            self.make_room(self._context, key)
            for number, run in runs.items():
                self._replay_for(self._context, key, number, run)
        made = self.graph_count - before
        log.info("%d decode graphs were captured ahead, in %.1f s", made, time.monotonic() - began)

    def _capture(self, context: StepContext, key: GraphKey, run: GraphRun) -> GraphCapture:
        capture, tokens, parts = GraphCapture(), key.tokens, self.parts
        states = capture.give((tokens, parts.size), context.dtype)
        layers = None if not key.layer_inputs else capture.give((tokens, key.layer_inputs), context.dtype)
        inputs = self.give_inputs(capture, context, key, give_angles(capture, key))
        loras = capture.give((tokens,), mx.int32) if key.lora_version else None
        table = None if run.experts is None else capture.give((run.experts.experts,), mx.int32)
        capture.result = self.capture_run(capture, run, states, key, inputs, loras, layers, table)
        return capture

    def capture_run(
        self,
        capture: GraphCapture,
        run: GraphRun,
        states: mx.array,
        key: GraphKey,
        inputs: Mapping[int, MixerInputs],
        loras: mx.array | None = None,
        layers: mx.array | None = None,
        table: mx.array | None = None,
    ) -> mx.array:
        places = iter(()) if run.experts is None or table is None else run.experts.places(table, key.tokens)
        slots = next(each.slots for each in inputs.values() if isinstance(each, GraphAttentionInputs))
        added: mx.array | None = None
        for (layer, part), residual in zip(run.parts, run.residuals[:-1], strict=True):
            states, normed = residual(capture, states, added)
            given = StepInputs(inputs.get(layer), slots, loras, layers, key.has_fixed_experts, self.computes_prompts)
            if isinstance(part, MoePart) and part.streamed is not None:
                given = replace(given, places=next(places))
            added = part.capture(capture, normed, given)
        return run.residuals[-1](capture, states, added)[0]

    def give_inputs(
        self, capture: GraphCapture, context: StepContext, key: GraphKey, angles: Sequence[mx.array]
    ) -> dict[int, MixerInputs]:
        """Placeholders for a step's inputs (`GraphStep.inputs`) besides angles, as each layer's mixer takes them, by
        its number."""
        token_scales = None if self._token_scale is None else angles[-1]
        slots, tables, rows = [], [], []
        bounds = {kind.group: bound for kind, bound in zip(context.kinds, key.rows, strict=True)}
        for group, table in enumerate(key.tables):
            count = bounds[group].rows
            slots.append(capture.give(token_slots([(-1, 0)] * key.tokens).shape, mx.int32))
            tables.append(capture.give((table,), mx.int32))
            rows.append(capture.give(KernelRows.of([[0]] * count, [1] * count).rows.shape, mx.int32))
        inputs: dict[int, MixerInputs] = {}
        if self._recurrent:
            rows_of, most = key.span_bounds
            spans = RecurrentSpans.of([(0, most, 0, 0)] * rows_of)
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
                token_scales,
            )
        return inputs


def give_angles(capture: GraphCapture, key: GraphKey) -> list[mx.array]:
    return [capture.give(shape, mx.float32) for shape in key.angles]


class GraphedLayer(LayerStandIn):
    """Replaces a layer, which it extends, that is computed with the others."""

    _stack: DecodeGraphs
    _number: int
    _names: tuple[str, ...]  # of its arguments behind hidden states
    _shared_kv: SharedKvSpec | None  # what it returns for later layers

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        shared, given = self._shared_kv, dict(zip(self._names, args, strict=False)) | options
        call = LayerCall(given, None if shared is None else shared.argument)
        # What it returns for later layers is a state only in mixed batches.
        passes_state = isinstance(call.state, AppendState) and call.state.whole is not None
        if is_mlx_lm_cache(call.cache) or not self._stack.follows(self._number) or not (shared is None or passes_state):
            return self.by_itself(x, *args, **options)
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
        layer._names = tuple(inspect.signature(own_class(layer).__call__).parameters)[2:]
    if parts.takes_layer_inputs:
        decoder = extend(decoder_of(model), LayerInputsDecoder, "Keeping")
        decoder._stack = stack
        model.get("language_model", model).update_modules({"model": decoder})
    return stack


def decode_graphs_of(model: Any) -> DecodeGraphs | None:
    """The graphs that run the layers of a model, where there are any."""
    layers = decoder_layers_of(model)
    return layers[0]._stack if layers and isinstance(layers[0], GraphedLayer) else None
