"""A forward pass: tokens and KV states in, logits of the selected tokens out, and decode steps compiled as one graph.

`run_forward` is the pass. `new_batch_state` makes the KV states of a model and of its draft head.

`CompiledSteps`: Python asks MLX for the same operations at every decode step. Lengths, block tables and positions of
rows are data, so that a step over as many rows is the same graph again; `mx.compile` keeps it, which saves Python's
part of a step, and most of what MLX spends on launching kernels of ours. This is done only where kernels read all keys
and values from their slabs: these, or their addresses, and the states of recurrent layers are inputs, too, so that a
graph depends on nothing else of a step. A graph that captured some of the data of its first step would be wrong at the
next one, so it is compared with the model's own result at two steps before it is used, and models that read unknown
data of a step are never compiled. The comparison allows for rounding, as compiled operations round elsewhere; how far
that may move a model's logits is measured on the model.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ingot.cache.arrays import copy_array
from ingot.cache.attention_state import AppendState, flatten_states, make_layer_states
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import REWIND_STATE_BYTES
from ingot.cache.forward_batch import ForwardPart, MixedBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import LayerState, RecurrentState
from ingot.cache.own_caches import OwnCacheState
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import CudaLauncher, MlxLauncher, kernel_launcher
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.kernels.paged_attention.shapes import KVSplits
from ingot.models.families.registry import is_apart_in_blocks
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_setup import kv_layouts
from ingot.models.layers.gpu_linear import FEW_ROWS
from ingot.models.layers.lm_head import LogitsSelection, embeddings_changed, nudged_embeddings
from ingot.models.layers.recurrent import RECURRENT_SPANS
from ingot.models.layers.rope import RopeAngles
from ingot.models.lora.layers import LoraMapping
from ingot.models.probe import is_close_gap, logits_gap
from ingot.models.vision.tower import DeepStack, VisualInputs
from ingot.upstream import caches

VisualContext = tuple[VisualInputs, DeepStack | None, int | None]
"""See `VisualInputs.behind` and `VisionTower.stand_in`."""
"""The image features of a pass, and the layers behind which some of them are added."""
log = logging.getLogger("ingot.models")
MOST_COMPILED_STEPS = 32
"""Graphs that are kept, for as many numbers of rows and lengths of their tables. On Metal each has the text of every
kernel that it launches: megabytes."""
STEP_TRIALS = 2
OWN_CACHE_LENGTHS = 64, 512
"""Tokens before a row's own caches are measured, and then again: caches grow by up to 256 tokens at once."""
_Arrays = list[mx.array]
_StepInputs = tuple[mx.array | _Arrays | list[_Arrays], ...]
_AfterStep = tuple[_Arrays, list[_Arrays]]
"""The tokens of storages, and the states of recurrent layers."""


def run_forward(
    model: Any,
    selection: LogitsSelection | None,
    rows: BatchState,
    tokens: mx.array,
    parts: Sequence[ForwardPart],
    at: Sequence[int] | None,
    *,
    mixed: bool,
    vision: VisualContext | None = None,
    lora_mapping: LoraMapping | None = None,
) -> mx.array:
    """See `ModelAdapter.run`. `model` may be its compiled steps, which support only passes that give logits after all
    tokens, without adapters."""
    own_caches = has_own_caches(rows)
    mixed = mixed and not (own_caches and tokens.size == parts[0].width)  # a row alone runs as its code has it
    count = 1 if mixed else len(parts[0].rows)
    chosen = None if at is None or len(at) == tokens.size else mx.array(list(at), dtype=mx.int32)[None]
    if mixed and own_caches and chosen is None and len(parts) == tokens.size and is_apart_in_blocks(model):
        count = tokens.size
    slots = [row.lora for part in parts for row in part.rows for _ in range(part.width)]
    if (chosen is not None or vision is not None or any(slots)) and isinstance(model, CompiledSteps):
        model = model.model
    tokens = tokens.reshape(count, -1)
    with rows.launch(parts, mixed=mixed) as layers, nullcontext() if lora_mapping is None else lora_mapping.over(slots):
        if vision is None:
            logits = _run_with_selection(model, selection, tokens, layers, chosen)
        else:
            visual, deepstack, stand_in = vision
            if stand_in is not None:
                tokens = visual.replacing(tokens, stand_in)
            with visual.behind(deepstack), embeddings_changed(model, visual.over):
                logits = _run_with_selection(model, selection, tokens, layers, chosen)
    return logits.reshape(-1, logits.shape[-1])


def _run_with_selection(
    model: Any, selection: LogitsSelection | None, tokens: mx.array, layers: Any, at: mx.array | None
) -> mx.array:
    """Logits at the positions `at` [rows, n]."""
    if selection is None:
        return _logits_at(model(tokens, cache=layers), at)
    selection.at, selection.width = at, tokens.shape[1]
    try:
        return _logits_at(model(tokens, cache=layers), at)
    finally:
        selection.at = None


