"""The log's form: lines for people, or JSON for machines, an object a line; and warnings said seldom enough for
people.

Every object that is about a request holds its id: that of the request in whose context it was logged, or the one
that `log_facts` names, as the engine's thread computes for many at once.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

current_request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that this context works for."""


def log_facts(request_id: str, **facts: object) -> dict[str, Any]:
    """`extra` of a log line: which request it is about, and what a machine would have to read out of its words."""
    return {"facts": {"request_id": request_id, **facts}}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if known := current_request_id.get():
            told["request_id"] = known
        told |= getattr(record, "facts", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told, enc_hook=str).decode()


def set_up_logging(level: str, form: str) -> None:
    """Write what ingot logs at `level` and above to stderr. What others log, from warnings on, has the same form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("ingot").setLevel(level.upper())


WARNED_EVERY_S: Final = 60.0


class RareWarning:
    """One kind of warning: said when it first comes up, then once a minute with how often it did. For one thread."""

    def __init__(self, log: logging.Logger, every_s: float = WARNED_EVERY_S) -> None:
        self._log, self._every_s = log, every_s
        self._said: float | None = None
        self._unsaid = 0

    def warn(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if self._said is not None and now - self._said < self._every_s:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} times more before)" if self._unsaid else ""
        self._said, self._unsaid = now, 0
        self._log.warning(message + "%s", *values, more)
