"""Events on their way out, handed to readers with the rest of a step's: each is woken once a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from ingot.engine.jobs import Job
from ingot.engine.request import Event
from ingot.observe.logs import about

log = logging.getLogger("ingot.engine")


class Outbox:
    """The engine thread's alone."""

    def __init__(self) -> None:
        self._events: dict[Job, list[Event]] = {}

    def put(self, job: Job, events: list[Event]) -> None:
        if events:
            self._events.setdefault(job, []).extend(events)

    def flush(self, gone: Callable[[Job], None]) -> None:
        """Hand out what is here. `gone` ends the job of a reader who takes nothing; nobody is told of that end."""
        events, self._events = self._events, {}
        for job, told in events.items():
            try:
                job.reader.post(told)
            except Exception:
                id = job.request.id
                log.exception("nobody takes the events of request %s; it ends", id, extra=about(id, event="failed"))
                gone(job)
                self._events.pop(job, None)

    def send_off(self, job: Job, last: Event) -> None:
        """Hand out a job's events and the last one, whatever its reader makes of it."""
        with suppress(Exception):
            job.reader.post([*self._events.pop(job, ()), last])
