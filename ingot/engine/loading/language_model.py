"""From settings and a model folder to a running engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.cache.footprint import Footprint
from ingot.config import Settings
from ingot.engine.admission import Limits
from ingot.engine.encoder_request import Role
from ingot.engine.engine import Engine
from ingot.engine.loaded import Loaded
from ingot.engine.loading.draft_models import begin_draft, sparse_offer
from ingot.engine.loop import Loop, nothing
from ingot.engine.memory_budget import Budget
from ingot.engine.model_card import ModelCard
from ingot.engine.start_beside import offer_beside
from ingot.engine.start_prefixes import prefix_bytes, prefix_codec, prefix_disk, prefix_teller
from ingot.engine.start_ranks import join_as_leader, withheld
from ingot.engine.start_target import Target, load_target
from ingot.engine.start_vision import Vision
from ingot.errors import ConfigError, ModelError
from ingot.kernels import device, native
from ingot.kernels.cpu import fastblas
from ingot.kernels.gpu.launcher import Compilation
from ingot.kernels.gpu.launchers import compilation
from ingot.models.files import packaged
from ingot.models.files.gguf_files import weight_bytes
from ingot.models.files.locate import ModelFolder
from ingot.models.pace import paced
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokens.generation_config import generation_config
from ingot.upstream import load_config

SHORTEST_CONTEXT = 512
"""A model that cannot hold this many tokens in the budget is not worth loading."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Bytes that a model may have, and those that all models may have together."""

    own: int
    all: int

    @classmethod
    def whole(cls, budget: int) -> MemoryShare:
        return cls(budget, budget)


def start_engine(
    settings: Settings,
    folder: Path,
    *,
    name: str,
    source: str,
    encoders: Mapping[Role, ModelFolder] | None = None,
    draft: ModelFolder | None = None,
    eagle: ModelFolder | None = None,
    scorer: ModelFolder | None = None,
    hearing: ModelFolder | None = None,
    speaking: ModelFolder | None = None,
    share: MemoryShare | None = None,
    loop: Loop | None = None,
    between: Callable[[], None] = nothing,
) -> Engine:
    """Load the model and start the engine thread. `draft` and `eagle` are the models of proposers that are models,
    `scorer` is the one that scores long prompts, `hearing` the one that writes down what is spoken, `speaking` the one
    that speaks. Among several models, `share` is what it has of the memory, `loop` is the thread of all of them, and
    `between` is called there after each piece of the load.

    Raises ModelError or ConfigError with what is wrong.
    """
    template = settings.chat_template.expanduser().read_text() if settings.chat_template else None
    tokenizer = Tokenizer.load(folder, template)
    if tokenizer.template is not None:
        tokenizer.template.check()
    limits = Limits(settings.max_sequences, settings.max_queue, settings.target_itl_ms)
    named = {"draft": draft, "eagle": eagle, "scorer": scorer}
    models = {name: found.path for name, found in named.items() if found is not None}

    def loaded() -> Loaded:
        with paced(between):
            return load(
                settings,
                folder,
                tokenizer,
                encoders or {},
                models,
                hearing,
                speaking,
                name=name,
                source=source,
                share=share,
            )

    return Engine(loaded, limits, loop)


