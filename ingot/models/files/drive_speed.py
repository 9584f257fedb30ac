"""How fast a drive gives what no memory has yet, by reading parts of a large file. Imports nothing heavy."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

READS, THREADS = 48, 8
MIB: Final = 1 << 20
ALIGNED: Final = 4096
"""What reads that pass the system's memory by begin at, in files and in memory, and are a multiple of."""


def read_speed(file: Path, *, size: int = MIB, in_order: bool = False) -> float | None:
    """Bytes a second of reads of `size` bytes each: one after another from one place on if they are `in_order`, else
    several at once from places all over the file. What the system has in memory is passed by, where it can be. None for
    a file that is too small or cannot be read."""
    size = max(ALIGNED, size // ALIGNED * ALIGNED)
    try:
        room = file.stat().st_size // size
        count = min(READS, room)
        if count < 8:
            return None
        if in_order:
            begin = random.randrange(room - count + 1)
            places = [(begin + number) * size for number in range(count)]
        else:
            places = [place * size for place in random.sample(range(room), count)]
        return _measured(file, places, size, 1 if in_order else THREADS)
    except OSError:
        return None


def _measured(file: Path, places: list[int], size: int, threads: int) -> float:
    past_cache = open_past_cache(file)
    descriptor = os.open(file, os.O_RDONLY) if past_cache is None else past_cache
    try:
        if past_cache is None and hasattr(os, "posix_fadvise"):
            for place in places:
                os.posix_fadvise(descriptor, place, size, os.POSIX_FADV_DONTNEED)
        shares = [places[first::threads] for first in range(threads)] if threads > 1 else [places]
        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(lambda own: _read(descriptor, own, size), shares))
        return done / max(1e-9, time.monotonic() - began)
    finally:
        os.close(descriptor)


def open_past_cache(file: Path) -> int | None:
    """A descriptor whose reads pass the system's memory by; None where the file system does not do that."""
    if not hasattr(os, "O_DIRECT"):
        return None
    descriptor = -1
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        _read(descriptor, [0], ALIGNED)
        return descriptor
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None


def _read(descriptor: int, places: list[int], size: int) -> int:
    with mmap.mmap(-1, size) as held:  # begins where a page does, as such reads need it
        return sum(os.preadv(descriptor, [held], place) for place in places)
