"""The index of a folder's records: what their headers say without their tensors, and when each was last used.

On disk it is an SQLite file, a cache of the files' headers that saves reading all of them when a server starts. It also
has the totals by scope and tenant, each tenant's records in order of their last use, the modification time of each
folder when it was last listed, and recent changes for the other processes that share it. An index that is missing,
damaged or of another version is made anew; if it cannot be written, it is kept in memory instead.

In memory, `KnownEntries` has all entries of a scope, by name and by the prefix that each continues.
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
WAL_PAGES: Final = 64  # of the write-ahead log, which counts against the folder's cap
REMEMBERED_CHANGES: Final = 1024
"""Changes that other processes can read one by one; after more of them they compare all names."""
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
    facts: bytes  # empty until a server of its scope has read it
    tenant: str  # its digest; empty where the file's header cannot be read


class RecordTotal(NamedTuple):
    records: int = 0
    nbytes: int = 0


class FolderNote(NamedTuple):
    """A folder within the folder, when it was last listed."""

    changed: int  # its modification time
    other: int  # bytes of files that are not records


class RecordIndex:
    """For one thread at a time. Raises sqlite3.Error, after which it is to be made anew."""

    def __init__(self, path: Path | None) -> None:
        """In memory, where there is no path."""
        self._path, self._file = path, (0, 0)
        self._last_change: int | None = None  # the last one that `changed` returned
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
        self._open.execute("PRAGMA synchronous = OFF")  # what is lost can be read from the files again
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
        """Whether it is still the file of its name, which another process may have replaced."""
        if self._path is None:
            return True
        try:
            return _file_identity(self._path.stat()) == self._file
        except OSError:
            return False

    # Records

    def rows(self, scope: str, names: Iterable[str]) -> list[IndexRow]:
        query = "SELECT scope, name, size, used, begin, facts, tenant FROM records WHERE scope = ? AND name = ?"
        found = (self._open.execute(query, (scope, name)).fetchone() for name in names)
        return [IndexRow(*row) for row in found if row is not None]

    def sizes(self, scope: str) -> dict[str, int]:
        """By name."""
        return dict(self._open.execute("SELECT name, size FROM records WHERE scope = ?", (scope,)).fetchall())

    def used(self, scope: str) -> dict[str, float]:
        """When each was last used, by any process."""
        return dict(self._open.execute("SELECT name, used FROM records WHERE scope = ?", (scope,)).fetchall())

    def least_used(self, tenant: str) -> Iterator[IndexRow]:
        """A tenant's records of any scope, without their facts: the least recently used first, and of those used
        together the longest paths. Reads lazily."""
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
        """The names of a scope that were added or removed since the last call; None where that is not known."""
        oldest, newest = self._open.execute("SELECT min(number), max(number) FROM changes").fetchone()
        since, self._last_change = self._last_change, newest or 0
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
        """A folder was changed, and the index has the change already."""
        self._open.execute("UPDATE folders SET changed = ? WHERE name = ?", (changed, name))

    def forget_folder(self, name: str) -> None:
        """It was removed, with all that was in it."""
        self._change("DELETE FROM records WHERE scope = ?", [(name,)])
        self._change("DELETE FROM folders WHERE name = ?", [(name,)])

    def _change(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._open.execute("BEGIN IMMEDIATE")
        self._open.executemany(statement, rows)
        self._open.execute("COMMIT")

    def close(self) -> None:
        self._open.close()


def index_files(path: Path) -> list[Path]:
    """The files that make up the index, which can be deleted."""
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


def _file_identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class ResilientIndex:
    """An index that survives whatever happens to its file. Any thread may use it."""

    def __init__(self, path: Path, files: FileSystem) -> None:
        """An index that is made anew is empty, and filled when the folder is listed next."""
        self._path, self._files = path, files
        self._open: RecordIndex | None = None
        self._lock = threading.Lock()

    def read(self, query: Callable[[RecordIndex], T], default: Callable[[], T]) -> T:
        """What `query` returns; a default, where not even an index in memory works."""
        with self._lock:
            if self._open is not None and not self._open.in_place:
                self._leave()
            for make in (self._opened, self._recreated, self._in_memory):
                try:
                    self._open = self._open or make()
                    return query(self._open)
                except (sqlite3.Error, OSError) as error:
                    log.warning("the index %s cannot be used as it is: %s", self._path, error)
                    self._leave()
        return default()

    def write(self, change: Callable[[RecordIndex], None]) -> None:
        self.read(change, lambda: None)

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
"""The digest of the tokens before a record that begins a path."""
MOST_SIBLINGS: Final = 32
"""Records at most that are compared of those that continue the same prefix with the same token. One server writes one
or two, as later ones continue from within these; servers that did not know of each other may have written more."""
HEAD_TOKENS: Final = 32
"""The first tokens by which these are then selected."""
_EntryKey = TypeVar("_EntryKey", tuple[str, str, int], tuple[str, int, int])


_TEXT_FACTS: Final = ("identity", "tenant", "salt", "before", "path", "within")


@dataclass(eq=False, slots=True)
class DiskEntry:
    """A record on disk, as its header says. Only `used` and `lost` change. Any thread sets `lost` when the file is gone
    or could not be written."""

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
        path = header.identity, header.owner, header.before, header.path, header.within, header.oldest
        tokens = record.begin, array("q", record.tokens), record.landmark, record.checkpoint is not None
        return cls(header.name, *path, *tokens, header.nbytes, used)

    @classmethod
    def from_row(cls, row: IndexRow) -> DiskEntry:
        """Raises ValueError, TypeError or KeyError where the row's facts are invalid."""
        facts: dict[str, Any] = json.loads(row.facts)
        if not facts["tokens"]:
            raise ValueError("no tokens")
        identity, tenant, salt, before, path, within = (str(facts[name]) for name in _TEXT_FACTS)
        oldest, tokens = tuple(map(int, facts["oldest"])), array("q", facts["tokens"])
        landmark, checkpoint = bool(facts["landmark"]), bool(facts["checkpoint"])
        prefix = identity, RecordOwner(tenant, salt), before, path, within, oldest
        return cls(row.name, *prefix, int(facts["begin"]), tokens, landmark, checkpoint, row.size, row.used)

    def row(self, scope: str) -> IndexRow:
        texts = self.identity, self.owner.tenant, self.owner.salt, self.before, self.path, self.within
        numbers = {"oldest": self.oldest, "begin": self.begin, "tokens": self.tokens.tolist()}
        flags = {"landmark": self.landmark, "checkpoint": self.checkpoint}
        facts = json.dumps({**dict(zip(_TEXT_FACTS, texts, strict=True)), **numbers, **flags}).encode()
        return IndexRow(scope, self.name, self.size, self.used, self.begin, facts, self.owner.tenant)

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    def matches_header(self, header: RecordHeader) -> bool:
        """Whether a file's header says the same as the index."""
        record = header.record
        mine = self.identity, self.owner, self.before, self.within, self.oldest, self.tokens.tolist()
        return mine == (header.identity, header.owner, header.before, header.within, header.oldest, [*record.tokens])


