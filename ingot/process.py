"""Signals, by how the process was started: with some of them ignored, from a terminal or from none.

A shell without job control ignores SIGINT in what it starts in the background, so that Ctrl-C reaches the program in
front alone; `nohup` ignores SIGHUP. A handler would undo that, so none is set for a signal that was ignored, with one
exception: who sends SIGHUP to a server by name wants its settings read again, also under `nohup`.
"""

from __future__ import annotations

import os
import signal


def is_ignored(number: signal.Signals) -> bool:
    """Whether whoever started the process had it ignore that signal. To be asked before a handler is set."""
    return signal.getsignal(number) == signal.SIG_IGN


def heeded(*numbers: signal.Signals) -> tuple[signal.Signals, ...]:
    """Those that are not ignored."""
    return tuple(number for number in numbers if not is_ignored(number))


class Terminal:
    """The terminal that the process was started from, if it is one whose end is the process's too."""

    def __init__(self) -> None:
        self._followed = not is_ignored(signal.SIGHUP) and _has_terminal()

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
