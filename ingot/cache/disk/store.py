"""Records in a folder, a file each: written to a temporary name and renamed, never changed, verified on every read.

    folder/index.sqlite           what the headers say, and when each record was used; can be deleted
    folder/lock                   held by whichever process writes to the folder
    folder/SCOPE/about.json       what the KV in there depends on, in words
    folder/SCOPE/RECORD           a record; this server can use those of its own scope
    folder/damaged/RECORD         a file that is not as it was written

All files in the folder count against its cap. To keep it, records of any scope are removed, and no other files: the
least recently used ones of tenants that exceed their share or have used nothing for a day. Any thread may call anything
here. Writing and reading block, so they are not for the engine thread; `along`, `touch`, `held` and `total` do not.

The files are authoritative: the index and the entries in memory follow them. All are listed when a store is opened.
After that, a write takes the same work however many there are: a process that changes a folder under the lock records
that in the index, with the folder's modification time, and others read it there. A folder with another modification
time, since a process was killed or files were copied into it, is listed again.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from ingot.cache.disk.index import (
    DiskEntry,
    FolderNote,
    IndexRow,
    KnownEntries,
    RecordIndex,
    RecordTotal,
    ResilientIndex,
    index_files,
)
from ingot.cache.disk.record_file import (
    RECORD_NAME,
    DamagedRecord,
    FileSystem,
    ListedFile,
    RecordHeader,
    RecordOwner,
    StoredData,
    read_header,
    read_record,
    sealed_scope_digest,
    tensor_checksums,
)
from ingot.config.keys import ArchiveKey
from ingot.errors import ConfigError, Unavailable
from ingot.shares import holders_exceeding

log = logging.getLogger("ingot.cache")

PATIENCE_S: Final = 10.0
"""How long to wait for another process that writes."""
IDLE_S: Final = 86_400.0
"""Seconds without use after which the others may use a tenant's share of the folder."""
MOST_RECORDS: Final = 100_000
"""In the whole folder."""
INDEX_ROOM: Final = 1 << 20
"""Bytes of the cap that records leave to the index and its write-ahead log,"""
INDEX_GROWTH: Final = 1 << 19
"""and the bytes by which these may grow until they are measured again."""
PART_SUFFIX: Final = ".part"
DAMAGED_FOLDER: Final = "damaged"
ABOUT_FILE: Final = "about.json"
NAME_FIELD: Final = "name"
"""Of the model, in that file."""
INDEX_FILE: Final = "index.sqlite"
LOCK_FILE: Final = "lock"
DIGESTS_FILE: Final = "digests.json"
"""Digests of model files, by name, size and time; written when a folder is opened for a model."""
_SCOPE: Final = re.compile(r"[0-9a-f]{32}")
_PART: Final = re.compile(rf"\.({RECORD_NAME.pattern}|{re.escape(ABOUT_FILE)}){re.escape(PART_SUFFIX)}")


def folder_secret(folder: Path, key_file: Path) -> bytes:
    """The secret that records in this folder are sealed with. Creates both if they do not exist. Raises ConfigError
    where one of them cannot be used or is not private."""
    try:
        claim_folder(folder, FileSystem())
        return ArchiveKey(key_file.expanduser()).secret()
    except Unavailable as error:
        raise ConfigError(
            f"cache_dir {folder} cannot be used without the key that records are sealed with, archive_key_file "
            f"{key_file}: {error.__cause__}",
            param="archive_key_file",
        ) from error
    except OSError as error:
        raise unusable_folder_error(folder, error) from error


