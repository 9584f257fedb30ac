"""Heartbeats: what a rank reports, how the parent process judges it, and a rank's link to its parent.

Heartbeats are sent, and the group's status is received, on threads of their own, so that this goes on while the rank
computes. Without its parent the process ends, as nobody else would stop it. Never imports mlx.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from ingot.distributed.place import RankConfig
from ingot.distributed.wire import Link, connect_to_host
from ingot.errors import Unavailable

HEARTBEAT_FRAME: Final = 1  # from a rank: `Heartbeat`
STATUS_FRAME: Final = 2  # to rank 0: a list of `RankStatus`
FAREWELL_FRAME: Final = 3  # to rank 0: why the group ends, as text

HEARTBEAT_S: Final = 0.25
"""Every rank sends a heartbeat this often,"""
FIRST_HEARTBEAT_S: Final = 60.0
"""from this long after its start on: a machine has to be reached, and Python to import its modules."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """`ready` once the rank is loaded; `step` is the last one that it has done, `stuck_s` how long it has been at the
    same piece of work, `trouble` why it cannot go on."""

    ready: bool
    step: int
    stuck_s: float
    pid: int
    trouble: str = ""


class RankStatus(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    ready: bool
    step: int
    silent_s: float  # since its last heartbeat
    late_s: float  # since it should have made progress

    def problem(self, limit_s: float) -> str | None:
        """Why the group cannot go on with it."""
        if self.silent_s > limit_s:
            return f"rank {self.rank} has sent no heartbeat for {self.silent_s:.0f} s"
        if self.late_s > limit_s:
            return f"rank {self.rank} has been at step {self.step + 1} for {self.late_s:.0f} s"
        return None


class WatchedRank:
    """A rank as its parent sees it. All times are of one monotonic clock."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.heartbeat = Heartbeat(False, 0, 0.0, 0)
        self._last_heartbeat = now + FIRST_HEARTBEAT_S
        self._behind: tuple[int, float] | None = None  # at which step, and since when

    def receive(self, heartbeat: Heartbeat, now: float) -> None:
        self.heartbeat, self._last_heartbeat = heartbeat, now

    def compare(self, furthest: int, now: float) -> None:
        """Compare with the last step that any rank knows of."""
        step = self.heartbeat.step
        if step >= furthest:
            self._behind = None
        elif self._behind is None or self._behind[0] != step:
            self._behind = step, now

    def status(self, now: float) -> RankStatus:
        behind_s = 0.0 if self._behind is None else now - self._behind[1]
        silent_s = max(now - self._last_heartbeat, 0.0)
        return RankStatus(
            self.rank, self.heartbeat.ready, self.heartbeat.step, silent_s, max(behind_s, self.heartbeat.stuck_s)
        )


class GroupWatch:
    def __init__(self, size: int, now: float) -> None:
        self._ranks = [WatchedRank(rank, now) for rank in range(size)]

    def receive(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        self._ranks[rank].receive(heartbeat, now)
        furthest = max(each.heartbeat.step for each in self._ranks)
        for each in self._ranks[1:]:  # rank 0 decides what is next: it reports by itself when it is stuck
            each.compare(furthest, now)

    @property
    def ready(self) -> bool:
        return all(each.heartbeat.ready for each in self._ranks)

    def pid(self, rank: int) -> int:
        """Of its process, on its machine; 0 where it is not known yet."""
        return self._ranks[rank].heartbeat.pid

    def statuses(self, now: float) -> list[RankStatus]:
        return [each.status(now) for each in self._ranks]


def first_rank_problem(statuses: Iterable[RankStatus], limit_s: float) -> str | None:
    """That of the rank that is furthest behind."""
    worst = max(statuses, key=lambda one: max(one.silent_s, one.late_s), default=None)
    return None if worst is None else worst.problem(limit_s)


def rank_not_ready(statuses: Iterable[RankStatus]) -> str | None:
    """The first rank that is still loading."""
    return next((f"rank {one.rank} is being started" for one in statuses if not one.ready), None)


PARENT_S: Final = 10.0  # within which the parent has to be reached
ORPHANED: Final = 70  # the exit code of a rank that has lost its parent

_encode_heartbeat = msgspec.msgpack.Encoder().encode
_decode_statuses = msgspec.msgpack.Decoder(list[RankStatus]).decode


class HeartbeatSender:
    """`step` gives the last one that the rank knows of, by default the last that it `did`; for `stuck_s` and `trouble`
    see `Heartbeat`."""

    def __init__(self, link: Link) -> None:
        self.ready = False
        self.step: Callable[[], int] = lambda: self._done
        self.stuck_s: Callable[[], float] = float
        self.trouble: Callable[[], str] = str
        self.on_farewell: Callable[[str], None] = lambda reason: os._exit(ORPHANED)
        self.rank_statuses: Sequence[RankStatus] = (RankStatus(0, False, 0, 0.0, 0.0),)  # until the parent sends all
        self._done = 0
        self._link = link
        self._closed = threading.Event()
        for work in (self._send_heartbeats, self._listen):
            threading.Thread(target=work, name="ingot-signs", daemon=True).start()

    def did(self, step: int) -> None:
        """The rank has done a step. 0: it is loaded."""
        self._done, self.ready = step, True

    def close(self) -> None:
        """The rank ends normally: from now on it may outlive its parent."""
        self._closed.set()

    def _send_heartbeats(self) -> None:
        with contextlib.suppress(Unavailable):  # the other thread notices, too
            while not self._closed.is_set():
                stuck_s = self.stuck_s() if self.ready else 0.0
                heartbeat = Heartbeat(self.ready, self.step(), stuck_s, os.getpid(), self.trouble())
                self._link.send(HEARTBEAT_FRAME, _encode_heartbeat(heartbeat))
                self._closed.wait(HEARTBEAT_S)

    def _listen(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if frame.kind == STATUS_FRAME:
                    self.rank_statuses = _decode_statuses(frame.body)
                elif frame.kind == FAREWELL_FRAME:
                    self.on_farewell(frame.body.decode())
        except Unavailable:
            if not self._closed.is_set():
                os._exit(ORPHANED)


def start_heartbeats(place: RankConfig) -> HeartbeatSender | None:
    """None without a parent, as under `mlx.launch`. Raises LinkLate and LinkLost."""
    if place.watch is None:
        return None
    return HeartbeatSender(
        connect_to_host(place.watch.host, place.watch.port, place.token, place.rank, "the parent process", PARENT_S)
    )
