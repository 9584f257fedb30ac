"""A loaded model behind one interface: tokens and the KV of running sequences in, logits out.

`load_model_adapter` loads everything that mlx-lm can load. The model's own code runs; modules that ingot computes
otherwise are swapped at load, and its caches are our per-layer KV states. A probe at load runs the model in every kind
of batch that it will see, so that what cannot work is reported then and not in the middle of an answer.

A `ModelAdapter` is immutable. Only the engine thread may call `run`. Loading raises ModelError.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from ingot.cache.pages import PAGE
from ingot.cache.record_encoding import RecordEncoding, record_encoding_for
from ingot.cache.records import RecordForm
from ingot.errors import ModelError
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import begin_mlx_compilation
from ingot.kernels.gpu.mlx_kernels import CompilationNeeds
from ingot.kernels.measured import COMPILED_STEPS, WHOLE_LAYERS, SlowerParts, slower_parts, steps_part
from ingot.models.checkpoint import evaluate_in_pieces, pause_loading
from ingot.models.draft_heads.checkpoint import model_classes_for
from ingot.models.experts.checked_once import CheckedOnce
from ingot.models.experts.loading import ExpertMemory, stream_experts
from ingot.models.experts.streaming import ExpertStore, StreamedExperts
from ingot.models.families import registry
from ingot.models.files.folder_checks import stated_context
from ingot.models.files.model_config import moved_weight_notes, older_config_names, weight_format
from ingot.models.forward import (
    STEP_TRIALS,
    CompiledSteps,
    attends_natively,
    can_compile_steps,
    growth_of_own_caches,
    has_own_caches,
    new_batch_state,
    run_forward,
)
from ingot.models.layers.decode_graph import DecodeGraphs, decode_graphs_of
from ingot.models.layers.gpu_linear import multiply_every_row, reserve_scratch
from ingot.models.layers.graph_layers import why_uncovered
from ingot.models.layers.layer_program import decoder_layers_of
from ingot.models.layers.lm_head import LogitsSelection, nudged_embeddings, select_at_lm_head
from ingot.models.layers.mlp import fixed_experts
from ingot.models.layers.modules import named_parameters
from ingot.models.layers.moe import use_fewer_experts
from ingot.models.layers.split_mixer import share_tokens
from ingot.models.layers.swapping import (
    allow_separate_layers,
    is_fused,
    restore_wrong_part,
    run_uncompiled,
    swap_modules,
    unknown_mixers,
)
from ingot.models.lora.loras import LoadedLoras
from ingot.models.parallelism import ModelSharding, shard_model
from ingot.models.precision import main_dtype, rounds_activations, settle_precision
from ingot.models.probe import Probe, ProbeFindings, ProbeVariants
from ingot.models.report import footprint_of, irreproducible_part, model_notes
from ingot.models.vision.loading import load_vision_tower
from ingot.models.vision.tower import DeepStack, VisionTower, VisualInputs, swap_deepstack_layers
from ingot.observe.logs import report_step
from ingot.quantities import format_bytes
from ingot.upstream import caches, load_config, load_model

log = logging.getLogger("ingot.models")


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """Number formats, by the names that people know."""

    weights: str  # in the model's files
    activations: str  # where they are multiplied by weights
    kv: str  # keys and values

    def __str__(self) -> str:
        return f"weights {self.weights}, activations {self.activations}, KV {self.kv}"


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
    mixed: bool  # parts of any kind may share one forward pass
    vocab: int
    notes: tuple[str, ...]
    rounded: bool = False  # activations are rounded to 8 bits where they are multiplied by quantised weights
    kernels: CheckedKernels | None = None  # of a GPU
    steps: CompiledSteps | None = None  # runs the model, where its steps can be compiled
    checked_once: CheckedOnce | None = None  # runs the model, where steps are likely to find all experts in memory
    live: PairCodec | None = None  # the codec of running sequences' keys and values before their tails, if any
    tower: VisionTower | None = None
    deepstack: DeepStack | None = None  # the layers behind which features of the tower are added
    deterministic: bool = False  # a token's bits are to depend on its row alone, where kernels can
    loras: LoadedLoras = field(kw_only=True)
    lossy: tuple[str, ...] = ()  # what was asked for that changes its answers
    head: Any = None  # its draft head, where it was loaded with one (`models/draft_heads`)
    experts: ExpertStore | None = None  # those that are read when they are needed

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def context(self) -> int:
        return stated_context(self.config)

    @property
    def weight_bytes(self) -> int:
        modules = (self.model,) if self.tower is None else (self.model, *self.tower.modules)
        own = sum(array.nbytes for module in modules for _, array in named_parameters(module))
        return own + (self.head.weight_bytes if self.head else 0)

    @cached_property
    def dtype(self) -> str:
        return str(main_dtype(self.model)).rsplit(".", 1)[-1]

    @property
    def graphs(self) -> int:
        """How many were captured so far: a step that has to capture one takes longer than the next ones like it."""
        stacks = [decode_graphs_of(each) for each in (self.model, self.head) if each is not None]
        return sum(each.graph_count for each in (*stacks, self.steps) if each is not None)

    @property
    def graph_tokens(self) -> float:
        """The most tokens of a step that is one graph: a larger step takes far longer. Infinite without graphs."""
        stack = _captured_graphs(self.model)
        return inf if stack is None else stack.most_tokens

    @property
    def irreproducible(self) -> str | None:
        """Which part of it may give a token other bits among other tokens, on a GPU; None where none does."""
        if self.device.kind == "cpu":
            return None
        if not self.deterministic:
            return "its prompts, without --deterministic"
        if not self.mixed:
            return "sequences, which this family's code computes one after another"
        if self.live is not None:
            return "keys and values, which are coded once there are more of them"
        return irreproducible_part(self.model)

    @property
    def is_whole(self) -> bool:
        """Whether all of the model and its KV are in this process."""
        return True

    @property
    def last_step(self) -> int:
        """The number of the last pass that was sent to other ranks; 0 where the model is all here."""
        return 0

    @property
    def ranks_trouble(self) -> str:
        """Why the other ranks cannot be reached any more; empty while they can."""
        return ""

    def close(self) -> None:
        """The last call: other ranks need not wait for passes any more, and no experts are read."""
        if self.experts is not None:
            self.experts.close()

    @property
    def separates_lora_rows(self) -> bool:
        """Whether rows with and without adapters take separate passes: the native operations for several modules at
        once, and the graphs that cannot have adapters, do not support them."""
        stack = _captured_graphs(self.model)
        return self.device.kind == "cpu" if stack is None else not stack.loras.are_possible

    @property
    def has_sinks(self) -> bool:
        """Whether attention has learned sinks, whatever its class calls them."""
        return any("sink" in name.rsplit(".", 1)[-1] for name, _ in named_parameters(self.model))

    @property
    def formats(self) -> NumberFormats:
        kv = self.dtype if self.kept is None else str(self.kept).rsplit(".", 1)[-1]
        return NumberFormats(
            weights=weight_format(self.config, self.dtype),
            activations="8-bit" if self.rounded else self.dtype,
            kv=kv if self.live is None else f"{self.live.name} behind the newest in {kv}",
        )

    def new_batch_state(self, most: int | None = None, earlier: int = REWIND_STATE_BYTES) -> BatchState:
        """KV states for this model, which allocate no more than `most` bytes ahead of need, and `earlier` bytes for
        recurrent states that rows may rewind to."""
        token_bytes = [size for _, size in self.footprint.groups]
        coding = (self.live, self.footprint.coded)
        return new_batch_state(
            self.model, self.margin, self.kept, self.kernels, most, token_bytes, self.head, earlier, *coding
        )

    def encoding(self, rows: BatchState, codec: PairCodec, form: RecordForm | None) -> RecordEncoding:
        """How records of these rows are encoded when they leave their pages; `form` is that of raw ones, which a lossy
        codec needs. Raises ConfigError where they cannot be."""
        return record_encoding_for(rows, codec, form)

    def allow_separate_layers(self) -> None:
        """From now on the layers' queries can be observed and their pages chosen (`AppendState.query_observer`,
        `choice`), also where layers are one operation otherwise."""
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
        the draft head takes them. With `visual` inputs, image features replace the embeddings of their tokens.
        Afterwards the rows are longer.

        Unless the adapter is `mixed`, there may be one part only; unless it is `ragged`, of one row.
        """
        if self.experts is not None:
            self.experts.trial.begin_pass(tokens.size)
        vision = None if visual is None or self.tower is None else (visual, self.deepstack, self.tower.stand_in)
        compute = partial(run_forward, mixed=self.mixed, vision=vision, lora_mapping=self.loras.mapping)
        if not hidden:
            checked = self.checked_once if vision is None else None
            return compute(checked or self.steps or self.model, self.selection, rows, tokens, parts, at)
        assert self.selection is not None, "a model without a known output head gives no hidden states"
        with self.selection.capturing_hidden():
            logits = compute(self.model, self.selection, rows, tokens, parts, at)
            states = self.selection.hidden
        assert states is not None, "no hidden states were captured"
        return logits, states.reshape(-1, states.shape[-1])