def _logits_at(logits: mx.array, positions: mx.array | None) -> mx.array:
    """The logits at `positions`, where the output head has not computed just those."""
    if positions is None or logits.shape[1] == positions.shape[1]:
        return logits
    return mx.take_along_axis(logits, positions[..., None], axis=1)


@dataclass(frozen=True)
class _OpenStep:
    """The open forward batch of a decode step."""

    layers: Sequence[LayerState]
    mixed: MixedBatch
    groups: dict[int, AppendState]  # one layer of each
    storages: tuple[KernelStorage, ...]  # of all layers
    recurrent: tuple[RecurrentState, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """Of the rows in recurrent states."""
        return tuple(row.slot for row in self.mixed.parts[0].rows) if self.recurrent else ()

    @property
    def recurrent_arrays(self) -> list[_Arrays]:
        return [state.arrays() for state in self.recurrent]

    @property
    def memory_sizes(self) -> tuple[int, ...]:
        """Pages of the slabs that kernels take, and slots of recurrent states."""
        storages = [state.storage for state in self.groups.values()]
        slabs = [slab.shape[0] for storage in storages if isinstance(storage, KernelStorage) for slab in storage.found]
        return (*slabs, *(array.shape[0] for state in self.recurrent[:1] for array in state.arrays()))

    def put(self, arrays: Sequence[_Arrays]) -> None:
        """Replace the states of recurrent layers."""
        for state, own in zip(self.recurrent, arrays, strict=True):
            state.cache = list(own)

    def rows(self, group: int) -> KernelRows:
        state = self.groups[group]
        assert isinstance(state.storage, KernelStorage)
        return state.kernel_rows(state.storage, self.mixed, (0,))

    def places(self, group: int) -> mx.array:
        state = self.groups[group]
        assert isinstance(state.storage, KernelStorage)
        return state.places(state.storage)


def can_compile_steps(device: Device) -> bool:
    """Whether kernels are launched when a graph runs: the emulator runs them while it is traced."""
    return isinstance(kernel_launcher(device), CudaLauncher | MlxLauncher)


class CompiledSteps:
    """Of one model. Only the engine thread may call it."""

    def __init__(self, model: Any, *, with_recurrent: bool = True) -> None:
        """Steps of models `with_recurrent` layers are compiled only if it says so."""
        self.model, self._with_recurrent = model, with_recurrent
        self._learned = False  # what the model reads of a step
        self._cuts: dict[int, tuple[tuple[KVSplits, int], ...]] = {}  # how it cuts rows of each group
        self._steps: OrderedDict[object, Callable[..., tuple[mx.array, _AfterStep]]] = OrderedDict()
        self._open: _OpenStep | None = None
        self._trials = 0
        self.graph_count = 0
        """Graphs compiled so far."""
        self.refusal: str | None = None
        """Why steps are not compiled."""

    def __call__(self, tokens: mx.array, cache: Sequence[LayerState]) -> mx.array:
        """The model's logits of tokens [1, tokens]."""
        opened = None if self.refusal is not None else _open_decode_step(cache)
        if opened is None or (opened.recurrent and not self._with_recurrent):
            return self._run_model(tokens, cache)
        if not self._learned:
            logits = self._run_model(tokens, cache)
            self._learn(opened)
            return logits
        if self._trials < STEP_TRIALS:
            return self._run_and_compare(tokens, opened)
        return self._run_compiled(tokens, opened)

    def _run_model(self, tokens: mx.array, layers: Sequence[LayerState]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=layers)
        return logits

    def _learn(self, opened: _OpenStep) -> None:
        """Which data of a step the model reads: all of it must be known, or a graph would keep this step's."""
        memo = opened.mixed.memo
        unknown = _reads_by_part(opened.mixed) or not all(map(_is_known_key, memo))
        if unknown or any(("rows", group, (0,)) not in memo for group in opened.groups):
            self._refuse(f"{self.model.model_type} reads data of its rows that cannot be compiled")
            return
        self._cuts = {group: opened.rows(group).asked for group in opened.groups}
        self._learned = True

    def _run_and_compare(self, tokens: mx.array, opened: _OpenStep) -> mx.array:
        """The model's own result. The compiled step writes the same KV to the same slots once more."""
        graphs, before = len(self._steps), _copied(opened.recurrent_arrays)
        logits = self._run_model(tokens, opened.layers)
        after = opened.recurrent_arrays
        mx.eval(logits, after)
        opened.put(_copied(before))
        compiled = self._run_compiled(tokens, opened)
        gap, dtype = logits_gap(compiled, logits), logits.dtype
        differs = self.refusal is None and not is_close_gap(gap, 0, dtype)
        if differs and not is_close_gap(gap, self._rounding_gap(tokens, opened, logits, before), dtype):
            self._refuse(f"compiled steps differ by {gap:.2g} of the logits' range")
        opened.put(after)
        if len(self._steps) == graphs:  # it was compiled at another step
            self._trials += 1
        return logits

    def _rounding_gap(self, tokens: mx.array, opened: _OpenStep, logits: mx.array, before: Sequence[_Arrays]) -> float:
        """How far rounding alone moves the model's own logits. Then the model runs once more, as the KV that it wrote
        was moved, too. `before` are the states of recurrent layers before the step."""
        nudged = nudged_embeddings(self.model, logits.dtype)
        if nudged is None:
            return 0.0
        opened.put(_copied(before))
        with nudged:
            gap = logits_gap(self._run_model(tokens, opened.layers), logits)
        opened.put(_copied(before))
        mx.eval(self._run_model(tokens, opened.layers), [storage.token for storage in opened.storages])
        return gap

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        log.warning("decode steps are not compiled, which is slower: %s", reason)

    def _run_compiled(self, tokens: mx.array, opened: _OpenStep) -> mx.array:
        inputs, key = self._inputs(tokens, opened)
        step = self._steps.get(key)
        if step is None:
            self.graph_count += 1
            step = self._steps[key] = mx.compile(self._trace)
            if len(self._steps) > MOST_COMPILED_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        self._open = opened
        try:
            logits, after = step(*inputs)
        except (ValueError, RuntimeError) as error:
            self._refuse(" ".join(str(error).split())[:300])
            return self._run_model(tokens, opened.layers)
        finally:
            self._open = None
        tokens_written, states = after
        for storage, token in zip(opened.storages, tokens_written, strict=True):
            storage.go_on(token)
        opened.put(states)
        return logits

    def _inputs(self, tokens: mx.array, opened: _OpenStep) -> tuple[_StepInputs, object]:
        """The data of a step, and the key of its graph: all sizes that it depends on."""
        rows = [opened.rows(group) for group in opened.groups]
        inputs = (
            tokens,
            [opened.places(group) for group in opened.groups],
            [each.table for each in rows],
            [each.rows for each in rows],
            opened.mixed.positions,
            [storage.token for storage in opened.storages],
            [storage.found for storage in opened.storages],
            opened.recurrent_arrays,
        )
        rooms = [each.rooms(self._cuts[group]) for group, each in zip(opened.groups, rows, strict=True)]
        sizes = [array.size for each in inputs[1:4] for array in each]
        return inputs, (tokens.size, opened.slots, opened.memory_sizes, *rooms, *sizes)

    def _trace(
        self,
        tokens: mx.array,
        places: _Arrays,
        tables: _Arrays,
        rows: _Arrays,
        positions: mx.array,
        after: _Arrays,
        slabs: list[_Arrays],
        states: list[_Arrays],
    ) -> tuple[mx.array, _AfterStep]:
        """Runs once a graph, on placeholders for the data of any step. What layers compute of these for each other is
        computed again."""
        opened = self._open
        assert opened is not None
        memo, attributes, lent = opened.mixed.memo, vars(opened.mixed), opened.recurrent_arrays
        memo_before, attributes_before = dict(memo), dict(attributes)
        rows_by_group = [opened.rows(group) for group in opened.groups]
        memo.clear()
        for group, own, table, each, slots in zip(opened.groups, rows_by_group, tables, rows, places, strict=True):
            memo["rows", group, (0,)], memo["places", group] = own.standing_for(table, each), slots
        attributes.pop("offset", None)
        attributes["positions"] = positions
        try:
            with ExitStack() as stack:
                for storage, token, found in zip(opened.storages, after, slabs, strict=True):
                    stack.enter_context(storage.standing_for(token, found))
                opened.put(states)
                logits = self._run_model(tokens, opened.layers)
                done = [storage.token for storage in opened.storages]
            if not all(map(_is_known_key, memo)) or _reads_by_part(opened.mixed):
                raise ValueError("the model read data of a step that it had not read before")
            return logits, (done, opened.recurrent_arrays)
        finally:
            opened.put(lent)
            memo.clear()
            memo.update(memo_before)
            attributes.clear()
            attributes.update(attributes_before)


def _open_decode_step(layers: Sequence[LayerState]) -> _OpenStep | None:
    """None where the open batch is not one token a row with all KV in the kernels' pages; and for so many rows that
    quantised weights are dequantised for them, into scratch memory that layers share: its contents are no data of a
    step."""
    mixed = layers[0].whole
    if mixed is None or len(mixed.parts) != 1 or mixed.has_stated_positions or mixed.tokens > FEW_ROWS:
        return None
    [part] = mixed.parts
    groups: dict[int, AppendState] = {}
    storages: list[KernelStorage] = []
    recurrent: list[RecurrentState] = []
    for state in flatten_states(layers):
        if isinstance(state, AppendState) and isinstance(state.storage, KernelStorage):
            groups.setdefault(state.group.number, state)
            storages.append(state.storage)
        elif isinstance(state, RecurrentState) and _has_all_parts(state):
            recurrent.append(state)
        else:
            return None
    # A row that begins has states that are recognised as missing.
    if part.width != 1 or (recurrent and not all(part.starts)):
        return None
    return _OpenStep(layers, mixed, groups, tuple(storages), tuple(recurrent))


def _has_all_parts(state: RecurrentState) -> bool:
    return not state.wanted and all(part is not None for part in state.cache)


def _copied(arrays: Sequence[_Arrays]) -> list[_Arrays]:
    """Copies of states, which kernels write in place."""
    copies = [[copy_array(array) for array in own] for own in arrays]
    mx.eval(copies)
    return copies


def _reads_by_part(mixed: MixedBatch) -> bool:
    """Whether a layer read the positions or the pages of a part by itself: a graph would keep this step's."""
    return any(part.memo or "offset" in vars(part) for part in mixed.parts)


def _is_known_key(key: object) -> bool:
    """Whether what the memo holds there is an input of a graph, is computed from inputs, or follows from its key."""
    if isinstance(key, tuple):
        return key[0] in ("places", "rows", "runs")
    return isinstance(key, RopeAngles) or key in ("calls", RECURRENT_SPANS, "positions in a model's own code")


def attends_natively(model: Any) -> bool:
    """Whether the native kernels read all keys and values of the model, but for those that indexers choose from."""
    mixed = [module for module in model.modules() if isinstance(module, MixedAttention)]
    stores = sum(isinstance(state, AppendState) for state in new_batch_state(model, 0, None, None).states)
    return any(module.native for module in mixed) and len(kv_layouts(model)) == stores


def new_batch_state(
    model: Any,
    margin: int,
    kept: mx.Dtype | None,
    kernels: CheckedKernels | None = None,
    most: int | None = None,
    token_bytes: Sequence[int] | None = None,
    head: Any = None,
    earlier: int = REWIND_STATE_BYTES,
    live: PairCodec | None = None,
    coded_bytes: int = 0,
) -> BatchState:
    """The KV states of a model and its draft head. Keys and values are rounded to `kept`, if there is such a dtype, and
    encoded by `live` before the tail of a row."""
    layers = kv_states_for(model, margin, kept, kernels)
    windows = (None,) if any(isinstance(state, OwnCacheState) for state in layers) else ()  # for the size of a token
    head_layers = [] if head is None else kv_states_for(head, 0, kept, kernels)
    rows = BatchState(layers, most, token_bytes, head_layers, earlier, live, coded_bytes, windows)
    if head is not None and head.kv == "model":
        rows.beside = [layers[number] for number in head.reads]
    return rows


def has_own_caches(rows: BatchState) -> bool:
    """Whether rows have caches that the model's own code made, which are all layers' then."""
    return isinstance(next(iter(rows.states), None), OwnCacheState)


def growth_of_own_caches(model: Any, selection: LogitsSelection | None) -> int:
    """The bytes that a row of a model with such caches grows by with each token."""
    rows = new_batch_state(model, 0, None)
    row, sizes = rows.new(), list[int]()
    for width in OWN_CACHE_LENGTHS:
        mx.eval(
            run_forward(
                model,
                selection,
                rows,
                mx.ones(width, mx.uint32),
                [ForwardPart((row,), width)],
                [width - 1],
                mixed=False,
            ),
            rows.pending(),
        )
        sizes.append(rows.slot_bytes)
    rows.free()
    return -(-(sizes[1] - sizes[0]) // OWN_CACHE_LENGTHS[1])


def kv_states_for(model: Any, margin: int, kept: mx.Dtype | None, kernels: CheckedKernels | None) -> list[LayerState]:
    """One for each cache of a model, or a draft head. Keys and values are rounded to `kept`, if there is such a
    dtype."""
    layers = make_layer_states(partial(caches.make_prompt_cache, model), margin)
    for state in flatten_states(layers):
        if isinstance(state, AppendState):
            state.kept, state.kernels = kept, kernels
    stores = [state for state in flatten_states(layers) if isinstance(state, AppendState)]
    layouts = kv_layouts(model)
    if len(stores) == len(layouts):
        for state, layout in zip(stores, layouts, strict=True):
            state.layout = layout
    return layers
