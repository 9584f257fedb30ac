"""Generated answers, cached as the tokens they were generated in, also across restarts.

A client sends an answer back as text. Encoded again, that text need not give the tokens that were computed, and it is
often incomplete: the thinking is missing, and the calls were serialized anew. So each answer is cached under the
conversation that it ends, and inserted into the next turn's prompt as it was.

`AnswerFile` stores them in an SQLite file for each model, written by a thread of its own, so that nobody waits for it.
Each row is authenticated with the server's secret, as records on disk are: write access to the folder is not enough to
forge an answer. Where the file is damaged or cannot be written, the cache lasts as long as the server. Several servers
may share a file; each reads it when it starts.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Final

from ingot.text.tokenizer.tokenizer import Tokenizer

MOST_ANSWER_TOKENS: Final = 4_000_000
MOST_ANSWER_VARIANTS: Final = 4
_ANSWER_OVERHEAD: Final = 64  # what an answer costs besides its tokens, in tokens


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """`opening` is the text that stood between the last message and the answer; `tokens` leave out the one that
    ended it, since the template writes one of its own. `reasoning` has no white space: some protocols cut it into
    blocks, which clients join as they like. `missing` is what an answer that was cut short lacks."""

    opening: str
    tokens: array[int]
    reasoning: str = ""
    missing: str = ""

    @property
    def cost(self) -> int:
        return len(self.tokens) + len(self.opening) + len(self.reasoning) // 4 + _ANSWER_OVERHEAD


class AnswerCache:
    """Bounded; evicts the least recently used. Any thread may use it."""

    def __init__(self, most_tokens: int = MOST_ANSWER_TOKENS, journal: AnswerFile | None = None) -> None:
        self._most, self._file = most_tokens, journal
        self._entries: OrderedDict[bytes, tuple[CachedAnswer, ...]] = OrderedDict()
        self._cost = 0
        self._lock = threading.Lock()
        for thread, answer in journal.read() if journal is not None else ():
            self._remember(thread, answer)

    def keep(self, thread: bytes, opening: str, tokens: Sequence[int], reasoning: str = "", missing: str = "") -> None:
        """Cache the answer after which a conversation has the key `thread`."""
        answer = CachedAnswer(opening, array("I", tokens), _without_white_space(reasoning), missing)
        self._remember(thread, answer)
        if self._file is not None:
            self._file.add(thread, answer)

    def _remember(self, thread: bytes, answer: CachedAnswer) -> None:
        with self._lock:
            before = self._entries.pop(thread, ())
            self._cost -= sum(each.cost for each in before)
            others = [each for each in before if each != answer]
            self._entries[thread] = answers = (answer, *others[: MOST_ANSWER_VARIANTS - 1])
            self._cost += sum(each.cost for each in answers)
            while self._cost > self._most and self._entries:
                _, oldest = self._entries.popitem(last=False)
                self._cost -= sum(each.cost for each in oldest)

    def recall(self, thread: bytes, reasoning: str | None = None) -> CachedAnswer | None:
        """The newest answer that ends this conversation, with this reasoning if the client sent any."""
        with self._lock:
            found = self._entries.get(thread)
            if found is None:
                return None
            self._entries.move_to_end(thread)
            wanted = None if reasoning is None else _without_white_space(reasoning)
            return next((each for each in found if wanted in (None, each.reasoning)), None)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._cost = 0

    def __len__(self) -> int:
        return len(self._entries)


def _without_white_space(text: str) -> str:
    return "".join(text.split())


log = logging.getLogger("ingot.cache")

ANSWER_FILE_VERSION: Final = 2
MOST_WAITING_ANSWERS: Final = 1024  # answers that may wait to be written; further ones are not
ANSWER_FILE_PATIENCE_S: Final = 5.0  # for another process that writes
TRIM_ANSWERS_EVERY: Final = 256
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
    def __init__(self, path: Path, secret: bytes, most_tokens: int = MOST_ANSWER_TOKENS) -> None:
        self._path, self._secret, self._most = path, secret, most_tokens
        self._waiting: queue.Queue[tuple[bytes, CachedAnswer] | None] = queue.Queue(MOST_WAITING_ANSWERS)
        self._thread = threading.Thread(target=self._live, name="ingot-answers", daemon=True)
        self._thread.start()

    def read(self) -> Iterator[tuple[bytes, CachedAnswer]]:
        """The stored answers, oldest first, without those that are malformed or were not sealed with the secret."""
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
                answer = CachedAnswer(str(opening), tokens, str(reasoning), str(missing))
                if compare_digest(bytes(mac), self._mac(bytes(thread), answer)):
                    yield bytes(thread), answer

    def add(self, thread: bytes, answer: CachedAnswer) -> None:
        """Queue it to be written, unless too many wait already."""
        with suppress(queue.Full):
            self._waiting.put_nowait((thread, answer))

    def close(self) -> None:
        """Returns once everything queued is written."""
        self._waiting.put(None)
        self._thread.join()

    def _live(self) -> None:
        written = 0
        while (item := self._waiting.get()) is not None:
            batch = [item]
            last = False
            with suppress(queue.Empty):
                while not last:
                    more = self._waiting.get_nowait()
                    last = more is None
                    batch += [] if more is None else [more]
            written += len(batch)
            self._write(batch, trims=written >= TRIM_ANSWERS_EVERY)
            written %= TRIM_ANSWERS_EVERY
            if last:
                return

    def _write(self, batch: list[tuple[bytes, CachedAnswer]], *, trims: bool) -> None:
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

    def _mac(self, thread: bytes, answer: CachedAnswer) -> bytes:
        mac = blake2b(key=self._secret, digest_size=32)
        texts = (answer.opening, answer.reasoning, answer.missing)
        for part in (thread, answer.tokens.tobytes(), *(text.encode("utf-8", "surrogatepass") for text in texts)):
            mac.update(len(part).to_bytes(8, "little") + part)
        return mac.digest()

    def _connected(self) -> sqlite3.Connection:
        """Opened for each batch, of which there are few a second, so that a deleted file comes back."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        connection = sqlite3.connect(self._path, ANSWER_FILE_PATIENCE_S)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, ANSWER_FILE_VERSION):
                raise sqlite3.DatabaseError(f"it is of version {version}")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version = {ANSWER_FILE_VERSION}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _give_up_file(self, error: Exception) -> None:
        """A file that is no database is deleted; any other problem may pass."""
        log.warning("cached answers in %s cannot be used: %s", self._path, error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def answers_path(folder: Path, tokenizer: Tokenizer, model: str) -> Path:
    """The file of a model's answers, which are in its vocabulary's tokens. Models that share a vocabulary have files of
    their own, as their thinking and the openings of their templates differ."""
    digest = blake2b(model.encode(), digest_size=8)
    for token in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token) or b""
        digest.update(len(raw).to_bytes(4, "little") + raw)
    return folder / f"answers-{digest.hexdigest()}.sqlite"
