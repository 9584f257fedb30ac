"""From settings and a model folder to the running engine of a model that generates.

`start_engine` reads the tokenizer and starts the engine; `load_language_model` runs on the engine thread, the only
one that may touch mlx, and loads the target model (or rank 0's share of it), its vision encoder, its LoRA
adapters, and where its prefixes are cached. Raises ModelError or ConfigError with what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.footprint import Footprint
from ingot.config import Settings, memory_bytes
from ingot.distributed.group import JoinedGroup, RankShare, join_group, rank_config_from_settings
from ingot.distributed.leader import LeaderAdapter, lead_group
from ingot.engine.admission import EngineLimits, ServedLoras
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.kv_events import open_kv_events
from ingot.engine.loading.draft_models import (
    ChosenProposers,
    choose_proposers,
    load_draft,
    make_draft_model,
    make_specprefill,
    with_drafter_role,
)
from ingot.engine.loop import Loop, do_nothing
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import ModelCard
from ingot.engine.speculation.options import PROPOSERS, SpeculationOptions
from ingot.engine.vision_encoder import VisionEncoder, make_vision_memory
from ingot.errors import AdapterError, ConfigError, ModelError
from ingot.kernels import device
from ingot.kernels.cpu import fastblas, native
from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import CompilationStats, compilation_stats
from ingot.media.image_processors import read_processor, states_vision
from ingot.media.layout import ImageLayoutOptions, MediaKind, MediaProcessor
from ingot.models import adapter as adapters
from ingot.models.adapter import ModelAdapter
from ingot.models.cache_key import open_disk_cache, weights_fingerprint
from ingot.models.checkpoint import loading_with_pauses
from ingot.models.draft_heads.loading import own_drafter, taps_layers
from ingot.models.experts.loading import ExpertMemory, has_experts
from ingot.models.files import packaged
from ingot.models.files.gguf_files import references_in, weight_bytes
from ingot.models.files.locate import ModelFolder
from ingot.models.kv_codec import with_kv_codec
from ingot.models.report import parts_without_fixed_order
from ingot.models.vision.loading import (
    LARGEST_IMAGE,
    has_vision_tower,
    largest_needs,
    require_vision,
    states_vision_tower,
    warm_up_vision_tower,
)
from ingot.models.vision.tower import VisionTower
from ingot.quantities import counted, format_bytes
from ingot.text.input_files import read_generation_config
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.upstream import load_config

SHORTEST_CONTEXT = 512
"""A model that cannot hold this many tokens in the budget is not worth loading."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Bytes that a model may have, and those that all models may have together. `vision` are those of which vision
    takes its part, where that is not the model's own share."""

    own: int
    all: int
    vision: int | None = None


def start_engine(
    settings: Settings,
    folder: Path,
    *,
    name: str,
    source: str,
    further: Mapping[str, ModelFolder] = MappingProxyType({}),
    share: MemoryShare | None = None,
    reserved: int = 0,
    loop: Loop | None = None,
    between: Callable[[], None] = do_nothing,
) -> Engine:
    """Load the model and start the engine thread. `further` models are those of proposers that are models (`draft` and
    `eagle`) and the one that scores long prompts (`scorer`). `share` is what it has of the memory; without it, it has
    the whole budget less the bytes `reserved` for models alongside. Among several models, `loop` is the thread of all
    of them, and `between` is called there after each piece of the load.

    Raises ModelError or ConfigError with what is wrong.
    """
    with ThreadPoolExecutor(1, "ingot-tokenizer") as beside:
        tokenizer = beside.submit(_read_tokenizer, settings, folder)

        def between_pieces() -> None:
            if tokenizer.done():
                tokenizer.result()  # what is wrong with it ends the load
            between()

        def loaded() -> LoadedModel:
            try:
                with loading_with_pauses(between_pieces):
                    named = ModelFolder(folder, name, source)
                    return load_language_model(settings, named, tokenizer.result, further, share, reserved)
            except ModelError:
                tokenizer.result()  # what is wrong with it comes first
                raise

        return Engine(partial(copy_context().run, loaded), EngineLimits.of(settings), loop)


