"""While requests run, copying records off the device takes little of the time, and little at once."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ingot.cache import prefix_tree
from ingot.cache.disk import record_file
from ingot.cache.disk.backend import DiskCounts
from ingot.cache.disk.record_file import PathHash, RecordOwner, extend_path_hash
from ingot.cache.disk.store import DiskLimits
from ingot.cache.prefix_tree import CacheOwner, PrefixForest, PrefixNode
from ingot.config import Settings
from ingot.engine import offload
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.offload import OFFLOAD_BURST_S, OFFLOAD_SHARE, Offloader
from ingot.engine.request import CacheReport, Ended, Failed, Request, Sampling, Stop
from ingot.errors import IngotError
from tests import engines, tiny
from tests.cache.disk.records import FaultyFiles, bytes_in, record

RECORD_S = 0.004
"""What copying a record takes here."""
STEP_S = 0.03
NODE: Any = SimpleNamespace(is_saved=False, root_owner=SimpleNamespace(exact=False))


class Copying(Offloader):
    """Where nothing but copying takes time, and time is only counted."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.now, self.copied = 0.0, 0
        self.disk: Any = SimpleNamespace(has_room=lambda: has_room, counts=DiskCounts())
        super().__init__(self.disk, cast(Any, None), cast(Any, None), clock=lambda: self.now)

    def _hand_over(self, node: object) -> bool:
        self.now += RECORD_S
        self.copied += 1
        return True


def test_copying_takes_a_small_share_of_the_time_and_what_would_take_more_is_dropped() -> None:
    offloader, steps = Copying(), 2000
    for _ in range(steps):
        offloader.now += STEP_S
        for _ in range(3):
            offloader.offload(NODE)
    used = offloader.copied * RECORD_S
    assert OFFLOAD_SHARE * steps * STEP_S <= used <= OFFLOAD_BURST_S + OFFLOAD_SHARE * offloader.now + RECORD_S
    assert offloader.copied + offloader.disk.counts.dropped == 3 * steps


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_between_two_steps_it_takes_no_longer_than_one_of_them_may(idle_s: float) -> None:
    offloader = Copying()
    offloader.now += idle_s
    started = offloader.now
    kept = [offloader.offload(NODE) for _ in range(100)]
    assert 0 < offloader.now - started <= OFFLOAD_BURST_S + RECORD_S < Settings().target_itl_ms / 1000
    assert kept == [True] * offloader.copied + [False] * (100 - offloader.copied)


def test_what_finds_the_writers_queue_full_is_dropped_before_it_is_copied() -> None:
    offloader = Copying(has_room=False)
    assert not offloader.offload(NODE) and offloader.copied == 0 and offloader.disk.counts.dropped == 1


def chain(*pieces: int) -> list[PrefixNode]:
    """A root and the nodes behind it, of so many tokens each; the tokens of all such chains are the same."""
    nodes = [PrefixNode(None, (), None, owner=CacheOwner())]
    for length in pieces:
        begin = nodes[-1].end
        nodes.append(PrefixNode(nodes[-1], tuple(range(begin, begin + length)), None, begin + length))
    return nodes


def test_no_token_of_a_path_is_hashed_twice_however_many_records_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(before: PathHash, tokens: tuple[int, ...]) -> PathHash:
        hashed.append(len(tokens))
        return extend_path_hash(before, tokens)

    monkeypatch.setattr(prefix_tree, "extend_path_hash", counted)
    nodes = chain(*[5] * 40)
    digests = [node.path_hash.hexdigest() for node in nodes[1:]]
    assert sum(hashed) == 200 and len(set(digests)) == 40
    branch = PrefixNode(nodes[-1], (7, 8), None, 202)
    assert branch.path_hash.hexdigest() not in digests and sum(hashed) == 202


def test_a_path_has_the_same_digest_wherever_it_is_cut() -> None:
    assert chain(200)[-1].path_hash.hexdigest() == chain(3, 100, 97)[-1].path_hash.hexdigest()
    assert chain(200)[-1].path_hash.hexdigest() != chain(199)[-1].path_hash.hexdigest()


EOS = tiny.VOCAB - 1
SOON_S = 30.0


