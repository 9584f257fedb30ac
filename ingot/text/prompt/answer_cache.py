"""Generated answers, cached as the tokens they were generated in, also across restarts.

A client sends an answer back as text. Encoded again, that text need not give the tokens that were computed, and often
enough it is not even whole: the thinking is missing, and the calls have been written anew. So each answer is kept under
the conversation that it ends, and put into the next turn's prompt as it was.

`AnswerFile` keeps them in an SQLite file for each model, written by a thread of its own: whoever caches an answer waits
for nothing. Each row is authenticated with the server's secret, as records on disk are: who can write to the folder
alone can put no words into a conversation. A file that is damaged, or cannot be written, is a cache that lasts as long
as the server. Several servers may share one; each reads it when it starts.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Final, Protocol

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


class AnswerLog(Protocol):
    """Where answers outlast the server."""

    def read(self) -> Iterable[tuple[bytes, CachedAnswer]]:
        """Those of before, oldest first."""
        ...

    def add(self, thread: bytes, answer: CachedAnswer) -> None:
        """Never waits."""
        ...


class AnswerCache:
    """Bounded; those that were not asked for longest go first. Any thread may ask."""

    def __init__(self, most_tokens: int = MOST_ANSWER_TOKENS, journal: AnswerLog | None = None) -> None:
        self._most, self._journal = most_tokens, journal
        self._kept: OrderedDict[bytes, tuple[CachedAnswer, ...]] = OrderedDict()
        self._cost = 0
        self._lock = threading.Lock()
        for thread, answer in journal.read() if journal is not None else ():
            self._remember(thread, answer)

    def keep(self, thread: bytes, opening: str, tokens: Sequence[int], reasoning: str = "", missing: str = "") -> None:
        """Remember the answer after which a conversation is named `thread`."""
        answer = CachedAnswer(opening, array("I", tokens), _without_white_space(reasoning), missing)
        self._remember(thread, answer)
        if self._journal is not None:
            self._journal.add(thread, answer)

    def _remember(self, thread: bytes, answer: CachedAnswer) -> None:
        with self._lock:
            others = [each for each in self._kept.pop(thread, ()) if self._forget(each) and each != answer]
            self._put(thread, (answer, *others[: MOST_ANSWER_VARIANTS - 1]))

    def recall(self, thread: bytes, reasoning: str | None = None) -> CachedAnswer | None:
        """The newest answer that ends this conversation; one with this reasoning, where the client tells of it."""
        with self._lock:
            found = self._kept.get(thread)
            if found is None:
                return None
            self._kept.move_to_end(thread)
            told = None if reasoning is None else _without_white_space(reasoning)
            return next((each for each in found if told in (None, each.reasoning)), None)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._cost = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _put(self, thread: bytes, answers: tuple[CachedAnswer, ...]) -> None:
        self._kept[thread] = answers
        self._cost += sum(each.cost for each in answers)
        while self._cost > self._most and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._cost -= sum(each.cost for each in oldest)

    def _forget(self, answer: CachedAnswer) -> bool:
        self._cost -= answer.cost
        return True


def _without_white_space(text: str) -> str:
    return "".join(text.split())


log = logging.getLogger("ingot.cache")

ANSWER_FILE_VERSION: Final = 2
MOST_WAITING_ANSWERS: Final = 1024
"""Answers that may wait to be written; one more is not."""
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
                answer = CachedAnswer(str(opening), tokens, str(reasoning), str(missing))
                if compare_digest(bytes(mac), self._mac(bytes(thread), answer)):
                    yield bytes(thread), answer

    def add(self, thread: bytes, answer: CachedAnswer) -> None:
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
        """Opened for each turn, of which there are few a second: so a file that was deleted comes back."""
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
