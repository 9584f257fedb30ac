"""The disk tier's parts that outlive whatever runs: the files, the threads that write and read them, and the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.cache.disk.backend import RecordWriter
from ingot.cache.disk.counts import DiskCounts
from ingot.cache.disk.entry import Entry
from ingot.cache.disk.header import Header
from ingot.cache.disk.reader import Reading, RecordReader
from ingot.cache.disk.store import RecordStore

if TYPE_CHECKING:
    from ingot.cache.packing import LooseRecord


@dataclass(frozen=True, slots=True)
class Disk:
    store: RecordStore
    writer: RecordWriter
    reader: RecordReader
    counts: DiskCounts

    @classmethod
    def of(cls, store: RecordStore) -> Disk:
        counts = DiskCounts()
        writer = RecordWriter(store, counts)
        return cls(store, writer, RecordReader(store, writer.pending), counts)

    # For the engine's thread

    def has_room(self) -> bool:
        """Whether a record would be taken now."""
        return self.writer.has_room()

    def offer(self, header: Header, data: tuple[bytes, ...], record: LooseRecord) -> Entry | None:
        """Have a record written, of which this is all; None where that is too much. Never waits."""
        return self.writer.offer(header, data)

    def ask(self, entry: Entry) -> Reading:
        """Have a record read. Never waits."""
        return self.reader.ask(entry)

    def touch(self, entries: Sequence[Entry]) -> None:
        """They were used just now. Those that others go on from must be used whenever those are."""
        self.store.touch(entries)

    def memory_of(self, entry: Entry) -> int:
        """Bytes that a record takes once it is read, but for what its pages have to spare."""
        return entry.size

    def forget_elsewhere(self, tenant: str) -> None:
        """Have others that have a part of each record remove theirs of a tenant's, by its digest. There are none."""

    def drain(self, within_s: float) -> bool:
        """Wait until all is written; False where that takes longer."""
        return self.writer.drain(within_s)

    # For others

    def find(self, name: str) -> Entry | None:
        """A record that is there, or on its way, by its file's name."""
        return self.writer.find(name) or self.store.find(name)

    def stored(self, name: str) -> Entry | None:
        """A record that need not be written again."""
        return self.store.find(name)

    def doubt(self, entries: Sequence[Entry]) -> None:
        """What comes before these could not be read. They are files of their own, and may be whole."""

    def forget(self, tenant: str) -> int:
        """Remove all of a tenant's, by its digest; returns the bytes. Raises OSError."""
        self.writer.forget(tenant)
        return self.store.forget(tenant)

    def close(self, within_s: float) -> None:
        """Write what waits, as far as there is time."""
        self.writer.close(within_s)
        self.reader.close()
        self.store.close()
