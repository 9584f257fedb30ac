"""The process: its signals, and free memory that the C library keeps.

A shell without job control starts background programs with SIGINT ignored, so that Ctrl-C reaches the foreground
program alone; `nohup` ignores SIGHUP. A handler would undo that, so none is set for an ignored signal, with one
exception: SIGHUP makes a server read its settings again, also under `nohup`.

Threads that allocate and free leave holes in the heap, which the C library does not return to the system: a process
that lives for months would take what its worst minute took.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final


def is_signal_ignored(number: signal.Signals) -> bool:
    """Whether the process was started with that signal ignored. To be called before a handler is set."""
    return signal.getsignal(number) == signal.SIG_IGN


def signals_not_ignored(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    return tuple(number for number in numbers if not is_signal_ignored(number))


class ControllingTerminal:
    """The terminal that the process was started from, if its end is the process's too."""

    def __init__(self) -> None:
        self._followed = not is_signal_ignored(signal.SIGHUP) and _has_terminal()

    @property
    def is_gone(self) -> bool:
        """Whether it was closed: then SIGHUP means that, not a command to read settings."""
        return self._followed and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


TRIMMED_EVERY_S: Final = 30.0
"""Each takes milliseconds, in a thread of its own."""


def find_malloc_trim() -> Callable[[], int] | None:
    """glibc's, or None elsewhere: other C libraries return memory by themselves."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: int(trim(0))


async def trim_heap(trim: Callable[[], int], every_s: float = TRIMMED_EVERY_S) -> None:
    """Again and again, until it is cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim)
