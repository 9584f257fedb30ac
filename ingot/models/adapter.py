"""A loaded model behind one face: tokens and live states in, logits out.

Everything mlx-lm can load comes in here. The model's own code runs unchanged; its RoPE modules and its output head
are swapped for ours at load, its caches are our live layer states. A probe at load runs the model once each way it
will be used, so that what cannot work is said then and not in the middle of somebody's answer.
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
from ingot.cache.batch_state import Rows
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import EARLIER_BYTES, Footprint
from ingot.cache.forward_batch import Part
from ingot.cache.packing import Form
from ingot.cache.record_encoding import RecordEncoding, encoding_of
from ingot.errors import ModelError
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.models.families import registry
from ingot.models.files.config_names import older_names
from ingot.models.files.folder_checks import stated_context
from ingot.models.files.model_config import moved_weights, weight_format
from ingot.models.footprints import footprint_of
from ingot.models.forward import run
from ingot.models.heads.headless import classes_in
from ingot.models.layers.decode_graph import stack_of
from ingot.models.layers.deepstack import DeepStack, swap_first_layers
from ingot.models.layers.experts import given_experts
from ingot.models.layers.gpu_linear import reserve_scratch
from ingot.models.layers.lm_head import Selection, nudged, select_at_heads
from ingot.models.layers.modules import parameters
from ingot.models.layers.swapping import let_apart, swap_modules, unlower
from ingot.models.live_states import attends_natively, new_rows
from ingot.models.lora.loras import Loras
from ingot.models.pace import evaluate
from ingot.models.parallelism import Sharing, share
from ingot.models.precision import main_dtype, rounds_activations, settle
from ingot.models.probe import Doubts, Findings, Probe
from ingot.models.report import remarks
from ingot.models.steps import CompiledSteps, compiles
from ingot.models.vision.loading import load_tower
from ingot.models.vision.tower import Tower
from ingot.models.vision.visual import Visual
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
class Adapter:
    model: Any
    config: dict[str, Any]
    device: Device
    selection: Selection | None
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
    tower: Tower | None = None  # what it sees with
    deep: DeepStack | None = None  # where features of it are added behind layers
    loras: Loras = field(kw_only=True)  # what stands beside it
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
        own = sum(array.nbytes for module in (self.model, *beside) for _, array in parameters(module))
        return own + (self.head.weight_bytes if self.head else 0)

    @property
    def dtype(self) -> str:
        return str(main_dtype(self.model)).rsplit(".", 1)[-1]

    @property
    def graphs(self) -> int:
        """Made so far: a step that has to make one takes longer than those like it that follow."""
        return sum(each.made for each in (stack_of(self.model), self.steps) if each is not None)

    @property
    def graph_tokens(self) -> float:
        """How many a step may have that is one graph: one with more takes far longer. Infinite where none is."""
        stack = stack_of(self.model)
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
    def adapts_apart(self) -> bool:
        """Whether rows with and without adapters take passes of their own: what computes the latter at once, all layers
        or a mixer with what is around it, does not know of adapters."""
        stack = stack_of(self.model)
        if stack is None or stack.refused is not None:
            return self.device.kind == "cpu"
        return not stack.adapted.are_possible

    @property
    def has_sinks(self) -> bool:
        """Whether attention weighs keys against learned numbers, whatever its class calls them."""
        return any("sink" in name.rsplit(".", 1)[-1] for name, _ in parameters(self.model))

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

    def new_rows(self, most: int | None = None, earlier: int = EARLIER_BYTES) -> Rows:
        """Live states for this model, which take no more than `most` bytes ahead of what they need, and `earlier` ones
        for recurrent states that rows may go back to."""
        token_bytes = [size for _, size in self.footprint.groups]
        coding = (self.live, self.footprint.coded)
        return new_rows(
            self.model, self.margin, self.kept, self.kernels, most, token_bytes, self.head, earlier, *coding
        )

    def encoding(self, rows: Rows, codec: PairCodec, form: Form | None) -> RecordEncoding:
        """What records of these rows are put into when they leave their pages; `form` is that of raw ones, which a
        lossy codec has to know. Raises ConfigError where they cannot be."""
        return encoding_of(rows, codec, form)

    def let_apart(self) -> None:
        """From now on somebody may look on at what layers ask of the states (`AppendState.onlooker`, `choice`), also
        where they are one operation otherwise."""
        let_apart(self.model, self.device)

    @overload
    def run(
        self,
        rows: Rows,
        tokens: mx.array,
        parts: Sequence[Part],
        at: Sequence[int] | None = ...,
        *,
        hidden: Literal[False] = ...,
        visual: Visual | None = ...,
    ) -> mx.array: ...

    @overload
    def run(
        self,
        rows: Rows,
        tokens: mx.array,
        parts: Sequence[Part],
        at: Sequence[int] | None = ...,
        *,
        hidden: Literal[True],
        visual: Visual | None = ...,
    ) -> tuple[mx.array, mx.array]: ...

    def run(
        self,
        rows: Rows,
        tokens: mx.array,
        parts: Sequence[Part],
        at: Sequence[int] | None = None,
        *,
        hidden: bool = False,
        visual: Visual | None = None,
    ) -> mx.array | tuple[mx.array, mx.array]:
        """One forward pass over the parts' tokens [tokens], part by part, row by row: logits [n, vocab] after each of
        the tokens `at`, or after all of them; with `hidden`, also the hidden states [tokens, size] of all of them, as
        the model's head wants them. Where it is shown something `visual`, features stand for embeddings of tokens.
        Afterwards the rows are longer.

        Unless the adapter is `mixed`, there may be one part only; unless it is `ragged`, of one row.
        """
        shown = None if visual is None else (visual, self.deep)
        compute = partial(run, mixed=self.mixed, shown=shown, blend=self.loras.blend)
        if not hidden:
            return compute(self.steps or self.model, self.selection, rows, tokens, parts, at)
        assert self.selection is not None, "a model whose output head is not known hands over no hidden states"
        with self.selection.handing_over():
            logits = compute(self.model, self.selection, rows, tokens, parts, at)
            states = self.selection.hidden
        assert states is not None, "no hidden states came by"
        return logits, states.reshape(-1, states.shape[-1])


def load(
    folder: Path,
    device: Device,
    *,
    dtype: str | None = None,
    widest: int = 2048,
    apart: bool = False,
    sees: bool = False,
    sharing: Sharing | None = None,
) -> Adapter:
    """Load the model in `folder`. Raises ModelError with what is wrong with it.

    `apart`: no layers become one operation, so that hidden states between them can be handed over. `sees`: its vision
    tower, which it must have, is loaded as well. With `sharing`, only this rank's share of it is loaded, and all ranks
    have to do the same at once.
    """
    try:
        stated = load_config(folder)
        whole = load_config(folder) if sees else {}
        classes = classes_in(folder, stated)
        model, config = load_model(folder, model_config=older_names(stated), get_model_classes=classes)
    except ModelError:
        raise
    # The code of a hundred families reads this folder and may trip over anything; one asks Python to exit.
    except (Exception, SystemExit) as error:
        raise ModelError(f"The model in {folder.name} cannot be loaded: {_said(error)}") from error
    if sharing is not None:
        share(model, config, sharing)
        apart = True  # what ranks add up, or hand on, comes between layers
    try:
        notes = [*moved_weights(config), *settle(model, device, dtype)]
        evaluate(array for _, array in parameters(model))
    except RuntimeError as error:  # a file that cannot be read any more, most likely
        raise ModelError(f"The weights in {folder.name} cannot be loaded: {_said(error)}") from error
    mx.clear_cache()  # of buffers that weights were read into before they were put in order
    model.eval()
    tower = load_tower(folder, whole, device, dtype) if sees else None
    exact = dtype is not None
    adapted = adapt(model, config, device, widest=widest, notes=notes, exact=exact, apart=apart, tower=tower)
    return adapted if sharing is None else replace(adapted, steps=None)


def adapt(
    model: nn.Module,
    config: dict[str, Any],
    device: Device,
    *,
    widest: int = 2048,
    notes: Sequence[str] = (),
    exact: bool = False,
    apart: bool = False,
    tower: Tower | None = None,
) -> Adapter:
    """Swap the modules of a model that is in memory, probe it, and describe it.

    `exact`: keys and values are kept in what they are computed in, also where the kernels can do with less.
    `apart`: see `load`. `tower` is what it sees with.
    Raises ModelError if it cannot be run here.
    """
    family, rounded = registry.of_type(str(config.get("model_type"))), rounds_activations(model)
    if family.refused is not None:
        raise ModelError(f"Models of type {family.name} cannot be served: {family.refused}")
    kernels = None if device.kind == "cpu" else CheckedKernels(device)
    axes, deep = (None, None) if tower is None else (tower.axes, swap_first_layers(model, tower.deep))
    # Native layers that are one operation turn by one axis, nothing can be added between them, and all tokens see what
    # is before them alone.
    mutual = tower is not None and tower.mutual
    apart = apart or (device.kind == "cpu" and (axes is not None or deep is not None or mutual))
    fused = swap_modules(model, device, kernels, apart=apart, axes=axes)
    if kernels is not None:
        reserve_scratch(model, kernels.packed)
    selection = select_at_heads(model)
    # Activations of 8 bits are as coarse as bfloat16, whatever they are summed in.
    coarse = mx.bfloat16 if rounded else main_dtype(model)

    def probed() -> tuple[mx.Dtype | None, Findings, int]:
        kept = None if exact or not (fused or attends_natively(model)) else mx.float16
        return kept, *_probe(model, selection, kept, kernels, coarse, unlike=family.unmixed is None)

    kept, found, margin = probed()
    if found.wrong is not None:
        notes = [*notes, f"layers run by mlx-lm's own modules, slower: by ingot's own, {found.wrong}"]
        unlower(model)
        fused = False
        kept, found, margin = probed()
    if mutual and not found.mixed:
        raise ModelError("Its pictures' tokens see each other, which this model's attention cannot be told here.")
    if (stack := stack_of(model)) is not None:
        stack.make_ahead()
    return Adapter(
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
        (*notes, *remarks(model, selection, found, kernels, stack)),
        rounded,
        kernels,
        CompiledSteps(model) if found.mixed and compiles(device) and not _is_captured(model) else None,
        tower=tower,
        deep=deep,
        loras=Loras(model, device, main_dtype(model)),
    )


def _is_captured(model: Any) -> bool:
    """Whether its steps are graphs, of which MLX has nothing to compile."""
    stack = stack_of(model)
    return stack is not None and stack.refused is None


def _probe(
    model: Any,
    selection: Selection | None,
    kept: mx.Dtype | None,
    kernels: CheckedKernels | None,
    dtype: mx.Dtype,
    *,
    unlike: bool,
) -> tuple[Findings, int]:
    """What was found out, and the margin that the model's windows need."""
    doubts = Doubts(lambda: nudged(model, dtype), lambda: given_experts(model), partial(_original, model))

    def findings(margin: int) -> Findings:
        rows = partial(new_rows, model, margin, kept, kernels)
        return Probe(partial(run, model, selection), rows, dtype, unlike=unlike, doubts=doubts).run()

    found = findings(0)
    windows = [state for state in found.rows.states if isinstance(state, WindowState)]
    # PLaMo 3's masks show a token one more than its caches keep.
    margin = max((state.asked - state.window for state in windows), default=0)
    return (findings(margin) if margin else found), margin


def _original(model: Any, prompt: list[int]) -> mx.array:
    """Logits [1, vocab] of mlx-lm's own code, which runs over its own caches."""
    logits: mx.array = model(mx.array([prompt]), cache=caches.make_prompt_cache(model))[:, -1]
    mx.eval(logits)
    return logits


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "mlx-lm needs a package for it that is not installed"
    return str(error) or type(error).__name__
