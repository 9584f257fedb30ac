"""A forward pass: tokens and KV states in, logits of the selected tokens out, and decode steps compiled as one graph.

`run_forward` is the pass. `new_batch_state` makes the KV states that a model, and a draft head beside it, ask for.

`CompiledSteps`: what Python asks MLX for layer by layer is the same at every decode step. Lengths, block tables and
positions of rows are data, so that a step over as many rows is the same graph again; `mx.compile` keeps it, and
Python's part of a step is gone. This is done only where kernels find all keys and values by their addresses: then
nothing else of a step is bound to where things lie. A graph that has kept something of the step that it was made of
would be wrong at the next one. So it is compared with what the model says by itself, at two steps, before the first is
used; what is not known here is never compiled. Numbers are compared, not bits: what is compiled rounds elsewhere, and
how far that moves a model it tells itself.
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

from ingot.cache.attention_state import AppendState, flatten_states, make_layer_state
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import REWIND_STATE_BYTES
from ingot.cache.forward_batch import ForwardPart, MixedBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.cache.layer_state import LayerState
from ingot.errors import ModelError
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import CudaLauncher, MlxLauncher, kernel_launcher
from ingot.kernels.paged_attention.inputs import KernelRows
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.gpu_linear import FEW_ROWS
from ingot.models.layers.lm_head import LogitsSelection, nudged_embeddings, token_embedding_of
from ingot.models.layers.rope import RopeAngles
from ingot.models.lora.layers import LoraMapping
from ingot.models.probe import is_close_gap, logits_gap
from ingot.models.vision.tower import DeepStack, VisualInputs
from ingot.upstream import caches

VisualContext = tuple[VisualInputs, DeepStack | None]
"""What a pass is shown, and the layers behind which some of it is added."""


def run_forward(
    model: Any,
    selection: LogitsSelection | None,
    rows: BatchState,
    tokens: mx.array,
    parts: Sequence[ForwardPart],
    at: Sequence[int] | None,
    *,
    mixed: bool,
    shown: VisualContext | None = None,
    blend: LoraMapping | None = None,
) -> mx.array:
    """See `Adapter.run`. `model` may be its compiled steps, which give logits after all tokens, of no adapter's, alone.
    `blend` is told which adapters the rows go through."""
    count = 1 if mixed else len(parts[0].rows)
    chosen = None if at is None or len(at) == tokens.size else mx.array(list(at), dtype=mx.int32)[None]
    slots = [row.lora for part in parts for row in part.rows for _ in range(part.width)]
    if (chosen is not None or shown is not None or any(slots)) and isinstance(model, CompiledSteps):
        model = model.model
    asked = tokens.reshape(count, -1)
    with rows.launch(parts, mixed=mixed) as layers, nullcontext() if blend is None else blend.over(slots):
        if shown is None:
            logits = _run_with_selection(model, selection, asked, layers, chosen)
        else:
            logits = _run_with_features(model, selection, asked, layers, chosen, *shown)
    return logits.reshape(-1, logits.shape[-1])


def _run_with_features(
    model: Any,
    selection: LogitsSelection | None,
    tokens: mx.array,
    layers: Any,
    at: mx.array | None,
    visual: VisualInputs,
    deep: DeepStack | None,
) -> mx.array:
    embed: Any = token_embedding_of(model)
    assert embed is not None, "a model that sees looks tokens up by a module that is known"
    with visual.behind(deep):
        seeing = partial(model, input_embeddings=visual.over(embed(tokens)))
        return _run_with_selection(seeing, selection, tokens, layers, at)


def _run_with_selection(
    model: Any, selection: LogitsSelection | None, tokens: mx.array, layers: Any, at: mx.array | None
) -> mx.array:
    """Logits at the positions `at` [rows, n]."""
    if selection is None:
        return _logits_at(model(tokens, cache=layers), at)
    selection.at = at
    try:
        return _logits_at(model(tokens, cache=layers), at)
    finally:
        selection.at = None


def _logits_at(logits: mx.array, positions: mx.array | None) -> mx.array:
    """The logits at `positions`, where the output head has not computed just those."""
    if positions is None or logits.shape[1] == positions.shape[1]:
        return logits
    return mx.take_along_axis(logits, positions[..., None], axis=1)


log = logging.getLogger("ingot.models")
MOST_COMPILED_STEPS = 256
"""Graphs: for as many numbers of rows and lengths of their tables."""
STEP_TRIALS = 2
_Arrays = list[mx.array]


@dataclass(frozen=True)
class _OpenStep:
    """What is open while a step is asked for."""

    layers: Sequence[LayerState]
    mixed: MixedBatch
    groups: dict[int, AppendState]  # one layer of each
    storages: tuple[KernelStorage, ...]  # of all layers

    def rows(self, group: int) -> KernelRows:
        state = self.groups[group]
        assert isinstance(state.storage, KernelStorage)
        return state.kernel_rows(state.storage, self.mixed, (0,))

    def places(self, group: int) -> mx.array:
        state = self.groups[group]
        assert isinstance(state.storage, KernelStorage)
        return state.places(state.storage)


def can_compile_steps(device: Device) -> bool:
    """Whether steps can be asked for without being run: the emulator runs kernels when they are asked for."""
    return isinstance(kernel_launcher(device), CudaLauncher | MlxLauncher)


class CompiledSteps:
    """Of one model. Only the engine thread may call it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._angles: tuple[RopeAngles, ...] | None = None  # which the model asks for; None: it was not seen yet
        self._cuts: dict[int, tuple[tuple[int, int], ...]] = {}  # and how it cuts rows of each group
        self._steps: OrderedDict[object, Callable[..., tuple[mx.array, _Arrays]]] = OrderedDict()
        self._open: _OpenStep | None = None
        self._agreed = 0
        self.made = 0
        """Graphs, so far."""
        self.refused: str | None = None
        """Why steps are not compiled."""

    def __call__(self, tokens: mx.array, cache: Sequence[LayerState]) -> mx.array:
        """The model's logits of tokens [1, tokens]."""
        opened = None if self.refused is not None else _open_decode_step(cache)
        if opened is None:
            return self._plain(tokens, cache)
        if self._angles is None:
            logits = self._plain(tokens, cache)
            self._learn(opened)
            return logits
        if self._agreed < STEP_TRIALS:
            return self._compared(tokens, opened)
        return self._compiled(tokens, opened)

    def _plain(self, tokens: mx.array, layers: Sequence[LayerState]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=layers)
        return logits

    def _learn(self, opened: _OpenStep) -> None:
        """What the model asked of a step: all of it must be known, or it would be kept from this step for all."""
        memo = opened.mixed.memo
        unknown = [key for key in memo if not _is_known_key(key)]
        if unknown or any(("rows", group, (0,)) not in memo for group in opened.groups):
            self._refuse(f"{self.model.model_type} looks at its rows in a way that cannot be compiled")
            return
        self._cuts = {group: opened.rows(group).asked for group in opened.groups}
        self._angles = tuple(key for key in memo if isinstance(key, RopeAngles))

    def _compared(self, tokens: mx.array, opened: _OpenStep) -> mx.array:
        """What the model says by itself. The compiled step writes the same to the same places once more."""
        known = len(self._steps)
        logits = self._plain(tokens, opened.layers)
        again = self._compiled(tokens, opened)
        gap, dtype = logits_gap(again, logits), logits.dtype
        off = self.refused is None and not is_close_gap(gap, 0, dtype)
        if off and not is_close_gap(gap, self._moved(tokens, opened, logits), dtype):
            self._refuse(f"compiled steps differ by {gap:.2g} of the logits' range")
        if len(self._steps) == known:  # it was made of another step
            self._agreed += 1
        return logits

    def _moved(self, tokens: mx.array, opened: _OpenStep, logits: mx.array) -> float:
        """How far rounding alone moves what the model says by itself. Then it says that once more, as what it left in
        the states was moved, too."""
        moving = nudged_embeddings(self.model, logits.dtype)
        if moving is None:
            return 0.0
        with moving:
            moved = logits_gap(self._plain(tokens, opened.layers), logits)
        mx.eval(self._plain(tokens, opened.layers), [storage.token for storage in opened.storages])
        return moved

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.warning("decode steps are not compiled, which is slower: %s", reason)

    def _compiled(self, tokens: mx.array, opened: _OpenStep) -> mx.array:
        given, key = self._given(tokens, opened)
        step = self._steps.get(key)
        if step is None:
            self.made += 1
            step = self._steps[key] = mx.compile(self._traced)
            if len(self._steps) > MOST_COMPILED_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        self._open = opened
        try:
            logits, after = step(*given)
        except (ValueError, RuntimeError) as error:
            self._refuse(" ".join(str(error).split())[:300])
            return self._plain(tokens, opened.layers)
        finally:
            self._open = None
        for storage, token in zip(opened.storages, after, strict=True):
            storage.go_on(token)
        return logits

    def _given(self, tokens: mx.array, opened: _OpenStep) -> tuple[tuple[mx.array | _Arrays, ...], object]:
        """The data of a step, and all that its graph is bound to."""
        assert self._angles is not None
        rows = [opened.rows(group) for group in opened.groups]
        given = (
            tokens,
            [opened.places(group) for group in opened.groups],
            [each.table for each in rows],
            [each.rows for each in rows],
            [angles.of(opened.mixed) for angles in self._angles],
            [storage.token for storage in opened.storages],
            [storage.addresses for storage in opened.storages],
        )
        rooms = [each.rooms(self._cuts[group]) for group, each in zip(opened.groups, rows, strict=True)]
        sizes = [array.size for each in given[1:] for array in each]
        return given, (tokens.size, *rooms, *sizes)

    def _traced(
        self,
        tokens: mx.array,
        places: _Arrays,
        tables: _Arrays,
        rows: _Arrays,
        angles: _Arrays,
        after: _Arrays,
        addresses: _Arrays,
    ) -> tuple[mx.array, _Arrays]:
        """Runs once a graph, on what stands for the data of any step."""
        opened, known = self._open, self._angles
        assert opened is not None and known is not None
        memo = opened.mixed.memo
        before = dict(memo)
        for number, group in enumerate(opened.groups):
            own = opened.rows(group)
            memo["rows", group, (0,)] = own.standing_for(tables[number], rows[number])
            memo["places", group] = places[number]
        memo.update(zip(known, angles, strict=True))
        try:
            with ExitStack() as stack:
                for storage, token, address in zip(opened.storages, after, addresses, strict=True):
                    stack.enter_context(storage.standing_for(token, address))
                logits = self._plain(tokens, opened.layers)
                done = [storage.token for storage in opened.storages]
            if not all(map(_is_static_key, memo.keys() - before.keys())):
                raise ValueError("something was asked of a step that had not been asked before")
            return logits, done
        finally:
            memo.clear()
            memo.update(before)


