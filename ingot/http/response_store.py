"""Stored responses, in one SQLite file, bounded in number, bytes and age; and the responses in progress, of all models.
Each tenant sees its own.

A response is stored with its whole conversation, so that it can be continued even if those before it are deleted. The
file also holds the secret that reasoning is signed with. Its calls block for a moment: not for an event loop. Light to
import.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from ingot.config import Settings
from ingot.errors import ConfigError, Unavailable
from ingot.http.streaming import MOST_FEED_BATCHES, EventFeed
from ingot.observe.logs import RareWarning
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.shares import heaviest_holder

if TYPE_CHECKING:
    from ingot.protocol.responses.answers import ResponseBody

log = logging.getLogger("ingot.responses")

STORE_VERSION: Final = 1
SECRET_BYTES: Final = 32
DAY_S: Final = 86400.0
STORE_ROOM_BYTES: Final = 16 << 10  # that must be free before a response begins
STORE_LOCK_S: Final = 10.0  # for another process that writes to the same file
STORE_SCHEMA: Final = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL, content BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX responses_by_age ON responses (created);
CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of the store. Sizes are of the compressed content."""

    rows: int
    size: int
    age_s: float


@dataclass(slots=True)
class TenantUsage:
    """One tenant's stored responses."""

    rows: int
    size: int


class ResponseStore:
    """Opened at its first use, so that a server without responses creates no file."""

    def __init__(self, path: Path, limits: StoreLimits) -> None:
        self._path, self._limits = path, limits
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._secret: bytes | None = None
        self._unusable_notice = RareWarning(log)

    def secret(self) -> bytes:
        """The key that signs thinking. It lasts only as long as the server, where the file cannot be used."""
        if self._secret is None:
            try:
                with self._using() as connection:
                    (value,) = connection.execute("SELECT value FROM secrets WHERE name = 'seal'").fetchone()
            except Unavailable:
                value = secrets.token_bytes(SECRET_BYTES)
            self._secret = bytes(value)
        return self._secret

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        with self._using() as connection:
            query = "SELECT content FROM responses WHERE id = ? AND tenant = ? AND created > ?"
            row = connection.execute(query, (response_id, tenant, time.time() - self._limits.age_s)).fetchone()
        if row is None:
            return None
        content = json.loads(zlib.decompress(row[0]))
        return StoredResponse(content["response"], content["input"])

    def keep(self, tenant: str, response: ResponseBody, items: list[dict[str, Any]]) -> None:
        """Store a response, or update a stored one. Beyond the limits, the oldest of the tenant with most is
        deleted."""
        content = zlib.compress(msgspec.json.encode({"response": response, "input": items}), level=1)
        row = (response.id, tenant, time.time(), len(content), content)
        with self._using() as connection:
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET size = excluded.size, content = excluded.content",
                row,
            )
            self._make_room(connection)

    def check(self) -> None:
        """Raises Unavailable where nothing can be stored, before anything is computed that would be lost."""
        with self._using() as connection:
            connection.execute("INSERT OR REPLACE INTO secrets VALUES ('room', randomblob(?))", (STORE_ROOM_BYTES,))

    def delete(self, tenant: str, response_id: str) -> bool:
        with self._using() as connection:
            done = connection.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant))
            return done.rowcount > 0

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _make_room(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM responses WHERE created <= ?", (time.time() - self._limits.age_s,))
        usage = {
            tenant: TenantUsage(rows, size)
            for tenant, rows, size in connection.execute("SELECT tenant, count(*), sum(size) FROM responses GROUP BY 1")
        }
        while (tenant := self._largest_user(usage)) is not None:
            query = "SELECT id, size FROM responses WHERE tenant = ? ORDER BY created, id LIMIT 1"
            oldest, freed = connection.execute(query, (tenant,)).fetchone()
            connection.execute("DELETE FROM responses WHERE id = ?", (oldest,))
            usage[tenant].rows -= 1
            usage[tenant].size -= freed

    def _largest_user(self, usage: Mapping[str, TenantUsage]) -> str | None:
        """Beyond a limit, the tenant with most. So every tenant has its equal share, and may use what others do not."""
        if sum(own.rows for own in usage.values()) > self._limits.rows:
            return heaviest_holder({tenant: own.rows for tenant, own in usage.items()})
        if sum(own.size for own in usage.values()) > self._limits.size:
            return heaviest_holder({tenant: own.size for tenant, own in usage.items()})
        return None

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one transaction."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = open_store_file(self._path)
                with self._connection:
                    yield self._connection
            except (sqlite3.Error, OSError, ConfigError) as error:
                self._unusable_notice.warn("the response store at %s cannot be used: %s", self._path, error)
                why = "its disk is full" if is_disk_full(error) else "the server's log says why"
                raise Unavailable(f"The response store cannot be used: {why}. Send `store: false`.") from error


def is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def open_response_store(settings: Settings) -> ResponseStore | None:
    path = settings.responses_path
    limits = StoreLimits(settings.responses_rows, settings.responses_bytes, settings.responses_days * DAY_S)
    return None if path is None else ResponseStore(path, limits)


class TenantResponses:
    """One tenant's responses, for parsing its bodies."""

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store, self._tenant = store, tenant

    def find(self, response_id: str) -> StoredResponse | None:
        return self._store.find(self._tenant, response_id)

    def check(self) -> None:
        self._store.check()


def open_store_file(path: Path) -> sqlite3.Connection:
    """A connection to the store at `path`, which is created if necessary. A damaged one is moved aside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return connect_store(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
        log.warning("the response store was damaged (%s); it was moved to %s", error, aside)
        path.rename(aside)
        return connect_store(path)


def connect_store(path: Path) -> sqlite3.Connection:
    # Conversations are private, so the file has these permissions before anything is in it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(path, timeout=STORE_LOCK_S, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        prepare_store(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare_store(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in STORE_SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO secrets VALUES ('seal', ?)", (secrets.token_bytes(SECRET_BYTES),))
            connection.execute(f"PRAGMA user_version = {STORE_VERSION}")
        elif version != STORE_VERSION:
            raise ConfigError(f"{path} was written by another version of ingot")


class OwnedRun(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...


R = TypeVar("R", bound=OwnedRun)


MOST_ENDED_RUNS: Final = 16  # background responses whose events are held after their end


class ResponseRuns(Generic[R]):
    """By id. Each tenant sees its own."""

    def __init__(self) -> None:
        self._runs: dict[str, R] = {}
        self._ended: dict[str, tuple[str, EventFeed]] = {}  # tenants and events by id, the newest last

    def add(self, run: R) -> None:
        self._runs[run.id] = run

    def remove(self, run: R) -> None:
        self._runs.pop(run.id, None)

    def end(self, run: R, feed: EventFeed) -> None:
        """Remove it, and hold its events for clients that reconnect."""
        self.remove(run)
        self._ended[run.id] = (run.tenant, feed)
        while (
            len(self._ended) > MOST_ENDED_RUNS or sum(len(feed) for _, feed in self._ended.values()) > MOST_FEED_BATCHES
        ):
            self.forget(next(iter(self._ended)))

    def forget(self, response_id: str) -> None:
        self._ended.pop(response_id, None)

    def find(self, tenant: str, response_id: str) -> R | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.tenant == tenant else None

    def recently_ended(self, tenant: str, response_id: str) -> EventFeed | None:
        """The events of a background response that has ended."""
        owner, feed = self._ended.get(response_id, ("", None))
        return feed if owner == tenant else None
