"""The threads that write and read: bounded, never waited for, and what goes wrong is one record's loss."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.cache.disk import backend as writer_module
from ingot.cache.disk.backend import PAUSE_S, DiskBackend, DiskCounts, RecordWriter
from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.store import RecordStore
from tests.cache.disk.records import KEY, LIMITS, ME, SECRET, FaultyFiles, is_right, opened, record
from tests.waiting import WAIT_S


class Gate(FaultyFiles):
    """Writes nothing until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.reached = threading.Event(), threading.Event()

    def put(self, descriptor: int, raw: memoryview) -> int:
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        return super().put(descriptor, raw)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def offered(writer: RecordWriter, tokens: list[int]) -> DiskEntry | None:
    header, data = record(tokens)
    return writer.offer(header, tuple(data))


def shut(folder: Path, gate: Gate) -> DiskBackend:
    gate.opened.set()
    made = DiskBackend.of(RecordStore(folder, KEY, LIMITS, SECRET, gate))
    gate.opened.clear()
    gate.reached.clear()
    return made


def test_what_is_too_much_is_dropped_and_counted_while_a_write_is_stuck(tmp_path: Path, gate: Gate) -> None:
    disk = shut(tmp_path, gate)
    disk.writer._most = 700_000
    taken = [offered(disk.writer, [number] * 100) for number in range(8)]
    assert gate.reached.wait(WAIT_S)
    assert [entry is not None for entry in taken] == [True] * 3 + [False] * 5
    assert disk.counts.dropped == 5
    assert not disk.writer.drain(0.0)
    gate.opened.set()
    assert disk.writer.drain(30)
    assert disk.counts.spills == 3
    disk.close(30)


def test_what_waits_to_be_written_can_be_read_already(tmp_path: Path, gate: Gate) -> None:
    disk = shut(tmp_path, gate)
    entry = offered(disk.writer, [1] * 10)
    assert entry is not None
    reading = disk.reader.ask(entry)
    assert reading.wait(WAIT_S) and reading.found is not None and is_right(reading.found)
    gate.opened.set()
    assert disk.writer.drain(30)
    again = disk.reader.ask(entry)
    assert again.wait(WAIT_S) and again.found is not None and is_right(again.found)
    disk.close(30)


def test_a_failed_write_is_a_lost_entry_and_a_pause(tmp_path: Path) -> None:
    now = [100.0]
    files = FaultyFiles()
    store, counts = opened(tmp_path, files=files), DiskCounts()
    writer = RecordWriter(store, counts, clock=lambda: now[0])
    files.fault = lambda call: errno.EIO if call == "put" else None
    entry = offered(writer, [1])
    assert writer.drain(30) and entry is not None and entry.lost
    assert counts.spill_failures == 1 and not writer.has_room()
    assert offered(writer, [2]) is None
    files.fault = lambda call: None
    now[0] += PAUSE_S
    again = offered(writer, [2])
    assert writer.drain(30) and again is not None and not again.lost
    writer.close(30)


def test_there_is_room_only_for_another_record_as_large_as_those_before(tmp_path: Path, gate: Gate) -> None:
    disk = shut(tmp_path, gate)
    assert offered(disk.writer, [1]) is not None
    disk.writer._most = disk.writer._bytes + 1
    assert not disk.writer.has_room() and offered(disk.writer, [2]) is None
    gate.opened.set()
    assert disk.writer.drain(30) and disk.writer.has_room()
    disk.close(30)


def test_the_same_record_is_written_once(tmp_path: Path, gate: Gate) -> None:
    disk = shut(tmp_path, gate)
    assert offered(disk.writer, [1]) is offered(disk.writer, [1])
    gate.opened.set()
    assert disk.writer.drain(30) and disk.counts.spills == 1
    disk.close(30)


def test_closing_writes_what_waits_and_gives_up_on_what_takes_too_long(tmp_path: Path, gate: Gate) -> None:
    disk = shut(tmp_path, gate)
    entries = [offered(disk.writer, [number]) for number in range(3)]
    assert gate.reached.wait(WAIT_S)
    disk.writer.close(0.0)
    assert [entry is not None and entry.lost for entry in entries] == [False, True, True]
    assert offered(disk.writer, [9]) is None
    gate.opened.set()
    disk.writer._thread.join(WAIT_S)
    assert [entry.end for entry in opened(tmp_path).entries(ME)] == [1]


def test_a_tenants_records_are_not_written_after_it_was_cleared(tmp_path: Path, gate: Gate) -> None:
    disk = shut(tmp_path, gate)
    entries = [offered(disk.writer, [number]) for number in range(3)]
    assert gate.reached.wait(WAIT_S)
    clearing = threading.Thread(target=disk.forget, args=(ME.tenant,))
    clearing.start()
    gate.opened.set()
    clearing.join(WAIT_S)
    assert not clearing.is_alive() and disk.writer.drain(30)
    assert all(entry is not None and entry.lost for entry in entries)
    assert list(tmp_path.glob("*/*.safetensors")) == []
    disk.close(30)


def test_a_reading_that_nobody_waits_for_reads_nothing(tmp_path: Path) -> None:
    disk = DiskBackend.of(RecordStore(tmp_path, KEY, LIMITS, SECRET))
    entry = disk.store.write(*record([1]))
    disk.reader.close()
    reading = disk.reader.ask(entry)
    reading.cancelled = True
    disk.reader._requests.put(None)
    disk.reader._run()
    assert reading.done and reading.found is None and not entry.lost


def test_uses_are_told_to_whoever_shares_the_folder_though_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = threading.Event()
    monkeypatch.setattr(writer_module, "SETTLE_S", 0.001)
    store = opened(tmp_path)
    entry = store.write(*record([1]))
    settle, before = store.settle, entry.used

    def settling() -> None:
        settle()
        settled.set()

    monkeypatch.setattr(store, "settle", settling)
    writer = RecordWriter(store, DiskCounts())
    assert settled.wait(WAIT_S)
    store.touch([entry])
    settled.clear()
    assert settled.wait(WAIT_S) and settled.clear() is None and settled.wait(WAIT_S)
    used: dict[str, float] = opened(tmp_path)._index.read(lambda index: index.used(store.scope), dict)
    assert used[entry.name] == entry.used > before
    writer.close(30)
