"""What rank 0 makes of others' answers about their files."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ingot.cache.deltas import Deltas
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.entry import Entry
from ingot.cache.disk.store import RecordStore
from ingot.cache.packing import LooseRecord
from ingot.distributed import control_channel
from ingot.distributed.control_channel import Kind
from ingot.distributed.leader import LeadingDisk
from ingot.distributed.wire import Link
from ingot.errors import Unavailable
from ingot.ranks.kept import ToldData
from ingot.ranks.pieces import Piece, ToldDeltas
from ingot.ranks.voice import Voice
from tests.cache.disk.records import KEY, LIMITS, SECRET, record

SOON_S = 30.0


class Others:
    """Two that follow, or rather their ends of the links."""

    def __init__(self, count: int = 2) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.voice = Voice([Link(ours, f"rank {number}") for number, (ours, _) in enumerate(pairs, 1)])
        self.links = [Link(theirs, "rank 0") for _, theirs in pairs]

    def heard(self, link: Link) -> list[control_channel.Event]:
        return [*control_channel.decode(link.receive(SOON_S).body)]

    def answer(self, number: int, *goods: bool) -> None:
        for link, good in zip(self.links, goods, strict=False):
            link.send(Kind.ANSWER, control_channel.encode_answer(control_channel.Answer(number, good)))


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def disk(tmp_path: Path, others: Others) -> LeadingDisk:
    own = Disk.of(RecordStore(tmp_path, KEY, LIMITS, SECRET))
    return LeadingDisk(own.store, own.writer, own.reader, own.counts, others.voice, 1.5)


def offered(disk: LeadingDisk) -> Entry:
    header, data = record(range(10))
    deltas = ToldDeltas.of(Deltas(()), Piece(disk.voice), None)
    entry = disk.offer(header, tuple(data), LooseRecord(0, 10, deltas, None))
    assert entry is not None
    return entry


def test_a_record_is_read_when_everybody_has_read_its_part(disk: LeadingDisk, others: Others) -> None:
    entry = disk.store.write(*record(range(10)))
    reading = disk.ask(entry)
    for link in others.links:
        [told] = others.heard(link)
        assert isinstance(told, control_channel.Fetched) and told.file.path == entry.path and not told.checkpoint
    assert reading._own.wait(SOON_S)  # type: ignore[attr-defined]
    assert not reading.done
    others.answer(told.number, True)
    assert not reading.done
    others.links[1].send(Kind.ANSWER, control_channel.encode_answer(control_channel.Answer(told.number, good=True)))
    assert reading.wait(SOON_S) and isinstance(reading.found, ToldData) and not entry.lost


def test_one_that_lacks_its_part_makes_it_lost(disk: LeadingDisk, others: Others) -> None:
    entry = disk.store.write(*record(range(10)))
    reading = disk.ask(entry)
    [told] = others.heard(others.links[0])
    assert isinstance(told, control_channel.Fetched)
    others.answer(told.number, False, True)
    assert reading.wait(SOON_S)
    assert reading.done and reading.found is None and entry.lost


def test_what_nobody_waits_for_any_more_is_released_and_answers_to_it_change_nothing(
    disk: LeadingDisk, others: Others
) -> None:
    reading = disk.ask(disk.store.write(*record(range(10))))
    [told] = others.heard(others.links[0])
    assert isinstance(told, control_channel.Fetched)
    reading.cancel()
    del reading
    others.answer(told.number, True, False)
    others.voice.listen()
    others.voice.tell(control_channel.Left(0))
    assert others.heard(others.links[0]) == [control_channel.Released(told.number), control_channel.Left(0)]


def test_a_rank_that_is_gone_is_noticed_while_its_answer_is_waited_for(disk: LeadingDisk, others: Others) -> None:
    reading = disk.ask(disk.store.write(*record(range(10))))
    others.links[1].close()
    assert reading._own.wait(SOON_S)  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="rank 2"):
        reading.wait(0.01)
    assert others.voice.trouble


def test_a_record_that_somebody_could_not_write_is_lost(disk: LeadingDisk, others: Others) -> None:
    entry = offered(disk)
    *_, told = others.heard(others.links[0])
    assert isinstance(told, control_channel.Filed) and told.tokens == [*range(10)]
    assert not disk.drain(0.0) and disk.writing.entries == [entry]
    others.answer(told.asked, True, False)
    assert disk.drain(SOON_S)
    assert entry.lost and disk.writer.has_room() and not disk.has_room(), "its drive is asked for more"


def test_what_others_have_not_written_yet_counts_as_waiting(
    disk: LeadingDisk, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = offered(disk)
    assert disk.writer.drain(SOON_S) and disk.has_room()
    monkeypatch.setattr("ingot.distributed.leader.MOST_WAITING", entry.size)  # it takes more on another rank
    assert not disk.has_room()
    *_, told = others.heard(others.links[0])
    assert isinstance(told, control_channel.Filed)
    others.answer(told.asked, True, True)
    assert disk.drain(SOON_S) and disk.has_room() and not entry.lost
