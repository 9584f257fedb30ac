"""Progress reports of long-running model work (fetching, converting)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from ingot.quantities import format_bytes as format_bytes

REDRAW_S = 0.1  # on a terminal: often enough to look alive, seldom enough to cost nothing
REPORT_S = 10.0  # in a log file: one line at each step and then one in a while


class Progress(Protocol):
    """Called from one thread at a time. `done` and `total` are bytes; None where unknown."""

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None: ...


def no_progress(message: str, done: int | None = None, total: int | None = None) -> None:
    """The progress of callers that show none."""


class TerminalProgress:
    """Writes to stderr: one line rewritten in place on a terminal, a few separate lines anywhere else."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._rewrites = self._stream.isatty()
        self._clock = clock
        self._message: str | None = None
        self._written_at = 0.0
        self._open_line = False

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None:
        starts = message != self._message
        ends = total is not None and done is not None and done >= total
        if not (starts or ends or self._clock() - self._written_at >= self._interval):
            return
        if starts:
            self.finish()
        self._message, self._written_at = message, self._clock()
        self._write(_progress_line(message, done, total))
        if ends:
            self.finish()

    @property
    def _interval(self) -> float:
        return REDRAW_S if self._rewrites else REPORT_S

    def _write(self, line: str) -> None:
        if self._rewrites:
            self._stream.write(f"\r\x1b[2K{line}")
            self._open_line = True
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def finish(self) -> None:
        """Ends the line that is being rewritten, so that other output starts on a fresh one."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False


def _progress_line(message: str, done: int | None, total: int | None) -> str:
    if done is None:
        return message
    if not total:
        return f"{message}: {format_bytes(done)}"
    percent = min(100, done * 100 // total)
    return f"{message}: {format_bytes(done)} of {format_bytes(total)} ({percent} %)"
