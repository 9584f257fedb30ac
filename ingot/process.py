"""The process: which signals mean something to it, and free memory that the C library keeps to itself.

Signals go by how the process was started: with some of them ignored, from a terminal or from none. A shell without
job control ignores SIGINT in what it starts in the background, so that Ctrl-C reaches the program in front alone;
`nohup` ignores SIGHUP. A handler would undo that, so none is set for a signal that was ignored, with one
exception: who sends SIGHUP to a server by name wants its settings read again, also under `nohup`.

What many threads allocate and free leaves holes in the heap, which the C library fills again but does not give
back by itself: a process that lives for months would take what its worst minute took.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final


def is_signal_ignored(number: signal.Signals) -> bool:
    """Whether whoever started the process had it ignore that signal. To be asked before a handler is set."""
    return signal.getsignal(number) == signal.SIG_IGN


def signals_not_ignored(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    """Those that are not ignored."""
    return tuple(number for number in numbers if not is_signal_ignored(number))


class ControllingTerminal:
    """The terminal that the process was started from, if it is one whose end is the process's too."""

    def __init__(self) -> None:
        self._followed = not is_signal_ignored(signal.SIGHUP) and _has_terminal()

    @property
    def is_gone(self) -> bool:
        """Whether it was closed: then SIGHUP means that, and no command to read settings."""
        return self._followed and not _has_terminal()


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


TRIMMED_EVERY_S: Final = 30.0
"""It takes milliseconds, in a thread of its own."""


def find_malloc_trim() -> Callable[[], int] | None:
    """glibc's, or None where the library has none: others give memory back by themselves."""
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
