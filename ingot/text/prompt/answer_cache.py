"""Remembered answers in a file, so that a conversation goes on after a restart in the tokens it was generated in.

An SQLite file for each model, written by a thread of its own: whoever remembers an answer waits for nothing. Each
row is sealed with the server's secret, as records are: who can write to the folder alone can put no words into a
conversation. A file that is damaged, or cannot be written, is a memory that lasts as long as the server. Several
servers may share one; each reads it when it starts.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, suppress
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Final

from ingot.text.prompt.remembered import MOST_TOKENS, RememberedAnswer
from ingot.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("ingot.cache")

VERSION: Final = 2
MOST_WAITING: Final = 1024
"""Answers that may wait to be written; one more is not."""
PATIENCE_S: Final = 5.0  # for another process that writes
TRIM_EVERY: Final = 256
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS answers (
    at REAL NOT NULL, thread BLOB NOT NULL, opening TEXT NOT NULL, tokens BLOB NOT NULL, reasoning TEXT NOT NULL,
    missing TEXT NOT NULL, cost INTEGER NOT NULL, mac BLOB NOT NULL
);
"""
_TRIM: Final = """
DELETE FROM answers WHERE rowid IN (
    SELECT rowid FROM (SELECT rowid, sum(cost) OVER (ORDER BY at DESC, rowid DESC) AS upto FROM answers) WHERE upto > ?
)
"""


class AnswerFile:
    def __init__(self, path: Path, secret: bytes, most_tokens: int = MOST_TOKENS) -> None:
        self._path, self._secret, self._most = path, secret, most_tokens
        self._waiting: queue.Queue[tuple[bytes, RememberedAnswer] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._live, name="ingot-answers", daemon=True)
        self._thread.start()

    def read(self) -> Iterator[tuple[bytes, RememberedAnswer]]:
        """What it holds, oldest first; nothing of what makes no sense, or was not sealed with the secret."""
        query = "SELECT thread, opening, tokens, reasoning, missing, mac FROM answers ORDER BY at, rowid"
        try:
            with closing(self._connected()) as connection:
                rows = connection.execute(query).fetchall()
        except (sqlite3.Error, OSError) as error:
            self._give_up_file(error)
            return
        for thread, opening, raw, reasoning, missing, mac in rows:
            with suppress(ValueError, TypeError):
                tokens = array("I")
                tokens.frombytes(raw)
                answer = RememberedAnswer(str(opening), tokens, str(reasoning), str(missing))
                if compare_digest(bytes(mac), self._mac(bytes(thread), answer)):
                    yield bytes(thread), answer

    def add(self, thread: bytes, answer: RememberedAnswer) -> None:
        """Have it written, unless too many wait for that."""
        with suppress(queue.Full):
            self._waiting.put_nowait((thread, answer))

    def close(self) -> None:
        """Once what waits is written."""
        self._waiting.put(None)
        self._thread.join()

    def _live(self) -> None:
        written = 0
        while (given := self._waiting.get()) is not None:
            batch = [given]
            last = False
            with suppress(queue.Empty):
                while not last:
                    more = self._waiting.get_nowait()
                    last = more is None
                    batch += [] if more is None else [more]
            written += len(batch)
            self._write(batch, trims=written >= TRIM_EVERY)
            written %= TRIM_EVERY
            if last:
                return

    def _write(self, batch: list[tuple[bytes, RememberedAnswer]], *, trims: bool) -> None:
        now = time.time()
        rows = [
            (
                *(now, thread, each.opening, each.tokens.tobytes(), each.reasoning, each.missing, each.cost),
                self._mac(thread, each),
            )
            for thread, each in batch
        ]
        try:
            with closing(self._connected()) as connection, connection:
                connection.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
                if trims:
                    connection.execute(_TRIM, (self._most,))
        except (sqlite3.Error, OSError) as error:
            self._give_up_file(error)

    def _mac(self, thread: bytes, answer: RememberedAnswer) -> bytes:
        mac = blake2b(key=self._secret, digest_size=32)
        texts = (answer.opening, answer.reasoning, answer.missing)
        for part in (thread, answer.tokens.tobytes(), *(text.encode("utf-8", "surrogatepass") for text in texts)):
            mac.update(len(part).to_bytes(8, "little") + part)
        return mac.digest()

    def _connected(self) -> sqlite3.Connection:
        """Opened for each turn, of which there are few a second: so a file that was deleted comes back."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(self._path, PATIENCE_S)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it is of version {version}")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _give_up_file(self, error: Exception) -> None:
        """One that is no database is begun anew; whatever else is wrong may pass."""
        log.warning("remembered answers in %s cannot be used: %s", self._path, error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def answers_path(folder: Path, tokenizer: Tokenizer, model: str) -> Path:
    """Where the answers of a model are kept, in its vocabulary's tokens. Others may have the same vocabulary: what they
    thought, and how their templates open an answer, is no part of its conversations."""
    digest = blake2b(model.encode(), digest_size=8)
    for token in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token) or b""
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return folder / f"answers-{digest.hexdigest()}.sqlite"