def load(
    settings: Settings,
    folder: Path,
    tokenizer: Tokenizer,
    encoders: Mapping[Role, ModelFolder],
    further: Mapping[str, Path],
    hearing: ModelFolder | None = None,
    speaking: ModelFolder | None = None,
    *,
    name: str,
    source: str,
    share: MemoryShare | None = None,
) -> Loaded:
    """Runs on the engine thread, the only one that may touch mlx. `further` models are those of proposers, by name, and
    the `scorer`."""
    here = device.current()
    native.use_one_path(settings.deterministic)
    joined, named = join_as_leader(settings), ModelFolder(folder, name, source)
    share = share or MemoryShare.whole((device if joined is None else joined).memory_budget(here, settings.memory))
    total = share.own
    _refuse_what_cannot_fit(folder, total * settings.ranks)
    vision = Vision.of(folder, load_config(folder), settings)
    target = load_target(settings, named, further, here, joined, total, sees=vision.sees)
    adapter, weights = target.adapter, target.weights
    beside = offer_beside(encoders, hearing, speaking, settings, here, total - weights)
    context = _context(settings, adapter.context)
    eyes = vision.eyes(adapter.tower, total - weights)
    others = beside.taken + (0 if eyes is None else eyes.memory.total)
    draft, taken = begin_draft(
        target.draft, adapter.footprint, total - weights - others, context=context, rows=settings.max_sequences
    )
    sparse = sparse_offer(settings, draft, tokenizer, further)
    budget = _budget(settings, target, total, weights + others + taken, context)
    device.bound_memory(here, share.all, budget.transient)
    compiled = compilation(here)
    notes = [*adapter.notes, *vision.notes, *target.guessing.notes, *beside.notes, *_advice(here, compiled)]
    fitting = _fitting(budget, context, weights, notes)
    vision.refuse(eyes, budget.widest_launch(fitting))
    card = replace(
        _card(settings, named, target, budget, here, fitting),
        notes=tuple(notes),
        kernels="" if compiled is None else str(compiled),
        sees=vision.shown,
        scorer="" if sparse is None else sparse.scorer.name,
    )
    codec = prefix_codec(settings, adapter)
    return Loaded(
        adapter,
        tokenizer,
        card,
        budget,
        prefix_bytes(settings, budget),
        beside.encoders.encoders,
        folder,
        proposers=target.guessing.begin(draft),
        guessed_tokens=target.guessed_tokens,
        processor=vision.processor,
        eyes=eyes,
        sparse=sparse,
        disk=prefix_disk(settings, adapter, folder, codec, joined),
        codec=codec,
        teller=prefix_teller(settings),
        loras=target.loras,
        hearing=beside.hearing.offered,
        speaking=beside.speaking.offered,
    )


def _budget(settings: Settings, target: Target, total: int, taken: int, context: int) -> Budget:
    """Of `total` bytes, `taken` are not for sequences."""
    adapter = target.adapter
    return Budget(
        total,
        max(taken, adapter.weight_bytes + withheld(adapter, total)),
        _with_what_is_taken_back(adapter.footprint) if target.guessing.names else adapter.footprint,
        context=context,
        widest=settings.prefill_chunk,
        rows=settings.max_sequences,
    )


def _card(
    settings: Settings, named: ModelFolder, target: Target, budget: Budget, here: device.Device, context: int
) -> ModelCard:
    """What is known of the model by itself."""
    adapter = target.adapter
    return ModelCard(
        name=named.name,
        source=named.source,
        family=adapter.family,
        context=context,
        exact_context=budget.longest(context, exact=True) if adapter.live is not None else None,
        vocab=adapter.vocab,
        device=f"{here.name} ({here.kind})",
        dtype=adapter.dtype,
        weight_bytes=adapter.weight_bytes,
        memory_budget=budget.total,
        max_sequences=settings.max_sequences,
        created=int(time.time()),
        recommended=generation_config(settings.generation_config, named.path, packaged.sampling_of(named.path)),
        quantization=adapter.formats.weights,
        formats=str(adapter.formats),
        proposers=target.guessing.names,
    )


def _fitting(budget: Budget, context: int, weights: int, notes: list[str]) -> int:
    """The longest context that memory holds; a note says where it is cut. Raises ModelError if it is too short."""
    fitting = budget.longest(context)
    if fitting < min(SHORTEST_CONTEXT, context):
        raise ModelError(
            f"The weights take {_gb(weights)} of a memory budget of {_gb(budget.total)}; what is left holds a sequence "
            f"of {fitting} tokens. Raise --memory or choose a smaller model."
        )
    if fitting < context:
        notes.append(f"context cut from {context} to {fitting} tokens, which is what the memory budget holds")
    return fitting


def _with_what_is_taken_back(footprint: Footprint) -> Footprint:
    """Recurrent states are held twice while guesses are verified, so that they can go back."""
    return replace(footprint, recurrent=2 * footprint.recurrent)


def _advice(here: device.Device, compiled: Compilation | None) -> list[str]:
    """What would make this machine faster."""
    on_cpus = (fastblas.advice(), native.advice()) if here.kind == "cpu" else ()
    slower = None if compiled is None else compiled.slower
    return [advice for advice in (*on_cpus, slower) if advice is not None]


def _context(settings: Settings, stated: int) -> int:
    if settings.context is None:
        return stated
    if settings.context > stated:
        raise ConfigError(f"context is {settings.context}, but the model was made for {stated} tokens", param="context")
    return settings.context


def _refuse_what_cannot_fit(folder: Path, total: int) -> None:
    size = weight_bytes(folder)
    if size > total:
        raise ModelError(
            f"The weights are {_gb(size)}, the memory budget is {_gb(total)}. "
            "Raise --memory, or choose a smaller or more strongly quantised model."
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