def _read_tokenizer(settings: Settings, folder: Path) -> Tokenizer:
    template = settings.chat_template.expanduser().read_text() if settings.chat_template else None
    tokenizer = Tokenizer.load(folder, template)
    if tokenizer.template is not None:
        tokenizer.template.check()
    return tokenizer


def load_language_model(
    settings: Settings,
    named: ModelFolder,
    read_tokenizer: Callable[[], Tokenizer],
    others: Mapping[str, ModelFolder],
    share: MemoryShare | None = None,
    reserved: int = 0,
) -> LoadedModel:
    """Runs on the engine thread, the only one that may touch mlx. `others` are what `start_engine` calls further."""
    folder, further = named.path, with_drafter_role({name: found.path for name, found in others.items()})
    here = device.current_device()
    native.use_one_path(settings.deterministic)
    joined = join_as_leader(settings)
    if share is None:
        whole = (device if joined is None else joined).memory_budget(here, settings.memory)
        share = MemoryShare(whole - reserved, whole)
    total = share.own
    if settings.expert_memory == ALL_EXPERTS:
        _refuse_what_cannot_fit(folder, total * settings.ranks)
    vision = VisionSupport.of(folder, load_config(folder), settings)
    target = load_target(settings, named, further, here, joined, total, with_vision=vision.with_vision)
    adapter, weights = target.adapter, target.weights
    context = _wanted_context(settings, adapter.context)
    seen_of = total if share.vision is None else share.vision
    vision_encoder = vision.vision_encoder(adapter.tower, seen_of - weights)
    apart = 0 if vision_encoder is None else vision_encoder.memory.total
    draft, taken = make_draft_model(
        target.draft, adapter.footprint, total - weights - apart, context=context, rows=settings.max_sequences
    )
    tokenizer = read_tokenizer()
    specprefill = make_specprefill(settings, adapter, draft, tokenizer, further)
    budget = _make_budget(settings, target, total, weights + apart + taken, context)
    device.limit_memory(here, share.all, budget.transient)
    compiled = compilation_stats(here)
    notes = [*adapter.notes, *vision.notes, *target.chosen_proposers.notes, *_speed_advice(here, compiled)]
    fitting = _fitting_context(budget, context, weights, notes)
    vision.refuse(vision_encoder, budget.widest_pass(fitting))
    card = replace(
        _make_card(settings, named, target, budget, here, fitting),
        notes=tuple(notes),
        kernels="" if compiled is None else str(compiled),
        sees=vision.shown,
        scorer="" if specprefill is None else specprefill.scorer.name,
        specprefill_from=settings.specprefill_threshold if settings.specprefill == "auto" else None,
    )
    codec = prefix_cache_codec(settings, adapter)
    card = replace(card, weights=weights_fingerprint(folder), **_arithmetic_facts(settings, adapter, codec))
    return LoadedModel(
        adapter,
        tokenizer,
        card,
        budget,
        prefix_cache_bytes(settings, budget),
        folder,
        proposers=target.chosen_proposers.begin(draft),
        fixed_draft_tokens=target.fixed_draft_tokens,
        processor=vision.processor,
        vision_encoder=vision_encoder,
        specprefill=specprefill,
        disk=prefix_cache_disk(settings, adapter, folder, codec, joined),
        codec=codec,
        kv_event_sink=open_kv_events(settings),
        loras=target.loras,
    )


def _make_budget(settings: Settings, target: TargetModel, total: int, taken: int, context: int) -> MemoryBudget:
    """Of `total` bytes, `taken` are not for sequences."""
    adapter = target.adapter
    return MemoryBudget(
        total,
        max(taken, adapter.weight_bytes + withheld_bytes(adapter, total)),
        _with_rewind_states(adapter.footprint) if target.chosen_proposers.names else adapter.footprint,
        context=context,
        widest=settings.prefill_chunk,
        rows=settings.max_sequences,
    )


