"""Records in a folder, a file each: written aside and renamed, never changed, checked whenever they are read.

    folder/index.sqlite           what the files say, and when each was used; can be deleted
    folder/lock                   held by whoever writes, of all processes that share the folder
    folder/SCOPE/about.json       what the states in there depend on, in words
    folder/SCOPE/RECORD           states that this server can use, if the scope is its own
    folder/damaged/RECORD         what was found to be otherwise than it was written

All files in the folder count against its cap, whosever they are. To keep it records are removed, of whichever scope,
and no other files: of tenants that hold more than their share, or have used nothing for a day, those that were used
longest ago first. Any thread may call anything here; writing and reading take their time, so neither is for the
engine's thread. `along`, `touch`, `held` and `total` wait for no file.

Files are the truth: the index, and what is known in memory, follow them. All are listed when a store is opened. From
then on a write takes the same work however many there are: whoever changes a folder of records under the lock says so
in the index, with what the file system then says of the folder, and what others changed is read there. A folder of
which the file system says something else, as a process was killed or somebody copied files into it, is listed anew.
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
"""For another process that writes."""
IDLE_S: Final = 86_400.0
"""Seconds after whose last use a tenant's share of the folder is lent to the others."""
MOST_RECORDS: Final = 100_000
"""In the whole folder."""
INDEX_ROOM: Final = 1 << 20
"""Bytes of the cap that records leave to the index and its journal,"""
INDEX_GROWTH: Final = 1 << 19
"""and those by which these may grow until that is looked at again."""
PART_SUFFIX: Final = ".part"
DAMAGED_FOLDER: Final = "damaged"
ABOUT_FILE: Final = "about.json"
INDEX_FILE: Final = "index.sqlite"
LOCK_FILE: Final = "lock"
DIGESTS_FILE: Final = "digests.json"
"""Of models' files, by their names, sizes and times: whoever opens a folder for a model writes them."""
_SCOPE: Final = re.compile(r"[0-9a-f]{32}")
_PART: Final = re.compile(rf"\.({RECORD_NAME.pattern}|{re.escape(ABOUT_FILE)}){re.escape(PART_SUFFIX)}")


def folder_secret(folder: Path, key_file: Path) -> bytes:
    """What records in this folder are sealed with. Both are made where there are none. Raises ConfigError where one of
    them cannot be relied on: whoever serves models later asks before it serves any."""
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
    """Makes the folder where there is none. Raises OSError where that fails, or others may have written there."""
    files.make_folder(folder)
    files.check_private(
        folder,
        (LOCK_FILE, DAMAGED_FOLDER, DIGESTS_FILE, *scopes, *(file.name for file in index_files(Path(INDEX_FILE)))),
    )


