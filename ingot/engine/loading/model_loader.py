"""Where a fleet's models are loaded and unloaded, all on one thread.

Light to import and to make: what a model needs is imported by the first load, or in the background before that.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TextIO, cast

from ingot.config import ModelEntry, Settings, model_entries, served_name, with_name
from ingot.engine.loop import engine_loop
from ingot.engine.status import Health, StatedFacts
from ingot.errors import BadRequest, IngotError
from ingot.kernels import device
from ingot.models.files.folder_checks import stated_context
from ingot.models.files.hub import is_hub_id, split_gguf_id
from ingot.models.files.locate import CHAT_KIND, config_or_empty, has_vision, local_model_folder, model_kind
from ingot.models.files.packaged import find_packaged_model
from ingot.models.files.progress import Progress, TerminalProgress
from ingot.models.files.short_names import find_named_model
from ingot.observe.logs import reporting_steps

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine
    from ingot.engine.loading.fleet_models import BlockingModelLoader, FoundModel
    from ingot.engine.loading.recommend import Recommendation


log: Final = logging.getLogger("ingot.fleet")


class _LogLines(io.TextIOBase):
    """A stream whose lines are in the log."""

    def write(self, text: str) -> int:
        log.info("%s", text.rstrip())
        return len(text)


@contextmanager
def showing_progress() -> Iterator[Progress]:
    """Of a server that runs: on its terminal, or else in its log."""
    progress = TerminalProgress(sys.stderr if sys.stderr.isatty() else cast("TextIO", _LogLines()))
    try:
        yield progress
    finally:
        progress.finish()


def ignore_share(done: float) -> None:
    """For who does not ask how far a load is."""


class ModelLoader:
    """Loads models of mlx-lm's for a `Fleet`. Its thread is the only one that touches mlx."""

    def __init__(self, settings: Settings, entries: Sequence[ModelEntry] = ()) -> None:
        """`entries` are the models of the server. Raises ConfigError."""
        self._settings, self._entries = settings, entries
        self._found: dict[str, FoundModel] = {}
        self._stated: dict[str, StatedFacts] = {}
        if settings.deterministic:
            device.multiply_in_full()
        self.loop = engine_loop()
        self.loop.start()
        self._device = self.loop.run(device.current_device)

    @property
    def device_kind(self) -> str:
        return self._device.kind

    @cached_property
    def memory(self) -> int:
        """Bytes that all models may have together."""
        return device.memory_budget(self._device, self._settings.memory)

    def warm_up(self) -> None:
        """Import what loads need, so that the first one does not have to. Takes seconds: for a thread of its own."""
        _blocking_loader_class()

    @cached_property
    def _loading(self) -> BlockingModelLoader:
        return _blocking_loader_class()(self.loop, self._device, self.memory, self._entries)

    def health(self) -> Health:
        """Of the thread; it knows of no requests."""
        pulse = self.loop.pulse()
        return Health(pulse.alive, pulse.ready, pulse.detail, pulse.beat_ago_s, 0, 0)

    def on_device_lost(self, call: Callable[[], None]) -> None:
        """Have `call` made once the device is lost, which all models share: see `Loop.on_device_lost`."""
        self.loop.on_device_lost(call)

    def close(self) -> None:
        """Give up what runs and end the thread. A process that leaves without it does it on its way out."""
        self.loop.close()

    def load_resident(self, progress: Progress) -> list[tuple[ModelEntry, ModelEngine]]:
        """The main model and those alongside it, each under the name that its files have. Not for an event loop.
        Raises IngotError."""
        main, *alongside = self._entries
        located = [self._loading.find(entry, progress) for entry in alongside]
        first = self._loading.find(main, progress)  # what it has of the memory depends on the others
        entries = [with_name(main, served_name(main.settings, first.folder.name))]
        for entry, found in zip(alongside, located, strict=True):
            entries.append(with_name(entry, found.folder.name, entries))
        models = zip(entries, [first, *located], strict=True)
        return [(entry, self._load_showing(entry, found, progress)) for entry, found in models]

    def _load_showing(
        self, entry: ModelEntry, found: FoundModel, progress: Progress, report: Callable[[float], None] = ignore_share
    ) -> ModelEngine:
        """Show the bytes of weights that are there, and what comes after them."""
        size = found.weight_bytes

        def show_share(share: float) -> None:
            report(share)
            progress(f"loading {entry.name}", int(share * size), size)

        def show_step(step: str) -> None:
            if sys.stderr.isatty():  # the log says when one is done
                progress(f"loading {entry.name}: {step}")

        with reporting_steps(show_step):
            return self._loading.load(entry, found, show_share)

    def stated(self, entry: ModelEntry) -> StatedFacts | None:
        """What the files of a chat model say of it; None where they are not here. Reads a few small files, once."""
        if entry.kind != CHAT_KIND:
            return None
        if entry.name not in self._stated:
            facts = _stated_facts(entry)
            if facts is None:
                return None
            self._stated[entry.name] = facts
        return self._stated[entry.name]

    def new_entry(self, name: str) -> ModelEntry:
        return new_model_entry(name, self._settings)

    def recommended(self) -> list[Recommendation]:
        """Models that the memory has room for. Takes a moment: not for an event loop."""
        from ingot.engine.loading.recommend import recommend_models

        return recommend_models(self.memory, self.device_kind)

    async def measure(self, entry: ModelEntry, report: Callable[[float], None] = ignore_share) -> int:
        """The bytes that a model is to have, by its files, which are fetched where they are not here; `report` is then
        called with the share that is. Raises IngotError."""
        if entry.name not in self._found:
            with showing_progress() as progress:

                def show(message: str, done: int | None = None, total: int | None = None) -> None:
                    if done is not None and total:
                        report(done / total)
                    progress(message, done, total)

                self._found[entry.name] = await asyncio.to_thread(lambda: self._loading.find(entry, show))
        return self._found[entry.name].claim

    async def load(self, entry: ModelEntry, claim: int, report: Callable[[float], None]) -> ModelEngine:
        """`report` is called with the share that is done, from any thread. Raises IngotError."""
        found = self._found.pop(entry.name)  # whoever loads it again looks at its files again
        with showing_progress() as progress:
            return await asyncio.to_thread(self._load_showing, entry, found, progress, report)

    async def unload(self, engine: ModelEngine) -> None:
        """Returns when its memory is back."""
        with showing_progress() as progress:
            if sys.stderr.isatty():  # the log says why, and when it is done
                progress(f"unloading {engine.card.name}")
            await asyncio.to_thread(self._loading.unload, engine)