def _make_card(
    settings: Settings, named: ModelFolder, target: TargetModel, budget: MemoryBudget, here: device.Device, context: int
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
        recommended=read_generation_config(
            settings.generation_config, named.path, packaged.packaged_sampling(named.path)
        ),
        quantization=adapter.formats.weights,
        formats=str(adapter.formats),
        proposers=target.chosen_proposers.names,
        lossy=adapter.lossy,
    )


def _arithmetic_facts(settings: Settings, adapter: ModelAdapter, codec: PairCodec) -> dict[str, Any]:
    """The card's fields about bits."""
    here, exact = adapter.device.kind, settings.deterministic
    sets = native.arithmetic(deterministic=exact) if here == "cpu" else f"{here}, deterministic {exact}"
    live = "raw" if adapter.live is None else adapter.live.described
    # What computes images is not known to have a fixed order.
    sees = adapter.tower is not None
    if here != "cpu":
        varies = "" if exact and adapter.irreproducible is None and not sees else "device"
    elif not native.available() or sees or parts_without_fixed_order(adapter.model):
        varies = "kernels"
    else:
        varies = "amx" if native.has_wide() and not exact else ""
    return {
        "arithmetic": f"mlx {version('mlx')}, {sets}, live codec {live}, cache codec {codec.described}",
        "varies": varies,
        "lossy_kv": codec.lossy or adapter.live is not None,
    }


def _fitting_context(budget: MemoryBudget, context: int, weights: int, notes: list[str]) -> int:
    """The longest context that memory holds; a note says where it is cut. Raises ModelError if it is too short."""
    fitting = budget.longest(context)
    if fitting < min(SHORTEST_CONTEXT, context):
        raise ModelError(
            f"The weights take {format_bytes(weights)} of a memory budget of {format_bytes(budget.total)}; what is "
            f"left holds a sequence of {counted(fitting, 'token')}. Raise --memory or choose a smaller model."
        )
    if fitting < context:
        notes.append(
            f"context cut from {context} to {counted(fitting, 'token')}, which is what the memory budget holds"
        )
    return fitting


def _with_rewind_states(footprint: Footprint) -> Footprint:
    """Recurrent states are held twice while draft tokens are verified, so that they can go back."""
    return replace(footprint, recurrent=2 * footprint.recurrent)


def _speed_advice(here: device.Device, compiled: CompilationStats | None) -> list[str]:
    """What would make this machine faster."""
    on_cpus = (fastblas.advice(), native.advice()) if here.kind == "cpu" else ()
    slower = None if compiled is None else compiled.slower
    return [advice for advice in (*on_cpus, slower) if advice is not None]


def _wanted_context(settings: Settings, stated: int) -> int:
    if settings.context is None:
        return stated
    if settings.context > stated:
        raise ConfigError(f"context is {settings.context}, but the model was made for {stated} tokens", param="context")
    return settings.context


def _refuse_what_cannot_fit(folder: Path, total: int) -> None:
    size = weight_bytes(folder)
    if size <= total:
        return
    advice = "Raise --memory, or choose a smaller or more strongly quantised model."
    if has_experts(load_config(folder)) and references_in(folder) is None:
        advice = (
            "Serve it with --expert-memory auto, which reads experts from disk when they are needed, or raise --memory."
        )
    raise ModelError(f"The weights are {format_bytes(size)}, the memory budget is {format_bytes(total)}. {advice}")


ALL_EXPERTS: Final = "all"
EXPERT_SHARE: Final = 3 / 4
"""Of what a model's other weights leave, the part that is for experts if nothing says how much."""


