"""The frames of a sound as they are needed: read ahead in a thread, and forgotten once they are heard."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator
from concurrent.futures import Executor, Future

import numpy as np

from ingot.engine.loop import Post
from ingot.errors import BadMedia, IngotError
from ingot.media import worker
from ingot.media.audio import Sound
from ingot.media.mel import FRAMES_A_SECOND, HOP, Floats, MelFrames

log = logging.getLogger("ingot.engine")

WINDOW = 30 * FRAMES_A_SECOND
AHEAD = WINDOW
"""Frames that are there beyond the window that is heard, so that the next need not be waited for."""


class Frames:
    """Belongs to the engine thread, but for what reads in a thread of `executor`; `post` brings back what it found."""

    def __init__(
        self, sound: Sound, bands: int, executor: Executor, post: Post, tenant: str = "", request: str = ""
    ) -> None:
        self._pieces = frames_of(sound, bands)
        self._left = threading.Event()
        self._client = worker.Client(tenant, lambda: not self._left.is_set(), request)
        self._lock = threading.Lock()  # whoever reads, or ends reading, has it
        self._executor, self._post = executor, post
        self._held = np.zeros((0, bands), np.float32)
        self._begin = 0  # of what is held
        self._reading = False
        self.ended = False
        self.failure: IngotError | None = None
        self._ask()

    @property
    def known(self) -> int:
        """Frames so far; all of them, where `ended`."""
        return self._begin + len(self._held)

    def ready(self, seek: int) -> bool:
        """Whether a window that begins at `seek` can be heard now. Raises what is wrong with the sound."""
        if self.failure is not None:
            raise self.failure
        self._held, self._begin = self._held[max(0, seek - self._begin) :], max(seek, self._begin)
        if not self.ended and not self._reading and len(self._held) < WINDOW + AHEAD:
            self._ask()
        return self.ended or len(self._held) >= WINDOW

    def window(self) -> Floats:
        """The frames from the last `seek` on, fewer at the end."""
        return self._held[:WINDOW]

    def _ask(self) -> None:
        self._reading = True
        self._executor.submit(self._read).add_done_callback(self._answer)

    def _read(self) -> Floats | None:
        with self._lock, worker.working_for(self._client):
            return next(self._pieces, None)

    def close(self) -> None:
        """Nobody hears the sound any more: who unpacks it stops."""
        self._left.set()
        with contextlib.suppress(RuntimeError):  # no threads are left, and no workers
            self._executor.submit(self._stop)

    def _stop(self) -> None:
        with self._lock:
            self._pieces.close()

    def _answer(self, read: Future[Floats | None]) -> None:
        if not read.cancelled():
            self._post(lambda: self._take(read))

    def _take(self, read: Future[Floats | None]) -> None:
        self._reading = False
        error = read.exception()
        if isinstance(error, IngotError):
            self.failure = error
            return
        if error is not None:
            log.error("a sound could not be read", exc_info=error)
            self.failure = BadMedia("the sound cannot be unpacked.")
            return
        piece = read.result()
        if piece is None:
            self.ended = True
        else:
            self._held = np.concatenate([self._held, piece])


def frames_of(sound: Sound, bands: int) -> Generator[Floats, None, None]:
    """All frames of a sound, about a window at a time."""
    mel, gathered = MelFrames(bands), 0
    held: list[Floats] = []
    for samples in sound.samples():
        held.append(samples)
        gathered += len(samples)
        if gathered >= WINDOW * HOP:
            yield mel.push(np.concatenate(held))
            held, gathered = [], 0
    held.append(np.zeros(0, np.float32))
    yield np.concatenate([mel.push(np.concatenate(held)), mel.end()])