def new_model_entry(name: str, settings: Settings) -> ModelEntry:
    """A model for `Fleet.add`: of the hub, or one that has a short name. Reads files: not for an event loop. Raises
    BadRequest for any other name: nobody names a file of the server."""
    known = find_packaged_model(name) is not None or find_named_model(name) is not None
    if not known and not is_hub_id(name) and split_gguf_id(name) is None:
        raise BadRequest(f"model: '{name[:100]}' is neither a short name nor a hub id such as org/name.", param="model")
    own = replace(settings, models={name.replace(":", "-"): {"path": name}}, models_config=None)
    return model_entries(own, model_kind)[0]


def _stated_facts(entry: ModelEntry) -> StatedFacts | None:
    from ingot.media.image_processors import read_processor
    from ingot.text.tokenizer.tokenizer import chat_template_source
    from ingot.text.tool_formats.registry import find_format

    folder = local_model_folder(entry.path, entry.settings)
    if folder is None or not (config := config_or_empty(folder)):
        return None
    try:
        context = stated_context(config)
        processor = read_processor(folder) if has_vision(entry.path, entry.settings) else None
        found = find_format(chat_template_source(folder), str(config.get("model_type"))).format
    except IngotError:  # which its load will report
        return None
    return StatedFacts(
        min(context, entry.settings.context or context),
        () if processor is None else tuple(processor.placeholders),
        found.name,
        None if found.thinking is None else found.thinking.name,
    )


def _blocking_loader_class() -> type[BlockingModelLoader]:
    from ingot.engine.loading.fleet_models import BlockingModelLoader

    return BlockingModelLoader
