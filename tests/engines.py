"""Engines for tests: the real one, over tiny models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.random_models import write_tokenizer
from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.record_file import FileSystem
from ingot.cache.disk.store import DiskLimits, RecordStore
from ingot.engine.admission import EngineLimits, ServedLoras
from ingot.engine.core import LoadedModel
from ingot.engine.engine import Engine
from ingot.engine.kv_events import KVEventSink
from ingot.engine.loop import Loop
from ingot.engine.memory_budget import REWIND_SHARE, TRANSIENT_SHARE, MemoryBudget
from ingot.engine.request import Ended, Event, ModelCard, Request, TextDelta
from ingot.engine.runner import Runner
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.speculation.proposer import Proposer
from ingot.kernels.device import Device
from ingot.models.adapter import ModelAdapter
from ingot.models.kv_codec import with_kv_codec
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import tiny
from tests.scripted import Wait

GPU = Device("cuda", "a CPU that follows a GPU's rules", 1 << 34)
"""Launches, pipelining and plain MLX operations as on a GPU, which is what the engine decides by the device's kind."""

DISK_LIMITS = DiskLimits(1 << 28, sync=False)
DISK_SECRET = b"ours"


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
    return int(states / (1 - aside)) + budget.footprint.scratch + 1000


def tiny_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), tiny.VOCAB)
        return Tokenizer.load(Path(folder))


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
    headed: Callable[[ModelAdapter], ModelAdapter] | None = None,
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
    """A running engine; `memory` are the bytes that states may take. `wait` is called before each launch, `headed`
    gives the model a head, `disk` is the folder that it keeps records in, if there is one; `codec` is what they are put
    into, `live` what running sequences have behind their tails, and `folder` has files that the model is known by;
    `specprefill` makes who scores long prompts, `kv_event_sink` is told what is kept, `loras` are the folders of
    adapters, and `loop` is one that it shares with other engines."""

    def load() -> LoadedModel:
        from ingot.kernels.cpu import native
        from ingot.kernels.device import current_device
        from ingot.models.adapter import adapt_model
        from ingot.models.precision import settle_precision

        native.use_one_path()  # without which equality holds but for the last bits
        model, here = tiny.build(kind), device or current_device()
        settle_precision(model, here, None)
        adapter = adapt_model(model, tiny.CONFIGS[kind], here, widest=widest, apart=headed is not None)
        if headed is not None:
            adapter = headed(adapter)
        adapter = with_kv_codec(adapter, live)
        if wait is not None:
            adapter = Held.of(adapter, wait)
        scoring = None if specprefill is None else specprefill()
        total = adapter.weight_bytes + (memory or 1 << 28)
        budget = MemoryBudget(total, adapter.weight_bytes, adapter.footprint, context=context, widest=widest, rows=32)
        card = ModelCard(
            name=f"tiny-{kind}",
            source="random weights",
            family=adapter.family,
            context=budget.longest(context),
            exact_context=budget.longest(context, exact=True),
            vocab=adapter.vocab,
            device="cpu",
            dtype=adapter.dtype,
            weight_bytes=adapter.weight_bytes,
            memory_budget=total,
            max_sequences=32,
            created=0,
            proposers=tuple(proposer.name for proposer in proposers),
            scorer="" if scoring is None else scoring.scorer.name,
        )
        named = None if loras is None else ServedLoras(adapter, most=64, most_rank=64)
        for lora, where in (loras or {}).items():
            assert named is not None
            named.load(lora, where)
        kept = (
            None
            if disk is None
            else DiskBackend.of(
                RecordStore(
                    disk,
                    {"model": kind, "device": here.kind, "codec": codec.described},
                    disk_limits,
                    DISK_SECRET,
                    files,
                )
            )
        )
        return LoadedModel(
            adapter,
            tokenizer,
            card,
            budget,
            cache_bytes,
            folder,
            codec=codec,
            proposers=proposers,
            fixed_draft_tokens=fixed_draft_tokens,
            disk=kept,
            specprefill=scoring,
            kv_event_sink=kv_event_sink,
            loras=named,
        )

    tokenizer = tiny_tokenizer()
    return Engine(load, limits or EngineLimits(), loop)


def runner_of(engine: Engine) -> Runner:
    """What the engine thread computes with, to look at while nothing runs."""
    return engine._generation._core.runner


def post(engine: Engine, letter: Callable[[], None]) -> None:
    """Have the engine thread read a letter on behalf of generation."""
    engine._loop.post(engine._generation, letter)


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
