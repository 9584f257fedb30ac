"""Where a fleet's models are loaded and unloaded, all on one thread.

Light to import and to make: what a model needs is imported by the first load, or in the background before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ingot.config import ModelEntry, Settings, served_name, with_name
from ingot.engine.loop import engine_loop
from ingot.engine.status import Health
from ingot.kernels import device

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine
    from ingot.engine.loading.fleet_models import BlockingModelLoader, FoundModel
    from ingot.models.files.progress import Progress


class ModelLoader:
    """Loads models of mlx-lm's for a `Fleet`. Its thread is the only one that touches mlx."""

    def __init__(self, settings: Settings, entries: Sequence[ModelEntry] = ()) -> None:
        """`entries` are the models of the server. Raises ConfigError."""
        self._settings, self._entries = settings, entries
        self._found: dict[str, FoundModel] = {}
        if settings.deterministic:
            device.multiply_in_full()
        self.loop = engine_loop()
        self.loop.start()
        self._device = self.loop.run(device.current_device)

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
        names = [*(entry.name for entry in entries), *(helper.name for helper in first.further.values())]
        progress(f"loading {', '.join(dict.fromkeys(names))}")
        models = zip(entries, [first, *located], strict=True)
        return [(entry, self._loading.load(entry, found, _ignore_progress)) for entry, found in models]

    async def measure(self, entry: ModelEntry) -> int:
        """The bytes that a model is to have, by its files, which are fetched where they are not here. Raises
        IngotError."""
        if entry.name not in self._found:
            self._found[entry.name] = await asyncio.to_thread(lambda: self._loading.find(entry))
        return self._found[entry.name].claim

    async def load(self, entry: ModelEntry, claim: int, report: Callable[[float], None]) -> ModelEngine:
        """`report` is called with the share that is done, from any thread. Raises IngotError."""
        found = self._found.pop(entry.name)  # whoever loads it again looks at its files again
        return await asyncio.to_thread(self._loading.load, entry, found, report)

    async def unload(self, engine: ModelEngine) -> None:
        """Returns when its memory is back."""
        await asyncio.to_thread(self._loading.unload, engine)


def _ignore_progress(done: float) -> None:
    """Nobody can be told yet."""


def _blocking_loader_class() -> type[BlockingModelLoader]:
    from ingot.engine.loading.fleet_models import BlockingModelLoader

    return BlockingModelLoader
