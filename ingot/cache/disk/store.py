"""Records in a folder, a file each: written aside and renamed, never changed, checked whenever they are read.

    folder/index.sqlite           what the files say, and when each was used; can be deleted
    folder/lock                   held by whoever writes, of all processes that share the folder
    folder/SCOPE/about.json       what the states in there depend on, in words
    folder/SCOPE/RECORD           states that this server can use, if the scope is its own
    folder/damaged/RECORD         what was found to be otherwise than it was written

All files in the folder count against its cap, whosever they are; only those of its own scope are ever removed to keep
it, those that were used longest ago first. Any thread may call anything here; writing and reading take their time, so
neither is for the engine's thread. Files are the truth: the index, and what is known in memory, follow them.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ingot.cache.disk.entry import Entry
from ingot.cache.disk.files import Files, Listed
from ingot.cache.disk.header import Damaged, Header, RecordOwner, scope_of, sums_of
from ingot.cache.disk.index import IndexRow, LastingIndex
from ingot.cache.disk.record_file import RECORD, StoredData, read_header, read_record

log = logging.getLogger("ingot.cache")

PATIENCE_S: Final = 10.0
"""For another process that writes."""
MOST_RECORDS: Final = 100_000
INDEX_ROOM: Final = 1 << 20
"""Bytes of the cap that records leave to the index and its journal."""
PART: Final = ".part"
DAMAGED: Final = "damaged"
ABOUT: Final = "about.json"
INDEX: Final = "index.sqlite"
LOCK: Final = "lock"


class NoRoom(OSError):
    """A record that does not fit under the cap, or above the floor of free space."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ENOSPC, reason)


@dataclass(frozen=True, slots=True)
class DiskLimits:
    most: int  # bytes of all files in the folder
    floor: int = 0  # bytes that stay free on the drive
    sync: bool = True  # a record that is there after a write is there after a loss of power


