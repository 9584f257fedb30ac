"""The C library's free memory goes back to the system while a server runs."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.process import find_malloc_trim, is_signal_ignored, signals_not_ignored, trim_heap
from tests import conftest

PIECE, PIECES = 64 << 10, 1024
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries give memory back by themselves")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@glibc
@pytest.mark.alone
def test_holes_between_what_is_kept_are_given_back() -> None:
    library, trim = ctypes.CDLL(None), find_malloc_trim()
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


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture
def ignoring() -> Iterator[None]:
    """All of them are, for as long as the test takes."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_no_test_runs_with_signals_ignored() -> None:
    assert signals_not_ignored(*HANDLED) == HANDLED


@pytest.mark.usefixtures("ignoring")
def test_who_is_started_to_ignore_signals_heeds_none_of_them() -> None:
    assert signals_not_ignored(*HANDLED) == () and all(map(is_signal_ignored, HANDLED))
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert signals_not_ignored(*HANDLED) == (signal.SIGTERM,)


@pytest.mark.usefixtures("ignoring")
@pytest.mark.parametrize("number", HANDLED)
def test_what_tests_start_does_not_ignore_what_they_were_started_to_ignore(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), {number.value}); print('alive')"]
    assert b"alive" in subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).stdout
    conftest.ignore_signals_alone()
    assert b"alive" not in subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).stdout
    signal.raise_signal(number)  # which the tests themselves still ignore
