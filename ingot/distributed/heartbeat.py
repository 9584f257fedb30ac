"""Heartbeats: what a rank says of itself, how the parent process sees it, and a rank's line to its parent.

Heartbeats go out and what becomes of the group comes in on threads of their own, so that it goes on while the rank
computes. Without a parent any more the process ends: nobody would stop it. Never imports mlx.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from ingot.distributed.place import RankPlace
from ingot.distributed.wire import Link, connect_to_host
from ingot.errors import Unavailable

HEARTBEAT_FRAME: Final = 1  # from a rank: `Heartbeat`
STATUS_FRAME: Final = 2  # to rank 0: a list of `RankStatus`
FAREWELL_FRAME: Final = 3  # to rank 0: why the group ends, as text

HEARTBEAT_S: Final = 0.25
"""Every rank shows that it lives this often,"""
FIRST_HEARTBEAT_S: Final = 60.0
"""from so long after its start on: a machine has to be reached, and Python to find its modules."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """`step` is the last one that the rank has done, `stuck_s` how long it has been at one and the same piece of work;
    `ready` once it is loaded, `trouble` why it cannot go on."""

    ready: bool
    step: int
    stuck_s: float
    pid: int
    trouble: str = ""


class RankStatus(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    ready: bool
    step: int
    silent_s: float  # since its last sign of life
    late_s: float  # since it ought to have gone on

    def problem(self, limit_s: float) -> str | None:
        """Why the group cannot go on with it."""
        if self.silent_s > limit_s:
            return f"rank {self.rank} has given no sign of life for {self.silent_s:.0f} s"
        if self.late_s > limit_s:
            return f"rank {self.rank} has been at step {self.step + 1} for {self.late_s:.0f} s"
        return None


class WatchedRank:
    """A rank as its parent sees it. All times are those of one monotonic clock."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.sign = Heartbeat(False, 0, 0.0, 0)
        self._heard = now + FIRST_HEARTBEAT_S
        self._behind: tuple[int, float] | None = None  # at which step, and since when

    def hear(self, sign: Heartbeat, now: float) -> None:
        self.sign, self._heard = sign, now

    def compare(self, furthest: int, now: float) -> None:
        """With the last step that any rank knows of."""
        step = self.sign.step
        if step >= furthest:
            self._behind = None
        elif self._behind is None or self._behind[0] != step:
            self._behind = step, now

    def standing(self, now: float) -> RankStatus:
        behind_s = 0.0 if self._behind is None else now - self._behind[1]
        silent_s = max(now - self._heard, 0.0)
        return RankStatus(self.rank, self.sign.ready, self.sign.step, silent_s, max(behind_s, self.sign.stuck_s))


class GroupWatch:
    """All ranks of a group."""

    def __init__(self, size: int, now: float) -> None:
        self._ranks = [WatchedRank(rank, now) for rank in range(size)]

    def hear(self, rank: int, sign: Heartbeat, now: float) -> None:
        self._ranks[rank].hear(sign, now)
        furthest = max(each.sign.step for each in self._ranks)
        for each in self._ranks[1:]:  # the first one says what is next: it is late when it says so itself
            each.compare(furthest, now)

    @property
    def ready(self) -> bool:
        return all(each.sign.ready for each in self._ranks)

    def pid(self, rank: int) -> int:
        """Of its process, on its machine; 0 where it has not said so yet."""
        return self._ranks[rank].sign.pid

    def standings(self, now: float) -> list[RankStatus]:
        return [each.standing(now) for each in self._ranks]


def first_rank_problem(standings: Iterable[RankStatus], limit_s: float) -> str | None:
    """Of who is furthest behind."""
    worst = max(standings, key=lambda one: max(one.silent_s, one.late_s), default=None)
    return None if worst is None else worst.problem(limit_s)


def rank_not_ready(standings: Iterable[RankStatus]) -> str | None:
    """Who is still being loaded."""
    return next((f"rank {one.rank} is being started" for one in standings if not one.ready), None)


PARENT_S: Final = 10.0  # within which it has to be reached
ORPHANED: Final = 70  # the exit code of who has no parent any more

_encode_heartbeat = msgspec.msgpack.Encoder().encode
_decode_statuses = msgspec.msgpack.Decoder(list[RankStatus]).decode


class HeartbeatSender:
    """`step` gives the last one that the rank knows of, by default the last that it `did`; `stuck_s` how long it has
    been at one and the same piece of work; `trouble` why it cannot go on, if so."""

    def __init__(self, link: Link) -> None:
        self.ready = False
        self.step: Callable[[], int] = lambda: self._done
        self.stuck_s: Callable[[], float] = float
        self.trouble: Callable[[], str] = str
        self.on_farewell: Callable[[str], None] = lambda reason: os._exit(ORPHANED)
        self.standings: Sequence[RankStatus] = (
            RankStatus(0, False, 0, 0.0, 0.0),
        )  # until the parent says how all stand
        self._done = 0
        self._link = link
        self._closed = threading.Event()
        for work in (self._tell, self._listen):
            threading.Thread(target=work, name="ingot-signs", daemon=True).start()

    def did(self, step: int) -> None:
        """The rank has done it. 0: it is loaded."""
        self._done, self.ready = step, True

    def close(self) -> None:
        """The rank ends as it should: the parent's end is no reason to hurry any more."""
        self._closed.set()

    def _tell(self) -> None:
        with contextlib.suppress(Unavailable):  # the other thread notices, too
            while not self._closed.is_set():
                stuck_s = self.stuck_s() if self.ready else 0.0
                sign = Heartbeat(self.ready, self.step(), stuck_s, os.getpid(), self.trouble())
                self._link.send(HEARTBEAT_FRAME, _encode_heartbeat(sign))
                self._closed.wait(HEARTBEAT_S)

    def _listen(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if frame.kind == STATUS_FRAME:
                    self.standings = _decode_statuses(frame.body)
                elif frame.kind == FAREWELL_FRAME:
                    self.on_farewell(frame.body.decode())
        except Unavailable:
            if not self._closed.is_set():
                os._exit(ORPHANED)


def start_heartbeats(place: RankPlace) -> HeartbeatSender | None:
    """None where nobody watches, as under `mlx.launch`. Raises LinkLate and LinkLost."""
    if place.watch is None:
        return None
    return HeartbeatSender(
        connect_to_host(place.watch.host, place.watch.port, place.token, place.rank, "the parent process", PARENT_S)
    )