def _open_decode_step(layers: Sequence[LayerState]) -> _OpenStep | None:
    """None where something else is open than one token of each of some rows, all of it in the kernels' pages; and for
    so many rows that packed weights are unpacked for them, into memory that layers have in turn: who had it before is
    no data of a step."""
    states = [layer for layer in layers if isinstance(layer, AppendState)]
    mixed = layers[0].whole
    if len(states) != len(layers) or mixed is None or len(mixed.parts) != 1 or mixed.has_stated_positions:
        return None
    if mixed.tokens > FEW_ROWS:
        return None
    storages = tuple(state.storage for state in states if isinstance(state.storage, KernelStorage))
    if mixed.parts[0].width != 1 or len(storages) != len(states) or not all(each.by_address for each in storages):
        return None
    return _OpenStep(layers, mixed, {state.group.number: state for state in reversed(states)}, storages)


def _is_known_key(key: object) -> bool:
    named = isinstance(key, tuple) and key[0] in ("places", "rows")
    return named or isinstance(key, RopeAngles) or _is_static_key(key)


def _is_static_key(key: object) -> bool:
    """It is numbers of Python's, which places or the number of rows follow from."""
    return key == "calls" or (isinstance(key, tuple) and key[0] == "runs")


def attends_natively(model: Any) -> bool:
    """Whether the native kernels read all keys and values that the model keeps."""
    covered = sum(isinstance(module, MixedAttention) and module.native for _, module in model.named_modules())
    return 0 < covered == sum(isinstance(state, AppendState) for state in new_batch_state(model, 0, None, None).states)


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
    """Live states of the kinds that the model, and a head beside it, ask for. Keys and values are rounded to `kept`, if
    that is given, and put into `live` behind the tail of a row."""
    layers = kv_states_for(model, margin, kept, kernels)
    beside = [] if head is None else kv_states_for(head, 0, kept, kernels)
    return BatchState(layers, most, token_bytes, beside, earlier, live, coded_bytes)


def kv_states_for(model: Any, margin: int, kept: mx.Dtype | None, kernels: CheckedKernels | None) -> list[LayerState]:
    """One for each cache that a model, or a head, asks for. Keys and values are rounded to `kept`, if that is given."""
    try:
        layers = [make_layer_state(cache, margin) for cache in caches.make_prompt_cache(model)]
    except KeyError as error:
        kind = error.args[0].__name__
        raise ModelError(f"This model keeps state in a {kind}, which ingot does not know yet") from error
    for state in flatten_states(layers):
        if isinstance(state, AppendState):
            state.kept, state.kernels = kept, kernels
    return layers
