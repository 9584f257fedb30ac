"""What ranks keep of prompts is as good as what one process keeps, whatever it is put into."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.store import RecordStore
from ingot.cache.kv_deltas import LayerDeltas
from ingot.cache.records import UnpagedRecord
from ingot.config import Settings
from ingot.distributed import control_channel
from ingot.distributed.control_channel import ControlChannel, FrameKind
from ingot.distributed.leader import LeaderDiskBackend, SharedStoredData
from ingot.distributed.leader_state import SharedDeltas, SharedPiece
from ingot.distributed.wire import Link
from ingot.engine import prefix_cache
from ingot.errors import Unavailable
from tests import tiny
from tests.cache.disk.records import KEY, LIMITS, SECRET, record
from tests.distributed import groups, keeping

CONFIGS: dict[str, dict[str, Any]] = {
    "wide": {**tiny.CONFIGS["llama"], "head_dim": 32},
    "deep": {**tiny.CONFIGS["llama"], "model_type": "qwen2", "head_dim": 32, "hidden_size": 128},
}
ASKED = {"max_sequences": 8, "memory": "1GB", "deterministic": True, "speculate": "off"}
DISK = {**ASKED, "cache_disk_free_gb": 0.0}
CODED = {**ASKED, "cache_codec": "affine8", "cache_memory": "1MB"}


def group(kind: str, way: str, games: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What two ranks give, of one model, asked for different things one after another."""
    groups.write_model(folder, CONFIGS[kind])
    request = [(str(folder), {**game, f"{way}_parallel_size": 2}) for game in games]
    message = groups.run("tests.distributed.keeping", [json.dumps(request)], 2, folder)
    return [json.loads(line) for line in message.splitlines()]


