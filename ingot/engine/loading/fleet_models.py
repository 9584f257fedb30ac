"""A fleet's models as files and as engines: found, measured, loaded, unloaded. For threads other than the engine's.

Unloading drops every reference on the engine thread and clears MLX's cache, and the freed memory is measured there
before another workload has a turn. Nothing that a process keeps (compiled kernels, the driver) grows with the number of
loads; tokenizers have no word cache, because the library's is one for each thread and would outlive the model there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ingot.config import KINDS, ModelEntry, Settings, memory_bytes
from ingot.engine.engine import ModelEngine, release_unused_memory
from ingot.engine.loading.language_model import ALL_EXPERTS, EXPERT_SHARE, MemoryShare, start_engine
from ingot.engine.loop import Loop
from ingot.engine.memory_budget import REWIND_SHARE, TRANSIENT_SHARE
from ingot.engine.speculation.options import SpeculationOptions
from ingot.engine.vision_encoder import make_vision_memory
from ingot.errors import ModelError
from ingot.kernels.device import Device, active_memory
from ingot.models.experts.kept import KEPT
from ingot.models.files.gguf_files import weight_bytes, weight_files
from ingot.models.files.locate import CHAT_KIND, ModelFolder, locate_model, model_kind_in
from ingot.models.files.progress import Progress, no_progress
from ingot.process import find_malloc_trim
from ingot.quantities import format_bytes

if TYPE_CHECKING:
    from ingot.models.memory_needs import MemoryNeeds

log = logging.getLogger("ingot.fleet")

USUAL_CONTEXT: Final = 8192
"""Tokens of a sequence that a model has memory for, if it was made for so many, whatever else is short."""
KV_SHARE: Final = 8
"""Beyond those, a model that states no memory of its own has this part of the budget for sequences at most."""
LEAST_TRANSIENT_BYTES: Final = 64 << 20
"""Bytes for what forward passes hold."""
POOLING_KINDS: Final = ("embedding", "rerank")
BATCH_SHARE: Final = 8
"""Alongside the main model, a pooling model has this part of the budget for a batch at most, whatever it could use."""
WIDENED_ON_CPU: Final = 2
"""On a CPU, weights of 16 bits may become 32."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The files of a model and of those that help it, and its share of the memory."""

    folder: ModelFolder
    further: Mapping[str, ModelFolder]
    claim: int

    @property
    def weight_bytes(self) -> int:
        """Of all its files, which are read."""
        return max(1, sum(weight_bytes(folder.path) for folder in (self.folder, *self.further.values())))


