"""The C library's free memory goes back to the system while a server runs."""

from __future__ import annotations

import asyncio
import ctypes
import platform
from pathlib import Path

import pytest

from ingot.heap import find_trim, trim_heap

PIECE, PIECES = 64 << 10, 1024
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries give memory back by themselves")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@glibc
@pytest.mark.alone
def test_holes_between_what_is_kept_are_given_back() -> None:
    library, trim = ctypes.CDLL(None), find_trim()
    assert trim is not None
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [library.malloc(PIECE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces[::2]:
        library.free(piece)
    holes = resident()
    trim()
    assert holes - resident() > PIECE * PIECES // 4
    for piece in pieces[1::2]:
        library.free(piece)


def test_a_heap_is_trimmed_again_and_again_until_the_server_stops() -> None:
    async def seen() -> int:
        times, enough = 0, asyncio.Event()
        loop = asyncio.get_running_loop()

        def trim() -> int:
            nonlocal times
            times += 1
            if times == 3:
                loop.call_soon_threadsafe(enough.set)
            return 1

        task = asyncio.create_task(trim_heap(trim, every_s=0.0))
        await enough.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return times

    assert asyncio.run(seen()) >= 3