def _expert_memory(settings: Settings, total: int) -> ExpertMemory | None:
    """None where all experts are in memory."""
    stated = settings.expert_memory
    if stated == ALL_EXPERTS:
        return None
    form = (settings.dtype, settings.deterministic)
    if stated == "auto":
        return ExpertMemory(lambda others, experts: int(max(0, total - others) * EXPERT_SHARE), form=form)
    amount = memory_bytes(stated, total)
    return ExpertMemory(lambda others, experts: amount, form=form)


@dataclass(frozen=True, slots=True)
class TargetModel:
    adapter: ModelAdapter  # with its draft head, and with the KV codec
    chosen_proposers: ChosenProposers
    fixed_draft_tokens: int | None
    draft: ModelAdapter | None  # the smaller model, which proposes and scores
    loras: ServedLoras | None
    lora_bytes: int  # that they take at most

    @property
    def weights(self) -> int:
        """Bytes of all that."""
        return self.adapter.weight_bytes + self.lora_bytes + (0 if self.draft is None else self.draft.weight_bytes)


def load_target(
    settings: Settings,
    folder: ModelFolder,
    further: Mapping[str, Path],
    here: Device,
    joined: JoinedGroup | None,
    total: int,
    *,
    with_vision: bool,
) -> TargetModel:
    """Of `joined` ranks, rank 0's share, which has `total` bytes. Raises ModelError or ConfigError."""
    plain, choice = _load_plain_model(settings, folder.path, further, here, joined, total, with_vision=with_vision)
    chosen_proposers = choose_proposers(choice, folder.path, plain, further, dtype=settings.dtype)
    draft = load_draft(settings, folder.path, plain, further)
    adapter = with_kv_codec(chosen_proposers.adapter, PairCodec(CodecName.parse(settings.kv_codec)))
    loras, lora_bytes = load_startup_loras(settings, adapter, folder.name)
    return TargetModel(adapter, chosen_proposers, choice.tokens, draft, loras, lora_bytes)


def _load_plain_model(
    settings: Settings,
    folder: Path,
    further: Mapping[str, Path],
    here: Device,
    joined: JoinedGroup | None,
    total: int,
    *,
    with_vision: bool,
) -> tuple[ModelAdapter, SpeculationOptions]:
    """The model by itself, and who may propose for it."""
    choice = SpeculationOptions.parse(settings.speculate, settings.speculate_tokens)
    if joined is not None:
        if settings.expert_memory != ALL_EXPERTS:
            raise ConfigError(
                "expert_memory: ranks have all experts in memory. Leave it out, or serve the model without ranks.",
                param="expert_memory",
            )
        if "drafter" in further:
            raise ConfigError(
                "speculate draft: this is a drafter, and ranks take a whole model or an EAGLE head. Leave it out."
            )
        leading = load_as_leader(joined, settings, folder, here, total, with_vision=with_vision)
        return leading, options_among_ranks(choice, leading)
    # Some drafters read hidden states between layers.
    drafter = further.get("drafter") or (own_drafter(folder) if choice.names is None or "mtp" in choice.names else None)
    apart = "eagle" in further or (drafter is not None and taps_layers(drafter))
    return (
        adapters.load_model_adapter(
            folder,
            here,
            dtype=settings.dtype,
            widest=settings.prefill_chunk,
            apart=apart,
            with_vision=with_vision,
            experts=settings.moe_top_k,
            deterministic=settings.deterministic,
            expert_memory=_expert_memory(settings, total),
        ),
        choice,
    )


HEAD_PROPOSERS: Final = ("mtp", "eagle")
TOKEN_PROPOSERS: Final = ("forced", "lookup")
"""Those that need tokens alone."""
RANKS_LOADING_S: Final = 3600.0
"""How long the others may take to load what they have of the model, once rank 0 has its own."""


