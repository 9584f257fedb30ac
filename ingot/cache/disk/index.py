"""The index of a folder's records: what their headers say without their tensors, and when each was last used.

On disk it is an SQLite file, a cache of what the files say, which saves reading all their headers when a server starts.
It also knows what all records take together, by scope and tenant and without asking each; which of a tenant's were used
longest ago; what each folder of records was like when it was last counted; and, for the other processes that share it,
what came and went. One that is missing, damaged or of another version is made anew; one that cannot be written to is
kept in memory instead.

In memory, `KnownEntries` has all entries of a scope, by name and by what each goes on from.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ingot.cache.disk.record_file import FileSystem, RecordHeader, RecordOwner, hex_digest

log = logging.getLogger("ingot.cache")
T = TypeVar("T")

INDEX_VERSION: Final = 4
INDEX_PATIENCE_S: Final = 5.0  # for another process that writes to it
WAL_PAGES: Final = 64  # of the journal, which counts against the folder's cap
REMEMBERED_CHANGES: Final = 1024
"""Changes that are told to other processes one by one; who missed more compares all names."""
# Not INSERT OR IGNORE: within a trigger the policy of the statement outside it holds, and an upsert's is to abort.
_ENSURE_TOTAL: Final = """INSERT INTO totals SELECT new.scope, new.tenant, 0, 0
    WHERE NOT EXISTS (SELECT 1 FROM totals WHERE scope = new.scope AND tenant = new.tenant)"""
_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS records (
    scope TEXT NOT NULL, name TEXT NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL, begin INTEGER NOT NULL,
    facts BLOB NOT NULL, tenant TEXT NOT NULL, PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_use ON records (tenant, used, begin DESC);
CREATE TABLE IF NOT EXISTS totals (
    scope TEXT NOT NULL, tenant TEXT NOT NULL, records INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (scope, tenant)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folders (
    name TEXT PRIMARY KEY, changed INTEGER NOT NULL, other INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, scope TEXT NOT NULL, name TEXT NOT NULL
);
CREATE TRIGGER IF NOT EXISTS record_added AFTER INSERT ON records BEGIN
    {_ENSURE_TOTAL};
    UPDATE totals SET records = records + 1, bytes = bytes + new.size WHERE scope = new.scope AND tenant = new.tenant;
    INSERT INTO changes (scope, name) VALUES (new.scope, new.name);
    DELETE FROM changes WHERE number <= last_insert_rowid() - {REMEMBERED_CHANGES};
END;
CREATE TRIGGER IF NOT EXISTS record_removed AFTER DELETE ON records BEGIN
    UPDATE totals SET records = records - 1, bytes = bytes - old.size WHERE scope = old.scope AND tenant = old.tenant;
    DELETE FROM totals WHERE scope = old.scope AND tenant = old.tenant AND records = 0;
    INSERT INTO changes (scope, name) VALUES (old.scope, old.name);
    DELETE FROM changes WHERE number <= last_insert_rowid() - {REMEMBERED_CHANGES};
END;
CREATE TRIGGER IF NOT EXISTS record_changed AFTER UPDATE OF size, tenant ON records BEGIN
    UPDATE totals SET records = records - 1, bytes = bytes - old.size WHERE scope = old.scope AND tenant = old.tenant;
    {_ENSURE_TOTAL};
    UPDATE totals SET records = records + 1, bytes = bytes + new.size WHERE scope = new.scope AND tenant = new.tenant;
    DELETE FROM totals WHERE scope = old.scope AND tenant = old.tenant AND records = 0;
END;
"""
_UPSERT: Final = """
INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (scope, name) DO UPDATE
SET size = excluded.size, used = max(used, excluded.used), begin = excluded.begin, facts = excluded.facts,
tenant = excluded.tenant
"""


class IndexRow(NamedTuple):
    scope: str
    name: str
    size: int
    used: float  # unix time
    begin: int
    facts: bytes  # none, where nobody of its scope has looked at it yet
    tenant: str  # by its digest; none, where its file does not say


class RecordTotal(NamedTuple):
    records: int = 0
    nbytes: int = 0


class FolderNote(NamedTuple):
    """What a folder within the folder was like when it was last counted."""

    changed: int  # as the file system says it
    other: int  # bytes of files that are no records


