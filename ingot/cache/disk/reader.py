"""The threads that read records back. Whoever asks gets what was read, or that it is lost, when it looks again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from ingot.cache.disk.entry import Entry
from ingot.cache.disk.header import Damaged
from ingot.cache.disk.record_file import StoredData
from ingot.cache.disk.store import RecordStore

log = logging.getLogger("ingot.cache")

THREADS: Final = 2
"""One reads while the other one checks what it has read."""


class Reading:
    """One record on its way back. `found` is what was read once it is `done`, and None where it is lost; `gone` where
    that is no failure, as whoever shares the folder removed its file."""

    __slots__ = ("_finished", "cancelled", "entry", "found", "gone", "seconds")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.found: StoredData | None = None
        self.seconds = 0.0
        self.cancelled = self.gone = False
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True

    def finish(self, found: StoredData | None) -> None:
        self.found = found
        self._finished.set()

    def wait(self, within_s: float) -> bool:
        return self._finished.wait(within_s)


class RecordReader:
    def __init__(
        self, store: RecordStore, pending: Callable[[Entry], StoredData | None], threads: int = THREADS
    ) -> None:
        """`pending` has records that are still to be written."""
        self._store, self._pending = store, pending
        self._asked: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._live, name="ingot-disk-reader", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, entry: Entry) -> Reading:
        """Have a record read, after those that were asked for before. Never waits."""
        reading = Reading(entry)
        self._asked.put(reading)
        return reading

    def close(self) -> None:
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def _live(self) -> None:
        while (reading := self._asked.get()) is not None:
            began = time.monotonic()
            found = None if reading.cancelled else self._read(reading)
            reading.seconds = time.monotonic() - began
            reading.finish(found)

    def _read(self, reading: Reading) -> StoredData | None:
        entry = reading.entry
        try:
            return self._pending(entry) or self._store.read(entry)
        except FileNotFoundError:
            reading.gone = True
            log.info("%s is gone from %s: whoever shares that folder removed it", entry.name, self._store.folder)
        except (OSError, Damaged) as error:
            log.warning("%s cannot be read back from %s: %s", entry.name, self._store.folder, error)
        except Exception:
            log.exception("%s could not be read back from %s", entry.name, self._store.folder)
        entry.lost = True
        return None
