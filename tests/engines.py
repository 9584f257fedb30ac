"""Engines for tests: the real one, over tiny models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.random_models import write_model
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.record_file import FileSystem
from ingot.cache.disk.store import DiskLimits, RecordStore
from ingot.config import Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.kv_events import KVEventSink
from ingot.engine.loading import draft_models
from ingot.engine.loading.language_model import MemoryShare, load_language_model
from ingot.engine.loop import Loop
from ingot.engine.memory_budget import REWIND_SHARE, TRANSIENT_SHARE
from ingot.engine.request import Ended, Event, Request, TextDelta
from ingot.engine.runner import Runner
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.speculation.proposer import Proposer
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import ModelAdapter
from ingot.models.files.locate import ModelFolder
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import tiny
from tests.scripted import Wait

GPU = Device("cuda", "a CPU that follows a GPU's rules", 1 << 34)
"""Launches, pipelining and plain MLX operations as on a GPU, which is what the engine decides by the device's kind."""

DISK_LIMITS = DiskLimits(1 << 28, sync=False)
DISK_SECRET = b"ours"
ALL_MODELS = 1 << 34
"""Bytes that MLX may take in a process of tests."""
_folders = tempfile.TemporaryDirectory(prefix="tiny-models-")


class Held(ModelAdapter):
    """Waits before it runs."""

    @classmethod
    def of(cls, adapter: ModelAdapter, wait: Wait) -> Held:
        known = {each.name: getattr(adapter, each.name) for each in fields(ModelAdapter)}
        return cls(**known | {"config": {**adapter.config, "wait": wait}})

    def run(self, rows: Any, tokens: Any, parts: Any, at: Any = None, **asked: Any) -> Any:
        self.config["wait"](tokens.size)
        return super().run(rows, tokens, parts, at, **asked)


def tight_memory(engine: Engine, *, rows: int, tokens: int) -> int:
    """What `start` must be given for so many sequences of so many tokens, and no more."""
    budget = engine._loaded.budget
    states = rows * budget.row_bytes(tokens) + budget.slot_bytes(rows)
    aside = TRANSIENT_SHARE + (REWIND_SHARE if budget.earlier else 0)
    return budget.weights + int(states / (1 - aside)) + budget.footprint.scratch + 1000


@cache
def tiny_folder(kind: str) -> Path:
    """The files of a tiny model."""
    return write_tiny(kind, tiny.CONFIGS[kind], tiny.build(kind))


def write_tiny(name: str, config: dict[str, Any], model: Any) -> Path:
    """The folder is removed when the process ends."""
    return write_model(Path(_folders.name) / name, config, model)


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.load(tiny_folder("llama"))