class RecordIndex:
    """For one thread at a time. Raises sqlite3.Error, after which it is to be made anew."""

    def __init__(self, path: Path | None) -> None:
        """In memory, where there is no path."""
        self._path, self._file = path, (0, 0)
        self._heard: int | None = None  # the last change that was asked for
        if path is not None:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            self._file = _file_identity(os.fstat(descriptor))
            os.close(descriptor)
        self._open = sqlite3.connect(
            ":memory:" if path is None else path, INDEX_PATIENCE_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare()
        except sqlite3.Error:
            self.close()
            raise

    def _prepare(self) -> None:
        self._open.execute("PRAGMA journal_mode = WAL")
        self._open.execute("PRAGMA synchronous = OFF")  # what is lost is read from the files again
        self._open.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        (version,) = self._open.execute("PRAGMA user_version").fetchone()
        if version not in (0, INDEX_VERSION):
            raise sqlite3.DatabaseError(f"an index of version {version}")
        self._open.executescript(_SCHEMA)
        self._open.execute(f"PRAGMA user_version = {INDEX_VERSION}")
        (state,) = self._open.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)

    @property
    def in_place(self) -> bool:
        """Whether it is still the file of its name: another process may have made that anew."""
        if self._path is None:
            return True
        try:
            return _file_identity(self._path.stat()) == self._file
        except OSError:
            return False

    # Records

    def rows(self, scope: str, names: Iterable[str]) -> list[IndexRow]:
        """Of these, those that it knows."""
        query = "SELECT scope, name, size, used, begin, facts, tenant FROM records WHERE scope = ? AND name = ?"
        found = (self._open.execute(query, (scope, name)).fetchone() for name in names)
        return [IndexRow(*row) for row in found if row is not None]

    def sizes(self, scope: str) -> dict[str, int]:
        """Of all of a scope's, by name."""
        return dict(self._open.execute("SELECT name, size FROM records WHERE scope = ?", (scope,)).fetchall())

    def used(self, scope: str) -> dict[str, float]:
        """When each was last, by whichever process."""
        return dict(self._open.execute("SELECT name, used FROM records WHERE scope = ?", (scope,)).fetchall())

    def least_used(self, tenant: str) -> Iterator[IndexRow]:
        """A tenant's records of any scope, without their facts: those that were used longest ago first, and of those
        that were used together the longest paths. Reads no more than is asked for."""
        query = "SELECT scope, name, size, used, begin FROM records WHERE tenant = ? ORDER BY used, begin DESC"
        for scope, name, size, used, begin in self._open.execute(query, (tenant,)):
            yield IndexRow(scope, name, size, used, begin, b"", tenant)

    def last_used(self, tenant: str) -> float:
        (used,) = self._open.execute("SELECT max(used) FROM records WHERE tenant = ?", (tenant,)).fetchone()
        return float(used or 0.0)

    def totals(self) -> dict[str, RecordTotal]:
        """By tenant, of all scopes."""
        found = self._open.execute("SELECT tenant, sum(records), sum(bytes) FROM totals GROUP BY tenant").fetchall()
        return {tenant: RecordTotal(records, nbytes) for tenant, records, nbytes in found}

    def add(self, rows: Iterable[IndexRow]) -> None:
        self._change(_UPSERT, rows)

    def remove(self, scope: str, names: Iterable[str]) -> None:
        self._change("DELETE FROM records WHERE scope = ? AND name = ?", ((scope, name) for name in names))

    def touch(self, scope: str, used: Iterable[tuple[str, float]]) -> None:
        self._change(
            "UPDATE records SET used = ? WHERE scope = ? AND name = ?", ((at, scope, name) for name, at in used)
        )

    def changed(self, scope: str) -> list[str] | None:
        """The names of a scope that came or went since this was last asked; None where that is not known."""
        (oldest,) = self._open.execute("SELECT min(number) FROM changes").fetchone()
        (newest,) = self._open.execute("SELECT max(number) FROM changes").fetchone()
        since, self._heard = self._heard, newest or 0
        if since is None or (oldest is not None and oldest > since + 1):
            return None
        query = "SELECT DISTINCT name FROM changes WHERE number > ? AND scope = ?"
        return [name for (name,) in self._open.execute(query, (since, scope))]

    # Folders

    def folders(self) -> dict[str, FolderNote]:
        found = self._open.execute("SELECT name, changed, other FROM folders").fetchall()
        return {name: FolderNote(changed, other) for name, changed, other in found}

    def note_folder(self, name: str, note: FolderNote) -> None:
        self._open.execute("INSERT OR REPLACE INTO folders VALUES (?, ?, ?)", (name, *note))

    def note_change(self, name: str, changed: int) -> None:
        """A folder was changed, and what that came to is in the index already."""
        self._open.execute("UPDATE folders SET changed = ? WHERE name = ?", (changed, name))

    def forget_folder(self, name: str) -> None:
        """It is gone, with all that was in it."""
        self._change("DELETE FROM records WHERE scope = ?", [(name,)])
        self._change("DELETE FROM folders WHERE name = ?", [(name,)])

    def _change(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._open.execute("BEGIN IMMEDIATE")
        self._open.executemany(statement, rows)
        self._open.execute("COMMIT")

    def close(self) -> None:
        self._open.close()


def index_files(path: Path) -> list[Path]:
    """The index's own, which can be deleted."""
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


def _file_identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class ResilientIndex:
    """An index that is there whatever happens to its file. Any thread may use it."""

    def __init__(self, path: Path, files: FileSystem) -> None:
        """One that is made anew is empty: whoever counts the folder next fills it."""
        self._path, self._files = path, files
        self._open: RecordIndex | None = None
        self._lock = threading.Lock()

    def using(self, work: Callable[[RecordIndex], T], otherwise: T) -> T:
        """What `work` gives; `otherwise`, where not even an index in memory works."""
        with self._lock:
            if self._open is not None and not self._open.in_place:
                self._leave()
            for make in (self._opened, self._recreated, self._in_memory):
                try:
                    self._open = self._open or make()
                    return work(self._open)
                except (sqlite3.Error, OSError) as error:
                    log.warning("the index %s cannot be used as it is: %s", self._path, error)
                    self._leave()
        return otherwise

    def close(self) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        if self._open is not None:
            with suppress(sqlite3.Error):
                self._open.close()
            self._open = None

    def _opened(self) -> RecordIndex:
        return RecordIndex(self._path)

    def _recreated(self) -> RecordIndex:
        for file in index_files(self._path):
            self._files.remove(file)
        return RecordIndex(self._path)

    def _in_memory(self) -> RecordIndex:
        return RecordIndex(None)


EMPTY_PATH: Final = hex_digest([])
"""What the digest of the tokens before a record is, where there are none."""
MOST_SIBLINGS: Final = 32
"""Records that go on from the same tokens with the same one and are looked at: where one server wrote them there are
one or two, as others go on amid these. Servers that knew nothing of one another may have left more."""
HEAD_TOKENS: Final = 32
"""Tokens by which it is then told which are likely."""
PlaceKey = TypeVar("PlaceKey", tuple[str, str, int], tuple[str, int, int])


@dataclass(eq=False, slots=True)
class DiskEntry:
    """Shared by the store and by whoever found it there. `lost` is set, by whichever thread, when its file is gone or
    was never written; nothing else changes but when it was used."""

    name: str
    identity: str
    owner: RecordOwner
    before: str
    path: str
    within: str
    oldest: tuple[int, ...]
    begin: int
    tokens: array[int]
    landmark: bool
    checkpoint: bool
    size: int
    used: float = 0.0
    lost: bool = False

    @classmethod
    def of(cls, header: RecordHeader, used: float) -> DiskEntry:
        record = header.record
        return cls(
            header.name,
            header.identity,
            header.owner,
            header.before,
            header.path,
            header.within,
            header.oldest,
            record.begin,
            array("q", record.tokens),
            record.landmark,
            record.checkpoint is not None,
            header.nbytes,
            used,
        )

    @classmethod
    def from_row(cls, row: IndexRow) -> DiskEntry:
        """Raises ValueError, TypeError or KeyError where the index holds something else."""
        facts: dict[str, Any] = json.loads(row.facts)
        if not facts["tokens"]:
            raise ValueError("no tokens")
        return cls(
            row.name,
            str(facts["identity"]),
            RecordOwner(str(facts["tenant"]), str(facts["salt"])),
            str(facts["before"]),
            str(facts["path"]),
            str(facts["within"]),
            tuple(int(first) for first in facts["oldest"]),
            int(facts["begin"]),
            array("q", facts["tokens"]),
            bool(facts["landmark"]),
            bool(facts["checkpoint"]),
            row.size,
            row.used,
        )

    def row(self, scope: str) -> IndexRow:
        facts = {
            "identity": self.identity,
            "tenant": self.owner.tenant,
            "salt": self.owner.salt,
            "before": self.before,
            "path": self.path,
            "within": self.within,
            "oldest": self.oldest,
            "begin": self.begin,
            "tokens": self.tokens.tolist(),
            "landmark": self.landmark,
            "checkpoint": self.checkpoint,
        }
        return IndexRow(
            scope, self.name, self.size, self.used, self.begin, json.dumps(facts).encode(), self.owner.tenant
        )

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    def says(self, header: RecordHeader) -> bool:
        """Whether a file's header says what the index said of it."""
        record = header.record
        mine = self.identity, self.owner, self.before, self.within, self.oldest, self.tokens.tolist()
        return mine == (header.identity, header.owner, header.before, header.within, header.oldest, [*record.tokens])


class KnownEntries:
    """By name, and by what each goes on from. One thread at a time changes it. Any may look meanwhile, and never waits:
    what it finds here is replaced, and not changed."""

    def __init__(self) -> None:
        self._by_name: dict[str, DiskEntry] = {}
        self._behind: dict[tuple[str, str, int], tuple[DiskEntry, ...]] = {}  # by owner, tokens before, first token
        self._amid: dict[tuple[str, int, int], tuple[DiskEntry, ...]] = {}  # by a record, where in it, first token
        self._forks: dict[str, tuple[int, ...]] = {}  # by a record, where in it others go on,
        self._forked: Counter[tuple[str, int]] = Counter()  # and how many do there
        self._held: dict[str, RecordTotal] = {}  # by tenant
        self.total = RecordTotal()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[DiskEntry]:
        return iter([*self._by_name.values()])

    def get(self, name: str) -> DiskEntry | None:
        return self._by_name.get(name)

    def held(self, tenant: str) -> RecordTotal:
        return self._held.get(tenant, RecordTotal())

    def add(self, entry: DiskEntry) -> None:
        """In the place of one of the same name, if there is one."""
        self.remove(entry.name)
        self._by_name[entry.name] = entry
        self._count(entry, 1)
        self._put(self._behind, _prefix_key(entry), entry)
        if entry.within:
            self._put(self._amid, _fork_key(entry), entry)
            self._forked[entry.within, entry.begin] += 1
            if self._forked[entry.within, entry.begin] == 1:
                self._forks[entry.within] = (*self._forks.get(entry.within, ()), entry.begin)

    def remove(self, name: str) -> None:
        entry = self._by_name.pop(name, None)
        if entry is None:
            return
        self._count(entry, -1)
        self._take(self._behind, _prefix_key(entry), entry)
        if entry.within:
            self._take(self._amid, _fork_key(entry), entry)
            self._forked[entry.within, entry.begin] -= 1
            if not self._forked[entry.within, entry.begin]:
                del self._forked[entry.within, entry.begin]
                forks = tuple(fork for fork in self._forks.pop(entry.within) if fork != entry.begin)
                if forks:
                    self._forks[entry.within] = forks

    def along(self, owner: RecordOwner, tokens: Sequence[int]) -> Iterator[tuple[DiskEntry, DiskEntry | None]]:
        """An owner's that begin as `tokens` go on there, each with the one that it goes on from, from its end or from
        amid it, which came before. Looks at these alone, and compares tokens: nothing is hashed."""
        wanted, seen = array("q", tokens), set[str]()
        pending: list[tuple[DiskEntry, DiskEntry | None]] = []

        def offer(found: Sequence[DiskEntry], after: DiskEntry | None) -> None:
            found = found if len(found) <= MOST_SIBLINGS else _likely_entries(found, wanted)
            pending.extend((entry, after) for entry in found if not entry.lost and entry.name not in seen)

        if wanted:
            offer(self._behind.get((owner.salt, EMPTY_PATH, wanted[0]), ()), None)
        while pending:
            entry, after = pending.pop()
            if entry.name in seen:
                continue
            seen.add(entry.name)
            yield entry, after
            agreed = entry.begin + _common_length(entry.tokens, wanted[entry.begin : entry.end])
            for fork in self._forks.get(entry.identity, ()):
                if entry.begin < fork <= agreed and fork < min(entry.end, len(wanted)):
                    offer(self._amid.get((entry.identity, fork, wanted[fork]), ()), entry)
            if agreed == entry.end < len(wanted):
                offer(self._behind.get((owner.salt, entry.path, wanted[agreed]), ()), entry)

    def _count(self, entry: DiskEntry, by: int) -> None:
        tenant = entry.owner.tenant
        records, nbytes = self.held(tenant)
        self._held[tenant] = RecordTotal(records + by, nbytes + by * entry.size)
        if not self._held[tenant].records:
            del self._held[tenant]
        self.total = RecordTotal(self.total.records + by, self.total.nbytes + by * entry.size)

    @staticmethod
    def _put(places: dict[PlaceKey, tuple[DiskEntry, ...]], key: PlaceKey, entry: DiskEntry) -> None:
        places[key] = (*places.get(key, ()), entry)

    @staticmethod
    def _take(places: dict[PlaceKey, tuple[DiskEntry, ...]], key: PlaceKey, entry: DiskEntry) -> None:
        left = tuple(each for each in places.pop(key) if each is not entry)
        if left:
            places[key] = left


def _prefix_key(entry: DiskEntry) -> tuple[str, str, int]:
    return entry.owner.salt, entry.before, entry.tokens[0]


def _fork_key(entry: DiskEntry) -> tuple[str, int, int]:
    return entry.within, entry.begin, entry.tokens[0]


def _likely_entries(found: Sequence[DiskEntry], wanted: array[int]) -> Sequence[DiskEntry]:
    """The newest that begin as `wanted` goes on there, or else the newest."""
    begin = found[0].begin
    ahead = {length: wanted[begin : begin + length] for length in range(1, HEAD_TOKENS + 1)}
    alike = [entry for entry in found if entry.tokens[:HEAD_TOKENS] == ahead[min(HEAD_TOKENS, len(entry.tokens))]]
    return (alike or found)[-MOST_SIBLINGS:]


def _common_length(one: array[int], other: array[int]) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs)