class Gates(FaultyFiles):
    """Lets writing and reading wait until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.reading = threading.Event(), threading.Event()
        self.asked = threading.Event()
        self.writing.set()
        self.reading.set()

    def put(self, descriptor: int, raw: memoryview) -> int:
        assert self.writing.wait(SOON_S)
        return super().put(descriptor, raw)

    def get(self, descriptor: int, into: memoryview) -> int:
        self.asked.set()
        assert self.reading.wait(SOON_S)
        return super().get(descriptor, into)


@pytest.fixture
def gates() -> Iterator[Gates]:
    made = Gates()
    yield made
    made.writing.set()
    made.reading.set()


def prompt(seed: int, length: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [*(rng.randrange(95) for _ in range(length)), EOS, 3]


def ask(name: str, tokens: list[int], new: int = 6, **options: object) -> Request:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    return Request(name, (tuple(tokens),), max_tokens=new, sampling=greedy, stop=endless, **options)  # type: ignore[arg-type]


def run(engine: Engine, request: Request) -> CacheReport:
    events = engines.answer(engine, request)
    assert isinstance(events[-1], Ended)
    return events[-1].cache[0]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def totals(engine: Engine) -> Any:
    return engine.kept.status("").totals.disk


def restarted(kind: str, folder: Path, gates: Gates, *prompts: list[int], **options: Any) -> Engine:
    """An engine that finds these prompts on disk."""
    first = engines.start(kind, cache_bytes=1 << 24, disk=folder)
    for number, tokens in enumerate(prompts):
        run(first, ask(f"before{number}", tokens))
    first.close()
    return engines.start(kind, cache_bytes=options.pop("cache_bytes", 1 << 24), disk=folder, files=gates, **options)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_answers_go_on_while_a_write_is_stuck(kind: str, tmp_path: Path, gates: Gates) -> None:
    engine = engines.start(kind, cache_bytes=120_000, disk=tmp_path, files=gates)
    engine._loaded.disk.writer._most = 60_000  # type: ignore[union-attr]
    gates.writing.clear()
    for number in range(12):
        run(engine, ask(f"a{number}", prompt(number)))
        engine.check()
    assert totals(engine).spills == 0 and totals(engine).dropped > 0
    gates.writing.set()
    engine.close()


def test_what_is_computed_is_saved_once_nothing_runs(tmp_path: Path, gates: Gates) -> None:
    engine = engines.start("hybrid", cache_bytes=1 << 24, disk=tmp_path, files=gates)
    for number in range(4):
        run(engine, ask(f"a{number}", prompt(number)))
    unsaved = lambda prefix_cache: sum(not node.is_saved for node in prefix_cache.index.nodes())  # noqa: E731
    until(lambda: engine._loop.run(lambda: unsaved(engine._workload.prefix_cache)) == 0)
    assert engine._loaded.disk.writer.drain(SOON_S)  # type: ignore[union-attr]
    spills = totals(engine).spills
    assert spills >= 4
    engine.close()
    assert len(list(tmp_path.glob("*/*.safetensors"))) == spills


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_others_run_while_a_record_is_read(kind: str, tmp_path: Path, gates: Gates) -> None:
    engine = restarted(kind, tmp_path, gates, prompt(1))
    gates.reading.clear()
    waiting = engine.generate(ask("waits", [*prompt(1), 7]))
    assert gates.asked.wait(SOON_S)
    for number in range(3):
        run(engine, ask(f"b{number}", prompt(10 + number)))
    assert [status.phase for status in engine.status()] == ["queued"]
    engine.check()
    gates.reading.set()
    events = [event for batch in waiting for event in batch]
    assert isinstance(events[-1], Ended) and events[-1].cache[0].tier == "disk"
    engine.close()


def test_what_takes_too_long_to_read_is_computed(tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = restarted("hybrid", tmp_path, gates, prompt(1))
    monkeypatch.setattr(offload, "ONLOAD_PATIENCE_S", 0.05)
    gates.reading.clear()
    assert run(engine, ask("waits", [*prompt(1), 7])).matched == 0
    gates.reading.set()
    engine.check()
    engine.close()


@pytest.mark.parametrize(("passes", "tokens", "tier"), [(1, 512, "disk"), (8, 16, "disk"), (8, 512, None)])
def test_what_is_computed_sooner_is_not_read_once_that_is_sure(
    passes: int, tokens: int, tier: str | None, tmp_path: Path, gates: Gates
) -> None:
    engine = restarted("hybrid", tmp_path, gates, prompt(1, 1000))
    prefix_cache = engines.runner_of(engine).prefix_cache
    for _ in range(passes):
        prefix_cache._costs.observe_prefill(tokens, 1e-6)
    assert run(engine, ask("again", [*prompt(1, 1000), 7])).tier == tier
    engine.check()
    engine.close()


def test_who_waits_for_a_record_can_be_cancelled_and_leaves_nothing(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("hybrid", tmp_path, gates, prompt(1))
    gates.reading.clear()
    stream = engine.generate(ask("waits", [*prompt(1), 7]))
    assert gates.asked.wait(SOON_S)
    assert engine.cancel("waits")
    events = [event for batch in stream for event in batch]
    assert isinstance(events[-1], Failed)
    gates.reading.set()
    prefix_cache = engines.runner_of(engine).prefix_cache
    until(lambda: engine._loop.run(lambda: prefix_cache._tier.reserved) == 0)
    engine.check()
    assert run(engine, ask("again", [*prompt(1), 7])).tier == "disk"
    engine.close()


def test_records_are_read_for_those_that_wait_for_a_seat(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1), limits=EngineLimits(max_sequences=1))
    gates.asked.clear()
    long = engine.generate(ask("long", prompt(5, 20), new=400))
    next(iter(long))
    queued = engine.generate(ask("queued", [*prompt(1), 7]))
    assert gates.asked.wait(SOON_S)
    assert "queued" in [status.phase for status in engine.status()]
    events = [event for batch in queued for event in batch]
    assert isinstance(events[-1], Ended) and events[-1].cache[0].tier == "disk"
    engine.close()


def test_what_does_not_fit_in_memory_is_not_read(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1, 1200), cache_bytes=60_000)
    report = run(engine, ask("large", [*prompt(1, 1200), 7]))
    assert report.matched == 0 and totals(engine).promotions == 0
    engine.check()
    engine.close()


def test_a_drive_that_fails_is_a_slower_server(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("hybrid", tmp_path, gates, prompt(1))
    gates.fault = lambda call: errno.EIO
    assert run(engine, ask("a", [*prompt(1), 7])).matched == 0
    assert run(engine, ask("b", [*prompt(1), 7])).tier == "ram"
    assert totals(engine).promotion_failures > 0
    engine.check()
    engine.close()


def saved(engine: Engine) -> bool:
    """Whether all that is kept is on disk."""
    index, disk = engines.runner_of(engine).prefix_cache.index, engine._loaded.disk
    assert disk is not None
    return disk.writer.drain(SOON_S) and engine._loop.run(lambda: all(node.is_saved for node in index.nodes()))


def test_reading_a_record_whose_path_is_left_midway_is_no_failure(tmp_path: Path, gates: Gates) -> None:
    first = engines.start("llama", cache_bytes=1 << 24, disk=tmp_path)
    branch = [*prompt(1)[:150], *prompt(2)]
    for number, tokens in enumerate((prompt(1), branch)):
        run(first, ask(f"before{number}", tokens))
        until(lambda: saved(first))  # each in a file of its own, the second goes on amid the first
    first.close()
    engine = engines.start("llama", cache_bytes=1 << 24, disk=tmp_path, files=gates)
    report = run(engine, ask("a", [*branch, 7]))
    assert report.tier == "disk" and report.matched >= len(branch)
    assert totals(engine).promotion_failures == 0 and totals(engine).hits == 1
    engine.close()


def test_each_record_that_cannot_be_read_is_named_in_the_log_with_the_reason(
    tmp_path: Path, gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1), prompt(2))
    gates.fault = lambda call: errno.EIO if call == "get" else None
    for number in (1, 2):
        run(engine, ask(f"a{number}", [*prompt(number), 7]))
    result = [line.getMessage() for line in caplog.records if "cannot be read back" in line.getMessage()]
    assert len(result) == totals(engine).promotion_failures >= 2
    assert all("injected" in line and ".safetensors" in line for line in result)
    engine.close()


def test_a_record_that_another_process_removed_is_a_miss_and_no_failure(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1))
    for file in tmp_path.glob("*/*.safetensors"):
        file.unlink()
    assert run(engine, ask("a", [*prompt(1), 7])).matched == 0
    assert totals(engine).promotion_failures == 0 and totals(engine).misses == 1
    engine.close()


def test_what_memory_has_no_room_for_is_said_and_is_no_failure(
    tmp_path: Path, gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1, 1200), cache_bytes=60_000)
    run(engine, ask("large", [*prompt(1, 1200), 7]))
    assert totals(engine).promotion_failures == 0
    assert any("memory has no room" in line.getMessage() for line in caplog.records)
    engine.close()


def test_an_answer_that_is_on_disk_already_is_not_written_again(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1))
    run(engine, ask("again", prompt(1)))
    until(lambda: saved(engine))
    assert totals(engine).spills == 0
    engine.close()


def fill(engine: Engine, count: int, along: list[int]) -> None:
    """Write records of an owner: many of other prompts, and three of one, which go on from one another."""
    disk = engine._loaded.disk
    assert disk is not None
    third, whose = len(along) // 3, RecordOwner.of("", "")
    paths = [([number % 80, number], 0) for number in range(count)]
    paths += [(along[: third * (number + 1)], third * number) for number in range(3)]
    for tokens, begin in paths:
        disk.store.write(*record(tokens, begin, owner=whose, key=disk.store.key))


def test_a_prompt_looks_at_the_records_along_it_and_hashes_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines.start("llama", cache_bytes=1 << 24, disk=tmp_path)
    planted: list[object] = []
    hashed: list[int] = []
    add_disk_entry, array_of = PrefixForest.add_entry, record_file.array

    def counted(*given: Any) -> Any:
        planted.append(given)
        return add_disk_entry(*given)

    def hashing(kind: str, tokens: Any) -> Any:
        made = array_of(kind, tokens)
        hashed.append(len(made))
        return made

    monkeypatch.setattr(PrefixForest, "add_entry", counted)
    for first in (90, 91):  # the second time as if others had written more
        along = [first, *prompt(first)[:59]]
        fill(engine, first, along)
        planted.clear()
        with monkeypatch.context() as counting:
            counting.setattr(record_file, "array", hashing)
            found = engine.kept.explain(ask("a", [*along, 7, 8]), 0)
        assert found.known == 60 and len(planted) == 3 and not hashed
    engine.check()
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_files_whose_paths_are_hashed_as_a_whole_are_read_and_gone_on_from(
    kind: str, tmp_path: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [prompt(1), [*prompt(1), *prompt(2)], [*prompt(1), *prompt(2), *prompt(3)]]
    with monkeypatch.context() as earlier:  # as those of earlier versions are
        earlier.setattr(offload, "_path_digest", lambda node: record_file.hex_digest(node.path_tokens))
        engine = restarted(kind, tmp_path, gates, turns[0])
    for turn in turns[1:]:
        report = run(engine, ask("a", turn))
        assert report.tier == "disk" and report.matched >= len(turn) - 210
        engine.close()
        engine = engines.start(kind, cache_bytes=1 << 24, disk=tmp_path, files=gates)
    engine.close()


def test_clearing_takes_what_is_on_disk_too(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("llama", tmp_path, gates, prompt(1))
    assert engine.kept.status("").disk.records > 0  # type: ignore[union-attr]
    assert engine.kept.clear("") > 0
    assert engine.kept.status("").disk.records == 0  # type: ignore[union-attr]
    assert run(engine, ask("a", [*prompt(1), 7])).matched == 0
    engine.close()


def test_what_would_be_found_on_disk_is_explained_and_left_there(tmp_path: Path, gates: Gates) -> None:
    engine = restarted("hybrid", tmp_path, gates, prompt(1))
    found = engine.kept.explain(ask("a", [*prompt(1), 7]), 0)
    assert found.tier == "disk" and found.matched >= 200
    assert totals(engine).promotions == 0
    engine.close()


def test_the_cap_holds_whatever_is_computed(tmp_path: Path, gates: Gates) -> None:
    limits = DiskLimits(2_500_000, sync=False)
    engine = engines.start("llama", cache_bytes=1 << 24, disk=tmp_path, disk_limits=limits, files=gates)
    for number in range(20):
        run(engine, ask(f"a{number}", prompt(number)))
        assert bytes_in(tmp_path) <= 2_500_000
    engine.close()
    assert 0 < bytes_in(tmp_path) <= 2_500_000


def test_a_disk_that_is_smaller_than_memory_is_not_written_to_forever(tmp_path: Path, gates: Gates) -> None:
    limits = DiskLimits(1_300_000, sync=False)
    engine = engines.start("llama", cache_bytes=1 << 24, disk=tmp_path, disk_limits=limits, files=gates)
    for number in range(12):
        run(engine, ask(f"a{number}", prompt(number)))
    nodes = engine._loop.run(lambda: len(list(engine._workload.prefix_cache.index.nodes())))
    disk = engine._loaded.disk
    assert disk is not None

    def idle() -> bool:
        before = disk.counts.spills
        for _ in range(20):
            engine._loop.wake()
            engine._loop.run(lambda: None)
        return disk.writer.drain(SOON_S) and disk.counts.spills == before

    until(idle)
    assert disk.counts.spills <= 2 * nodes
    engine.close()


def test_an_engine_that_had_to_begin_anew_finds_what_it_had_saved(tmp_path: Path, gates: Gates) -> None:
    engine = engines.start("hybrid", cache_bytes=1 << 24, disk=tmp_path, files=gates)
    run(engine, ask("a", prompt(1)))
    disk = engine._loaded.disk
    assert disk is not None
    until(lambda: disk.counts.spills >= 2)
    assert disk.writer.drain(SOON_S)
    engine._loop.run(lambda: engine._workload.reset_after_fault(IngotError("a fault")))
    assert run(engine, ask("b", [*prompt(1), 7])).tier == "disk"
    engine.check()
    engine.close()
