"""Log formats: text lines, or JSON, an object a line; rate-limited warnings; and what long work says about itself while
it runs, on a line of the terminal that log lines must not run into.

Every object about a request holds its id: that of the current context, or the one that `log_facts` names, as the engine
thread computes for many at once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

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


TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that this context works for."""


def log_facts(request_id: str, **facts: object) -> dict[str, Any]:
    """`extra` of a log line: its request, and the facts in its text as fields."""
    return {"facts": {"request_id": request_id, **facts}}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            fields["request_id"] = request_id
        fields |= getattr(record, "facts", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def set_up_logging(level: str, form: str) -> None:
    """Log ingot's messages at `level` and above to stderr, and other packages' warnings in the same format."""
    handler = LineAwareHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("ingot").setLevel(level.upper())


WARNED_EVERY_S: Final = 60.0


class RareWarning:
    """A warning that is logged when it first comes up, then once a minute with a count. For one thread."""

    def __init__(self, log: logging.Logger, every_s: float = WARNED_EVERY_S) -> None:
        self._log, self._every_s = log, every_s
        self._last_warning: float | None = None
        self._suppressed = 0

    def warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if self._last_warning is not None and now - self._last_warning < self._every_s:
            self._suppressed += 1
            return
        more = f" (and {self._suppressed} times more before)" if self._suppressed else ""
        self._last_warning, self._suppressed = now, 0
        self._log.warning(message + "%s", *values, more)
