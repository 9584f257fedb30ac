"""Records on disk of a model that several ranks have: each rank has its own part of each in a file of its own.

A record is there where every rank has its part whole. Rank 0 knows its own files; whether the others have theirs turns
out when they are read, by everybody at once: one that lacks its part, or finds it damaged, makes it a miss for all. An
answer that does not come is no answer: whoever reads gives up after a while (`Promotions`), and what was not written
everywhere is not there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ingot.cache.disk.backend import MOST_WAITING, PAUSE_S
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.entry import Entry
from ingot.cache.disk.header import Header, variant_of
from ingot.cache.disk.reader import Reading
from ingot.cache.disk.record_file import StoredData
from ingot.cache.packing import LooseRecord
from ingot.distributed import control_channel
from ingot.ranks.kept import ToldData
from ingot.ranks.pieces import Piece, ToldCheckpoint, ToldDeltas
from ingot.ranks.voice import Question, Voice

log = logging.getLogger("ingot.cache")

LOOK_S: Final = 0.01


class ToldReading(Reading):
    """Of everybody's parts of a record. For the engine's thread."""

    __slots__ = ("_own", "_piece", "_question", "_voice")

    def __init__(self, own: Reading, voice: Voice) -> None:
        super().__init__(own.entry)
        self._own, self._voice, self._piece = own, voice, Piece(voice)
        self._question = voice.ask(self._piece.number)
        voice.tell(control_channel.Fetched(self._piece.number, file_ref(own.entry), own.entry.checkpoint))

    @property
    def done(self) -> bool:
        if not super().done:
            self._look()
        return super().done

    def cancel(self) -> None:
        self._own.cancel()
        self._voice.expect_no_more(self._piece.number)

    def wait(self, within_s: float) -> bool:
        if self._own.wait(within_s) and not self._question.settled:
            self._voice.listen(within_s)
        return self.done

    def _look(self) -> None:
        if not self._question.settled:
            self._voice.listen()
        if not self._own.done or not self._question.settled:
            return
        self.seconds = self._own.seconds
        self.gone = self._own.gone
        if not self._question.good:
            log.warning("%s cannot be read back: another rank lacks its part, or found it damaged", self.entry.name)
            self.entry.lost = True
        self.finish(self._everybodys(self._own.found) if self._question.good else None)

    def _everybodys(self, found: StoredData | None) -> StoredData | None:
        return None if found is None else ToldData(found.header, found.tensors, self._piece)


class Writing:
    """Records that not everybody has said to have written. What a rank could not write is lost, and nobody is asked for
    more for a while: its drive may be full, or gone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._paused_until = clock, 0.0
        self._asked: list[tuple[Entry, Question]] = []

    def add(self, entry: Entry, question: Question) -> None:
        self._asked.append((entry, question))

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry, _ in self._asked]

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._paused_until

    def look(self) -> None:
        """Once answers were heard."""
        settled = [(entry, question) for entry, question in self._asked if question.settled]
        self._asked = [(entry, question) for entry, question in self._asked if not question.settled]
        for entry in (entry for entry, question in settled if not question.good):
            entry.lost = True
            self._paused_until = self._clock() + PAUSE_S


@dataclass(frozen=True, slots=True)
class LeadingDisk(Disk):
    """Rank 0's files. What the others have not said to have written counts as waiting, so that no rank is asked for
    more than it can write."""

    voice: Voice
    heavier: float
    """How many times as much as here a record takes on the rank where it takes most."""
    writing: Writing = field(default_factory=Writing)

    def has_room(self) -> bool:
        self._look()
        waiting = sum(map(self.memory_of, self.writing.entries))
        return waiting < MOST_WAITING and not self.writing.is_paused and Disk.has_room(self)

    def stored(self, name: str) -> Entry | None:
        """None: whether other ranks still have their parts turns out when these are read."""
        return None

    def doubt(self, entries: Sequence[Entry]) -> None:
        """A rank that lacks one part may lack these too. They are written again once they were computed again."""
        for entry in entries:
            entry.lost = True

    def offer(self, header: Header, data: tuple[bytes, ...], record: LooseRecord) -> Entry | None:
        entry = Disk.offer(self, header, data, record)
        if entry is None:
            return None
        deltas, checkpoint = record.deltas, record.checkpoint
        assert isinstance(deltas, ToldDeltas), "states that the other ranks do not know"
        assert checkpoint is None or isinstance(checkpoint, ToldCheckpoint)
        asked = self.voice.number()
        self.writing.add(entry, self.voice.ask(asked))
        self.voice.tell(
            control_channel.Filed(
                asked,
                deltas.piece.number,
                None if checkpoint is None else checkpoint.number,
                file_ref(entry),
                header.before,
                list(header.oldest),
                list(header.record.tokens),
                header.record.landmark,
            )
        )
        return entry

    def ask(self, entry: Entry) -> Reading:
        return ToldReading(Disk.ask(self, entry), self.voice)

    def touch(self, entries: Sequence[Entry]) -> None:
        Disk.touch(self, entries)
        if entries:
            self.voice.note(control_channel.Used([file_ref(entry) for entry in entries]))

    def memory_of(self, entry: Entry) -> int:
        return int(self.heavier * entry.size)

    def forget_elsewhere(self, tenant: str) -> None:
        self.voice.tell(control_channel.Forgotten(tenant))

    def drain(self, within_s: float) -> bool:
        """Everywhere."""
        until = time.monotonic() + within_s
        own = Disk.drain(self, within_s)
        self._look()
        while self.writing.entries and time.monotonic() < until:
            self.voice.listen(LOOK_S)
            self._look()
        return own and not self.writing.entries

    def close(self, within_s: float) -> None:
        try:
            self.drain(within_s)
        finally:
            Disk.close(self, within_s)

    def _look(self) -> None:
        if self.writing.entries:
            self.voice.listen()
            self.writing.look()


def file_ref(entry: Entry) -> control_channel.FileRef:
    return control_channel.FileRef(
        entry.owner.tenant, entry.owner.salt, entry.path, entry.begin, variant_of(entry.name)
    )
