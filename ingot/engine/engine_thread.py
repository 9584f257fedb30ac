"""The one thread that may touch mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot.engine.loop import Loop, Workload
from ingot.kernels.device import is_lost, leave_device


def engine_loop(prepare: Callable[[], Sequence[Workload]] = tuple) -> Loop:
    """A loop on that thread; to be started."""
    return Loop("ingot-engine", prepare, leave_device, is_lost)
