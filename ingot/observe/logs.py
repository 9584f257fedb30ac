"""The log's form: lines for people, or JSON for machines, an object a line.

Every object that is about a request holds its id: that of the request in whose context it was logged, or the one that
`about` names, as the engine's thread computes for many at once.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that this context works for."""


def about(request_id: str, **facts: object) -> dict[str, Any]:
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
        if known := request_id.get():
            told["request_id"] = known
        told |= getattr(record, "facts", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(told, enc_hook=str).decode()


def set_up(level: str, form: str) -> None:
    """Write what ingot logs at `level` and above to stderr. What others log, from warnings on, has the same form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("ingot").setLevel(level.upper())