@pytest.mark.parametrize(
    ("kind", "way"), [("wide", "tensor"), pytest.param("deep", "pipeline", marks=pytest.mark.slow)]
)
def test_records_in_fewer_bits_are_gone_on_from_as_by_one_process(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [together] = group(
        kind, way, [{**CODED, "cache_memory": "500KB"}], tmp_path
    )  # each has half of the heads or layers
    for name, value in keeping.ENCOURAGED.items():
        monkeypatch.setattr(prefix_cache, name, value)
    alone = keeping.played(tmp_path, Settings(**CODED))
    assert together["texts"] == alone.texts
    assert any(codec == "affine8" and matched for codec, matched, _ in together["taken"])


@pytest.mark.parametrize(
    ("kind", "way"), [("wide", "tensor"), pytest.param("deep", "pipeline", marks=pytest.mark.slow)]
)
def test_a_group_that_is_started_again_goes_on_from_what_it_wrote(kind: str, way: str, tmp_path: Path) -> None:
    game = {**DISK, "cache_dir": str(tmp_path / "kept")}
    first, second = group(kind, way, [game, game], tmp_path)
    alone = keeping.played(tmp_path, Settings(**ASKED))
    assert first["texts"] == second["texts"] == alone.texts
    assert not any(read for _, _, read in first["taken"])
    assert [read for _, _, read in second["taken"][:4]] == [299] * 4


SOON_S = 30.0


class Others:
    """Two that follow, or rather their ends of the links."""

    def __init__(self, count: int = 2) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.channel = ControlChannel([Link(ours, f"rank {number}") for number, (ours, _) in enumerate(pairs, 1)])
        self.links = [Link(theirs, "rank 0") for _, theirs in pairs]

    def heard(self, link: Link) -> list[control_channel.StateEvent]:
        return [*control_channel.decode_events(link.receive(SOON_S).body)]

    def answer(self, number: int, *goods: bool) -> None:
        for link, good in zip(self.links, goods, strict=False):
            link.send(FrameKind.ANSWER, control_channel.encode_answer(control_channel.FollowerAnswer(number, good)))


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def disk(tmp_path: Path, others: Others) -> LeaderDiskBackend:
    own = DiskBackend.of(RecordStore(tmp_path, KEY, LIMITS, SECRET))
    return LeaderDiskBackend(own.store, own.writer, own.reader, own.counts, others.channel, 1.5)


def offered(disk: LeaderDiskBackend) -> DiskEntry:
    header, data = record(range(10))
    deltas = SharedDeltas.of(LayerDeltas(()), SharedPiece(disk.channel), None)
    entry = disk.offer(header, tuple(data), UnpagedRecord(0, 10, deltas, None))
    assert entry is not None
    return entry


def test_a_record_is_read_when_everybody_has_read_its_part(disk: LeaderDiskBackend, others: Others) -> None:
    entry = disk.store.write(*record(range(10)))
    reading = disk.ask(entry)
    for link in others.links:
        [event] = others.heard(link)
        assert (
            isinstance(event, control_channel.PieceOnloaded) and event.file.path == entry.path and not event.checkpoint
        )
    assert reading._own.wait(SOON_S)  # type: ignore[attr-defined]
    assert not reading.done
    others.answer(event.number, True)
    assert not reading.done
    others.links[1].send(
        FrameKind.ANSWER, control_channel.encode_answer(control_channel.FollowerAnswer(event.number, good=True))
    )
    assert reading.wait(SOON_S) and isinstance(reading.found, SharedStoredData) and not entry.lost


def test_one_that_lacks_its_part_makes_it_lost(disk: LeaderDiskBackend, others: Others) -> None:
    entry = disk.store.write(*record(range(10)))
    reading = disk.ask(entry)
    [event] = others.heard(others.links[0])
    assert isinstance(event, control_channel.PieceOnloaded)
    others.answer(event.number, False, True)
    assert reading.wait(SOON_S)
    assert reading.done and reading.found is None and entry.lost


def test_what_nobody_waits_for_any_more_is_released_and_answers_to_it_change_nothing(
    disk: LeaderDiskBackend, others: Others
) -> None:
    reading = disk.ask(disk.store.write(*record(range(10))))
    [event] = others.heard(others.links[0])
    assert isinstance(event, control_channel.PieceOnloaded)
    reading.cancel()
    del reading
    others.answer(event.number, True, False)
    others.channel.receive_answers()
    others.channel.send(control_channel.RowRemoved(0))
    assert others.heard(others.links[0]) == [
        control_channel.PieceReleased(event.number),
        control_channel.RowRemoved(0),
    ]


def test_a_rank_that_is_gone_is_noticed_while_its_answer_is_waited_for(disk: LeaderDiskBackend, others: Others) -> None:
    reading = disk.ask(disk.store.write(*record(range(10))))
    others.links[1].close()
    assert reading._own.wait(SOON_S)  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="rank 2"):
        reading.wait(0.01)
    assert others.channel.trouble


def test_a_record_that_somebody_could_not_write_is_lost(disk: LeaderDiskBackend, others: Others) -> None:
    entry = offered(disk)
    *_, event = others.heard(others.links[0])
    assert isinstance(event, control_channel.PieceOffloaded) and event.tokens == [*range(10)]
    assert not disk.drain(0.0) and disk.writing.entries == [entry]
    others.answer(event.question, True, False)
    assert disk.drain(SOON_S)
    assert entry.lost and disk.writer.has_room() and not disk.has_room(), "its drive is asked for more"


def test_what_others_have_not_written_yet_counts_as_waiting(
    disk: LeaderDiskBackend, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = offered(disk)
    assert disk.writer.drain(SOON_S) and disk.has_room()
    monkeypatch.setattr("ingot.distributed.leader.MOST_WAITING", entry.size)  # it takes more on another rank
    assert not disk.has_room()
    *_, event = others.heard(others.links[0])
    assert isinstance(event, control_channel.PieceOffloaded)
    others.answer(event.question, True, True)
    assert disk.drain(SOON_S) and disk.has_room() and not entry.lost
