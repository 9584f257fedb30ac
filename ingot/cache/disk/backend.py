"""The thread that writes records. What waits for it is bounded in bytes; what is too much is not taken.

`offer` never waits for a file. What was taken can be read back from here before it is written. Whatever goes wrong with
a record is that record's loss: it is counted, said in the log, and its entry is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ingot.cache.disk.counts import DiskCounts
from ingot.cache.disk.entry import Entry
from ingot.cache.disk.header import Header
from ingot.cache.disk.record_file import StoredData
from ingot.cache.disk.store import NoRoom, RecordStore
from ingot.observe.notices import Notice

log = logging.getLogger("ingot.cache")

MOST_WAITING: Final = 128 << 20
"""Bytes of records that may wait, beside what the memory budget counts; one that is larger is taken when none does."""
SETTLE_S: Final = 10.0
"""How often the index is told what was used while nothing is written: whoever shares the folder goes by that."""
PAUSE_S: Final = 10.0
"""After a write failed, for how long nothing is taken: a drive that is full or gone stays so for a while."""


@dataclass(frozen=True, slots=True)
class Spill:
    """A record on its way to disk, as bytes."""

    entry: Entry
    header: Header
    data: tuple[bytes, ...]


class RecordWriter:
    def __init__(
        self,
        store: RecordStore,
        counts: DiskCounts,
        wrote: Callable[[], None] = lambda: None,
        most: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wrote` is called after each record, by the writer's thread."""
        self._store, self._counts, self._most, self._clock = store, counts, most, clock
        self.wrote = wrote
        self._waiting: deque[Spill] = deque()
        self._by_name: dict[str, Spill] = {}  # with the one that is being written
        self._bytes = 0
        self._paused_until = 0.0
        self._closing = False
        self._changed = threading.Condition()
        self._failed, self._full = Notice(log), Notice(log)
        self._thread = threading.Thread(target=self._live, name="ingot-disk-writer", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Whether a record would be taken now."""
        with self._changed:
            return not self._closing and not self.is_paused and self._bytes < self._most

    @property
    def is_paused(self) -> bool:
        """A write failed a moment ago."""
        return self._clock() < self._paused_until

    def offer(self, header: Header, data: tuple[bytes, ...]) -> Entry | None:
        """Have a record written; None where that is too much, and counted."""
        size = sum(map(len, data))
        with self._changed:
            fits = self._bytes + size <= self._most or not self._by_name
            if self._closing or not fits or self.is_paused:
                self._counts.dropped += 1
                return None
            held = self._by_name.get(header.name)
            if held is not None:
                return held.entry
            spill = Spill(Entry.of(header, time.time()), header, data)
            self._waiting.append(spill)
            self._by_name[header.name] = spill
            self._bytes += size
            self._changed.notify_all()
        return spill.entry

    def find(self, name: str) -> Entry | None:
        """A record that is not written yet, by its file's name."""
        with self._changed:
            spill = self._by_name.get(name)
        return None if spill is None else spill.entry

    def pending(self, entry: Entry) -> StoredData | None:
        """A record that is not written yet."""
        with self._changed:
            spill = self._by_name.get(entry.name)
        return None if spill is None else StoredData(spill.header, tuple(map(memoryview, spill.data)))

    def forget(self, tenant: str) -> None:
        """Write nothing more of a tenant's, by its digest. What is being written is waited for."""
        with self._changed:
            for spill in [spill for spill in self._waiting if spill.header.owner.tenant == tenant]:
                self._waiting.remove(spill)
                self._done(spill, lost=True)
            self._changed.wait_for(
                lambda: not any(spill.header.owner.tenant == tenant for spill in self._by_name.values())
            )

    def drain(self, within_s: float) -> bool:
        """Wait until all is written; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._by_name, within_s)

    def close(self, within_s: float) -> None:
        """Write what waits, as far as there is time, and end the thread."""
        self.drain(within_s)
        with self._changed:
            self._closing = True
            while self._waiting:
                self._done(self._waiting.popleft(), lost=True)
            self._changed.notify_all()
        self._thread.join(within_s)

    # The thread

    def _live(self) -> None:
        while (spill := self._next()) is not None:
            lost = not self._written(spill)
            with self._changed:
                self._done(spill, lost=lost)
            self.wrote()

    def _next(self) -> Spill | None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or bool(self._waiting), SETTLE_S):
                    return self._waiting.popleft() if self._waiting else None
            self._store.settle()

    def _written(self, spill: Spill) -> bool:
        began = time.monotonic()
        try:
            self._store.write(spill.header, spill.data, spill.entry)
            self._store.settle()
        except OSError as error:
            self._counts.spill_failures += 1
            if isinstance(error, NoRoom):
                self._full.warn("a record is not written to %s: %s", self._store.folder, error.strerror)
            else:
                self._failed.warn("a record cannot be written to %s: %s", self._store.folder, error)
            self._paused_until = self._clock() + PAUSE_S
            return False
        except Exception:
            log.exception("a record could not be written to %s", self._store.folder)
            self._counts.spill_failures += 1
            return False
        self._counts.spills += 1
        self._counts.spilled_bytes += spill.entry.size
        self._counts.spill_s += time.monotonic() - began
        return True

    def _done(self, spill: Spill, *, lost: bool) -> None:
        spill.entry.lost = spill.entry.lost or lost
        self._by_name.pop(spill.header.name, None)
        self._bytes -= sum(map(len, spill.data))
        self._changed.notify_all()
