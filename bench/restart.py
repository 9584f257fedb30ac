"""What a restart costs a conversation: the first token of its next turn, with the disk cache and cold.

python -m bench.restart                        the packaged model with 7,000 tokens, the foundry's hybrid with 16,000
python -m bench.restart --model PATH --tokens 1000 --rounds 5 --json figures.json
python -m bench.restart --parts streams        only one of the figures
python -m bench.restart --parts records --records 10000

For each model: a server computes a conversation and stops; others start on its folder, one after another, and each is
asked for the next turn with the cache and then, in the same process, without. Seconds to the first token of both, their
ratio in each round, and the median of the ratios. Loading the model is not part of either. A second figure: a stream's
speed while records of other prompts are evicted, with a disk cache relative to without one, and the longest wait for a
token of both. A third one: what a folder full of records costs, in CPU time of the engine thread for an owner's first
prompt and for the one after another server wrote there, in the longest wait for a token of another stream meanwhile,
and in CPU time of the writer for each further record.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from bench.restore import ended, request
from ingot.cache.archive import StoredRecord, TensorShape
from ingot.cache.disk.record_file import FileSystem, RecordHeader, RecordOwner, hex_digest, tensor_checksums
from ingot.cache.disk.store import DiskLimits, RecordStore
from ingot.cli.peers.report import surroundings
from ingot.config import DEFAULT_MODEL, Settings
from ingot.config.keys import ArchiveKey
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Ended
from ingot.models.files.locate import locate_model
from ingot.models.files.progress import TerminalProgress

HYBRID = Path(__file__).parent.parent / "foundry" / "models" / "hybrid"
PARTS = ("restarts", "streams", "records")
WANTED = 20.0
"""How many times sooner the first token must come than cold."""
TAIL = 16
"""Tokens of the next turn."""
PIECE = 256
"""Tokens of a record in a full folder,"""
PIECES = 16
"""and records of a conversation there."""
SALT = "full"
"""Whose they are."""
LIMITS = DiskLimits(1 << 40, sync=False)
WRITES = 40
FIRST_MS = 20.0
"""What an owner's first prompt may take of the engine's thread."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """Seconds to the first token after a restart and cold; what was read for it, and how much of the time reading
    and putting into memory took."""

    warm: float
    cold: float
    matched: int
    read_bytes: int
    read_s: float

    @property
    def ratio(self) -> float:
        return self.cold / self.warm


@dataclass(frozen=True, slots=True)
class Streams:
    """A stream's speed while records spill, over that of one without a disk; the longest waits for a token of both."""

    speed: float
    wait: float
    plain_wait: float


@dataclass(frozen=True, slots=True)
class FullFolder:
    """With so many records on disk: seconds of the engine's thread that the first prompt of their owner took, and the
    first one after another server had written there; the longest waits for a token of another stream, alone and while
    such prompts came; and CPU seconds of a write."""

    records: int
    first: float
    after_others: float
    alone: float
    wait: float
    write: float


def first_token_s(engine: Engine, name: str, tokens: Sequence[int], *, cache: bool) -> tuple[float, int]:
    """From the request to its first token, and how many tokens were taken over."""
    began = time.perf_counter()
    stream = engine.generate(request(name, tokens, output=2, cache=cache))
    next(iter(stream))
    spent = time.perf_counter() - began
    *_, last = (event for batch in stream for event in batch)
    assert isinstance(last, Ended)
    return spent, last.usage.cached_tokens


def measured(settings: Settings, folder: Path, tokens: list[int], rounds: int) -> Iterator[Restarted]:
    engine = opened(settings, folder)
    ended(engine, request("before", tokens, output=8, cache=True))
    engine.close()
    for number in range(rounds):
        engine = opened(settings, folder)
        ended(engine, request("warming", [1, 2, 3], output=4, cache=False))
        longer = [*tokens, *range(5, 5 + TAIL)]
        warm, matched = first_token_s(engine, f"warm{number}", longer, cache=True)
        cold, _ = first_token_s(engine, f"cold{number}", longer, cache=False)
        totals = engine.kept.status("").totals.disk
        assert totals is not None and matched >= len(tokens) - 1, f"only {matched} tokens came back"
        engine.close()
        yield Restarted(warm, cold, matched, totals.promoted_bytes, totals.promotion_s)


def longer(folder: Path, made: Path, tokens: int) -> Path:
    """The folder, or another of the same weights whose config allows a conversation of so many tokens. What the model
    says of tokens that it was not trained for is nothing, but it takes as long."""
    config = json.loads((folder / "config.json").read_text())
    room = tokens + 2 * TAIL
    held = config.get("text_config", config)
    if held["max_position_embeddings"] >= room:
        return folder
    held["max_position_embeddings"] = room
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config))
    return made


