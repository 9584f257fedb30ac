"""Copies from the host into arrays that are in a GPU's memory already, by threads of their own, while the GPU computes.

Host memory that the driver has pinned is copied by the GPU's own engines. A thread has a stream of its own, which waits
for nothing that MLX does: whoever calls sees to it that nothing reads what is written. Memory is pinned, and arrays are
located, by the engine thread.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device, acting_as
from ingot.kernels.gpu.cuda_graph import CudaDriver, CudaError

log = logging.getLogger("ingot.kernels")
Locate = Callable[[Sequence[mx.array]], list[int]]
"""The addresses of evaluated arrays."""


class DeviceCopies:
    def __init__(self, driver: CudaDriver, locate: Locate) -> None:
        self._driver, self.locate = driver, locate
        self._own = threading.local()

    def pinned(self, size: int) -> tuple[memoryview, int]:
        """Memory of the host, and its address; until the process ends. Raises CudaError."""
        address = self._driver.pinned(size)
        return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B"), address

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """(to, from, bytes) each, and wait until all are there. For any thread. Raises CudaError."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            self._driver.enter()
            stream = self._own.stream = self._driver.stream()
        for to, source, size in copies:
            self._driver.copy_to_device(to, source, size, stream)
        self._driver.synchronize(stream)

    def works(self) -> bool:
        """Whether an array has what was copied into it."""
        array, size = mx.zeros((2, 1024), mx.uint32) + 0, 4096
        mx.eval(array)
        [address] = self.locate([array])
        memory, source = self.pinned(size)
        memory[:] = np.arange(1, 1025, dtype=np.uint32).tobytes()
        self.copy([(address + size, source, size)])
        expected = mx.stack([mx.zeros(1024, mx.uint32), mx.arange(1, 1025, dtype=mx.uint32)])
        return bool(mx.array_equal(array, expected).item())


@cache
def find_device_copies(device: Device) -> DeviceCopies | None:
    """None where the memory is the host's, or the driver cannot be called."""
    if device.kind != "cuda" or acting_as() is not None:
        return None
    from ingot.kernels.decode_graph.capture import locate_arrays
    from ingot.kernels.gpu.launcher import required_launcher

    try:
        run = required_launcher(device)
        found = DeviceCopies(CudaDriver.find(), lambda arrays: locate_arrays(run, arrays))
        if found.works():
            return found
        log.warning("experts are copied by the host, which is slower: copies to the device have other numbers")
    except (CudaError, RuntimeError, ValueError) as error:
        log.warning("experts are copied by the host, which is slower: %s", error)
    return None
