"""What long work says about itself while it runs: the step that it has come to, from wherever that is known; and the
line of the terminal that shows it, which log lines must not run into."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final, TextIO

CLEAR_LINE: Final = "\r\x1b[2K"
_reporter: ContextVar[Callable[[str], None] | None] = ContextVar("step_reporter", default=None)
_open_lines: Final[set[int]] = set()
"""Of which streams, by `id`, the last line is being rewritten."""


@contextlib.contextmanager
def reporting_steps(report: Callable[[str], None]) -> Iterator[None]:
    """Work within the block, and in copies of its context, tells `report` what it has come to."""
    token = _reporter.set(report)
    try:
        yield
    finally:
        _reporter.reset(token)


def report_step(words: str) -> None:
    """Say what begins now, to whoever shows it."""
    if (report := _reporter.get()) is not None:
        report(words)


def rewrite_line(stream: TextIO, text: str) -> None:
    """Put `text` in place of the stream's last line, which stays open."""
    _open_lines.add(id(stream))
    stream.write(f"{CLEAR_LINE}{text}")
    stream.flush()


def close_line(stream: TextIO, *, keep: bool = True) -> None:
    """Leave the line as it is, or empty, so that other output begins on a fresh one."""
    if id(stream) in _open_lines:
        _open_lines.discard(id(stream))
        stream.write("\n" if keep else CLEAR_LINE)
        stream.flush()


class LineAwareHandler(logging.StreamHandler[TextIO]):
    """Writes a record in place of a line that is being rewritten, which its owner draws again below."""

    def emit(self, record: logging.LogRecord) -> None:
        if id(self.stream) in _open_lines:
            self.stream.write(CLEAR_LINE)
        super().emit(record)