@contextmanager
def acting_as(kind: str) -> Iterator[None]:
    """What is loaded inside follows the rules of this kind of device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("INGOT_AS", raising=False)
        if (actual := current_device().kind) != kind:
            if actual != "cpu":
                pytest.skip("this machine has another GPU")
            patch.setenv("INGOT_AS", kind)
        yield


def disk_backend(
    folder: Path, key: dict[str, str], limits: DiskLimits = DISK_LIMITS, files: FileSystem | None = None
) -> DiskBackend:
    return DiskBackend.of(RecordStore(folder, key, limits, DISK_SECRET, files))


def load(
    settings: Settings,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    memory: int | None = None,
    device: Device | None = None,
    further: Mapping[str, Path] | None = None,
    name: str = "tiny",
) -> LoadedModel:
    """What a server loads with these settings, each token computed in one way on CPUs; `memory` is its whole budget. A
    draft head may have random weights, and predict nothing."""
    if device is None or device.kind == "cpu":
        settings = replace(settings, deterministic=True)
    others = {role: ModelFolder(path, role, "random weights") for role, path in (further or {}).items()}
    share = MemoryShare(memory or 1 << 29, ALL_MODELS)
    rules = nullcontext() if device is None else acting_as(device.kind)
    with rules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_models, "check_draft_head", lambda head, adapter: None)
        return load_language_model(
            settings, ModelFolder(folder, name, "random weights"), lambda: tokenizer, others, share
        )


def start(
    kind: str,
    *,
    memory: int | None = None,
    context: int = 2048,
    widest: int = 256,
    limits: EngineLimits | None = None,
    cache_bytes: int = 0,
    device: Device | None = None,
    wait: Wait | None = None,
    proposers: Sequence[Proposer] = (),
    fixed_draft_tokens: int | None = None,
    eagle: Path | None = None,
    drafter: Path | None = None,
    disk: Path | None = None,
    disk_limits: DiskLimits = DISK_LIMITS,
    files: FileSystem | None = None,
    codec: PairCodec = RAW_CODEC,
    live: PairCodec = RAW_CODEC,
    folder: Path | None = None,
    specprefill: Callable[[], SpecPrefillSetup] | None = None,
    kv_event_sink: KVEventSink | None = None,
    loras: Mapping[str, Path] | None = None,
    loop: Loop | None = None,
) -> Engine:
    """A running engine; `memory` are the bytes of weights and states. `wait` is called before each launch, `eagle`
    or `drafter` is the folder of its draft head, `disk` the one that it keeps records in, if there is one; `codec` is
    what they are put into, `live` what running sequences have behind their tails, and `folder` has files that the model
    is known by; `specprefill` makes who scores long prompts, `kv_event_sink` is told what is kept, `loras` are the
    folders of adapters, and `loop` is one that it shares with other engines."""
    stated = tiny.CONFIGS[kind] | tiny.CONFIGS[kind].get("text_config", {})
    helpers = {role: path for role, path in (("eagle", eagle), ("draft", drafter)) if path is not None}
    settings = Settings(
        context=min(context, stated.get("max_position_embeddings", context)),
        prefill_chunk=widest,
        speculate=",".join(f"{role}:{path}" for role, path in helpers.items()) or "off",
        kv_codec=str(live.name),
        lora_modules=tuple(f"{name}={path}" for name, path in (loras or {}).items()),
        max_loras=64,
        max_lora_rank=64,
        expert_memory=tiny.EXPERT_MEMORY.get(kind, "all"),
    )

    def loaded() -> LoadedModel:
        made = load(
            settings,
            tiny_folder(kind),
            tokenizer,
            memory=memory,
            device=device,
            further=helpers,
            name=f"tiny-{kind}",
        )
        scoring = None if specprefill is None else specprefill()
        key = {"model": kind, "device": made.adapter.device.kind, "codec": codec.described}
        named = tuple(proposer.name for proposer in proposers) or made.card.proposers
        return replace(
            made,
            adapter=made.adapter if wait is None else Held.of(made.adapter, wait),
            card=replace(made.card, proposers=named, scorer="" if scoring is None else scoring.scorer.name),
            cache_bytes=cache_bytes,
            folder=folder or made.folder,
            proposers=proposers,
            fixed_draft_tokens=fixed_draft_tokens,
            codec=codec,
            disk=None if disk is None else disk_backend(disk, key, disk_limits, files),
            specprefill=scoring,
            kv_event_sink=kv_event_sink,
        )

    tokenizer = tiny_tokenizer()
    return Engine(loaded, limits or EngineLimits(), loop)


def runner_of(engine: Engine) -> Runner:
    """What the engine thread computes with, to look at while nothing runs."""
    return engine._workload._core.runner


def post(engine: Engine, letter: Callable[[], None]) -> None:
    """Have the engine thread read a letter on behalf of generation."""
    engine._loop.post(engine._workload, letter)


def answer(engine: Engine, request: Request) -> list[Event]:
    """All events of a request, run to its end."""
    return [event for batch in engine.generate(request) for event in batch]


def preempted(engine: Engine, requests: Sequence[Request]) -> tuple[list[str], int]:
    """Answers to all of them at once, and how many preemptions were seen meanwhile."""
    streams = [engine.generate(request) for request in requests]
    seen, texts = 0, []
    for stream in streams:
        events: list[Event] = []
        for batch in stream:
            seen = max(seen, sum(status.preemptions for status in engine.status()))
            events += batch
        texts.append(text_of(events))
    return texts, seen


def text_of(events: list[Event], index: int = 0) -> str:
    assert isinstance(events[-1], Ended), events[-1]
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.index == index)