def join_as_leader(settings: Settings) -> JoinedGroup | None:
    """None where the model runs in one process. Raises ConfigError."""
    where = rank_config_from_settings(settings)
    if where is None:
        return None
    if where.rank:
        raise ConfigError(f"Rank {where.rank} follows; only rank 0 starts an engine.")
    return join_group(settings, where)


def load_as_leader(
    joined: JoinedGroup, settings: Settings, folder: Path, here: Device, total: int, *, with_vision: bool
) -> LeaderAdapter:
    """Raises ModelError or ConfigError, or Unavailable where another rank is gone."""
    if with_vision:
        raise ModelError("Vision models are not run by several ranks: serve it with --text-only.")
    own = joined.load(folder, here, settings)
    kept = joined.record_form(own, settings)
    share = RankShare.of(own, total, {} if kept is None else kept.sizes)
    leading = lead_group(share, own, joined.links, joined.sharing.group, RANKS_LOADING_S)
    if kept is not None and not leading.whole.forgets:
        raise ConfigError(
            "cache_codec and cache_dir cannot be used: rank 0 has no layers of a kind that other ranks have, so that "
            "it cannot say what they have of a record. Leave them out, or use other ranks."
        )
    return leading


def withheld_bytes(adapter: ModelAdapter, total: int) -> int:
    """Of `total` bytes, what rank 0 leaves free as another rank has no more."""
    return max(0, total - adapter.weight_bytes - adapter.whole.spare) if isinstance(adapter, LeaderAdapter) else 0


def options_among_ranks(choice: SpeculationOptions, adapter: LeaderAdapter) -> SpeculationOptions:
    """Who may propose. Raises ConfigError where the settings ask for one that cannot."""
    if not adapter.whole.rewinds:
        return _without_proposers(
            choice,
            PROPOSERS,
            "rank 0 has none of the model's recurrent layers, so that it cannot say how far others go back. Use "
            "speculate off, or other ranks.",
        )
    if adapter.live is not None:
        return _without_proposers(
            choice,
            HEAD_PROPOSERS,
            "the KV of a draft head is not put into kv_codec where there are several ranks. Leave out one.",
        )
    return choice


def _without_proposers(choice: SpeculationOptions, refused: Sequence[str], reason: str) -> SpeculationOptions:
    asked = [name for name in choice.names or () if name in refused]
    if asked:
        raise ConfigError(f"speculate {asked[0]}: {reason}")
    plain = tuple(name for name in TOKEN_PROPOSERS if name not in refused)
    return replace(choice, names=plain) if choice.names is None else choice


REFUSED_FAMILIES = dict.fromkeys(
    ("phi4mm", "phi4_multimodal"),
    "Phi 4 multimodal is not served: it reads images and audio through adapters of its language model, for which "
    "mlx-lm has no class.",
)
"""By model_type, families that nothing can be done for."""


