"""Warnings that may come up many times a second, said seldom enough for a log that people read."""

from __future__ import annotations

import logging
import time
from typing import Final

EVERY_S: Final = 60.0


class Notice:
    """One kind of warning: said when it first comes up, then once a minute with how often it did. For one thread."""

    def __init__(self, log: logging.Logger, every_s: float = EVERY_S) -> None:
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
