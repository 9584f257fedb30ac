"""What a rank that follows has of records on disk: its own files, written and read as it is told, and what it answers.

Files are written and read by threads, as everywhere; whether they are done is looked at by the one thread that follows,
which puts what was read into arrays and says so. No step waits for a file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.cache.checkpoint import Checkpoint
from ingot.cache.deltas import Deltas
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.entry import Entry
from ingot.cache.disk.header import Header, RecordOwner, identity, named
from ingot.cache.disk.reader import Reading
from ingot.cache.packing import Form, LooseRecord, described, fitted, packed, unpacked
from ingot.distributed import control_channel
from ingot.errors import IngotError

log = logging.getLogger("ingot.cache")


@dataclass(frozen=True, slots=True)
class _Asked:
    reading: Reading
    checkpoint: bool


class FollowingFiles:
    """Owns the disk. For the thread that follows."""

    def __init__(self, disk: Disk, form: Form) -> None:
        """`form` is that of this rank's part of a record, as it is written."""
        self._disk, self._form = disk, form
        self._readings: dict[int, _Asked] = {}
        self._writing: dict[int, Entry] = {}
        self._refused: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether there is something that will be answered."""
        return bool(self._readings or self._writing or self._refused)

    def fetch(self, event: control_channel.Fetched) -> None:
        entry = self._find(event.file)
        if entry is None:
            self._refused.append(event.number)
        else:
            self._readings[event.number] = _Asked(self._disk.reader.ask(entry), event.checkpoint)

    def file(self, event: control_channel.Filed, deltas: Deltas, checkpoint: Checkpoint | None) -> None:
        loose = LooseRecord(event.file.begin, event.file.begin + len(event.tokens), deltas, checkpoint)
        header = Header(
            self._disk.store.key,
            _owner(event.file),
            event.before,
            event.file.path,
            "",  # nobody looks for a file here but by its name
            tuple(event.oldest),
            described(loose, tuple(event.tokens), landmark=event.landmark),
            variant=event.file.variant,
        )
        entry = self._disk.writer.offer(header, tuple(packed(loose)))
        if entry is None:
            self._refused.append(event.asked)
        else:
            self._writing[event.asked] = entry

    def use(self, files: list[control_channel.FileRef]) -> None:
        found = (self._find(file) for file in files)
        self._disk.store.touch([entry for entry in found if entry is not None])

    def cancel(self, number: int) -> None:
        """Nobody waits for a piece any more."""
        asked = self._readings.pop(number, None)
        if asked is not None:
            asked.reading.cancel()

    def forget(self, tenant: str) -> None:
        """Beside the steps: what is being written is waited for."""
        threading.Thread(target=self._forget, args=(tenant,), name="ingot-disk-clearing").start()

    def written(self) -> Iterator[control_channel.Answer]:
        """What has come of files that were to be written, and of what could not even be begun."""
        refused, self._refused = self._refused, []
        yield from (control_channel.Answer(number, good=False) for number in refused)
        for number, entry in [*self._writing.items()]:
            if self._disk.writer.find(entry.name) is not entry:
                del self._writing[number]
                yield control_channel.Answer(number, good=not entry.lost)

    def read(self) -> Iterator[tuple[int, LooseRecord | None]]:
        """What has come of those that were to be read, by number."""
        for number, asked in [*self._readings.items()]:
            if asked.reading.done:
                del self._readings[number]
                yield number, self._opened(asked)

    def close(self, within_s: float) -> None:
        self._disk.close(within_s)

    def _find(self, file: control_channel.FileRef) -> Entry | None:
        whose = identity(self._disk.store.key, _owner(file), file.path, file.begin)
        return self._disk.find(named(whose, file.variant))

    def _opened(self, asked: _Asked) -> LooseRecord | None:
        """None where it is lost, or not what rank 0 takes it for."""
        found = asked.reading.found
        if found is None:
            return None
        try:
            record = fitted(unpacked(found.header.record, found.tensors), self._form)
        except IngotError as error:
            log.warning("%s: %s", asked.reading.entry.name, error.message)
            asked.reading.entry.lost = True
            return None
        lacking = asked.checkpoint and self._form.sample.checkpoint is not None and record.checkpoint is None
        return None if lacking else record

    def _forget(self, tenant: str) -> None:
        try:
            self._disk.forget(tenant)
        except OSError as error:
            log.error("what is kept in %s cannot be removed: %s", self._disk.store.folder, error)


def _owner(file: control_channel.FileRef) -> RecordOwner:
    return RecordOwner(file.tenant, file.salt)