def opened(settings: Settings, folder: Path) -> Engine:
    return start_engine(settings, folder, name="model", source="a folder")


def streamed(engine: Engine, name: str, beside: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Tokens a second of a stream while prompts are computed beside it, one after another, and the longest wait for
    one."""
    stream = engine.generate(request(f"{name}-stream", [1, 2, 3], output=400, cache=False))
    next(iter(stream))
    times, tokens = [time.perf_counter()], 0
    others = [
        engine.generate(request(f"{name}-{number}", each, output=1, cache=True)) for number, each in enumerate(beside)
    ]
    for batch in stream:
        times.append(time.perf_counter())
        tokens += len(batch)
    for other in others:
        list(other)
    return tokens / (times[-1] - times[0]), max(later - earlier for earlier, later in pairwise(times))


def measured_streams(settings: Settings, folder: Path, rng: random.Random, vocab: int, rounds: int) -> list[Streams]:
    """A stream while records spill for want of memory, and the same without a disk; alternating."""
    small = replace(settings, cache_memory="24MB")
    plain, spilling = (
        opened(replace(small, cache_dir=None, cache_disk_free_gb=5.0), folder),
        opened(small, folder),
    )
    found = []
    for number in range(rounds):
        beside = [[rng.randrange(vocab) for _ in range(600)] for _ in range(4)]
        order = (plain, spilling) if number % 2 == 0 else (spilling, plain)
        figures = {engine: streamed(engine, f"s{number}", beside) for engine in order}
        (rate, wait), (plain_rate, plain_wait) = figures[spilling], figures[plain]
        found.append(Streams(rate / plain_rate, wait, plain_wait))
    plain.close()
    spilling.close()
    return found


def stored(
    key: Mapping[str, str], path: Sequence[int], begin: int, before: str, whole: str
) -> tuple[RecordHeader, list[bytes]]:
    """A record of the last tokens of a path, with next to nothing in it: nobody is going to read it."""
    data = [bytes(8)]
    record = StoredRecord(
        tuple(path[begin:]), begin, False, ((begin, len(path), 1), None), None, (TensorShape("U8", (8,)),)
    )
    return RecordHeader(
        key, RecordOwner.of("", SALT), before, whole, "", (begin,), record, tensor_checksums(data)
    ), data


def conversation(key: Mapping[str, str], rng: random.Random, pieces: int) -> Iterator[tuple[RecordHeader, list[bytes]]]:
    path: list[int] = []
    before = hex_digest([])
    for _ in range(pieces):
        begin = len(path)
        path += [rng.randrange(1000) for _ in range(PIECE)]
        whole = hex_digest(path)
        yield stored(key, path, begin, before, whole)
        before = whole


def fill(folder: Path, key: Mapping[str, str], secret: bytes, rng: random.Random, records: int) -> list[int]:
    """Write files as a server that ran for long would have left them, without its index; returns the tokens of one of
    the conversations."""
    store = RecordStore(folder, key, LIMITS, secret)
    store.close()
    files, home = FileSystem(), folder / store.scope
    path: list[int] = []
    for begun in range(0, records, PIECES):
        path = []
        for header, data in conversation(key, rng, min(PIECES, records - begun)):
            files.write(home / header.name, [header.encoded(secret), *data], sync=False)
            path += header.record.tokens
    return path


def looked_up(engine: Engine, tokens: Sequence[int]) -> float:
    """CPU seconds of the engine's thread until it knows what is on disk of a prompt."""
    wanted = replace(request("look", tokens, cache=True), salt=SALT)
    prefix_cache = engine._generation.prefix_cache

    def look() -> float:
        began = time.thread_time()
        prefix_cache.explain(wanted, tokens)
        return time.thread_time() - began

    return engine._loop.run(look)


def longest_wait(engine: Engine, name: str, prompts: Sequence[Sequence[int]]) -> float:
    """Of a stream, for a token, while these prompts come of the owner whose folder is full."""
    stream = engine.generate(request(f"{name}-stream", [1, 2, 3], output=200, cache=False))
    next(iter(stream))
    times = [time.perf_counter()]
    others = [
        engine.generate(replace(request(f"{name}-{number}", tokens, cache=True), salt=SALT))
        for number, tokens in enumerate(prompts)
    ]
    times += [time.perf_counter() for _ in stream]
    for other in others:
        list(other)
    return max(later - earlier for earlier, later in pairwise(times))


def measured_full(settings: Settings, folder: Path, rng: random.Random, records: int) -> FullFolder:
    assert settings.cache_dir is not None
    engine = opened(settings, folder)
    disk = engine._loaded.disk
    assert disk is not None
    key = disk.store.key
    engine.close()
    secret = ArchiveKey(settings.archive_key_file.expanduser()).secret()
    known = fill(settings.cache_dir, key, secret, rng, records)
    engine = opened(settings, folder)
    disk = engine._loaded.disk
    assert disk is not None and disk.store.total().records >= records, "the engine does not know what is there"
    ended(engine, request("warming", [1, 2, 3], output=4, cache=False))
    alone = longest_wait(engine, "alone", [])

    def prompt() -> list[int]:
        return [rng.randrange(1000) for _ in range(TAIL)]

    def another_server() -> list[int]:
        """Writes, after which this one does, and finds it; returns what it wrote of."""
        other = RecordStore(disk.store.folder, key, LIMITS, secret)
        path: list[int] = []
        for header, data in conversation(key, rng, PIECES):
            other.write(header, data)
            path += header.record.tokens
        other.close()
        for header, data in conversation(key, rng, 1):
            disk.store.write(header, data)
        return path

    first = looked_up(engine, [*known, *prompt()])
    after = looked_up(engine, [*another_server(), *prompt()])
    another_server()
    wait = longest_wait(engine, "beside", [prompt()])
    further = list(conversation(key, rng, WRITES))
    began = time.thread_time()
    for header, data in further:
        disk.store.write(header, data)
    write = (time.thread_time() - began) / WRITES
    engine.close()
    return FullFolder(records, first, after, alone, wait, write)


def tell_full(name: str, found: FullFolder) -> None:
    first, after, alone, wait, write = (
        1000 * each for each in (found.first, found.after_others, found.alone, found.wait, found.write)
    )
    verdict = "as wanted" if max(first, after) <= FIRST_MS else f"more than the {FIRST_MS:.0f} that are wanted"
    print(
        f"{name}, {found.records} records of an owner: its first prompt takes {first:.2f} ms of the engine thread, "
        f"the next one after another server wrote {after:.2f} ({verdict}); another stream waits {wait:.0f} ms for a "
        f"token at most, alone {alone:.0f}; a further record takes {write:.2f} ms of CPU time to write",
        flush=True,
    )


def told_restarts(name: str, rounds: Iterable[Restarted]) -> list[Restarted]:
    """The same, when each was told as soon as it was there."""
    found = []
    for each in rounds:
        first, second = f"{1000 * each.warm:.0f} ms after a restart", f"{1000 * each.cold:.0f} ms cold"
        read = f"{each.read_bytes / 1e6:.0f} MB read in {1000 * each.read_s:.0f} ms"
        print(f"{name}, {each.matched} tokens: {first}, {second}, {each.ratio:.1f} times as long; {read}", flush=True)
        found.append(each)
    ratio = statistics.median(each.ratio for each in found)
    verdict = "as wanted" if ratio >= WANTED else f"less than the {WANTED:.0f} that are wanted"
    print(f"{name}: {ratio:.1f} times sooner than cold ({verdict})", flush=True)
    return found


def tell_streams(name: str, rounds: Sequence[Streams]) -> None:
    speeds = sorted(each.speed for each in rounds)
    wait, plain = (1000 * statistics.median(getattr(each, of) for each in rounds) for of in ("wait", "plain_wait"))
    print(
        f"{name}: a stream is {statistics.median(speeds):.3f} times as fast while records are offloaded "
        f"({speeds[0]:.3f} to {speeds[-1]:.3f}); its longest wait for a token is {wait:.0f} ms, or {plain:.0f} ms "
        "without a disk cache",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a packaged model (default: the packaged model and the hybrid)")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--records", type=int, default=10_000, help="of an owner, in the full folder")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    wanted = [(given.model, given.tokens)] if given.model else [(DEFAULT_MODEL, 7000), (str(HYBRID), 16_000)]
    figures: dict[str, object] = {"surroundings": surroundings()}
    for model, tokens in wanted:
        name, rng = Path(model).name, random.Random(0)
        found: dict[str, object] = {"tokens": tokens}
        with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as made:
            folder = longer(locate_model(model, Settings(), TerminalProgress()).path, Path(made), tokens)
            settings = Settings(cache_dir=Path(kept), cache_disk_free_gb=0.0)
            prompt = [rng.randrange(1000) for _ in range(tokens)]
            if "restarts" in given.parts:
                rounds = told_restarts(name, measured(settings, folder, prompt, given.rounds))
                found["restarts"] = [asdict(each) | {"ratio": each.ratio} for each in rounds]
            if "streams" in given.parts:
                streams = measured_streams(settings, folder, rng, 1000, given.rounds)
                tell_streams(name, streams)
                found["streams"] = [asdict(each) for each in streams]
            if "records" in given.parts:
                full = measured_full(settings, folder, rng, given.records)
                tell_full(name, full)
                found["records"] = asdict(full)
        figures[name] = found
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
