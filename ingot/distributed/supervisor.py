"""The parent of a group: it starts every rank, watches that all of them advance, and begins anew when one does not.

It never imports mlx, so nothing that can hang a rank can hang it. The port that clients know is its own: rank 0 is
handed it and takes connections from it, and while no rank 0 does, the parent itself answers there that it will be back.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Protocol

from ingot.distributed.heartbeat import BEAT_S, first_problem
from ingot.distributed.hosts import Hosts
from ingot.errors import DeviceLost
from ingot.process import Terminal, heeded
from ingot.ranks.life import Gone, Life, Showed
from ingot.ranks.processes import COMMAND

log = logging.getLogger("ingot.ranks")

LAST_WORDS_S: Final = 1.5  # what rank 0 has to end its requests with an error that clients can read
SAME_CAUSE_S: Final = 0.2  # who ends within this of another may have been the cause of it
SAVING_S: Final = 20.0  # what rank 0 has to have written what is kept, where there is a folder for it
FOLLOWERS_S: Final = 5.0  # what the others have to end once rank 0 has
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
TRIES: Final = 8  # in a row
INTERRUPTED: Final = 130
FAILED: Final = 1


class Door(Protocol):
    """Answers clients while no rank does."""

    def open(self, reason: str) -> None:
        """From now on, or with a new reason."""

    def close(self) -> None:
        """Returns when nobody is answered any more."""


@dataclass(slots=True)
class Patience:
    """How long to wait before the group is started again, and when not to any more."""

    failures: int = 0

    def pause_after(self, *, was_ready: bool) -> float | None:
        """`was_ready`: the group that failed had served. None: too many in a row never did."""
        self.failures = 1 if was_ready else self.failures + 1
        if self.failures > TRIES:
            return None
        return min(FIRST_PAUSE_S * 4 ** (self.failures - 1), LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Fault:
    """`final`: it would be the same again."""

    reason: str
    final: bool = False


@dataclass(slots=True)
class Asked:
    """What signals asked for."""

    stops: int = 0
    reloads: int = 0


@dataclass(slots=True)
class Supervisor:
    hosts: Hosts
    arguments: Sequence[str]
    listening: Sequence[socket.socket]
    door: Door
    stall_s: float
    drain_s: float
    command: Sequence[str] = COMMAND
    asked: Asked = field(default_factory=Asked)
    _served: bool = False
    _ready: bool = False

    def run(self) -> int:
        """Until a signal ends it; the process's exit code. From the main thread."""
        self._take_signals()
        patience = Patience()
        reason = "the ranks are being started"
        while True:
            self.door.open(reason)
            life = Life(self.hosts, self.arguments, self.listening, self.command)
            try:
                fault = self._attend(life)
                if fault is None:
                    return self._stop(life)
                log.error("%s; all ranks are ended", fault.reason)
                self.door.open(fault.reason)
                life.say_farewell(fault.reason, LAST_WORDS_S)
            finally:
                life.end()
            pause = None if fault.final else patience.pause_after(was_ready=self._ready)
            if pause is None:
                log.critical("given up: %s", fault.reason)
                return FAILED
            log.warning("started again in %.1f s", pause)
            if not self._rest(pause):
                return 0
            reason = f"{fault.reason}; the ranks are being started again"

    def _take_signals(self) -> None:
        terminal = Terminal()

        def stop(number: int, frame: FrameType | None) -> None:
            self.asked.stops += 1

        def reload(number: int, frame: FrameType | None) -> None:
            if terminal.is_gone:
                self.asked.stops += 1
            else:
                self.asked.reloads += 1

        for number in (signal.SIGTERM, *heeded(signal.SIGINT)):
            signal.signal(number, stop)
        signal.signal(signal.SIGHUP, reload)

    def _attend(self, life: Life) -> Fault | None:
        """What went wrong, once something has; None: it is asked to stop."""
        self._ready = False
        while not self.asked.stops:
            if self.asked.reloads:
                self.asked.reloads = 0
                life.reload()
            try:
                event = life.mail.get(timeout=BEAT_S)
                while True:
                    if isinstance(event, Gone) or event.sign.trouble:
                        return self._cause(life, event)
                    life.watch.hear(event.rank, event.sign, time.monotonic())
                    event = life.mail.get_nowait()
            except queue.Empty:
                pass
            standings = life.watch.standings(time.monotonic())
            problem = first_problem(standings, self.stall_s)
            if problem is not None:
                return Fault(problem)
            if not self._ready and life.watch.ready:
                self._ready = self._served = True
                self.door.close()
            if self._ready:  # not before: rank 0 is healthy once it alone takes connections
                life.tell(standings)
        return None

    def _cause(self, life: Life, first: Gone | Showed) -> Fault:
        """Of what went wrong at about the same time: who was killed is more likely the cause than who gave up, and
        that more likely than that somebody cannot go on."""
        gone = [first] if isinstance(first, Gone) else []
        deadline = time.monotonic() + SAME_CAUSE_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = life.mail.get(timeout=left)
            except queue.Empty:
                break
            if not isinstance(event, Showed):
                gone.append(event)
        ended = [each for each in gone if each.code is not None]
        killed = [each for each in ended if each.code is not None and each.code < 0]
        cause = next(iter(killed or ended or gone), None)
        reason = first.sign.trouble if cause is None and isinstance(first, Showed) else str(cause)
        lost = any(each.code == DeviceLost.exit_code for each in ended)
        return Fault(reason, final=not self._served and not killed and not lost and bool(ended))

    def _rest(self, pause: float) -> bool:
        """False: it is asked to stop meanwhile."""
        deadline = time.monotonic() + pause
        while not self.asked.stops and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, BEAT_S))
        return not self.asked.stops

    def _stop(self, life: Life) -> int:
        """Let requests finish as one server would; asked once more, leave at once."""
        life.ask_to_end()
        deadline = time.monotonic() + self.drain_s + LAST_WORDS_S + FOLLOWERS_S
        while time.monotonic() < deadline:
            if life.wait(BEAT_S):
                return 0
            if self.asked.stops > 1:
                return INTERRUPTED
        return 0