@dataclass(frozen=True, slots=True)
class VisionSupport:
    """`with_vision`: whether the vision tower is to be loaded. `processor` is there also where it is not, but could
    be."""

    processor: MediaProcessor | None
    with_vision: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, config: dict[str, Any], settings: Settings) -> VisionSupport:
        """As the model's files and the settings say. Raises ModelError."""
        if (refusal := REFUSED_FAMILIES.get(str(config.get("model_type")))) is not None:
            raise ModelError(refusal)
        if has_vision_tower(folder, config):
            if settings.text_only:
                return cls(
                    read_processor(folder),
                    with_vision=False,
                    notes=("text alone, as --text-only says: its vision tower is not loaded",),
                )
            require_vision()
            return cls(read_processor(folder), with_vision=True)
        notes = []
        if states_vision_tower(config):
            notes.append("text alone: the model's files hold no weights of its vision tower")
        elif states_vision(config):
            notes.append("text alone: its vision tower is of an unknown family")
        asked = [
            name for name, given in (("text-only", settings.text_only), ("media-hosts", settings.media_hosts)) if given
        ]
        notes += [f"--{name} changes nothing: there is no vision tower here" for name in asked]
        return cls(None, with_vision=False, notes=tuple(notes))

    @property
    def shown(self) -> tuple[MediaKind, ...]:
        """What it sees."""
        return tuple(self.processor.placeholders) if self.with_vision and self.processor is not None else ()

    def vision_encoder(self, tower: VisionTower | None, free: int) -> VisionEncoder | None:
        """`free` are the bytes that weights leave. The tower is run once, so that nothing is left to compile."""
        if tower is None or self.processor is None:
            return None
        warm_up_vision_tower(tower, self.processor)
        memory = make_vision_memory(largest_needs(tower, self.processor), free)
        return VisionEncoder(tower, memory, self.processor)

    def refuse(self, vision_encoder: VisionEncoder | None, widest: int) -> None:
        """Raises ConfigError where an image has more tokens than the `widest` forward pass, and all of them have to be
        computed at once."""
        if vision_encoder is None or self.processor is None or not vision_encoder.tower.bidirectional:
            return
        needed = self.processor.image_layout(LARGEST_IMAGE, ImageLayoutOptions()).mutual
        if needed > widest:
            raise ConfigError(
                f"an image of this model is {needed} tokens, which are computed at once, but memory and prefill_chunk "
                f"allow {widest}. Raise them, or serve it with --text-only.",
                param="prefill_chunk",
            )


def load_startup_loras(settings: Settings, model: ModelAdapter, name: str) -> tuple[ServedLoras | None, int]:
    """The LoRA adapters of a model that is called `name`, if there may be any, and the bytes that they take at most.
    Runs on the engine thread. Raises ConfigError or ModelError that names the adapter."""
    if not settings.loras and not settings.allow_runtime_lora_updating:
        return None, 0
    later = settings.allow_runtime_lora_updating
    room = model.loras.most_bytes(settings.max_loras, settings.max_lora_rank) if later else None
    made = ServedLoras(model, most=settings.max_loras, most_rank=settings.max_lora_rank, room=room)
    names = (name, *settings.served_model_name)
    for lora in settings.loras:
        if lora.name in names or (lora.base is not None and lora.base not in names):
            wrong = f"its name is a model's: {lora.name}" if lora.name in names else f"there is no model {lora.base!r}"
            raise ConfigError(f"adapter {lora.name}: {wrong}", param="lora_modules")
        try:
            made.load(lora.name, lora.path)
        except AdapterError as error:
            raise ModelError(f"The adapter {lora.name} cannot be served: {error.message}") from error
    return made, made.nbytes if room is None else room


def prefix_cache_bytes(settings: Settings, budget: MemoryBudget) -> int:
    """The most memory that they may take."""
    if not settings.prefix_cache:
        return 0
    return memory_bytes(settings.cache_memory, budget.states) if settings.cache_memory else budget.states // 2


def prefix_cache_codec(settings: Settings, adapter: ModelAdapter) -> PairCodec:
    """The codec of cached records. Raises ConfigError where that would wreck the model."""
    codec = RecordCodec(CodecName.parse(settings.cache_codec))
    if codec.lossy and adapter.has_sinks:
        raise ConfigError(
            f"cache_codec {codec.name} cannot be used: this model's attention has sinks, which weigh keys against a "
            "fixed number, so that small errors in keys change what it attends to. Use cache_codec raw.",
            param="cache_codec",
        )
    return codec


def prefix_cache_disk(
    settings: Settings, adapter: ModelAdapter, folder: Path, codec: PairCodec, joined: JoinedGroup | None
) -> DiskBackend | None:
    """None where prefixes are cached in memory alone. Raises ConfigError."""
    if not isinstance(adapter, LeaderAdapter) or joined is None:
        return open_disk_cache(settings, adapter, folder, codec)
    own = open_disk_cache(settings, adapter, folder, codec, joined.sharing.part)
    return None if own is None else adapter.leader_disk(own)