def load_model_adapter(
    folder: Path,
    device: Device,
    *,
    dtype: str | None = None,
    widest: int = 2048,
    apart: bool = False,
    with_vision: bool = False,
    sharing: ModelSharding | None = None,
    experts: int | None = None,
    deterministic: bool = False,
    expert_memory: ExpertMemory | None = None,
) -> ModelAdapter:
    """Load the model in `folder`. Raises ModelError with what is wrong with it.

    `apart`: no layers become one operation, so that hidden states between them can be captured. `with_vision`: its
    vision tower, which it must have, is loaded as well. With `sharing`, only this rank's share of it is loaded, and all
    ranks have to do the same at once. `experts`: how many a token has, if fewer than the model says; ConfigError
    where that cannot be. `deterministic`: on GPUs a token's bits depend on its row alone, where kernels can. With
    `expert_memory`, experts that do not fit are read when they are needed.
    """
    stored = dict[str, mx.array]()
    try:
        stated = load_config(folder)
        compilation = begin_mlx_compilation(device, CompilationNeeds.of(stated, dtype))
        whole = load_config(folder) if with_vision else {}
        classes = model_classes_for(folder, stated)
        model, config = load_model(
            folder, model_config=older_config_names(stated), get_model_classes=classes, stored=stored
        )
    except ModelError:
        raise
    # The code of a hundred families reads this folder and may trip over anything; one asks Python to exit.
    except (Exception, SystemExit) as error:
        raise ModelError(f"The model in {folder.name} cannot be loaded: {_error_text(error)}") from error
    lossy = () if experts is None else (use_fewer_experts(model, experts),)
    if sharing is not None:
        shard_model(model, config, sharing)
        apart = True  # ranks communicate between layers
    streamed = None if expert_memory is None else stream_experts(model, folder, stored, expert_memory, device)
    stored.clear()
    with _closing_on_failure(streamed):
        notes = _read_weights(model, config, folder, device, dtype)
        tower = load_vision_tower(folder, whole, device, dtype) if with_vision else None
        if compilation is not None:
            compilation.wait(pause_loading)
        exact = dtype is not None
        adapted = adapt_model(
            model,
            config,
            device,
            widest=widest,
            notes=notes,
            exact=exact,
            apart=apart,
            tower=tower,
            deterministic=deterministic,
        )
        adapted = replace(adapted, lossy=lossy, experts=streamed)
        if streamed is not None:  # which experts are in memory is decided between layers: steps are not compiled
            streamed.read_ahead = expert_memory is not None and expert_memory.read_ahead
            checked = CheckedOnce(model, streamed) if _captured_graphs(model) is None else None
            adapted = replace(adapted, steps=None, checked_once=checked)
            return replace(adapted, notes=(*adapted.notes, expected_speed(adapted, streamed)))
    if sharing is not None:
        return replace(adapted, steps=None)
    if can_compile_steps(device):
        rehearse_steps(adapted)
    return adapted


