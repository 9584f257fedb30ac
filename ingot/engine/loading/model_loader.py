"""Where a fleet's models are loaded and unloaded, all on one thread.

Light to import and to make: what a model needs is imported by the first load, or in the background before that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from ingot.config import ModelEntry, Settings
from ingot.engine.engine_thread import engine_loop
from ingot.engine.loop import Pulse
from ingot.kernels import device

if TYPE_CHECKING:
    from ingot.engine.loading.fleet_models import FoundModel, Loading
    from ingot.engine.side_engine import SideEngine


class Garage:
    """Implements `Opens` for models of mlx-lm's. Its thread is the only one that touches mlx."""

    def __init__(self, settings: Settings, *, alone: bool) -> None:
        """`alone`: there is one model, which has all memory. Raises ConfigError."""
        self._alone = alone
        self._found: dict[str, FoundModel] = {}
        self._loop = engine_loop()
        self._loop.start()
        self._device = self._loop.run(device.current)
        self.memory = device.memory_budget(self._device, settings.memory)

    def warm_up(self) -> None:
        """Import what loads need, so that the first one does not have to. Takes seconds: for a thread of its own."""
        _loading_class()

    @cached_property
    def _loading(self) -> Loading:
        return _loading_class()(self._loop, self._device, self.memory, alone=self._alone)

    def pulse(self) -> Pulse:
        return self._loop.pulse()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have `call` made once the device is lost, which all models share: see `Loop.when_lost`."""
        self._loop.when_lost(call)

    def close(self) -> None:
        """Give up what runs and end the thread. A process that leaves without it does it on its way out."""
        self._loop.close()

    async def measure(self, entry: ModelEntry) -> int:
        if entry.name not in self._found:
            self._found[entry.name] = await asyncio.to_thread(lambda: self._loading.find(entry))
        return self._found[entry.name].claim

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> SideEngine:
        found = self._found.pop(entry.name)  # whoever loads it again looks at its files again
        return await asyncio.to_thread(self._loading.load, entry, found, told)

    async def unload(self, engine: SideEngine) -> None:
        await asyncio.to_thread(self._loading.unload, engine)


def _loading_class() -> type[Loading]:
    from ingot.engine.loading.fleet_models import Loading

    return Loading
