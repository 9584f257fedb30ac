"""A loaded model behind one interface: tokens and the KV of running sequences in, logits out.

Everything that mlx-lm can load comes in here (`load`). The model's own code runs unchanged; its RoPE modules and its
output head are swapped for ours at load, and its caches are our per-layer KV states. A probe at load runs the model
once each way it will be used, so that what cannot work is said then and not in the middle of somebody's answer.

An `Adapter` is immutable. Only the engine thread may call `run`. `load` and `adapt` raise ModelError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal, overload

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import WindowState
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import REWIND_STATE_BYTES, Footprint
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.record_encoding import RecordEncoding, record_encoding_for
from ingot.cache.records import RecordForm
from ingot.errors import ModelError
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.models.checkpoint import evaluate_in_pieces
from ingot.models.draft_heads.checkpoint import model_classes_for
from ingot.models.families import registry
from ingot.models.files.folder_checks import stated_context
from ingot.models.files.model_config import moved_weight_notes, older_config_names, weight_format
from ingot.models.forward import CompiledSteps, attends_natively, can_compile_steps, new_batch_state, run_forward
from ingot.models.layers.decode_graph import decode_graphs_of
from ingot.models.layers.gpu_linear import reserve_scratch
from ingot.models.layers.lm_head import LogitsSelection, nudged_embeddings, select_at_lm_head
from ingot.models.layers.mlp import fixed_experts
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.swapping import allow_separate_layers, restore_mlx_lm_modules, swap_modules
from ingot.models.lora.loras import LoadedLoras
from ingot.models.parallelism import ModelSharding, shard_model
from ingot.models.precision import main_dtype, rounds_activations, settle_precision
from ingot.models.probe import Probe, ProbeFindings, ProbeVariants
from ingot.models.report import footprint_of, model_notes
from ingot.models.vision.loading import load_vision_tower
from ingot.models.vision.tower import DeepStack, VisionTower, VisualInputs, swap_deepstack_layers
from ingot.upstream import caches, load_config, load_model


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """What numbers are, by the names that people know."""

    weights: str  # in the model's files
    activations: str  # where they meet weights
    states: str  # keys and values

    def __str__(self) -> str:
        return f"weights {self.weights}, activations {self.activations}, states {self.states}"


@dataclass(frozen=True)
class ModelAdapter:
    model: Any
    config: dict[str, Any]
    device: Device
    selection: LogitsSelection | None
    widest: int
    margin: int  # tokens by which windows are wider than the model's caches say
    kept: mx.Dtype | None  # what keys and values are rounded to; None: they stay as they are computed
    footprint: Footprint
    ragged: bool  # rows of different lengths may decode together
    mixed: bool  # launches of any kind may share one forward pass
    vocab: int
    notes: tuple[str, ...]
    rounded: bool = False  # activations are rounded to 8 bits where they meet packed weights
    kernels: CheckedKernels | None = None  # of a GPU
    steps: CompiledSteps | None = None  # what runs the model, where its steps can be compiled
    live: PairCodec | None = None  # what keys and values of running sequences are put into behind their tails, if so
    tower: VisionTower | None = None  # what it sees with
    deep: DeepStack | None = None  # where features of it are added behind layers
    loras: LoadedLoras = field(kw_only=True)  # what stands beside it
    head: Any = None  # what it guesses ahead with, where it was loaded with a head (`models/heads`)

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def context(self) -> int:
        return stated_context(self.config)

    @property
    def weight_bytes(self) -> int:
        beside = () if self.tower is None else self.tower.modules
        own = sum(array.nbytes for module in (self.model, *beside) for _, array in named_parameters(module))
        return own + (self.head.weight_bytes if self.head else 0)

    @property
    def dtype(self) -> str:
        return str(main_dtype(self.model)).rsplit(".", 1)[-1]

    @property
    def graphs(self) -> int:
        """Made so far: a step that has to make one takes longer than those like it that follow."""
        return sum(each.made for each in (decode_graphs_of(self.model), self.steps) if each is not None)

    @property
    def graph_tokens(self) -> float:
        """How many a step may have that is one graph: one with more takes far longer. Infinite where none is."""
        stack = decode_graphs_of(self.model)
        return inf if stack is None or stack.refused is not None else stack.most

    @property
    def is_whole(self) -> bool:
        """Whether all of the model and its states are in this process."""
        return True

    @property
    def last_step(self) -> int:
        """The number of the last pass that other ranks were told of; 0 where the model is all here."""
        return 0

    @property
    def ranks_trouble(self) -> str:
        """Why they cannot be told anything any more; empty while they can."""
        return ""

    def close(self) -> None:
        """The last call: nobody else has to wait for passes any more."""

    @property
    def separates_lora_rows(self) -> bool:
        """Whether rows with and without adapters take passes of their own: what computes the latter at once, all layers
        or a mixer with what is around it, does not know of adapters."""
        stack = decode_graphs_of(self.model)
        if stack is None or stack.refused is not None:
            return self.device.kind == "cpu"
        return not stack.adapted.are_possible

    @property
    def has_sinks(self) -> bool:
        """Whether attention weighs keys against learned numbers, whatever its class calls them."""
        return any("sink" in name.rsplit(".", 1)[-1] for name, _ in named_parameters(self.model))

    @property
    def formats(self) -> NumberFormats:
        return NumberFormats(
            weights=weight_format(self.config, self.dtype),
            activations="8-bit" if self.rounded else self.dtype,
            states=self._states,
        )

    @property
    def _states(self) -> str:
        raw = self.dtype if self.kept is None else str(self.kept).rsplit(".", 1)[-1]
        return raw if self.live is None else f"{self.live.name} behind the newest in {raw}"

    def new_batch_state(self, most: int | None = None, earlier: int = REWIND_STATE_BYTES) -> BatchState:
        """Live states for this model, which take no more than `most` bytes ahead of what they need, and `earlier` ones
        for recurrent states that rows may go back to."""
        token_bytes = [size for _, size in self.footprint.groups]
        coding = (self.live, self.footprint.coded)
        return new_batch_state(
            self.model, self.margin, self.kept, self.kernels, most, token_bytes, self.head, earlier, *coding
        )

    def encoding(self, rows: BatchState, codec: PairCodec, form: RecordForm | None) -> RecordEncoding:
        """What records of these rows are put into when they leave their pages; `form` is that of raw ones, which a
        lossy codec has to know. Raises ConfigError where they cannot be."""
        return record_encoding_for(rows, codec, form)

    def allow_separate_layers(self) -> None:
        """From now on somebody may look on at what layers ask of the states (`AppendState.onlooker`, `choice`), also
        where they are one operation otherwise."""
        allow_separate_layers(self.model, self.device)

    @overload
    def run(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None = ...,
        *,
        hidden: Literal[False] = ...,
        visual: VisualInputs | None = ...,
    ) -> mx.array: ...

    @overload
    def run(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None = ...,
        *,
        hidden: Literal[True],
        visual: VisualInputs | None = ...,
    ) -> tuple[mx.array, mx.array]: ...

    def run(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None = None,
        *,
        hidden: bool = False,
        visual: VisualInputs | None = None,
    ) -> mx.array | tuple[mx.array, mx.array]:
        """One forward pass over the parts' tokens [tokens], part by part, row by row: logits [n, vocab] after each of
        the tokens `at`, or after all of them; with `hidden`, also the hidden states [tokens, size] of all of them, as
        the model's head wants them. Where it is shown something `visual`, features stand for embeddings of tokens.
        Afterwards the rows are longer.

        Unless the adapter is `mixed`, there may be one part only; unless it is `ragged`, of one row.
        """
        shown = None if visual is None else (visual, self.deep)
        compute = partial(run_forward, mixed=self.mixed, shown=shown, blend=self.loras.blend)
        if not hidden:
            return compute(self.steps or self.model, self.selection, rows, tokens, parts, at)
        assert self.selection is not None, "a model whose output head is not known hands over no hidden states"
        with self.selection.capturing_hidden():
            logits = compute(self.model, self.selection, rows, tokens, parts, at)
            states = self.selection.hidden
        assert states is not None, "no hidden states came by"
        return logits, states.reshape(-1, states.shape[-1])


def load_model_adapter(
    folder: Path,
    device: Device,
    *,
    dtype: str | None = None,
    widest: int = 2048,
    apart: bool = False,
    sees: bool = False,
    sharing: ModelSharding | None = None,
) -> ModelAdapter:
    """Load the model in `folder`. Raises ModelError with what is wrong with it.

    `apart`: no layers become one operation, so that hidden states between them can be handed over. `sees`: its vision
    tower, which it must have, is loaded as well. With `sharing`, only this rank's share of it is loaded, and all ranks
    have to do the same at once.
    """
    try:
        stated = load_config(folder)
        whole = load_config(folder) if sees else {}
        classes = model_classes_for(folder, stated)
        model, config = load_model(folder, model_config=older_config_names(stated), get_model_classes=classes)
    except ModelError:
        raise
    # The code of a hundred families reads this folder and may trip over anything; one asks Python to exit.
    except (Exception, SystemExit) as error:
        raise ModelError(f"The model in {folder.name} cannot be loaded: {_error_text(error)}") from error
    if sharing is not None:
        shard_model(model, config, sharing)
        apart = True  # what ranks add up, or hand on, comes between layers
    try:
        notes = [*moved_weight_notes(config), *settle_precision(model, device, dtype)]
        evaluate_in_pieces(array for _, array in named_parameters(model))
    except RuntimeError as error:  # a file that cannot be read any more, most likely
        raise ModelError(f"The weights in {folder.name} cannot be loaded: {_error_text(error)}") from error
    mx.clear_cache()  # of buffers that weights were read into before they were put in order
    model.eval()
    tower = load_vision_tower(folder, whole, device, dtype) if sees else None
    exact = dtype is not None
    adapted = adapt_model(model, config, device, widest=widest, notes=notes, exact=exact, apart=apart, tower=tower)
    return adapted if sharing is None else replace(adapted, steps=None)


def adapt_model(
    model: nn.Module,
    config: dict[str, Any],
    device: Device,
    *,
    widest: int = 2048,
    notes: Sequence[str] = (),
    exact: bool = False,
    apart: bool = False,
    tower: VisionTower | None = None,
) -> ModelAdapter:
    """Swap the modules of a model that is in memory, probe it, and describe it.

    `exact`: keys and values are kept in what they are computed in, also where the kernels can do with less.
    `apart`: see `load_model_adapter`. `tower` is what it sees with.
    Raises ModelError if it cannot be run here.
    """
    family, rounded = registry.family_of_type(str(config.get("model_type"))), rounds_activations(model)
    if family.refused is not None:
        raise ModelError(f"Models of type {family.name} cannot be served: {family.refused}")
    kernels = None if device.kind == "cpu" else CheckedKernels(device)
    axes, deep = (None, None) if tower is None else (tower.axes, swap_deepstack_layers(model, tower.deep))
    # Native layers that are one operation turn by one axis, nothing can be added between them, and all tokens see what
    # is before them alone.
    bidirectional = tower is not None and tower.bidirectional
    apart = apart or (device.kind == "cpu" and (axes is not None or deep is not None or bidirectional))
    fused = swap_modules(model, device, kernels, apart=apart, axes=axes)
    if kernels is not None:
        reserve_scratch(model, kernels.packed)
    selection = select_at_lm_head(model)
    # Activations of 8 bits are as coarse as bfloat16, whatever they are summed in.
    coarse = mx.bfloat16 if rounded else main_dtype(model)

    def probed() -> tuple[mx.Dtype | None, ProbeFindings, int]:
        kept = None if exact or not (fused or attends_natively(model)) else mx.float16
        return kept, *_probe_model(model, selection, kept, kernels, coarse, unlike=family.unmixed is None)

    kept, found, margin = probed()
    if found.wrong is not None:
        notes = [*notes, f"layers run by mlx-lm's own modules, slower: by ingot's own, {found.wrong}"]
        restore_mlx_lm_modules(model)
        fused = False
        kept, found, margin = probed()
    if bidirectional and not found.mixed:
        raise ModelError("Its pictures' tokens see each other, which this model's attention cannot be told here.")
    if (stack := decode_graphs_of(model)) is not None:
        stack.capture_ahead()
    return ModelAdapter(
        model,
        config,
        device,
        selection,
        widest,
        margin,
        kept,
        footprint_of(model, config, found, device, kernels, fused=fused),
        found.ragged,
        found.mixed,
        found.vocab,
        (*notes, *model_notes(model, selection, found, kernels, stack)),
        rounded,
        kernels,
        CompiledSteps(model) if found.mixed and can_compile_steps(device) and not _is_captured(model) else None,
        tower=tower,
        deep=deep,
        loras=LoadedLoras(model, device, main_dtype(model)),
    )


def _is_captured(model: Any) -> bool:
    """Whether its steps are graphs, of which MLX has nothing to compile."""
    stack = decode_graphs_of(model)
    return stack is not None and stack.refused is None


def _probe_model(
    model: Any,
    selection: LogitsSelection | None,
    kept: mx.Dtype | None,
    kernels: CheckedKernels | None,
    dtype: mx.Dtype,
    *,
    unlike: bool,
) -> tuple[ProbeFindings, int]:
    """What was found out, and the margin that the model's windows need."""
    doubts = ProbeVariants(
        lambda: nudged_embeddings(model, dtype), lambda: fixed_experts(model), partial(_mlx_lm_logits, model)
    )

    def findings(margin: int) -> ProbeFindings:
        rows = partial(new_batch_state, model, margin, kept, kernels)
        return Probe(partial(run_forward, model, selection), rows, dtype, unlike=unlike, doubts=doubts).run()

    found = findings(0)
    windows = [state for state in found.rows.states if isinstance(state, WindowState)]
    # PLaMo 3's masks show a token one more than its caches keep.
    margin = max((state.asked - state.window for state in windows), default=0)
    return (findings(margin) if margin else found), margin


def _mlx_lm_logits(model: Any, prompt: list[int]) -> mx.array:
    """Logits [1, vocab] of mlx-lm's own code, which runs over its own caches."""
    logits: mx.array = model(mx.array([prompt]), cache=caches.make_prompt_cache(model))[:, -1]
    mx.eval(logits)
    return logits


def _error_text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "mlx-lm needs a package for it that is not installed"
    return str(error) or type(error).__name__
