"""Free memory that the C library keeps to itself. What many threads allocate and free leaves holes, which it fills
again but does not give back by itself: a process that lives for months would take what its worst minute took."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 30.0
"""It takes milliseconds, in a thread of its own."""


def find_trim() -> Callable[[], int] | None:
    """glibc's, or None where the library has none: others give memory back by themselves."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: int(trim(0))


async def trim_heap(trim: Callable[[], int], every_s: float = EVERY_S) -> None:
    """Again and again, until it is cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim)
