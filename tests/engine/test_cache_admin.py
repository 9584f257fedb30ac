"""What one engine keeps goes on in another: taken out to a file, and in from it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ingot.cache.archive import ArchiveError
from ingot.cache.codecs.pair import RAW_CODEC
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.prefix_tree import CacheOwner
from ingot.cache.records import Record, UnpagedRecord
from ingot.engine.cache_admin import SKIPPED_AT_ONCE, PrefixCacheAdmin, _ExportWalk, export_prefixes
from ingot.engine.engine import Engine
from ingot.engine.prefix_cache import PrefixCache, PrefixCacheCounts
from ingot.engine.request import Ended, Request, Sampling, Stop
from ingot.engine.status import SaltStatus
from ingot.errors import Unsupported
from tests import engines, tiny
from tests.cache.paper import APPEND, HYBRID, Paper, index, store

KINDS = ["llama", "window", "hybrid"]
EOS = tiny.VOCAB - 1
SECRET = b"of both servers"


def start(kind: str, folder: Path, cache_bytes: int = 1 << 24) -> Engine:
    """An engine that knows its model by the files in a folder."""
    made = engines.start(kind, cache_bytes=cache_bytes)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(kind)
    (folder / "model.safetensors").write_bytes(b"weights of " + kind.encode())
    (folder / "tokenizer.json").write_text("{}")
    made._loaded = replace(made._loaded, folder=folder)
    return made


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    both = start(request.param, tmp_path / "a"), start(request.param, tmp_path / "b")
    yield both
    for engine in both:
        engine.check()
        engine.close()


def ask(engine: Engine, name: str, prompt: list[int], **more: object) -> tuple[str, int]:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    events = engines.answer(
        engine,
        Request(name, (tuple(prompt),), max_tokens=6, sampling=greedy, stop=endless, **more),  # type: ignore[arg-type]
    )
    assert isinstance(events[-1], Ended)
    return engines.text_of(events), events[-1].usage.cached_tokens


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    head = [*(rng.randrange(95) for _ in range(80)), EOS]
    tails = [[*(rng.randrange(95) for _ in range(40)), EOS] for _ in range(3)]
    return [[*head, *tail, number] for number, tail in enumerate(tails)]


def test_another_engine_goes_on_where_this_one_was(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    here, there = pair
    for number, prompt in enumerate(prompts()):
        ask(here, f"first{number}", prompt)
        ask(here, f"salted{number}", prompt, salt="s")
    path = tmp_path / "kept.safetensors"
    tokens = here.kept.export("", path, SECRET)
    assert there.kept.adopt("", path, SECRET) == tokens > 0
    there.check()
    for number, prompt in enumerate(prompts()):
        longer = [*prompt, 7, 8]
        warm, cached = ask(there, f"warm{number}", longer)
        assert (warm, cached) == ask(here, f"warm{number}", longer)
        assert warm == ask(there, f"cold{number}", longer, cache=False)[0]
        assert cached >= len(prompt) - 1
        assert ask(there, f"salt{number}", longer, salt="s")[1] == cached


@pytest.mark.sampled(3)
def test_what_is_here_already_is_not_kept_twice(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    here, there = pair
    for number, prompt in enumerate(prompts()):
        ask(here, f"first{number}", prompt)
    ask(there, "own", prompts()[0])
    path = tmp_path / "kept.safetensors"
    tokens = here.kept.export("", path, SECRET)
    assert 0 < there.kept.adopt("", path, SECRET) < tokens
    assert there.kept.adopt("", path, SECRET) == 0
    there.check()


@pytest.mark.sampled(3)
def test_tenants_move_their_own_alone(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    here, there = pair
    ask(here, "mine", prompts()[0], tenant="me")
    path = tmp_path / "kept.safetensors"
    assert here.kept.export("you", path, SECRET) == 0
    assert here.kept.export("me", path, SECRET) > 0
    there.kept.adopt("you", path, SECRET)
    assert ask(there, "me", [*prompts()[0], 9], tenant="me")[1] == 0
    assert ask(there, "you", [*prompts()[0], 9], tenant="you")[1] > 0


def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path) -> None:
    here, there = start("llama", tmp_path / "a"), start("llama", tmp_path / "b", cache_bytes=100_000)
    for number, prompt in enumerate(prompts()):
        ask(here, f"first{number}", prompt)
    path = tmp_path / "kept.safetensors"
    here.kept.export("", path, SECRET)
    there.kept.adopt("", path, SECRET)
    there.check()
    assert 0 < there.kept.status("").used_bytes <= 100_000
    for engine in (here, there):
        engine.close()


def test_another_models_file_is_refused_by_name(tmp_path: Path) -> None:
    here, there = start("llama", tmp_path / "a"), start("moe", tmp_path / "b")
    ask(here, "first", prompts()[0])
    path = tmp_path / "kept.safetensors"
    here.kept.export("", path, SECRET)
    with pytest.raises(ArchiveError, match="another model"):
        there.kept.adopt("", path, SECRET)
    for engine in (here, there):
        engine.close()


def test_states_of_other_shapes_are_refused_whatever_the_key_says(tmp_path: Path) -> None:
    here, there = start("window", tmp_path / "a"), start("llama", tmp_path / "b")
    ask(here, "first", prompts()[0])
    here._loaded = replace(here._loaded, folder=tmp_path / "b")
    path = tmp_path / "kept.safetensors"
    here.kept.export("", path, SECRET)
    with pytest.raises(ArchiveError, match="not laid out like this model's"):
        there.kept.adopt("", path, SECRET)
    there.check()
    assert there.kept.status("").used_bytes == 0
    for engine in (here, there):
        engine.close()


def test_each_call_of_an_export_takes_one_record_however_many_there_are(tmp_path: Path) -> None:
    engine = start("hybrid", tmp_path / "model")
    for number, prompt in enumerate(prompts()):
        ask(engine, f"mine{number}", prompt, salt=f"s{number}")
    prefix_cache = engine._workload.prefix_cache
    loose, counts = prefix_cache.encoding.loose, [0]

    def counted(record: Record) -> UnpagedRecord:
        counts[-1] += 1
        return loose(record)

    def run(work: Callable[[PrefixCache], Any]) -> Any:
        counts.append(0)
        return engine._loop.run(lambda: work(prefix_cache))

    prefix_cache.encoding.loose = counted  # type: ignore[method-assign]
    seal = engine.kept._seal(SECRET)
    tokens = export_prefixes(run, "", seal, tmp_path / "kept", lambda: True)
    assert max(counts) == 1 and sum(counts) == engine._loop.run(lambda: len(list(prefix_cache.index.nodes())))
    assert tokens == sum(salt.tokens for salt in engine.kept.status("").salts)
    engine.close()


def test_nodes_that_have_nothing_in_memory_are_passed_over_a_few_at_a_time() -> None:
    prefix_index = PrefixIndex(APPEND, float, offload=lambda node: True)
    for first in range(3 * SKIPPED_AT_ONCE):
        store(prefix_index, [first, 1], APPEND)
    prefix_index.shrink(0)
    walk, calls = _ExportWalk(cast(Any, SimpleNamespace(index=prefix_index)), ""), 0
    while not walk.ended:
        assert walk.advance(cast(Any, SimpleNamespace(index=prefix_index))) is None
        calls += 1
    assert calls >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_while_it_is_exported_leaves_a_file_that_fits(kind: str, tmp_path: Path) -> None:
    """Between any two pieces nodes are cut in two, evicted or come."""
    here, there = start(kind, tmp_path / "a"), start(kind, tmp_path / "b")
    for number, prompt in enumerate(prompts()):
        ask(here, f"mine{number}", prompt)
    prefix_cache, calls = here._workload.prefix_cache, [0]

    def disturb(number: int) -> None:
        if number in (2, 3):
            ask(here, f"parts{number}", [*prompts()[0][: 100 - 60 * (number - 2)], 1, 2, 3])
        elif number == 5:
            here._loop.run(lambda: prefix_cache.index.shrink(prefix_cache.index.nbytes // 2))

    def run(work: Callable[[PrefixCache], Any]) -> Any:
        calls[0] += 1
        disturb(calls[0])
        return here._loop.run(lambda: work(prefix_cache))

    path = tmp_path / "kept"
    assert export_prefixes(run, "", here.kept._seal(SECRET), path, lambda: True) > 0
    assert calls[0] > 6
    assert there.kept.adopt("", path, SECRET) > 0
    for engine in (here, there):
        engine.check()
        for number, prompt in enumerate(prompts()):
            longer = [*prompt, 7, 8]
            warm, _ = ask(engine, f"warm{number}", longer)
            assert warm == ask(engine, f"cold{number}", longer, cache=False)[0]
        engine.close()


def test_a_model_without_files_cannot_be_known_again(tmp_path: Path) -> None:
    engine = engines.start("llama", cache_bytes=1 << 20)
    engine._loaded = replace(engine._loaded, folder=None)
    with pytest.raises(Unsupported, match="no files"):
        engine.kept.export("", tmp_path / "kept", SECRET)
    engine.close()


SALTS = 200


def test_no_record_is_looked_at_on_the_engine_thread_however_many_salts_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix_index, encoder_runs = index(HYBRID), [0]
    for number in range(SALTS):
        store(prefix_index, [1, 2, 3], HYBRID, CacheOwner("me", f"s{number}"))
        store(prefix_index, [1, 2, 3, 4, 5], HYBRID, CacheOwner("me", f"s{number}", exact=True))
    store(prefix_index, [7] * 9, HYBRID, CacheOwner("you"))
    prefix_index.pin(CacheOwner("me", "s3"), [1, 2])
    nbytes = Paper.nbytes

    def counted(paper: Paper) -> int:
        encoder_runs[0] += 1
        return cast(Any, nbytes).fget(paper)

    def run(work: Callable[[Any], Any]) -> Any:
        return work(SimpleNamespace(index=prefix_index, limit=1 << 20, counts=defaultdict(PrefixCacheCounts)))

    monkeypatch.setattr(Paper, "nbytes", property(counted))
    kept = PrefixCacheAdmin(run, cast(Any, SimpleNamespace(live=None)), None, None, RAW_CODEC)
    status = kept.status("me")
    assert encoder_runs[0] == 0
    assert len(status.salts) == SALTS and sum(salt.bytes for salt in status.salts) == status.used_bytes
    assert status.salts[0] == SaltStatus("s0", records=2, tokens=8, checkpoints=2, pinned_tokens=0, bytes=280)
    assert [salt.pinned_tokens for salt in status.salts[2:5]] == [0, 2, 0]
    assert kept.status("nobody").salts == ()
