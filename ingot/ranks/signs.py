"""A rank's line to its parent process: signs of life go out, and what becomes of the group comes in.

On threads of its own, so that it goes on while the rank computes. Without a parent any more the process ends: nobody
would stop it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ingot.distributed.heartbeat import BEAT_S, FAREWELL, SIGN, STANDINGS, Sign, Standing
from ingot.distributed.place import Place
from ingot.distributed.wire import Link
from ingot.errors import Unavailable
from ingot.ranks.meeting import join

PARENT_S: Final = 10.0  # within which it has to be reached
ORPHANED: Final = 70  # the exit code of who has no parent any more

_encoded = msgspec.msgpack.Encoder().encode
_standings = msgspec.msgpack.Decoder(list[Standing]).decode


class Signs:
    """`step` gives the last one that the rank knows of, by default the last that it `did`; `stuck_s` how long it has
    been at one and the same piece of work; `trouble` why it cannot go on, if so."""

    def __init__(self, link: Link) -> None:
        self.ready = False
        self.step: Callable[[], int] = lambda: self._done
        self.stuck_s: Callable[[], float] = float
        self.trouble: Callable[[], str] = str
        self.on_farewell: Callable[[str], None] = lambda reason: os._exit(ORPHANED)
        self.standings: Sequence[Standing] = (Standing(0, False, 0, 0.0, 0.0),)  # until the parent says how all stand
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
                sign = Sign(self.ready, self.step(), stuck_s, os.getpid(), self.trouble())
                self._link.send(SIGN, _encoded(sign))
                self._closed.wait(BEAT_S)

    def _listen(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if frame.kind == STANDINGS:
                    self.standings = _standings(frame.body)
                elif frame.kind == FAREWELL:
                    self.on_farewell(frame.body.decode())
        except Unavailable:
            if not self._closed.is_set():
                os._exit(ORPHANED)


def signs_to_parent(place: Place) -> Signs | None:
    """None where nobody watches, as under `mlx.launch`. Raises LinkLate and LinkLost."""
    if place.watch is None:
        return None
    return Signs(join(place.watch.host, place.watch.port, place.token, place.rank, "the parent process", PARENT_S))
