"""The disk tier: the store, the threads that write and read its records, and their counts.

One thread writes. Its queue is bounded in bytes; records beyond that are dropped. `offer` never blocks on a file. A
record that waits to be written can be read back from the queue. A failure concerns only its record: it is counted and
logged, and the entry is lost. Other threads read records; the caller polls the `PendingRead`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.record_file import DamagedRecord, RecordHeader, StoredData
from ingot.cache.disk.store import NoDiskRoom, RecordStore
from ingot.observe.logs import RareWarning

if TYPE_CHECKING:
    from ingot.cache.records import UnpagedRecord


@dataclass(frozen=True, slots=True)
class DiskBackend:
    store: RecordStore
    writer: RecordWriter
    reader: RecordReader
    counts: DiskCounts

    @classmethod
    def of(cls, store: RecordStore) -> DiskBackend:
        counts = DiskCounts()
        writer = RecordWriter(store, counts)
        return cls(store, writer, RecordReader(store, writer.pending), counts)

    # For the engine thread

    def has_room(self) -> bool:
        """Whether a record would be accepted now."""
        return self.writer.has_room()

    def offer(self, header: RecordHeader, data: tuple[bytes, ...], record: UnpagedRecord) -> DiskEntry | None:
        """Queue a record to be written; None where the queue is full. Never blocks."""
        return self.writer.offer(header, data)

    def ask(self, entry: DiskEntry) -> PendingRead:
        """Start reading a record. Never blocks."""
        return self.reader.ask(entry)

    def touch(self, entries: Sequence[DiskEntry]) -> None:
        """Mark entries as used now. Whoever uses an entry must touch those that it continues, too."""
        self.store.touch(entries)

    def memory_of(self, entry: DiskEntry) -> int:
        """Bytes that a record takes once it is loaded, apart from the unused rest of its pages."""
        return entry.size

    def forget_on_followers(self, tenant: str) -> None:
        """Have other ranks remove their parts of a tenant's records, by its digest. Here there are none."""

    def drain(self, within_s: float) -> bool:
        """Wait until all is written; False where that takes longer."""
        return self.writer.drain(within_s)

    # For any thread

    def find(self, name: str) -> DiskEntry | None:
        """A record that is stored or waits to be written, by its file's name."""
        return self.writer.find(name) or self.store.find(name)

    def stored(self, name: str) -> DiskEntry | None:
        """A record that need not be written again."""
        return self.store.find(name)

    def doubt(self, entries: Sequence[DiskEntry]) -> None:
        """The records before these could not be read. Here each is a file of its own, and may be intact."""

    def forget(self, tenant: str) -> int:
        """Remove all of a tenant's records, by its digest; returns their bytes. Raises OSError."""
        self.writer.forget(tenant)
        return self.store.forget(tenant)

    def close(self, within_s: float) -> None:
        """Write what is queued, as far as there is time."""
        self.writer.close(within_s)
        self.reader.close()
        self.store.close()


log = logging.getLogger("ingot.cache")