class NoDiskRoom(OSError):
    """A record that does not fit under the cap, or above the floor of free space."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ENOSPC, reason)


@dataclass(frozen=True, slots=True)
class DiskLimits:
    most: int  # bytes of all files in the folder
    floor: int = 0  # bytes that stay free on the drive
    sync: bool = True  # a record that is there after a write is there after a loss of power


class FolderUsage(NamedTuple):
    """Bytes of files."""

    others: int
    indexed: int  # the index's own, and its journal's

    @property
    def nbytes(self) -> int:
        return self.others + self.indexed


class RecordStore:
    """Those of one scope, in a folder that may have others. Made where there is none; raises OSError where that fails,
    or where others than this user may write there. One that can only be read is read. Records are sealed with
    `secret`; those of another secret are another scope's."""

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, str],
        limits: DiskLimits,
        secret: bytes,
        files: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.key, self.limits, self.scope = folder, dict(key), limits, sealed_scope_digest(key, secret)
        self._files, self._clock, self._secret = files or FileSystem(), clock, secret
        claim_folder(folder, self._files, self.scope)
        self._home = folder / self.scope
        self._known = KnownEntries()
        self._touched: dict[str, float] = {}
        self._books = threading.Lock()  # over changes of what is known; never held while a file is read or written
        self._index = ResilientIndex(folder / INDEX_FILE, self._files)
        self._files.make_folder(self._home)
        self._learn(self._listed(self._home))
        self._tidy()

    # What is there

    def entries(self, owner: RecordOwner) -> list[DiskEntry]:
        """An owner's, each after those that it may go on from."""
        return sorted((entry for entry in self._known if entry.owner == owner), key=lambda entry: entry.begin)

    def along(self, owner: RecordOwner, tokens: Sequence[int]) -> Iterator[tuple[DiskEntry, DiskEntry | None]]:
        """An owner's that begin as `tokens` go on there, each with the one that it goes on from, which came before."""
        return self._known.along(owner, tokens)

    def find(self, name: str) -> DiskEntry | None:
        return self._known.get(name)

    def held(self, tenant: str) -> RecordTotal:
        """Records and bytes of a tenant, by its digest."""
        return self._known.held(tenant)

    def total(self) -> RecordTotal:
        """Records and bytes of this scope."""
        return self._known.total

    def folder_bytes(self) -> int:
        """What all files in the folder take, whosever they are, as far as the index knows."""
        try:
            _, files = self._files.within(self.folder)
        except OSError:
            files = []
        return self._occupied(files, *self._noted()).nbytes

    def touch(self, entries: Iterable[DiskEntry]) -> None:
        """They were used just now. Those that others go on from must be used whenever those are."""
        now = self._clock()
        with self._books:
            for entry in entries:
                entry.used = self._touched[entry.name] = now

    # Writing

    def write(
        self, header: RecordHeader, data: Sequence[bytes | memoryview], entry: DiskEntry | None = None
    ) -> DiskEntry:
        """Store a record, unless it is there; less useful ones go where they must. It is known as `entry` from then on,
        if one is given. Raises OSError."""
        header = replace(header, sums=tensor_checksums(data))
        entry = entry or DiskEntry.of(header, self._clock())
        self._files.make_folder(self._home)
        with self._files.alone(self._lock, PATIENCE_S):
            used = self._counted()
            self._follow()
            if not (self._home / entry.name).exists():
                self._make_room(entry.size, used, entry.owner.tenant)
                self._put(entry, [header.encoded(self._secret), *data])
        with self._books:
            self._known.add(entry)
        return entry

    def _put(self, entry: DiskEntry, pieces: Sequence[bytes | memoryview]) -> None:
        # First, so that it is counted whatever happens then.
        self._index.using(lambda index: index.add([entry.row(self.scope)]), None)
        try:
            self._replace(entry.name, pieces)
        except BaseException:
            self._index.using(lambda index: index.remove(self.scope, [entry.name]), None)
            raise
        self._note_change(self.scope)

    def _replace(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Whole or not at all."""
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
        """Tell the index what was used since the last time."""
        with self._books:
            used, self._touched = self._touched, {}
        if used:
            self._index.using(lambda index: index.touch(self.scope, used.items()), None)

    def forget(self, tenant: str) -> int:
        """Remove all of a tenant's, by its digest; returns the bytes. Raises OSError where that fails."""
        with self._files.alone(self._lock, PATIENCE_S):
            self._counted()
            self._follow()
            gone = [entry for entry in self._known if entry.owner.tenant == tenant]
            self._remove([(self.scope, entry.name) for entry in gone])
        return sum(entry.size for entry in gone)

    # Reading

    def read(self, entry: DiskEntry) -> StoredData:
        """Raises Damaged, once the file is set aside, or OSError. Whichever it is, the entry is lost."""
        path = self._home / entry.name
        try:
            found = read_record(self._files, path, self._secret)
            if found.header.key != self.key:
                raise DamagedRecord("it is another model's")
        except DamagedRecord as problem:
            self._set_aside(path, problem)
            self._lose([entry])
            raise
        except OSError:
            self._lose([entry])
            raise
        if not entry.says(found.header):
            self._lose([entry])
            raise DamagedRecord("the index says something else of it than its header")
        return found

    # Learning

    def _learn(self, listed: Iterable[ListedFile]) -> None:
        """Know the files that are in its folder now, and no others: by the index, else by their headers."""
        there = {file.path.name: file for file in listed if RECORD_NAME.fullmatch(file.path.name)}
        self._lose([entry for entry in self._known if entry.name not in there])
        none: dict[str, int] = {}
        indexed = self._index.using(lambda index: index.sizes(self.scope), none)
        gone = indexed.keys() - there.keys()
        if gone:
            self._index.using(lambda index: index.remove(self.scope, gone), None)
        self._learn_files(file for name, file in there.items() if name not in self._known)
        lacking = [entry for entry in self._known if entry.name not in indexed]
        if lacking:
            self._index.using(lambda index: index.add([entry.row(self.scope) for entry in lacking]), None)

    def _follow(self) -> None:
        """While nobody else writes: know what other processes wrote and removed, as the index says."""
        none: dict[str, int] | None = None
        unchanged: list[str] | None = []
        names = self._index.using(lambda index: index.changed(self.scope), unchanged)
        if names is None:
            indexed = self._index.using(lambda index: index.sizes(self.scope), none)
            names = [entry.name for entry in self._known if indexed is not None and entry.name not in indexed]
            names += [name for name in indexed or () if name not in self._known]
        nothing: list[IndexRow] = []
        rows = {row.name: row for row in self._index.using(lambda index: index.rows(self.scope, names), nothing)}
        known = (self._known.get(name) for name in names if name not in rows)
        self._lose([entry for entry in known if entry is not None])
        self._learn_files(
            ListedFile(self._home / row.name, row.size, row.used)
            for row in rows.values()
            if row.name not in self._known
        )

    def _learn_files(self, files: Iterable[ListedFile]) -> None:
        """Know files, by the index or else by their headers. Those that are damaged are set aside."""
        unknown = {file.path.name: file for file in files}
        none: list[IndexRow] = []
        rows = {row.name: row for row in self._index.using(lambda index: index.rows(self.scope, unknown), none)}
        examined: list[IndexRow] = []
        for file in unknown.values():
            entry = self._indexed(file, rows.get(file.path.name))
            if entry is None and (entry := self._examined(file)) is not None:
                examined.append(entry.row(self.scope))
            if entry is not None:
                with self._books:
                    self._known.add(entry)
        if examined:
            self._index.using(lambda index: index.add(examined), None)

    def _indexed(self, file: ListedFile, row: IndexRow | None) -> DiskEntry | None:
        if row is not None and row.size == file.nbytes:
            with suppress(ValueError, TypeError, KeyError):
                return DiskEntry.from_row(row)
        return None

    def _examined(self, file: ListedFile) -> DiskEntry | None:
        """What a file's header says; one that is damaged is set aside."""
        try:
            header = read_header(self._files, file.path, file.nbytes, self._secret)
            if header.key != self.key:
                raise DamagedRecord("it is another model's")
        except DamagedRecord as problem:
            self._set_aside(file.path, problem)
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", file.path, error)
            return None
        return DiskEntry.of(header, file.changed)

    def _tidy(self) -> None:
        """Keep to the cap from the start, and clear away what a process that died left."""
        try:
            with self._files.alone(self._lock, PATIENCE_S):
                if not (self._home / ABOUT_FILE).exists():
                    self._replace(ABOUT_FILE, [json.dumps(self.key, indent=2).encode()])
                for folder in self._files.within(self.folder)[0]:
                    self._survey(folder)
                self._make_room(0, self._counted())
                self._follow()
        except OSError as error:
            log.warning("%s is only read from, as nothing can be written there: %s", self.folder, error)

    # Counting

    def _counted(self) -> FolderUsage:
        """While nobody else writes: what all files take, of which only those are listed that may have changed."""
        for last in (False, False, True):
            folders, files = self._files.within(self.folder)
            noted, totals = self._noted()
            gone = noted.keys() - {folder.name for folder in folders}
            stale = [folder for folder in folders if not self._is_noted(folder, noted, lately=last)]
            if not gone and not stale:
                return self._occupied(files, noted, totals)
            for name in gone:
                self._index.using(lambda index: index.forget_folder(name), None)  # noqa: B023  (run at once)
            for folder in stale:
                self._survey(folder)
        raise OSError(errno.EIO, "what is in the folder cannot be counted", str(self.folder))

    def _occupied(
        self, files: Iterable[ListedFile], noted: Mapping[str, FolderNote], totals: Mapping[str, RecordTotal]
    ) -> FolderUsage:
        """`files` are those beside the folders of records."""
        own = index_files(self.folder / INDEX_FILE)
        other = sum(file.nbytes for file in files if file.path not in own) + sum(note.other for note in noted.values())
        index = sum(file.nbytes for file in files if file.path in own)
        return FolderUsage(other + sum(total.nbytes for total in totals.values()), index)

    def _noted(self) -> tuple[dict[str, FolderNote], dict[str, RecordTotal]]:
        nothing: tuple[dict[str, FolderNote], dict[str, RecordTotal]] = {}, {}
        return self._index.using(lambda index: (index.folders(), index.totals()), nothing)

    def _is_noted(self, folder: Path, noted: Mapping[str, FolderNote], *, lately: bool) -> bool:
        """Whether a folder is as it was when it was counted; or was counted `lately`, where it changes all the time."""
        note = noted.get(folder.name)
        return note is not None and (lately or note.changed == self._files.changed(folder))

    def _survey(self, folder: Path) -> None:
        """List a folder within the folder, and let the index know what is in it."""
        changed, listed = self._files.changed(folder), self._listed(folder)
        parts = [file for file in listed if file.path.parent == folder and _PART.fullmatch(file.path.name)]
        for part in parts:  # what others, who died, were writing
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
            self._learn(records.values())
        elif is_scope:
            self._update(folder.name, records)
        self._index.using(lambda index: index.note_folder(folder.name, FolderNote(changed, other)), None)

    def _update(self, scope: str, there: Mapping[str, ListedFile]) -> None:
        """Let the index know another scope's records, and whose they are."""
        none: dict[str, int] = {}
        indexed = self._index.using(lambda index: index.sizes(scope), none)
        gone = [name for name in indexed if name not in there]
        new = [file for name, file in there.items() if indexed.get(name) != file.nbytes]
        rows = [
            IndexRow(scope, file.path.name, file.nbytes, file.changed, 0, b"", self._tenant_in(file)) for file in new
        ]
        self._index.using(lambda index: index.remove(scope, gone), None)
        self._index.using(lambda index: index.add(rows), None)

    def _tenant_in(self, file: ListedFile) -> str:
        """Whose a record is, as its file says; nobody's, where that cannot be read, which is not for this scope to
        set aside."""
        try:
            return read_header(self._files, file.path, file.nbytes, None).owner.tenant
        except (DamagedRecord, OSError):
            return ""

    def _note_change(self, scope: str) -> None:
        """A folder of records was changed, and the index knows how."""
        changed = self._files.changed(self.folder / scope)
        self._index.using(lambda index: index.note_change(scope, changed), None)

    # Room

    def _make_room(self, wanted: int, used: FolderUsage, tenant: str = "") -> None:
        """While nobody else writes: let so many bytes of a tenant's be written, beside those that are used. Raises
        NoRoom, before anything is removed for it."""
        noted, totals = self._noted()
        missing = self._missing(wanted, used, sum(total.records for total in totals.values()))
        if missing <= 0:
            return
        aside = noted[DAMAGED_FOLDER].other if DAMAGED_FOLDER in noted else 0
        self.settle()  # uses that the index does not know yet
        held = Counter({holder: total.nbytes for holder, total in totals.items()})
        held[tenant] += wanted
        none: list[IndexRow] = []
        gone = self._index.using(lambda index: self._records_to_remove(index, held, missing - aside, tenant), none)
        if wanted and sum(row.size for row in gone) + aside < missing:
            raise NoDiskRoom(f"{wanted} bytes more do not fit, even without any other record that could give way")
        if aside:
            for file in self._listed(self.folder / DAMAGED_FOLDER):
                self._files.remove(file.path)
            self._survey(self.folder / DAMAGED_FOLDER)
        self._remove([(row.scope, row.name) for row in gone])

    def _records_to_remove(self, index: RecordIndex, held: Counter[str], nbytes: int, writing: str) -> list[IndexRow]:
        """So many bytes of records, each of a tenant that holds more than its share of what is left then: the one that
        was used longest ago. Looks at no others."""
        most, since = held.total() - nbytes, self._clock() - IDLE_S
        known = (holder for holder in held if holder)
        active = {holder for holder in known if holder == writing or index.last_used(holder) > since}
        ahead = {holder: index.least_used(holder) for holder in held}
        first = {holder: row for holder, rows in ahead.items() if (row := next(rows, None)) is not None}
        gone: list[IndexRow] = []
        while nbytes > 0 and (givers := holders_exceeding(held, most, active) & first.keys()):
            row = min((first[holder] for holder in givers), key=lambda row: (row.used, -row.begin))
            gone.append(row)
            nbytes -= row.size
            held[row.tenant] -= row.size
            following = next(ahead[row.tenant], None)
            if following is None:
                del first[row.tenant]
            else:
                first[row.tenant] = following
        return gone

    def _missing(self, wanted: int, used: FolderUsage, records: int) -> int:
        """How many bytes have to go first."""
        over_cap = used.others + max(INDEX_ROOM, used.indexed + INDEX_GROWTH) + wanted - self.limits.most
        # Where others have filled the drive, this folder does not grow; to shrink it would not help them for long.
        over_floor = min(wanted, wanted + self.limits.floor - self._files.free(self.folder))
        too_many = wanted > 0 and records >= MOST_RECORDS
        return max(over_cap, over_floor, int(too_many))

    def _remove(self, records: Sequence[tuple[str, str]]) -> None:
        """Records of any scope, by scope and name."""
        for scope in dict.fromkeys(scope for scope, _ in records):
            names = [name for each, name in records if each == scope]
            for name in names:
                self._files.remove(self.folder / scope / name)
            known = (self._known.get(name) for name in names) if scope == self.scope else ()
            self._lose([entry for entry in known if entry is not None])
            self._index.using(lambda index: index.remove(scope, names), None)  # noqa: B023  (run at once)
            self._note_change(scope)

    def _lose(self, entries: Sequence[DiskEntry]) -> None:
        if not entries:
            return
        with self._books:
            for entry in entries:
                entry.lost = True
                self._known.remove(entry.name)
        self._index.using(lambda index: index.remove(self.scope, [entry.name for entry in entries]), None)

    def _set_aside(self, path: Path, problem: DamagedRecord) -> None:
        log.warning("%s is damaged: %s; it is set aside", path, problem)
        with suppress(OSError):
            self._files.make_folder(self.folder / DAMAGED_FOLDER)
            self._files.rename(path, self.folder / DAMAGED_FOLDER / path.name)

    # Files and index

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
