"""Engines over tiny models that see, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.speculation.proposer import Proposer
from ingot.engine.vision_encoder import VisionEncoder, VisionEncoderRunner, VisionMemory
from ingot.kernels.device import Device
from ingot.media.items import MediaItem
from tests import engines

ROOMY = VisionMemory(1 << 26, 1 << 22)


def start_seeing(
    folder: Path,
    *,
    device: Device | None = None,
    memory: int = 1 << 29,
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
    """A running engine; `memory` is its whole budget in bytes. `headed`: its draft head proposes tokens;
    `specprefill` makes the scorer of prompts, `loras` are the folders of adapters."""

    settings = Settings(
        context=1024,
        prefill_chunk=widest,
        speculate="mtp" if headed else "off",
        speculate_tokens=3 if headed else None,
        kv_codec=str(live.name),
        lora_modules=tuple(f"{name}={path}" for name, path in (loras or {}).items()),
        max_loras=64,
        max_lora_rank=64,
    )

    def loaded() -> LoadedModel:
        made = engines.load(settings, folder, engines.tiny_tokenizer(), memory=memory, device=device)
        assert made.adapter.tower is not None
        return replace(
            made,
            card=replace(made.card, scorer="" if specprefill is None else specprefill.scorer.name),
            cache_bytes=cache_bytes,
            proposers=proposers,
            vision_encoder=VisionEncoder(made.adapter.tower, looking),
            specprefill=specprefill,
            disk=None if disk is None else engines.disk_backend(disk, {"model": folder.name}),
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
    looks = engine._workload._vision
    assert looks is not None
    return looks
