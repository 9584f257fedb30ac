"""What workloads beside generation have in common: how long they work between two steps, and how their jobs end.

Whoever runs beside generation answers each of its requests once, and takes what steps leave of the latency target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ingot.errors import DeadlineExceeded, IngotError

UNHURRIED_MS = 1000.0
"""Longest work while nobody streams: how long a cancel or a newcomer may have to wait."""
LEAST_SHARE = 0.5
"""It gets at least this part of the time that a step took."""


class _Asked(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def deadline(self) -> float | None: ...


class _Job(Protocol):
    @property
    def request(self) -> _Asked: ...


class BesideSteps:
    _jobs: Mapping[str, _Job]
    _target_ms: float

    def work(self, milliseconds: float) -> None:
        """For about that long."""
        raise NotImplementedError

    def _end(self, request_id: str, result: Any) -> None:
        """Answer a request, with what came of it or with the error that ended it; nothing where it has ended."""
        raise NotImplementedError

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """Work between two steps of the generating model, of which the one before took `spent_s`.

        Where nobody streams, for as long as a newcomer may have to wait. Else for what the step left of the target,
        but at least a part of what it took, so that this goes on beside the longest steps too.
        """
        spent_ms = 1000 * spent_s
        self.work(max(self._target_ms - spent_ms, LEAST_SHARE * spent_ms) if shared() else UNHURRIED_MS)

    def expire(self, now: float) -> None:
        late = [job.request.id for job in list(self._jobs.values()) if (job.request.deadline or now) < now]
        for request_id in late:
            self._end(request_id, DeadlineExceeded("The request took longer than its deadline allows"))

    def abandon(self, error: IngotError) -> None:
        for request_id in list(self._jobs):
            self._end(request_id, error)

    def farewell(self, error: IngotError) -> None:
        for request_id in list(self._jobs):
            with contextlib.suppress(Exception):
                self._end(request_id, error)
