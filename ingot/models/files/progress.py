"""Progress reports of long-running work: fetching, converting, loading, compiling, unloading, stopping."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from ingot.observe.logs import close_line, rewrite_line
from ingot.quantities import format_bytes as format_bytes

REDRAW_S = 0.1  # on a terminal: often enough to look alive, seldom enough to cost nothing
TICK_S = 1.0  # of a step whose length is unknown
REPORT_S = 10.0  # in a log file: one line at each step and then one in a while


class Progress(Protocol):
    """Called from one thread at a time. `done` and `total` are bytes; None where unknown."""

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None: ...


def no_progress(message: str, done: int | None = None, total: int | None = None) -> None:
    """The progress of callers that show none."""


class TerminalProgress:
    """Writes to stderr: one line rewritten in place on a terminal, a few separate lines anywhere else. On a terminal,
    a step of unknown length shows how long it has taken so far, so that it never looks as if it hung, and leaves no
    line behind; what was counted in bytes does."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._rewrites = self._stream.isatty()
        self._clock = clock
        self._message: str | None = None
        self._began = self._written_at = 0.0
        self._counts = False  # whether the last line has bytes in it
        self._drawing = threading.RLock()
        self._ticker: threading.Timer | None = None

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None:
        starts = message != self._message
        ends = total is not None and done is not None and done >= total
        if not (starts or ends or self._clock() - self._written_at >= self._interval):
            return
        with self._drawing:
            if starts:
                self.finish()
                self._began = self._clock()
            self._message, self._written_at, self._counts = message, self._clock(), done is not None
            self._write(_progress_line(message, done, total))
            if ends:
                self.finish()
            elif starts and done is None and self._rewrites:
                self._tick(message)

    def note(self, text: str) -> None:
        """Put `text` in place of the last line, whatever that said: of work that says itself how far it is. Elsewhere
        than on a terminal only the first one is written."""
        with self._drawing:
            if self._rewrites or self._message is None:
                self._message, self._counts = text, False
                self._write(text)

    @property
    def _interval(self) -> float:
        return REDRAW_S if self._rewrites else REPORT_S

    def _tick(self, message: str) -> None:
        """Show the seconds of a step that says nothing more."""

        def draw() -> None:
            with self._drawing:
                if self._ticker is timer and self._message == message:
                    self._write(f"{message} ({self._clock() - self._began:.0f} s)")
                    self._tick(message)

        timer = threading.Timer(TICK_S, draw)
        timer.daemon = True
        self._ticker = timer
        timer.start()

    def _write(self, line: str) -> None:
        if self._rewrites:
            rewrite_line(self._stream, line)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def finish(self) -> None:
        """Ends the line that is being rewritten, so that other output starts on a fresh one. May be called twice."""
        with self._drawing:
            if self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None
            if self._rewrites:
                close_line(self._stream, keep=self._counts)


def _progress_line(message: str, done: int | None, total: int | None) -> str:
    if done is None:
        return message
    if not total:
        return f"{message}: {format_bytes(done)}"
    percent = min(100, done * 100 // total)
    return f"{message}: {format_bytes(done)} of {format_bytes(total)} ({percent} %)"
