"""The index of a folder's records: an SQLite file that says what their headers say, and when each was last used.

It is a cache of what the files say, and saves reading all their headers when a server starts. It also knows what all
records take together, by scope and tenant and without asking each; which of a tenant's were used longest ago; what each
folder of records was like when it was last counted; and, for the other processes that share it, what came and went. One
that is missing, damaged or of another version is made anew (`LastingIndex`); one that cannot be written to is kept in
memory instead.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ingot.cache.disk.files import Files

log = logging.getLogger("ingot.cache")
T = TypeVar("T")

VERSION: Final = 4
PATIENCE_S: Final = 5.0  # for another process that writes to it
PAGES_AHEAD: Final = 64  # of the journal, which counts against the folder's cap
REMEMBERED: Final = 1024
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
    DELETE FROM changes WHERE number <= last_insert_rowid() - {REMEMBERED};
END;
CREATE TRIGGER IF NOT EXISTS record_removed AFTER DELETE ON records BEGIN
    UPDATE totals SET records = records - 1, bytes = bytes - old.size WHERE scope = old.scope AND tenant = old.tenant;
    DELETE FROM totals WHERE scope = old.scope AND tenant = old.tenant AND records = 0;
    INSERT INTO changes (scope, name) VALUES (old.scope, old.name);
    DELETE FROM changes WHERE number <= last_insert_rowid() - {REMEMBERED};
END;
CREATE TRIGGER IF NOT EXISTS record_changed AFTER UPDATE OF size, tenant ON records BEGIN
    UPDATE totals SET records = records - 1, bytes = bytes - old.size WHERE scope = old.scope AND tenant = old.tenant;
    {_ENSURE_TOTAL};
    UPDATE totals SET records = records + 1, bytes = bytes + new.size WHERE scope = new.scope AND tenant = new.tenant;
    DELETE FROM totals WHERE scope = old.scope AND tenant = old.tenant AND records = 0;
END;
"""
_ADD: Final = """
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


class Total(NamedTuple):
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
            self._file = _file_of(os.fstat(descriptor))
            os.close(descriptor)
        self._open = sqlite3.connect(
            ":memory:" if path is None else path, PATIENCE_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare()
        except sqlite3.Error:
            self.close()
            raise

    def _prepare(self) -> None:
        self._open.execute("PRAGMA journal_mode = WAL")
        self._open.execute("PRAGMA synchronous = OFF")  # what is lost is read from the files again
        self._open.execute(f"PRAGMA wal_autocheckpoint = {PAGES_AHEAD}")
        (version,) = self._open.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"an index of version {version}")
        self._open.executescript(_SCHEMA)
        self._open.execute(f"PRAGMA user_version = {VERSION}")
        (state,) = self._open.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)

    @property
    def in_place(self) -> bool:
        """Whether it is still the file of its name: another process may have made that anew."""
        if self._path is None:
            return True
        try:
            return _file_of(self._path.stat()) == self._file
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

    def totals(self) -> dict[str, Total]:
        """By tenant, of all scopes."""
        found = self._open.execute("SELECT tenant, sum(records), sum(bytes) FROM totals GROUP BY tenant").fetchall()
        return {tenant: Total(records, nbytes) for tenant, records, nbytes in found}

    def add(self, rows: Iterable[IndexRow]) -> None:
        self._change(_ADD, rows)

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


def files_of(path: Path) -> list[Path]:
    """The index's own, which can be deleted."""
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


def _file_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


class LastingIndex:
    """An index that is there whatever happens to its file. Any thread may use it."""

    def __init__(self, path: Path, files: Files) -> None:
        """One that is made anew is empty: whoever counts the folder next fills it."""
        self._path, self._files = path, files
        self._open: RecordIndex | None = None
        self._lock = threading.Lock()

    def using(self, work: Callable[[RecordIndex], T], otherwise: T) -> T:
        """What `work` gives; `otherwise`, where not even an index in memory works."""
        with self._lock:
            if self._open is not None and not self._open.in_place:
                self._leave()
            for make in (self._opened, self._made_anew, self._in_memory):
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

    def _made_anew(self) -> RecordIndex:
        for file in files_of(self._path):
            self._files.remove(file)
        return RecordIndex(self._path)

    def _in_memory(self) -> RecordIndex:
        return RecordIndex(None)
