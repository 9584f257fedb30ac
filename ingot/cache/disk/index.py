"""The index of a folder's records: an SQLite file that says what their headers say, and when each was last used.

It is a cache of what the files say, and saves reading all their headers when a server starts. One that is missing,
damaged or of another version is made anew (`LastingIndex`); one that cannot be written to is kept in memory instead.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ingot.cache.disk.files import Files

log = logging.getLogger("ingot.cache")
T = TypeVar("T")

VERSION: Final = 1
PATIENCE_S: Final = 5.0  # for another process that writes to it
PAGES_AHEAD: Final = 64  # of the journal, which counts against the folder's cap
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    name TEXT PRIMARY KEY, scope TEXT NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL, facts BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_scope ON records (scope);
"""


class IndexRow(NamedTuple):
    name: str
    scope: str
    size: int
    used: float  # unix time
    facts: bytes


class RecordIndex:
    """For one thread at a time. Raises sqlite3.Error, after which it is to be made anew."""

    def __init__(self, path: Path | None) -> None:
        """In memory, where there is no path."""
        self._path = path
        if path is not None:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
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

    def rows(self, scope: str) -> list[IndexRow]:
        found = self._open.execute("SELECT name, scope, size, used, facts FROM records WHERE scope = ?", (scope,))
        return [IndexRow(*row) for row in found]

    def used(self, scope: str) -> dict[str, float]:
        """When each was last, by whichever process."""
        return dict(self._open.execute("SELECT name, used FROM records WHERE scope = ?", (scope,)).fetchall())

    def add(self, rows: Iterable[IndexRow]) -> None:
        self._open.execute("BEGIN IMMEDIATE")
        self._open.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", rows)
        self._open.execute("COMMIT")

    def remove(self, names: Iterable[str]) -> None:
        self._open.execute("BEGIN IMMEDIATE")
        self._open.executemany("DELETE FROM records WHERE name = ?", ((name,) for name in names))
        self._open.execute("COMMIT")

    def touch(self, used: Iterable[tuple[str, float]]) -> None:
        self._open.execute("BEGIN IMMEDIATE")
        self._open.executemany("UPDATE records SET used = ?2 WHERE name = ?1", used)
        self._open.execute("COMMIT")

    def close(self) -> None:
        self._open.close()


def files_of(path: Path) -> list[Path]:
    """The index's own, which can be deleted."""
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


class LastingIndex:
    """An index that is there whatever happens to its file. Any thread may use it."""

    def __init__(self, path: Path, files: Files, rows: Callable[[], list[IndexRow]]) -> None:
        """`rows` is what one that is made anew begins with."""
        self._path, self._files, self._rows = path, files, rows
        self._open: RecordIndex | None = None
        self._lock = threading.Lock()

    def using(self, work: Callable[[RecordIndex], T], otherwise: T) -> T:
        """What `work` gives; `otherwise`, where not even an index in memory works."""
        with self._lock:
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
        return self._filled(RecordIndex(self._path))

    def _in_memory(self) -> RecordIndex:
        return self._filled(RecordIndex(None))

    def _filled(self, index: RecordIndex) -> RecordIndex:
        index.add(self._rows())
        return index