MOST_WAITING: Final = 128 << 20
"""Bytes of queued records, outside of the memory budget. A larger record is accepted when the queue is empty."""
SETTLE_S: Final = 10.0
"""How often uses are written to the index while nothing else is, for other processes that share the folder."""
PAUSE_S: Final = 10.0
"""For how long nothing is accepted after a failed write: a drive that is full or gone stays so for a while."""


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A record on its way to disk, as bytes."""

    entry: DiskEntry
    header: RecordHeader
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
        self._waiting: deque[PendingWrite] = deque()
        self._by_name: dict[str, PendingWrite] = {}  # with the one that is being written
        self._bytes = self._largest = 0  # of what waits, and of the largest record so far
        self._paused_until = 0.0
        self._closing = False
        self._changed = threading.Condition()
        self._failed, self._full = RareWarning(log), RareWarning(log)
        self._thread = threading.Thread(target=self._run, name="ingot-disk-writer", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        with self._changed:
            fits = self._bytes + self._largest <= self._most or not self._by_name
            return fits and not self._closing and not self.is_paused

    @property
    def is_paused(self) -> bool:
        """A write failed a moment ago."""
        return self._clock() < self._paused_until

    def offer(self, header: RecordHeader, data: tuple[bytes, ...]) -> DiskEntry | None:
        """Queue a record; None where the queue is full."""
        size = sum(map(len, data))
        with self._changed:
            self._largest = max(self._largest, size)
            fits = self._bytes + size <= self._most or not self._by_name
            if self._closing or not fits or self.is_paused:
                self._counts.dropped += 1
                return None
            queued = self._by_name.get(header.name)
            if queued is not None:
                return queued.entry
            write = PendingWrite(DiskEntry.of(header, time.time()), header, data)
            self._waiting.append(write)
            self._by_name[header.name] = write
            self._bytes += size
            self._changed.notify_all()
        return write.entry

    def find(self, name: str) -> DiskEntry | None:
        """A record that is not written yet, by its file's name."""
        with self._changed:
            write = self._by_name.get(name)
        return None if write is None else write.entry

    def pending(self, entry: DiskEntry) -> StoredData | None:
        """A record that is not written yet."""
        with self._changed:
            write = self._by_name.get(entry.name)
        return None if write is None else StoredData(write.header, tuple(map(memoryview, write.data)))

    def forget(self, tenant: str) -> None:
        """Drop what is queued of a tenant, by its digest, and wait for what is being written."""
        with self._changed:
            for write in [write for write in self._waiting if write.header.owner.tenant == tenant]:
                self._waiting.remove(write)
                self._done(write, lost=True)
            self._changed.wait_for(
                lambda: not any(write.header.owner.tenant == tenant for write in self._by_name.values())
            )

    def drain(self, within_s: float) -> bool:
        """Wait until all is written; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._by_name, within_s)

    def close(self, within_s: float) -> None:
        """Write what is queued, as far as there is time, and end the thread."""
        self.drain(within_s)
        with self._changed:
            self._closing = True
            while self._waiting:
                self._done(self._waiting.popleft(), lost=True)
            self._changed.notify_all()
        self._thread.join(within_s)

    # The thread

    def _run(self) -> None:
        while (write := self._next()) is not None:
            lost = not self._write(write)
            with self._changed:
                self._done(write, lost=lost)
            self.wrote()

    def _next(self) -> PendingWrite | None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or bool(self._waiting), SETTLE_S):
                    return self._waiting.popleft() if self._waiting else None
            self._store.settle()

    def _write(self, write: PendingWrite) -> bool:
        """Whether it was written."""
        began = time.monotonic()
        try:
            self._store.write(write.header, write.data, write.entry)
            self._store.settle()
        except OSError as error:
            self._counts.spill_failures += 1
            if isinstance(error, NoDiskRoom):
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
        self._counts.spilled_bytes += write.entry.size
        self._counts.spill_s += time.monotonic() - began
        return True

    def _done(self, write: PendingWrite, *, lost: bool) -> None:
        write.entry.lost = write.entry.lost or lost
        self._by_name.pop(write.header.name, None)
        self._bytes -= sum(map(len, write.data))
        self._changed.notify_all()


READER_THREADS: Final = min(max(2, (os.cpu_count() or 2) // 2), 8)
"""Some read while others verify what they have read, which takes longer."""


class PendingRead:
    """A record that is being read. Once it is `done`, `found` is what was read, or None where the record is lost;
    `gone` means that this is no failure, as another process that shares the folder removed the file."""

    __slots__ = ("_finished", "cancelled", "entry", "found", "gone", "seconds")

    def __init__(self, entry: DiskEntry) -> None:
        self.entry = entry
        self.found: StoredData | None = None
        self.seconds = 0.0
        self.cancelled = self.gone = False
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self, found: StoredData | None) -> None:
        self.found = found
        self._finished.set()

    def wait(self, within_s: float) -> bool:
        return self._finished.wait(within_s)


class RecordReader:
    def __init__(
        self, store: RecordStore, pending: Callable[[DiskEntry], StoredData | None], threads: int = READER_THREADS
    ) -> None:
        """`pending` returns records that are still to be written."""
        self._store, self._pending = store, pending
        self._requests: queue.SimpleQueue[PendingRead | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="ingot-disk-reader", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, entry: DiskEntry) -> PendingRead:
        """Start reading a record, behind those requested before. Never blocks."""
        reading = PendingRead(entry)
        self._requests.put(reading)
        return reading

    def close(self) -> None:
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (reading := self._requests.get()) is not None:
            began = time.monotonic()
            found = None if reading.cancelled else self._read(reading)
            reading.seconds = time.monotonic() - began
            reading.finish(found)

    def _read(self, reading: PendingRead) -> StoredData | None:
        entry = reading.entry
        try:
            return self._pending(entry) or self._store.read(entry)
        except FileNotFoundError:
            reading.gone = True
            log.info("%s is gone from %s: another process removed it", entry.name, self._store.folder)
        except (OSError, DamagedRecord) as error:
            log.warning("%s cannot be read back from %s: %s", entry.name, self._store.folder, error)
        except Exception:
            log.exception("%s could not be read back from %s", entry.name, self._store.folder)
        entry.lost = True
        return None


@dataclass(slots=True)
class DiskCounts:
    """Each number is changed by one thread. Any thread may read them."""

    spills: int = 0  # records that were written
    spilled_bytes: int = 0
    spill_s: float = 0.0
    dropped: int = 0  # records that were not, since the queue was full
    spill_failures: int = 0  # records that could not be written
    hits: int = 0  # prompts that reused something from disk
    misses: int = 0  # prompts that found nothing there
    promotions: int = 0  # records that were read back
    promoted_bytes: int = 0
    promotion_s: float = 0.0
    promotion_failures: int = 0  # records that could not be read, or were damaged