class BlockingModelLoader:
    """`memory` are the bytes for all models. Where `entries` have one main model, it has all of them but those of the
    models alongside it."""

    def __init__(self, loop: Loop, device: Device, memory: int, entries: Sequence[ModelEntry] = ()) -> None:
        self._loop, self._device, self._memory = loop, device, memory
        self._alongside = [entry for entry in entries if entry.alongside]
        self._alongside_claims: dict[str, int] = {}
        self._has_main_model = len(entries) - len(self._alongside) == 1
        self._has_loaded = False
        self._trim = find_malloc_trim()
        self._loaded: dict[ModelEngine, int] = {}  # with their claims

    def find(self, entry: ModelEntry, progress: Progress = no_progress) -> FoundModel:
        folder, further = find_model_files(entry.settings, entry.kind, progress)
        if entry.kind == CHAT_KIND and (kind := model_kind_in(folder.path)) != CHAT_KIND:
            hint = "" if self._has_main_model else f': say kind = "{kind}" in its table'
            raise ModelError(f"its files are those of a model of kind {kind}{hint}")
        claim = self._claim(entry, [folder, *further.values()])
        if entry.alongside:
            self._alongside_claims[entry.kind] = claim
        return FoundModel(folder, further, claim)

    def _claim(self, entry: ModelEntry, folders: Sequence[ModelFolder]) -> int:
        """The bytes that the first folder's model, served with the others, is to have."""
        if self._has_main_model and not entry.alongside:
            reserved = self._reserved_bytes()
            if reserved >= self._memory:
                raise ModelError(
                    f"The models alongside take {format_bytes(reserved)}, and the memory budget is "
                    f"{format_bytes(self._memory)}. Raise --memory, or leave some of them out."
                )
            return self._memory - reserved
        if entry.settings.memory is not None:
            return memory_bytes(entry.settings.memory, self._device.memory)
        if entry.kind != CHAT_KIND:
            return self._claim_by_kind(entry, folders[0])
        from ingot.models.memory_needs import memory_needs

        needs = [self._loop.run(partial(memory_needs, folder.path, self._device)) for folder in folders]
        weights = sum(
            weight_bytes(folder.path) if need is None else need.weights
            for folder, need in zip(folders, needs, strict=True)
        )
        own = needs[0]
        if own is not None:
            weights -= own.experts - min(own.experts, self._expert_bytes(entry.settings.expert_memory, own))
        kv = self._memory // KV_SHARE if own is None else self._kv_bytes(own, entry.settings.context)
        aside = TRANSIENT_SHARE + REWIND_SHARE
        vision = self._vision_bytes(entry, folders[0], weights)
        wanted = weights + vision + LEAST_TRANSIENT_BYTES + int(kv / (1 - aside))
        return min(wanted, max(self._memory, weights))

    def _expert_bytes(self, stated: str, need: MemoryNeeds) -> int:
        """What the setting leaves a model's experts."""
        if stated == ALL_EXPERTS:
            return need.experts
        if stated == "auto":
            return int(max(0, self._memory - (need.weights - need.experts)) * EXPERT_SHARE)
        return memory_bytes(stated, self._memory)

    def _vision_bytes(self, entry: ModelEntry, folder: ModelFolder, weights: int) -> int:
        """As much as the model would have for vision if it were the only one."""
        if entry.settings.text_only:
            return 0
        from ingot.models.memory_needs import largest_media_needs

        largest = self._loop.run(partial(largest_media_needs, folder.path, self._device))
        return 0 if largest is None else make_vision_memory(largest, self._memory - weights).total

    def _claim_by_kind(self, entry: ModelEntry, folder: ModelFolder) -> int:
        needs = _load_reference("ingot.models", KINDS[entry.kind].needs)
        claim = int(self._loop.run(lambda: needs(folder.path, self._device))) + LEAST_TRANSIENT_BYTES
        if not entry.alongside or entry.kind not in POOLING_KINDS:
            return claim
        weights = weight_bytes(folder.path) * (WIDENED_ON_CPU if self._device.kind == "cpu" else 1)
        return min(claim, weights + LEAST_TRANSIENT_BYTES + self._memory // BATCH_SHARE)

    def _reserved_bytes(self) -> int:
        """What the models alongside the main one have."""
        for entry in self._alongside:
            if entry.kind not in self._alongside_claims:
                self.find(entry)
        return sum(self._alongside_claims.values())

    def _kv_bytes(self, need: MemoryNeeds, context: int | None) -> int:
        def kv_of(tokens: int) -> int:
            return need.at_full_context - need.per_token * (need.context - min(tokens, need.context))

        wanted = kv_of(context or need.context)
        return min(wanted, max(kv_of(USUAL_CONTEXT), self._memory // KV_SHARE))

    def load(self, entry: ModelEntry, found: FoundModel, report: Callable[[float], None]) -> ModelEngine:
        """`report` is called with the share that is done."""
        began = time.monotonic()
        if entry.settings.expert_memory == ALL_EXPERTS:
            prefetch_weights(found.folder.path)
        free = self._memory - sum(self._loaded.values()) - found.claim
        self._loop.run(lambda: KEPT.make_room(free, but=found.folder.path))
        # Before the first load there is nothing to release, and looking for it takes a tenth of a second.
        before = self._loop.run(release_unused_memory if self._has_loaded else active_memory)
        self._has_loaded = True
        size, reported = found.weight_bytes, 0.0

        def between() -> None:
            nonlocal reported
            share = min(1.0, (active_memory() - before) / size)
            if share > reported:  # what comes after the weights takes memory, too
                reported = share
                report(share)
            self._loop.run_other_workloads()

        engine = self._start(entry, found, between)
        self._loaded[engine] = found.claim
        if self._trim is not None:
            self._trim()  # a tokenizer of many words leaves holes in the heap of whichever thread made it
        took, weights = time.monotonic() - began, engine.card.weight_bytes / 1e9
        level = logging.DEBUG if entry.resident else logging.INFO  # of a resident one, the ready line tells
        log.log(level, "%s was loaded in %.1f s: %.3f GB of weights", entry.name, took, weights)
        for note in engine.card.notes:
            log.log(level, "%s: note: %s", entry.name, note)
        return engine

    def _start(self, entry: ModelEntry, found: FoundModel, between: Callable[[], None]) -> ModelEngine:
        if entry.kind != CHAT_KIND:
            start = _load_reference("ingot.engine.loading", KINDS[entry.kind].start)
            folder = replace(found.folder, name=entry.name)
            return cast("ModelEngine", start(entry.settings, folder, found.claim, self._loop, between))
        # Where ranks share the model, the budget is what they agree on.
        main = self._has_main_model
        seen_of = self._memory if entry.settings.memory is None else None
        return start_engine(
            entry.settings,
            found.folder.path,
            name=entry.name,
            source=found.folder.source,
            further=found.further,
            share=None if main else MemoryShare(found.claim, self._memory, seen_of),
            reserved=self._memory - found.claim if main else 0,
            loop=self._loop,
            between=between,
        )

    def unload(self, engine: ModelEngine) -> None:
        """Says in the log what came back, and warns where that is less than the weights were."""
        name, weights = engine.card.name, engine.card.weight_bytes
        began = time.monotonic()
        self._loaded.pop(engine, None)
        KEPT.room, kept = self._memory - sum(self._loaded.values()), KEPT.nbytes
        freed = engine.leave()
        kept = max(0, KEPT.nbytes - kept)
        if self._trim is not None:
            self._trim()
        level = logging.WARNING if freed + kept < 0.99 * weights else logging.INFO
        stays = f"; {kept / 1e9:.3f} GB of experts stay until something else needs the memory" if kept else ""
        log.log(
            level,
            "%s was unloaded in %.1f s: %.3f GB are free again, of which %.3f GB were its weights%s",
            *(name, time.monotonic() - began, freed / 1e9, (weights - kept) / 1e9, stays),
        )


def _load_reference(package: str, reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(f"{package}.{module}"), name))


def prefetch_weights(folder: Path) -> None:
    """Let the system begin to read the weights, while nobody waits for them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in weight_files(folder):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


READ_BY_ADAPTERS: Final = ("draft", "scorer")
"""Helper models that are loaded as the main one is: their weights may stay in a GGUF file."""


def find_model_files(
    settings: Settings, kind: str, progress: Progress = no_progress
) -> tuple[ModelFolder, dict[str, ModelFolder]]:
    """The files of a model, and of those that help it, by their role; fetched or converted where need be. Raises
    ModelError."""
    folder = locate_model(settings.model, settings, progress, in_place=kind == CHAT_KIND)
    if kind != CHAT_KIND:
        return folder, {}
    helpers: dict[str, str | None] = {
        **SpeculationOptions.parse(settings.speculate).models,
        "scorer": settings.specprefill_draft_model,
    }
    return folder, {
        role: locate_model(name, settings, progress, in_place=role in READ_BY_ADAPTERS)
        for role, name in helpers.items()
        if name is not None
    }