@contextmanager
def _closing_on_failure(experts: ExpertStore | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if experts is not None:
            experts.close()
        raise


def _read_weights(
    model: nn.Module, config: dict[str, Any], folder: Path, device: Device, dtype: str | None
) -> list[str]:
    """Put the model's weights into the device's formats, and read them; returns notes for users. Raises ModelError."""
    try:
        notes = [*moved_weight_notes(config), *settle_precision(model, device, dtype)]
        evaluate_in_pieces(array for _, array in named_parameters(model))
    except RuntimeError as error:  # a file that cannot be read any more, most likely
        raise ModelError(f"The weights in {folder.name} cannot be loaded: {_error_text(error)}") from error
    mx.clear_cache()  # of buffers that weights were read into before they were put in order
    model.eval()
    return notes


@contextmanager
def _logging_time(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    log.info("%s, in %.1f s", what, time.monotonic() - began)


def rehearse_steps(adapter: ModelAdapter) -> None:
    """Compute prompts and as many decode steps as it takes until they are compiled, so that no request waits for a
    compiler."""
    with _logging_time("prompts and decode steps were rehearsed"):
        for prompt, steps in ((PAGE, STEP_TRIALS + 3), (min(8 * PAGE, adapter.widest), 2)):
            rows = adapter.new_batch_state()
            row = rows.new()
            for width in (prompt, *[1] * steps):
                logits = adapter.run(rows, mx.ones(width, mx.uint32), [ForwardPart((row,), width)], [width - 1])
                mx.eval(logits, rows.pending())
            rows.leave(row)


def expected_speed(adapter: ModelAdapter, experts: ExpertStore) -> str:
    """What to expect of a model whose experts do not all fit: what a step takes when it reads nothing, and the drive's
    speed. At worst as many experts are found as fit in memory, at best half of the others, too: those that are used
    most are there, and some are read before they are needed."""
    rows = adapter.new_batch_state()
    row, fastest = rows.new(), inf
    for _ in range(4):  # of the same token, whose experts are there after the first
        began = time.monotonic()
        mx.eval(adapter.run(rows, mx.ones(1, mx.uint32), [ForwardPart((row,), 1)], [0]), rows.pending())
        fastest = min(fastest, time.monotonic() - began)
    rows.leave(row)
    fits = f"fits {100 * experts.share:.0f} % of the experts"
    speed = experts.drive_speed()
    if speed is None:
        return fits
    lacking, reading = 1 - experts.share, experts.token_bytes / speed
    rates = dict.fromkeys(_rate(1 / (fastest + part * reading)) for part in (lacking, lacking / 2))
    drive = f"a drive that reads {format_bytes(int(speed))}/s"
    later = "" if experts.files.passes_cache else ", and more once the system's memory has the files"
    return f"{fits}; expect {' to '.join(rates)} tok/s at one stream, from {drive}{later}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


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
    deterministic: bool = False,
) -> ModelAdapter:
    """Swap the modules of a model that is in memory, probe it, and describe it.

    `exact`: keys and values are stored in the format that they are computed in, also where kernels support a smaller
    one. `apart`, `deterministic`: see `load_model_adapter`. Raises ModelError if it cannot be run here.
    """
    family_name = str(config.get("model_type", "unknown"))
    family, rounded = registry.family_of_type(family_name), rounds_activations(model)
    if family.refused is not None:
        raise ModelError(f"Models of type {family.name} cannot be served: {family.refused}")
    slower = slower_parts(device)
    kernels = None if device.kind == "cpu" else CheckedKernels(device, slower)
    deepstack, uncovered = _swap_for_device(
        model, family_name, device, kernels, slower, tower, apart=apart, deterministic=deterministic
    )
    selection = select_at_lm_head(model)
    # Activations of 8 bits are as coarse as bfloat16, whatever they are summed in.
    coarse = mx.bfloat16 if rounded else main_dtype(model)

    def probed() -> tuple[mx.Dtype | None, ProbeFindings, int]:
        kept = None if exact or not (is_fused(model) or attends_natively(model)) else mx.float16
        unlike = family.unmixed is None or not unknown_mixers(model)
        return kept, *_probe_model(model, selection, kept, kernels, coarse, unlike=unlike)

    report_step("probing the model")
    with _logging_time("the model was probed"):
        kept, found, margin = probed()
    if found.wrong is not None:
        notes = [*notes, _restore(model, device, found.wrong, lambda: probed()[1].wrong is None)]
        kept, found, margin = probed()
    if tower is not None and tower.bidirectional and not found.mixed:
        raise ModelError("Its image tokens see each other, which this model's attention does not support here.")
    if (stack := decode_graphs_of(model)) is not None:
        stack.capture_ahead()
    growth = growth_of_own_caches(model, selection) if has_own_caches(found.rows) else None
    compiles = found.mixed and growth is None and can_compile_steps(device) and _captured_graphs(model) is None
    compiles = compiles and not slower.leave_out(steps_part(family_name, len(decoder_layers_of(model)), COMPILED_STEPS))
    adapted = ModelAdapter(
        model,
        config,
        device,
        selection,
        widest,
        margin,
        kept,
        footprint_of(model, config, found, device, kernels, fused=is_fused(model), growth=growth),
        found.ragged,
        found.mixed,
        found.vocab,
        tuple(dict.fromkeys([*notes, *model_notes(model, selection, found, kernels, stack, uncovered), *slower.notes])),
        rounded,
        kernels,
        # On CUDA, hybrids' compiled steps were never measured, nor whether batches then change a row's answers.
        CompiledSteps(model, with_recurrent=device.kind == "metal") if compiles else None,
        tower=tower,
        deepstack=deepstack,
        deterministic=deterministic,
        loras=LoadedLoras(model, device, main_dtype(model)),
    )
    if not deterministic or adapted.irreproducible is None:
        return adapted
    return replace(adapted, notes=(*adapted.notes, f"--deterministic does not hold for {adapted.irreproducible}"))


def _restore(model: nn.Module, device: Device, wrong: str, is_right: Callable[[], bool]) -> str:
    """Run the part that is wrong by the family's own modules; returns what is to be said of it."""
    part = restore_wrong_part(model, device, is_right)
    how = "one after another" if part == "layers" else "by the family's own modules"
    return f"{part or 'layers'} run {how}, slower: otherwise {wrong}"


def _swap_for_device(
    model: nn.Module,
    family_name: str,
    device: Device,
    kernels: CheckedKernels | None,
    slower: SlowerParts,
    tower: VisionTower | None,
    *,
    apart: bool,
    deterministic: bool,
) -> tuple[DeepStack | None, str | None]:
    """Returns what adds to the states between layers for images, and why decode graphs cannot have this model's layers,
    where they might."""
    axes, deepstack = (None, None) if tower is None else (tower.axes, swap_deepstack_layers(model, tower.deep))
    # Native layers that are one operation have positions of one axis and causal attention, and nothing can be added
    # between them.
    bidirectional = tower is not None and tower.bidirectional
    apart = apart or (device.kind == "cpu" and (axes is not None or deepstack is not None or bidirectional))
    layers = len(decoder_layers_of(model))
    if not apart and device.kind in WHOLE_LAYERS:
        apart = slower.leave_out(steps_part(family_name, layers, WHOLE_LAYERS[device.kind]))
    report_step("compiling and checking kernels" if kernels is not None else "swapping modules")
    with _logging_time("modules were swapped and their kernels checked"):
        swap_modules(model, device, kernels, apart=apart, axes=axes, slower=slower)
    run_uncompiled(model)
    if has_own_caches(new_batch_state(model, 0, None)):
        share_tokens(model)
    is_uncovered = device.kind == "cuda" and not apart and decode_graphs_of(model) is None
    stack = decode_graphs_of(model)
    if stack is not None and deterministic:
        stack.lost_bits = multiply_every_row(model)
        stack.computes_prompts = stack.lost_bits is None
    if kernels is not None and (stack is None or not stack.computes_prompts):
        reserve_scratch(model, kernels.packed)
    return deepstack, why_uncovered(model) if is_uncovered else None


def _captured_graphs(model: Any) -> DecodeGraphs | None:
    """The decode graphs of a model whose steps are graphs."""
    stack = decode_graphs_of(model)
    return None if stack is None or stack.refusal is not None else stack


def _probe_model(
    model: Any,
    selection: LogitsSelection | None,
    kept: mx.Dtype | None,
    kernels: CheckedKernels | None,
    dtype: mx.Dtype,
    *,
    unlike: bool,
) -> tuple[ProbeFindings, int]:
    """The findings, and the margin that the model's windows need. Where experts would have to be read, all tokens go to
    the same one."""
    is_streamed = any(isinstance(module, StreamedExperts) for module in model.modules())
    variants = ProbeVariants(
        lambda: nudged_embeddings(model, dtype),
        lambda: None if is_streamed else fixed_experts(model),
        partial(_mlx_lm_logits, model),
    )

    def findings(margin: int) -> ProbeFindings:
        rows = partial(new_batch_state, model, margin, kept, kernels)
        own_caches = has_own_caches(rows())
        probe = Probe(
            *(partial(run_forward, model, selection), rows, dtype),
            unlike=unlike,
            in_chunks=own_caches,
            variants=variants,
        )
        return probe.run()

    with (fixed_experts(model) if is_streamed else None) or nullcontext():
        found = findings(0)
        windows = [state for state in found.rows.states if isinstance(state, WindowState)]
        # PLaMo 3's masks show a token one more than its caches keep.
        margin = max((state.asked - state.window for state in windows), default=0)
        return (findings(margin) if margin else found), margin


def _mlx_lm_logits(model: Any, prompt: list[int]) -> mx.array:
    """Logits [1, vocab] of mlx-lm's own code, which runs over its own caches. Nothing is fused in it: for CUDA, MLX
    compiles each fused operation for seconds, and most of them are not needed again."""
    mx.disable_compile()
    try:
        logits: mx.array = model(mx.array([prompt]), cache=caches.make_prompt_cache(model))[:, -1]
        mx.eval(logits)
    finally:
        mx.enable_compile()
    return logits


def _error_text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "mlx-lm needs a package for it that is not installed"
    return str(error) or type(error).__name__
