"""Log formats: text lines, or JSON, an object a line; and rate-limited warnings.

Every object about a request holds its id: that of the current context, or the one that `log_facts` names, as the engine
thread computes for many at once.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ingot.observe.steps import LineAwareHandler

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
