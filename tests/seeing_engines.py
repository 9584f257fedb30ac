"""Engines over tiny models that see, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.store import RecordStore
from ingot.engine.admission import EngineLimits, ServedLoras
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import ModelCard, Request, Sampling, Stop
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.speculation.proposer import Proposer
from ingot.engine.vision_encoder import VisionEncoder, VisionEncoderRunner, VisionMemory
from ingot.kernels.device import Device, current_device
from ingot.media.image_processors import read_processor
from ingot.media.items import MediaItem
from ingot.models.adapter import load_model_adapter
from ingot.models.draft_heads.checkpoint import find_head
from ingot.models.draft_heads.mtp import load_mtp_head, with_draft_head
from ingot.models.kv_codec import with_kv_codec
from tests.engines import DISK_LIMITS, DISK_SECRET, tiny_tokenizer

ROOMY = VisionMemory(1 << 26, 1 << 22)


def start_seeing(
    folder: Path,
    *,
    device: Device | None = None,
    memory: int = 1 << 28,
    cache_bytes: int = 0,
    looking: VisionMemory = ROOMY,
    limits: EngineLimits | None = None,
    proposers: tuple[Proposer, ...] = (),
    widest: int = 64,
    disk: Path | None = None,
    headed: bool = False,
    live: PairCodec = RAW_CODEC,
    specprefill: SpecPrefillSetup | None = None,
    loras: Mapping[str, Path] | None = None,
) -> Engine:
    """A running engine; `memory` is the size of the KV cache in bytes. `headed`: its draft head proposes tokens;
    `specprefill` makes the scorer of prompts, `loras` are the folders of adapters."""

    def loaded() -> LoadedModel:
        from ingot.kernels.cpu import native

        native.use_one_path()
        adapter = load_model_adapter(folder, device or current_device(), widest=widest, with_vision=True)
        assert adapter.tower is not None
        if headed:
            source = find_head(folder, adapter.config)
            assert source is not None
            adapter = with_draft_head(adapter, load_mtp_head(source, adapter))
        adapter = with_kv_codec(adapter, live)
        named = None if loras is None else ServedLoras(adapter, most=64, most_rank=64)
        for name, where in (loras or {}).items():
            assert named is not None
            named.load(name, where)
        total = adapter.weight_bytes + memory
        budget = MemoryBudget(total, adapter.weight_bytes, adapter.footprint, context=1024, widest=widest, rows=32)
        card = ModelCard(
            name="tiny",
            source="random weights",
            family=adapter.family,
            context=budget.longest(1024),
            vocab=adapter.vocab,
            device="cpu",
            dtype=adapter.dtype,
            weight_bytes=adapter.weight_bytes,
            memory_budget=total,
            max_sequences=32,
            created=0,
            scorer="" if specprefill is None else specprefill.scorer.name,
        )
        return LoadedModel(
            adapter,
            tiny_tokenizer(),
            card,
            budget,
            cache_bytes,
            proposers=proposers,
            fixed_draft_tokens=3 if headed else None,
            processor=read_processor(folder),
            vision_encoder=VisionEncoder(adapter.tower, looking),
            specprefill=specprefill,
            loras=named,
            disk=None
            if disk is None
            else DiskBackend.of(RecordStore(disk, {"model": folder.name}, DISK_LIMITS, DISK_SECRET)),
        )

    return Engine(loaded, limits or EngineLimits(target_itl_ms=5.0))


def asked(name: str, tokens: list[int], items: list[MediaItem], count: int = 6, **options: object) -> Request:
    return Request(
        name,
        (tuple(tokens),),
        max_tokens=count,
        sampling=Sampling(temperature=0.0),
        stop=Stop(ignore_eos=True),
        media=(tuple(items),) if items else (),
        **options,  # type: ignore[arg-type]
    )


def looks_of(engine: Engine) -> VisionEncoderRunner:
    looks = engine._generation._vision
    assert looks is not None
    return looks