def unusable_folder_error(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cache_dir {folder} cannot be used: {error.strerror}", param="cache_dir")


def claim_folder(folder: Path, files: FileSystem, *scopes: str) -> None:
    """Creates the folder if it does not exist. Raises OSError where that fails or other users can write to it."""
    files.make_folder(folder)
    files.check_private(
        folder,
        (LOCK_FILE, DAMAGED_FOLDER, DIGESTS_FILE, *scopes, *(file.name for file in index_files(Path(INDEX_FILE)))),
    )


class NoDiskRoom(OSError):
    """A record does not fit under the cap, or would leave less free space than the floor."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ENOSPC, reason)


@dataclass(frozen=True, slots=True)
class DiskLimits:
    most: int  # bytes of all files in the folder
    floor: int = 0  # bytes that stay free on the drive
    sync: bool = True  # a record that was written survives a power loss


class FolderUsage(NamedTuple):
    """Bytes of files."""

    others: int
    indexed: int  # of the index and its write-ahead log

    @property
    def nbytes(self) -> int:
        return self.others + self.indexed


class RecordStore:
    """The records of one scope, in a folder that may have others. Creates the folder; raises OSError where that fails
    or other users can write to it. A read-only folder is only read. Records are sealed with `secret`; those of another
    secret belong to another scope. `model` is a name for people: a scope is the same under any."""

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, str],
        limits: DiskLimits,
        secret: bytes,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
        *,
        model: str = "",
    ) -> None:
        self._model = model
        self.folder, self.key, self.limits, self.scope = folder, dict(key), limits, sealed_scope_digest(key, secret)
        self._files, self._clock, self._secret = files or FileSystem(), clock, secret
        claim_folder(folder, self._files, self.scope)
        self._home = folder / self.scope
        self._entries = KnownEntries()
        self._touched: dict[str, float] = {}
        self._entries_lock = threading.Lock()  # never held during file access
        self._index = ResilientIndex(folder / INDEX_FILE, self._files)
        self._files.make_folder(self._home)
        self._load_entries(self._listed(self._home))
        self._tidy()

    def entries(self, owner: RecordOwner) -> list[DiskEntry]:
        """An owner's, each behind those that it may continue."""
        return sorted((entry for entry in self._entries if entry.owner == owner), key=lambda entry: entry.begin)

    def along(self, owner: RecordOwner, tokens: Sequence[int]) -> Iterator[tuple[DiskEntry, DiskEntry | None]]:
        """An owner's entries along `tokens`, each behind and with the one that it continues."""
        return self._entries.along(owner, tokens)

    def find(self, name: str) -> DiskEntry | None:
        return self._entries.get(name)

    def held(self, tenant: str) -> RecordTotal:
        """Of a tenant, by its digest."""
        return self._entries.held(tenant)

    def total(self) -> RecordTotal:
        return self._entries.total

    def folder_bytes(self) -> int:
        """The size of all files in the folder, according to the index."""
        try:
            _, files = self._files.within(self.folder)
        except OSError:
            files = []
        return self._occupied(files, *self._noted()).nbytes

    def touch(self, entries: Iterable[DiskEntry]) -> None:
        """Mark entries as used now. Whoever uses an entry must touch those that it continues, too."""
        now = self._clock()
        with self._entries_lock:
            for entry in entries:
                entry.used = self._touched[entry.name] = now

    # Writing

    def write(
        self, header: RecordHeader, data: Sequence[bytes | memoryview], entry: DiskEntry | None = None
    ) -> DiskEntry:
        """Store a record, unless it exists; others are removed to make room. Returns `entry`, if one is passed. Raises
        OSError."""
        header = replace(header, sums=tensor_checksums(data))
        entry = entry or DiskEntry.of(header, self._clock())
        self._files.make_folder(self._home)
        with self._files.alone(self._lock, PATIENCE_S):
            used = self._counted()
            self._follow()
            if not (self._home / entry.name).exists():
                self._make_room(entry.size, used, entry.owner.tenant)
                self._put(entry, [header.encoded(self._secret), *data])
        with self._entries_lock:
            self._entries.add(entry)
        return entry

    def _put(self, entry: DiskEntry, pieces: Sequence[bytes | memoryview]) -> None:
        # First, so that it is counted whatever happens next.
        self._index.write(lambda index: index.add([entry.row(self.scope)]))
        try:
            self._replace(entry.name, pieces)
        except BaseException:
            self._index.write(lambda index: index.remove(self.scope, [entry.name]))
            raise
        self._note_change(self.scope)

    def _replace(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file completely or not at all."""
        part = self._home / f".{name}{PART_SUFFIX}"
        try:
            self._files.write(part, pieces, sync=self.limits.sync)
            self._files.rename(part, self._home / name)
        except BaseException:
            with suppress(OSError):
                self._files.remove(part)
            raise
        if self.limits.sync:
            self._files.sync_folder(self._home)

    def settle(self) -> None:
        """Write to the index what was used since the last call."""
        with self._entries_lock:
            used, self._touched = self._touched, {}
        if used:
            self._index.write(lambda index: index.touch(self.scope, used.items()))

    def forget(self, tenant: str) -> int:
        """Remove all of a tenant's, by its digest; returns the bytes. Raises OSError where that fails."""
        with self._files.alone(self._lock, PATIENCE_S):
            self._counted()
            self._follow()
            gone = [entry for entry in self._entries if entry.owner.tenant == tenant]
            self._remove([(self.scope, entry.name) for entry in gone])
        return sum(entry.size for entry in gone)

    # Reading

    def read(self, entry: DiskEntry) -> StoredData:
        """Raises DamagedRecord, once the file is set aside, or OSError. Either way the entry is lost."""
        path = self._home / entry.name
        try:
            found = read_record(self._files, path, self._secret)
            if found.header.key != self.key:
                raise DamagedRecord("it belongs to another model")
        except (DamagedRecord, OSError) as error:
            if isinstance(error, DamagedRecord):
                self._set_aside(path, error)
            self._lose([entry])
            raise
        if not entry.matches_header(found.header):
            self._lose([entry])
            raise DamagedRecord("its header differs from its entry in the index")
        return found

    # Following the files

    def _load_entries(self, listed: Iterable[ListedFile]) -> None:
        """Have an entry for each file that is in the folder now, from the index or else from its header."""
        there = {file.path.name: file for file in listed if RECORD_NAME.fullmatch(file.path.name)}
        self._lose([entry for entry in self._entries if entry.name not in there])
        indexed: dict[str, int] = self._index.read(lambda index: index.sizes(self.scope), dict)
        gone = indexed.keys() - there.keys()
        if gone:
            self._index.write(lambda index: index.remove(self.scope, gone))
        self._load_files(file for name, file in there.items() if name not in self._entries)
        lacking = [entry for entry in self._entries if entry.name not in indexed]
        if lacking:
            self._index.write(lambda index: index.add([entry.row(self.scope) for entry in lacking]))

    def _follow(self) -> None:
        """Under the lock: apply what other processes wrote and removed, according to the index."""
        names: list[str] | None = self._index.read(lambda index: index.changed(self.scope), list)
        if names is None:
            indexed: dict[str, int] | None = self._index.read(lambda index: index.sizes(self.scope), lambda: None)
            names = [entry.name for entry in self._entries if indexed is not None and entry.name not in indexed]
            names += [name for name in indexed or () if name not in self._entries]
        rows = self._index_rows(names)
        removed = (self._entries.get(name) for name in names if name not in rows)
        self._lose([entry for entry in removed if entry is not None])
        self._load_files(
            ListedFile(self._home / row.name, row.size, row.used)
            for row in rows.values()
            if row.name not in self._entries
        )

    def _load_files(self, files: Iterable[ListedFile]) -> None:
        """Add entries for files, from the index or else from their headers. Damaged files are set aside."""
        new = {file.path.name: file for file in files}
        rows = self._index_rows(new)
        unindexed: list[IndexRow] = []
        for file in new.values():
            entry, row = None, rows.get(file.path.name)
            if row is not None and row.size == file.nbytes:
                with suppress(ValueError, TypeError, KeyError):
                    entry = DiskEntry.from_row(row)
            if entry is None and (entry := self._entry_from_file(file)) is not None:
                unindexed.append(entry.row(self.scope))
            if entry is not None:
                with self._entries_lock:
                    self._entries.add(entry)
        if unindexed:
            self._index.write(lambda index: index.add(unindexed))

    def _index_rows(self, names: Iterable[str]) -> dict[str, IndexRow]:
        rows: list[IndexRow] = self._index.read(lambda index: index.rows(self.scope, names), list)
        return {row.name: row for row in rows}

    def _entry_from_file(self, file: ListedFile) -> DiskEntry | None:
        """From a file's header. A damaged file is set aside."""
        try:
            header = read_header(self._files, file.path, file.nbytes, self._secret)
            if header.key != self.key:
                raise DamagedRecord("it belongs to another model")
        except DamagedRecord as problem:
            self._set_aside(file.path, problem)
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", file.path, error)
            return None
        return DiskEntry.of(header, file.changed)

    def _tidy(self) -> None:
        """Enforce the cap from the start, and remove what a process that died left."""
        try:
            with self._files.alone(self._lock, PATIENCE_S):
                if not (self._home / ABOUT_FILE).exists():
                    self._replace(ABOUT_FILE, [json.dumps({NAME_FIELD: self._model, **self.key}, indent=2).encode()])
                for folder in self._files.within(self.folder)[0]:
                    self._survey(folder)
                self._make_room(0, self._counted())
                self._follow()
        except OSError as error:
            log.warning("%s is used read-only, as nothing can be written there: %s", self.folder, error)

    # Counting bytes

    def _counted(self) -> FolderUsage:
        """Under the lock: the size of all files. Only folders that changed are listed."""
        for last in (False, False, True):
            folders, files = self._files.within(self.folder)
            noted, totals = self._noted()
            gone = noted.keys() - {folder.name for folder in folders}
            # In the last round, one that was just listed counts as current: it may change all the time.
            stale = [
                folder
                for folder in folders
                if folder.name not in noted or not (last or noted[folder.name].changed == self._files.changed(folder))
            ]
            if not gone and not stale:
                return self._occupied(files, noted, totals)
            for name in gone:
                self._index.write(lambda index: index.forget_folder(name))  # noqa: B023  (run at once)
            for folder in stale:
                self._survey(folder)
        raise OSError(errno.EIO, "the size of the folder cannot be determined", str(self.folder))

    def _occupied(
        self, files: Iterable[ListedFile], noted: Mapping[str, FolderNote], totals: Mapping[str, RecordTotal]
    ) -> FolderUsage:
        """`files` are those directly in the folder."""
        own = index_files(self.folder / INDEX_FILE)
        other = sum(file.nbytes for file in files if file.path not in own) + sum(note.other for note in noted.values())
        index = sum(file.nbytes for file in files if file.path in own)
        return FolderUsage(other + sum(total.nbytes for total in totals.values()), index)

    def _noted(self) -> tuple[dict[str, FolderNote], dict[str, RecordTotal]]:
        return self._index.read(lambda index: (index.folders(), index.totals()), lambda: ({}, {}))

    def _survey(self, folder: Path) -> None:
        """List a folder within the folder, and update the index."""
        changed, listed = self._files.changed(folder), self._listed(folder)
        parts = [file for file in listed if file.path.parent == folder and _PART.fullmatch(file.path.name)]
        for part in parts:  # left by processes that died while writing
            self._files.remove(part.path)
        changed = self._files.changed(folder) if parts else changed
        is_scope = _SCOPE.fullmatch(folder.name) is not None
        records = {
            file.path.name: file
            for file in listed
            if is_scope and file.path.parent == folder and RECORD_NAME.fullmatch(file.path.name)
        }
        other = sum(file.nbytes for file in listed if file not in parts and file.path.name not in records)
        if folder == self._home:
            self._load_entries(records.values())
        elif is_scope:
            self._update(folder.name, records)
        self._index.write(lambda index: index.note_folder(folder.name, FolderNote(changed, other)))

    def _update(self, scope: str, there: Mapping[str, ListedFile]) -> None:
        """Update the index for another scope's records, with their tenants."""
        indexed: dict[str, int] = self._index.read(lambda index: index.sizes(scope), dict)
        gone = [name for name in indexed if name not in there]
        new = [file for name, file in there.items() if indexed.get(name) != file.nbytes]
        rows = [
            IndexRow(scope, file.path.name, file.nbytes, file.changed, 0, b"", self._tenant_in(file)) for file in new
        ]
        self._index.write(lambda index: index.remove(scope, gone))
        self._index.write(lambda index: index.add(rows))

    def _tenant_in(self, file: ListedFile) -> str:
        """The tenant's digest in a record's header; empty where that cannot be read. Setting such a file aside is up to
        a server of its own scope."""
        try:
            return read_header(self._files, file.path, file.nbytes, None).owner.tenant
        except (DamagedRecord, OSError):
            return ""

    def _note_change(self, scope: str) -> None:
        """A folder of records was changed, and the index has the change."""
        changed = self._files.changed(self.folder / scope)
        self._index.write(lambda index: index.note_change(scope, changed))

    # Making room

    def _make_room(self, wanted: int, used: FolderUsage, tenant: str = "") -> None:
        """Under the lock: make room for `wanted` more bytes of a tenant. Raises NoDiskRoom before anything is
        removed."""
        noted, totals = self._noted()
        missing = self._missing(wanted, used, sum(total.records for total in totals.values()))
        if missing <= 0:
            return
        damaged = noted[DAMAGED_FOLDER].other if DAMAGED_FOLDER in noted else 0
        self.settle()  # uses that are not in the index yet
        usage = Counter({holder: total.nbytes for holder, total in totals.items()})
        usage[tenant] += wanted
        gone: list[IndexRow] = self._index.read(
            lambda index: self._records_to_remove(index, usage, missing - damaged, tenant), list
        )
        if wanted and sum(row.size for row in gone) + damaged < missing:
            raise NoDiskRoom(f"{wanted} more bytes do not fit, even if all records that may be removed were")
        if damaged:
            for file in self._listed(self.folder / DAMAGED_FOLDER):
                self._files.remove(file.path)
            self._survey(self.folder / DAMAGED_FOLDER)
        self._remove([(row.scope, row.name) for row in gone])

    def _records_to_remove(self, index: RecordIndex, usage: Counter[str], nbytes: int, writing: str) -> list[IndexRow]:
        """Records of so many bytes in all, each the least recently used one of a tenant that exceeds its share at that
        point. Reads no others."""
        most, since = usage.total() - nbytes, self._clock() - IDLE_S
        active = {holder for holder in usage if holder and (holder == writing or index.last_used(holder) > since)}
        least_used = {holder: index.least_used(holder) for holder in usage}
        first = {holder: row for holder, rows in least_used.items() if (row := next(rows, None)) is not None}
        gone: list[IndexRow] = []
        while nbytes > 0 and (exceeding := holders_exceeding(usage, most, active) & first.keys()):
            row = min((first[holder] for holder in exceeding), key=lambda row: (row.used, -row.begin))
            gone.append(row)
            nbytes -= row.size
            usage[row.tenant] -= row.size
            following = next(least_used[row.tenant], None)
            if following is None:
                del first[row.tenant]
            else:
                first[row.tenant] = following
        return gone

    def _missing(self, wanted: int, used: FolderUsage, records: int) -> int:
        """How many bytes have to be removed first."""
        over_cap = used.others + max(INDEX_ROOM, used.indexed + INDEX_GROWTH) + wanted - self.limits.most
        # If others have filled the drive, this folder does not grow. Shrinking it would not help them for long.
        over_floor = min(wanted, wanted + self.limits.floor - self._files.free(self.folder))
        too_many = wanted > 0 and records >= MOST_RECORDS
        return max(over_cap, over_floor, int(too_many))

    def _remove(self, records: Sequence[tuple[str, str]]) -> None:
        """Records of any scope, by scope and name."""
        for scope in dict.fromkeys(scope for scope, _ in records):
            names = [name for each, name in records if each == scope]
            for name in names:
                self._files.remove(self.folder / scope / name)
            entries = (self._entries.get(name) for name in names) if scope == self.scope else ()
            self._lose([entry for entry in entries if entry is not None])
            self._index.write(lambda index: index.remove(scope, names))  # noqa: B023  (run at once)
            self._note_change(scope)

    def _lose(self, entries: Sequence[DiskEntry]) -> None:
        if not entries:
            return
        with self._entries_lock:
            for entry in entries:
                entry.lost = True
                self._entries.remove(entry.name)
        self._index.write(lambda index: index.remove(self.scope, [entry.name for entry in entries]))

    def _set_aside(self, path: Path, problem: DamagedRecord) -> None:
        log.warning("%s is damaged: %s; it is set aside", path, problem)
        with suppress(OSError):
            self._files.make_folder(self.folder / DAMAGED_FOLDER)
            self._files.rename(path, self.folder / DAMAGED_FOLDER / path.name)

    @property
    def _lock(self) -> Path:
        return self.folder / LOCK_FILE

    def _listed(self, folder: Path) -> list[ListedFile]:
        try:
            return self._files.listed(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def close(self) -> None:
        self.settle()
        self._index.close()