class KnownEntries:
    """By name, and by the prefix that each continues. One thread at a time changes it. Any may read meanwhile without a
    lock: values are replaced, never changed."""

    def __init__(self) -> None:
        self._by_name: dict[str, DiskEntry] = {}
        self._behind: dict[tuple[str, str, int], tuple[DiskEntry, ...]] = {}  # by owner, tokens before, first token
        self._amid: dict[tuple[str, int, int], tuple[DiskEntry, ...]] = {}  # by record, offset in it, first token
        self._forks: dict[str, tuple[int, ...]] = {}  # by record, the offsets at which others branch off,
        self._forked: Counter[tuple[str, int]] = Counter()  # and how many do at each
        self._totals: dict[str, RecordTotal] = {}  # by tenant
        self.total = RecordTotal()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[DiskEntry]:
        return iter([*self._by_name.values()])

    def get(self, name: str) -> DiskEntry | None:
        return self._by_name.get(name)

    def held(self, tenant: str) -> RecordTotal:
        return self._totals.get(tenant, RecordTotal())

    def add(self, entry: DiskEntry) -> None:
        """Replaces one of the same name."""
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
        """An owner's entries along `tokens`, each behind and with the one that it continues, from its end or from
        within it. Visits only these, and compares tokens instead of hashing them."""
        prompt, seen = array("q", tokens), set[str]()
        pending: list[tuple[DiskEntry, DiskEntry | None]] = []

        def offer(found: Sequence[DiskEntry], earlier: DiskEntry | None) -> None:
            found = found if len(found) <= MOST_SIBLINGS else _likely_entries(found, prompt)
            pending.extend((entry, earlier) for entry in found if not entry.lost and entry.name not in seen)

        if prompt:
            offer(self._behind.get((owner.salt, EMPTY_PATH, prompt[0]), ()), None)
        while pending:
            entry, earlier = pending.pop()
            if entry.name in seen:
                continue
            seen.add(entry.name)
            yield entry, earlier
            matched = entry.begin + common_prefix_length(entry.tokens, prompt[entry.begin : entry.end])
            for fork in self._forks.get(entry.identity, ()):
                if entry.begin < fork <= matched and fork < min(entry.end, len(prompt)):
                    offer(self._amid.get((entry.identity, fork, prompt[fork]), ()), entry)
            if matched == entry.end < len(prompt):
                offer(self._behind.get((owner.salt, entry.path, prompt[matched]), ()), entry)

    def _count(self, entry: DiskEntry, by: int) -> None:
        tenant = entry.owner.tenant
        records, nbytes = self.held(tenant)
        self._totals[tenant] = RecordTotal(records + by, nbytes + by * entry.size)
        if not self._totals[tenant].records:
            del self._totals[tenant]
        self.total = RecordTotal(self.total.records + by, self.total.nbytes + by * entry.size)

    @staticmethod
    def _put(entries: dict[_EntryKey, tuple[DiskEntry, ...]], key: _EntryKey, entry: DiskEntry) -> None:
        entries[key] = (*entries.get(key, ()), entry)

    @staticmethod
    def _take(entries: dict[_EntryKey, tuple[DiskEntry, ...]], key: _EntryKey, entry: DiskEntry) -> None:
        others = tuple(each for each in entries.pop(key) if each is not entry)
        if others:
            entries[key] = others


def _prefix_key(entry: DiskEntry) -> tuple[str, str, int]:
    return entry.owner.salt, entry.before, entry.tokens[0]


def _fork_key(entry: DiskEntry) -> tuple[str, int, int]:
    return entry.within, entry.begin, entry.tokens[0]


def _likely_entries(found: Sequence[DiskEntry], prompt: array[int]) -> Sequence[DiskEntry]:
    """The newest whose first tokens are the prompt's, or else the newest."""
    begin = found[0].begin
    heads = {length: prompt[begin : begin + length] for length in range(1, HEAD_TOKENS + 1)}
    alike = [entry for entry in found if entry.tokens[:HEAD_TOKENS] == heads[min(HEAD_TOKENS, len(entry.tokens))]]
    return (alike or found)[-MOST_SIBLINGS:]


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # the ordinary case
        return shorter
    equal, differ = 0, shorter  # bisect: comparing slices is many times faster than comparing tokens one by one
    while differ - equal > 1:
        middle = (equal + differ) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            differ = middle
    return equal
