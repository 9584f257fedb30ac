"""Where a fleet's models are loaded and unloaded, all on one thread.

Light to import and to make: what a model needs is imported by the first load, or in the background before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from ingot.config import ModelEntry, Settings
from ingot.engine.loop import engine_loop
from ingot.engine.status import Health
from ingot.kernels import device

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine
    from ingot.engine.loading.fleet_models import BlockingModelLoader, FoundModel


class ModelLoader:
    """Implements `Opens` for models of mlx-lm's. Its thread is the only one that touches mlx."""

    def __init__(self, settings: Settings, *, alone: bool) -> None:
        """`alone`: there is one model, which has all memory. Raises ConfigError."""
        self._alone, self._settings = alone, settings
        self._found: dict[str, FoundModel] = {}
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
        return _blocking_loader_class()(self.loop, self._device, self.memory, alone=self._alone)

    def health(self) -> Health:
        """That of the thread, which no request is counted by."""
        pulse = self.loop.pulse()
        return Health(pulse.alive, pulse.ready, pulse.detail, pulse.beat_ago_s, 0, 0)

    def on_device_lost(self, call: Callable[[], None]) -> None:
        """Have `call` made once the device is lost, which all models share: see `Loop.when_lost`."""
        self.loop.on_device_lost(call)

    def close(self) -> None:
        """Give up what runs and end the thread. A process that leaves without it does it on its way out."""
        self.loop.close()

    async def measure(self, entry: ModelEntry) -> int:
        if entry.name not in self._found:
            self._found[entry.name] = await asyncio.to_thread(lambda: self._loading.find(entry))
        return self._found[entry.name].claim

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> ModelEngine:
        found = self._found.pop(entry.name)  # whoever loads it again looks at its files again
        return await asyncio.to_thread(self._loading.load, entry, found, told)

    async def unload(self, engine: ModelEngine) -> None:
        await asyncio.to_thread(self._loading.unload, engine)


def _blocking_loader_class() -> type[BlockingModelLoader]:
    from ingot.engine.loading.fleet_models import BlockingModelLoader

    return BlockingModelLoader
