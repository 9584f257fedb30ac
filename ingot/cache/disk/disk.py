"""The disk tier's parts that outlive whatever runs: the files, the threads that write and read them, and the counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.cache.disk.counts import DiskCounts
from ingot.cache.disk.files import Files
from ingot.cache.disk.reader import RecordReader
from ingot.cache.disk.store import DiskLimits, RecordStore
from ingot.cache.disk.writer import RecordWriter


@dataclass(frozen=True, slots=True)
class Disk:
    store: RecordStore
    writer: RecordWriter
    reader: RecordReader
    counts: DiskCounts

    @classmethod
    def open(cls, folder: Path, key: Mapping[str, str], limits: DiskLimits, files: Files | None = None) -> Disk:
        """Raises OSError where there is no such folder and none can be made."""
        counts = DiskCounts()
        store = RecordStore(folder, key, limits, files)
        writer = RecordWriter(store, counts)
        return cls(store, writer, RecordReader(store, writer.pending), counts)

    def forget(self, tenant: str) -> int:
        """Remove all of a tenant's, by its digest; returns the bytes. Raises OSError."""
        self.writer.forget(tenant)
        return self.store.forget(tenant)

    def close(self, within_s: float) -> None:
        """Write what waits, as far as there is time."""
        self.writer.close(within_s)
        self.reader.close()
        self.store.close()