class RecordStore:
    """Those of one scope, in a folder that may have others. Made where there is none; raises OSError where that fails.
    One that can only be read is read."""

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, str],
        limits: DiskLimits,
        files: Files | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.key, self.limits, self.scope = folder, dict(key), limits, scope_of(key)
        self._files, self._clock = files or Files(), clock
        self._home = folder / self.scope
        self._known: dict[str, Entry] = {}
        self._touched: dict[str, float] = {}
        self._books = threading.Lock()  # over what is known; never held while a file is read or written
        self.generation = 0  # of what is known: changes when files of other processes came to light
        self._index = LastingIndex(folder / INDEX, self._files, self._rows)
        self._files.make_folder(self._home)
        self._learn(self._listed(self._home))
        self._tidy()

    # What is there

    def entries(self, owner: RecordOwner) -> list[Entry]:
        """An owner's, each after those that it may go on from."""
        with self._books:
            found = [entry for entry in self._known.values() if entry.owner == owner]
        return sorted(found, key=lambda entry: entry.begin)

    def find(self, name: str) -> Entry | None:
        with self._books:
            return self._known.get(name)

    def held(self, tenant: str) -> tuple[int, int]:
        """Records and bytes of a tenant, by its digest."""
        with self._books:
            sizes = [entry.size for entry in self._known.values() if entry.owner.tenant == tenant]
        return len(sizes), sum(sizes)

    def total(self) -> tuple[int, int]:
        """Records and bytes of this scope."""
        with self._books:
            sizes = [entry.size for entry in self._known.values()]
        return len(sizes), sum(sizes)

    def touch(self, entries: Iterable[Entry]) -> None:
        """They were used just now. Those that others go on from must be used whenever those are."""
        now = self._clock()
        with self._books:
            for entry in entries:
                entry.used = self._touched[entry.name] = now

    # Writing

    def write(self, header: Header, data: Sequence[bytes | memoryview], entry: Entry | None = None) -> Entry:
        """Store a record, unless it is there; less useful ones go where they must. It is known as `entry` from then on,
        if one is given. Raises OSError."""
        header = replace(header, sums=sums_of(data))
        entry = entry or Entry.of(header, self._clock())
        self._files.make_folder(self._home)
        with self._files.alone(self._lock, PATIENCE_S):
            if (self._home / entry.name).exists():
                return self._know(entry)
            self._make_room(entry.size)
            self._replace(entry.name, [header.encoded(), *data])
        return self._know(entry)

    def _replace(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Whole or not at all."""
        part = self._home / f".{name}{PART}"
        try:
            self._files.write(part, pieces, sync=self.limits.sync)
            self._files.rename(part, self._home / name)
        except BaseException:
            with suppress(OSError):
                self._files.remove(part)
            raise
        if self.limits.sync:
            self._files.sync_folder(self._home)

    def _know(self, entry: Entry) -> Entry:
        with self._books:
            self._known[entry.name] = entry
        self._index.using(lambda index: index.add([entry.row(self.scope)]), None)
        return entry

    def settle(self) -> None:
        """Tell the index what was used since the last time."""
        with self._books:
            used, self._touched = self._touched, {}
        if used:
            self._index.using(lambda index: index.touch(used.items()), None)

    def forget(self, tenant: str) -> int:
        """Remove all of a tenant's, by its digest; returns the bytes. Raises OSError where that fails."""
        with self._files.alone(self._lock, PATIENCE_S):
            with self._books:
                gone = [entry for entry in self._known.values() if entry.owner.tenant == tenant]
            self._remove(gone)
        return sum(entry.size for entry in gone)

    # Reading

    def read(self, entry: Entry) -> StoredData:
        """Raises Damaged, once the file is set aside, or OSError. Whichever it is, the entry is lost."""
        path = self._home / entry.name
        try:
            found = read_record(self._files, path)
            if found.header.key != self.key:
                raise Damaged("it is another model's")
        except Damaged as problem:
            self._set_aside(path, problem)
            self._lose([entry])
            raise
        except OSError:
            self._lose([entry])
            raise
        return found

    # Learning

    def _learn(self, listed: Iterable[Listed]) -> None:
        """Know the files that are in its folder now, and no others: by the index, else by their headers."""
        there = {file.path.name: file for file in listed if RECORD.fullmatch(file.path.name)}
        with self._books:
            gone = [entry for name, entry in self._known.items() if name not in there]
            unknown = [file for name, file in there.items() if name not in self._known]
        if gone:
            self._lose(gone)
        if unknown:
            none: list[IndexRow] = []
            rows = {row.name: row for row in self._index.using(lambda index: index.rows(self.scope), none)}
            unknown = sorted(unknown, key=lambda file: file.changed)[-MOST_RECORDS:]
            found = [entry for file in unknown if (entry := self._entry(file, rows)) is not None]
            with self._books:
                self._known |= {entry.name: entry for entry in found}
                self.generation += 1
            self._index.using(lambda index: index.add([entry.row(self.scope) for entry in found]), None)
            self._index.using(lambda index: index.remove(rows.keys() - there.keys()), None)

    def _entry(self, file: Listed, rows: Mapping[str, IndexRow]) -> Entry | None:
        row = rows.get(file.path.name)
        if row is not None and row.size == file.nbytes:
            with suppress(ValueError, TypeError, KeyError):
                return Entry.from_row(row)
        return self._examined(file)

    def _examined(self, file: Listed) -> Entry | None:
        """What a file's header says; one that is damaged is set aside."""
        try:
            header = read_header(self._files, file.path, file.nbytes)
            if header.key != self.key:
                raise Damaged("it is another model's")
        except Damaged as problem:
            self._set_aside(file.path, problem)
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", file.path, error)
            return None
        return Entry.of(header, file.changed)

    def _rows(self) -> list[IndexRow]:
        with self._books:
            known = list(self._known.values())
        return [entry.row(self.scope) for entry in known]

    def _tidy(self) -> None:
        """Keep to the cap from the start, and clear away what a process that died left."""
        try:
            with self._files.alone(self._lock, PATIENCE_S):
                if not (self._home / ABOUT).exists():
                    self._replace(ABOUT, [json.dumps(self.key, indent=2).encode()])
                self._make_room(0)
        except OSError as error:
            log.warning("%s is only read from, as nothing can be written there: %s", self.folder, error)

    # Room

    def _make_room(self, wanted: int) -> None:
        """While nobody else writes: let so many bytes be written. Raises NoRoom, before anything is removed for it."""
        listed = self._without_parts(self._listed(self.folder))
        self._learn(file for file in listed if file.path.parent == self._home)
        missing = self._missing(wanted, sum(file.nbytes for file in listed))
        if missing <= 0:
            return
        aside = [file for file in listed if file.path.parent.name == DAMAGED]
        if wanted and sum(file.nbytes for file in aside) + self.total()[1] < missing:
            raise NoRoom(f"{wanted} bytes more do not fit, and what would have to go belongs to others")
        for file in aside:
            self._files.remove(file.path)
            missing -= file.nbytes
        self._remove(self._least_used(missing))

    def _without_parts(self, listed: Iterable[Listed]) -> list[Listed]:
        """What others, who died, were writing is removed."""
        whole = []
        for file in listed:
            if file.path.parent == self._home and file.path.name.endswith(PART):
                self._files.remove(file.path)
            else:
                whole.append(file)
        return whole

    def _missing(self, wanted: int, used: int) -> int:
        """How many bytes have to go first."""
        over_cap = used + wanted + INDEX_ROOM - self.limits.most
        # Where others have filled the drive, this folder does not grow; to shrink it would not help them for long.
        over_floor = min(wanted, wanted + self.limits.floor - self._files.free(self.folder))
        with self._books:
            too_many = wanted > 0 and len(self._known) >= MOST_RECORDS
        return max(over_cap, over_floor, int(too_many))

    def _least_used(self, missing: int) -> list[Entry]:
        """So many bytes of records; of those that were used together the longest paths first."""
        never: dict[str, float] = {}
        used = self._index.using(lambda index: index.used(self.scope), never)
        with self._books:
            known = list(self._known.values())
        known.sort(key=lambda entry: (max(entry.used, used.get(entry.name, 0.0)), -entry.begin))
        found: list[Entry] = []
        for entry in known:
            if missing <= 0:
                break
            found.append(entry)
            missing -= entry.size
        return found

    def _remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._files.remove(self._home / entry.name)
        self._lose(entries)

    def _lose(self, entries: Sequence[Entry]) -> None:
        with self._books:
            for entry in entries:
                entry.lost = True
                self._known.pop(entry.name, None)
        self._index.using(lambda index: index.remove([entry.name for entry in entries]), None)

    def _set_aside(self, path: Path, problem: Damaged) -> None:
        log.warning("%s is damaged: %s; it is set aside", path, problem)
        with suppress(OSError):
            self._files.make_folder(self.folder / DAMAGED)
            self._files.rename(path, self.folder / DAMAGED / path.name)

    # Files and index

    @property
    def _lock(self) -> Path:
        return self.folder / LOCK

    def _listed(self, folder: Path) -> list[Listed]:
        try:
            return self._files.listed(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def close(self) -> None:
        self.settle()
        self._index.close()
