"""From settings and a model folder to a running engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.files import FOLDER_MODE
from ingot.cache.disk.store import DiskLimits
from ingot.cache.footprint import Footprint
from ingot.config import Settings, memory_bytes
from ingot.engine.budget import Budget
from ingot.engine.encoder_request import Role
from ingot.engine.engine import Engine, Limits, Loaded
from ingot.engine.kv_events.publisher import Address, Publisher
from ingot.engine.loop import Loop, nothing
from ingot.engine.model_card import ModelCard
from ingot.engine.speculation.choice import Choice
from ingot.engine.start_draft import begin_draft, load_draft, sparse_offer
from ingot.engine.start_encoders import offer
from ingot.engine.start_hearing import NO_HEARING, offer_hearing
from ingot.engine.start_loras import begin_loras
from ingot.engine.start_proposers import offer_proposers
from ingot.engine.start_ranks import among_ranks, join_as_leader, load_leading, withheld
from ingot.engine.start_speaking import NO_SPEECH, offer_speech
from ingot.engine.start_vision import Vision
from ingot.engine.states_key import exact_key
from ingot.errors import ConfigError, ModelError
from ingot.kernels import device, fastblas, native
from ingot.kernels.gpu.launchers import compilation
from ingot.models import adapter as adapters
from ingot.models.adapter import Adapter
from ingot.models.files.locate import ModelFolder
from ingot.models.live_codec import with_live_codec
from ingot.models.pace import paced
from ingot.text.tokens.generation_config import generation_config
from ingot.text.tokens.tokenizer import Tokenizer
from ingot.upstream import load_config

GB = 1_000_000_000
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
    joined = join_as_leader(settings)
    share = share or MemoryShare.whole((device if joined is None else joined).memory_budget(here, settings.memory))
    total = share.own
    _refuse_what_cannot_fit(folder, total * settings.ranks)
    vision = Vision.of(folder, load_config(folder), settings)
    choice = Choice.parse(settings.speculate, settings.speculate_tokens)
    if joined is None:
        # An EAGLE draft reads hidden states between layers.
        apart = "eagle" in further
        adapter = adapters.load(
            folder, here, dtype=settings.dtype, widest=settings.prefill_chunk, apart=apart, sees=vision.sees
        )
    else:
        adapter = leading = load_leading(joined, settings, folder, here, total, sees=vision.sees)
        choice = among_ranks(choice, leading)
    guessing = offer_proposers(choice, folder, adapter, further, dtype=settings.dtype)
    reader = load_draft(settings, folder, adapter, further)
    adapter = with_live_codec(guessing.adapter, PairCodec(CodecName.parse(settings.kv_codec)))
    loras, lora_bytes = begin_loras(settings, adapter, name)
    weights = adapter.weight_bytes + lora_bytes + (0 if reader is None else reader.weight_bytes)
    offered = offer(encoders, settings, here, total - weights)
    ears, mouth = NO_HEARING, NO_SPEECH
    free = total - weights - offered.weights - offered.batch
    if hearing is not None:
        ears = offer_hearing(hearing, settings, here, free)
    if speaking is not None:
        mouth = offer_speech(speaking, free - ears.taken)
    context = _context(settings, adapter.context)
    eyes = vision.eyes(adapter.tower, total - weights)
    others = offered.weights + offered.batch + ears.taken + mouth.taken + (0 if eyes is None else eyes.memory.total)
    draft, taken = begin_draft(
        reader, adapter.footprint, total - weights - others, context=context, rows=settings.max_sequences
    )
    sparse = sparse_offer(settings, draft, tokenizer, further)
    budget = Budget(
        total,
        max(weights + others + taken, adapter.weight_bytes + withheld(adapter, total)),
        _with_what_is_taken_back(adapter.footprint) if guessing.names else adapter.footprint,
        context=context,
        widest=settings.prefill_chunk,
        rows=settings.max_sequences,
    )
    device.bound_memory(here, share.all, budget.transient)
    advice = _advice() if here.kind == "cpu" else ()
    notes = [*adapter.notes, *vision.notes, *guessing.notes, *offered.notes, *ears.notes, *mouth.notes, *advice]
    compiled = compilation(here)
    if compiled is not None and compiled.slower is not None:
        notes.append(compiled.slower)
    fitting = _fitting(budget, context, weights, notes)
    vision.refuse(eyes, budget.widest_launch(fitting))
    card = ModelCard(
        name=name,
        source=source,
        family=adapter.family,
        context=fitting,
        exact_context=budget.longest(fitting, exact=True) if adapter.live is not None else None,
        vocab=adapter.vocab,
        device=f"{here.name} ({here.kind})",
        dtype=adapter.dtype,
        weight_bytes=adapter.weight_bytes,
        memory_budget=total,
        max_sequences=settings.max_sequences,
        created=int(time.time()),
        notes=tuple(notes),
        recommended=generation_config(settings.generation_config, folder),
        quantization=adapter.formats.weights,
        formats=str(adapter.formats),
        proposers=guessing.names,
        kernels="" if compiled is None else str(compiled),
        sees=vision.shown,
        scorer="" if sparse is None else sparse.scorer.name,
    )
    cache_bytes = _cache_bytes(settings, budget)
    codec = _codec(settings, adapter)
    return Loaded(
        adapter,
        tokenizer,
        card,
        budget,
        cache_bytes,
        offered.encoders,
        folder,
        proposers=guessing.begin(draft),
        guessed_tokens=choice.tokens,
        processor=vision.processor,
        eyes=eyes,
        sparse=sparse,
        disk=None if settings.cache_dir is None else _disk(settings, settings.cache_dir, adapter, folder, codec),
        codec=codec,
        teller=_teller(settings),
        loras=loras,
        hearing=ears.offered,
        speaking=mouth.offered,
    )


def _teller(settings: Settings) -> Publisher | None:
    if settings.kv_events is None:
        return None
    return Publisher(Address(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic or ""))


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


def _codec(settings: Settings, adapter: Adapter) -> PairCodec:
    """What kept records are put into. Raises ConfigError where that would wreck the model."""
    codec = RecordCodec(CodecName.parse(settings.cache_codec))
    if codec.lossy and adapter.has_sinks:
        raise ConfigError(
            f"cache_codec {codec.name} cannot be used: this model's attention has sinks, which weigh keys against a "
            "fixed number, so that small errors in keys change what it attends to. Use cache_codec raw.",
            param="cache_codec",
        )
    return codec


def _disk(settings: Settings, where: Path, adapter: Adapter, folder: Path, codec: PairCodec) -> Disk:
    limits = DiskLimits(
        int(settings.cache_disk_gb * GB), int(settings.cache_disk_free_gb * GB), settings.cache_disk_sync
    )
    try:
        where.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        key = exact_key(adapter, folder, codec, where / "digests.json", deterministic=settings.deterministic)
        return Disk.open(where, key, limits)
    except OSError as error:
        raise ConfigError(f"cache_dir {where} cannot be used: {error.strerror}", param="cache_dir") from error


def _advice() -> list[str]:
    """What would make this machine faster."""
    return [advice for advice in (fastblas.advice(), native.advice()) if advice is not None]


def _context(settings: Settings, stated: int) -> int:
    if settings.context is None:
        return stated
    if settings.context > stated:
        raise ConfigError(f"context is {settings.context}, but the model was made for {stated} tokens", param="context")
    return settings.context


def _cache_bytes(settings: Settings, budget: Budget) -> int:
    if not settings.prefix_cache:
        return 0
    return memory_bytes(settings.cache_memory, budget.states) if settings.cache_memory else budget.states // 2


def _refuse_what_cannot_fit(folder: Path, total: int) -> None:
    size = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    if size > total:
        raise ModelError(
            f"The weights are {_gb(size)}, the memory budget is {_gb(total)}. "
            "Raise --memory, or choose a smaller or more strongly quantised model."
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
