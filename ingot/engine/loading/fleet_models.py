"""A fleet's models as files and as engines: found, measured, loaded, unloaded. For threads other than the engine's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from ingot.config import KINDS, ModelEntry, Settings, memory_bytes
from ingot.engine.engine import ModelEngine
from ingot.engine.loading.language_model import MemoryShare, start_engine
from ingot.engine.loading.model_files import find_model_files
from ingot.engine.loading.pooling_and_speech import start_side_engine
from ingot.engine.loop import Loop
from ingot.engine.memory_budget import REWIND_SHARE, TRANSIENT_SHARE
from ingot.errors import ModelError
from ingot.kernels.device import Device, active_memory
from ingot.kernels.memory import release_unused_memory
from ingot.models.files.gguf_files import weight_bytes, weight_files
from ingot.models.files.locate import CHAT_KIND, ModelFolder, model_kind_in
from ingot.models.memory_needs import MemoryNeeds, memory_needs
from ingot.process import find_malloc_trim

log = logging.getLogger("ingot.fleet")

USUAL_CONTEXT: Final = 8192
"""Tokens of a sequence that a model has memory for, if it was made for so many, whatever else is short."""
KV_SHARE: Final = 8
"""Beyond those, a model that states no memory of its own has this part of the budget for sequences at most."""
LEAST_TRANSIENT_BYTES: Final = 64 << 20
"""Bytes for what forward passes hold."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The files of a model and of those that serve it, and what it is to have of the memory."""

    folder: ModelFolder
    further: Mapping[str, ModelFolder]
    claim: int


class BlockingModelLoader:
    """`memory` are the bytes for all models; `alone`: there is one, which has them all."""

    def __init__(self, loop: Loop, device: Device, memory: int, *, alone: bool) -> None:
        self._loop, self._device, self._memory, self._alone = loop, device, memory, alone
        self._trim = find_malloc_trim()

    def find(self, entry: ModelEntry) -> FoundModel:
        folder, further = find_model_files(entry.settings, entry.kind)
        if entry.kind != CHAT_KIND:
            return FoundModel(folder, {}, self._claim(entry.settings, [folder], entry.kind))
        if (kind := model_kind_in(folder.path)) != CHAT_KIND:
            raise ModelError(f'its files are those of a model of kind {kind}: say kind = "{kind}" in its table')
        return FoundModel(folder, further, self._claim(entry.settings, [folder, *further.values()], CHAT_KIND))

    def _claim(self, settings: Settings, folders: Sequence[ModelFolder], kind: str) -> int:
        """What the first folder's model, served with the others, is to have."""
        if self._alone:
            return self._memory
        if settings.memory is not None:
            return memory_bytes(settings.memory, self._device.memory)
        if kind != CHAT_KIND:
            module, _, name = KINDS[kind].needs.partition(":")
            tells = getattr(import_module(f"ingot.models.{module}"), name)
            return int(self._loop.run(lambda: tells(folders[0].path, self._device))) + LEAST_TRANSIENT_BYTES
        told = [self._loop.run(partial(memory_needs, folder.path, self._device)) for folder in folders]
        weights = sum(
            _file_bytes(folder.path) if need is None else need.weights
            for folder, need in zip(folders, told, strict=True)
        )
        own = told[0]
        states = self._memory // KV_SHARE if own is None else self._states(own, settings.context)
        aside = TRANSIENT_SHARE + REWIND_SHARE
        return min(weights + LEAST_TRANSIENT_BYTES + int(states / (1 - aside)), max(self._memory, weights))

    def _states(self, need: MemoryNeeds, context: int | None) -> int:
        def of(tokens: int) -> int:
            return need.at_full_context - need.per_token * (need.context - min(tokens, need.context))

        wanted = of(context or need.context)
        return min(wanted, max(of(USUAL_CONTEXT), self._memory // KV_SHARE))

    def load(self, entry: ModelEntry, found: FoundModel, told: Callable[[float], None]) -> ModelEngine:
        """`told` is called with the share that is done."""
        began = time.monotonic()
        prefetch_weights(found.folder.path)
        before = self._loop.run(release_unused_memory)
        size = max(1, _file_bytes(found.folder.path))

        def between() -> None:
            told(min(1.0, (active_memory() - before) / size))
            self._loop.run_other_workloads()

        engine = self._started(entry, found, between)
        if self._trim is not None:
            self._trim()  # a tokenizer of many words leaves holes in the heap of whichever thread made it
        took, weights = time.monotonic() - began, engine.card.weight_bytes / 1e9
        log.info("%s was loaded in %.1f s: %.3f GB of weights", entry.name, took, weights)
        return engine

    def _started(self, entry: ModelEntry, found: FoundModel, between: Callable[[], None]) -> ModelEngine:
        if entry.kind != CHAT_KIND:
            folder = replace(found.folder, name=entry.name)
            return start_side_engine(
                entry.settings, entry.kind, folder, memory=found.claim, loop=self._loop, between=between
            )
        return start_engine(
            entry.settings,
            found.folder.path,
            name=entry.name,
            source=found.folder.source,
            further=found.further,
            share=MemoryShare(found.claim, self._memory),
            loop=self._loop,
            between=between,
        )

    def unload(self, engine: ModelEngine) -> None:
        """Says in the log what came back, and warns where that is less than the weights were."""
        name, weights = engine.card.name, engine.card.weight_bytes
        began = time.monotonic()
        freed = engine.leave()
        if self._trim is not None:
            self._trim()
        level = logging.WARNING if freed < 0.99 * weights else logging.INFO
        log.log(
            level,
            "%s was unloaded in %.1f s: %.3f GB are free again, of which %.3f GB were its weights",
            *(name, time.monotonic() - began, freed / 1e9, weights / 1e9),
        )


def _file_bytes(folder: Path) -> int:
    return weight_bytes(folder)


def prefetch_weights(folder: Path) -> None:
    """Let the system begin to read the weights, while nobody waits for them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in weight_files(folder):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
