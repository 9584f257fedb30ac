"""The open connections: at most so many, of which idle ones make room for new ones."""

from __future__ import annotations

import contextlib
import logging
import resource
from pathlib import Path
from typing import Final, Literal, Protocol

from ingot.observe.notices import Notice

log = logging.getLogger("ingot.http")

GUESTS: Final = 16  # connections above the most that are heard, so that they can be told why they are refused
SPARE_FILES: Final = 32  # for stored responses, kept prompts, tools and what grammars are tried in

Admission = Literal["in", "guest", "out"]


class Connection(Protocol):
    def give_way(self) -> None:
        """Close at once."""


class Connections:
    """Belongs to one event loop. A connection is idle while no request on it is under way."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._idle: dict[Connection, None] = {}  # the one that has been idle for longest comes first
        self._working: set[Connection] = set()
        self._guests: set[Connection] = set()
        self._crowded = Notice(log)

    def enter(self, one: Connection) -> Admission:
        """Where a new connection is put. At the most, one that is idle is closed for it; where all are at work, it is
        a guest, which may be told so and no more, or has to go at once."""
        if len(self._idle) + len(self._working) >= self.most:
            if not self._idle:
                return self._turned_away(one)
            longest = next(iter(self._idle))
            del self._idle[longest]
            longest.give_way()
        self._idle[one] = None
        return "in"

    def work(self, one: Connection) -> None:
        """A request on it is under way."""
        if one in self._idle:
            del self._idle[one]
            self._working.add(one)

    def rest(self, one: Connection) -> None:
        """The last request on it is done."""
        if one in self._working:
            self._working.discard(one)
            self._idle[one] = None

    def leave(self, one: Connection) -> None:
        self._idle.pop(one, None)
        self._working.discard(one)
        self._guests.discard(one)

    def _turned_away(self, one: Connection) -> Admission:
        self._crowded.warn("all %d connections are at work; new ones are refused", self.most)
        if len(self._guests) >= GUESTS:
            return "out"
        self._guests.add(one)
        return "guest"


def affordable(wanted: int) -> int:
    """As many connections as were wanted, or as the limit of open files leaves room for; it is raised if it may be."""
    needed = len(list(Path("/dev/fd").iterdir())) + SPARE_FILES + GUESTS + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    with contextlib.suppress(ValueError, OSError):  # the system may have a bound of its own
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        soft = more
    most = max(1, wanted - (needed - soft))
    if most < wanted:
        log.warning("the limit of %d open files leaves room for %d connections, not %d", soft, most, wanted)
    return most
