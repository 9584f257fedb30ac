"""Live keys and values in fewer bits go to files as they lie, and come back so: an engine that was restarted goes on as
one that was not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.cache import footprint
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.records import serialise_record, unpage_record, unpage_record_as_stored
from ingot.engine.engine import Engine
from ingot.engine.request import CacheReport, Ended, Request, Sampling, Stop
from ingot.kernels.device import Device
from tests import engines, tiny
from tests.engines import GPU

CODEC = PairCodec(CodecName.parse("k8v4"))
STEP, TAIL = 128, 64
"""Short, so that short prompts are coded."""
KINDS = ["kernel", "kernel-window", "kernel-hybrid"]
PLACES = [*((kind, None) for kind in KINDS), ("kernel", GPU)]
HERE = ("kernel", None)
EOS = tiny.VOCAB - 1
SECRET = b"of both servers"


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(footprint, "ENCODE_STEP_TOKENS", STEP)
        patch.setattr(footprint, "RAW_TAIL_TOKENS", TAIL)
        yield


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{'gpu' if place[1] else 'here'}")
def place(request: pytest.FixtureRequest) -> tuple[str, Device | None]:
    found: tuple[str, Device | None] = request.param
    return found


def start(place: tuple[str, Device | None], **more: Any) -> Engine:
    return engines.start(place[0], device=place[1], live=CODEC, context=1024, cache_bytes=1 << 26, **more)


def run(engine: Engine, name: str, tokens: list[int]) -> tuple[str, CacheReport]:
    greedy, endless = Sampling(temperature=0.0), Stop(ignore_eos=True)
    events = engines.answer(engine, Request(name, (tuple(tokens),), max_tokens=6, sampling=greedy, stop=endless))
    assert isinstance(events[-1], Ended)
    return engines.text_of(events), events[-1].cache[0]


def conversation(seed: int, *lengths: int) -> list[int]:
    rng = random.Random(seed)
    return [token for length in lengths for token in (*(rng.randrange(95) for _ in range(length - 1)), EOS)]


def states(engine: Engine) -> dict[tuple[int, ...], tuple[int, list[bytes]]]:
    """What is in memory, by its tokens, to the last bit, and how many of its pages are in fewer."""

    def read() -> dict[tuple[int, ...], tuple[int, list[bytes]]]:
        prefix_cache = engine._workload.prefix_cache
        held = {node.path_tokens: node.record for node in prefix_cache.index.nodes() if node.record is not None}
        loose = {path: unpage_record_as_stored(prefix_cache.rows, record) for path, record in held.items()}
        coded = {path: [each.coded for each in record.deltas if each is not None] for path, record in loose.items()}
        return {path: (max(coded[path], default=0), serialise_record(record)) for path, record in loose.items()}

    return engine._loop.run(read)


def test_a_restarted_engine_goes_on_as_one_that_was_not(place: tuple[str, Device | None], tmp_path: Path) -> None:
    first = start(place, disk=tmp_path)
    prompt = conversation(1, 150, 230, 70)
    run(first, "a", prompt)
    left = states(first)
    assert sum(coded for coded, _ in left.values()) >= 3
    first.close()
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    second = start(place, disk=tmp_path)
    _, report = run(second, "b", [*prompt, 7, 8])
    assert report.tier == "disk" and report.matched >= len(prompt) - 1 and report.codec == "k8v4"
    second.check()
    found = states(second)
    shared = left.keys() & found.keys()
    assert shared and all(left[path] == found[path] for path in shared)
    assert sum(found[path][0] for path in shared) >= 3
    second.close()
    again = {path.name: path.read_bytes() for path in tmp_path.rglob("*.safetensors") if path.name in written}
    assert again == written, "what was read is what would be written"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_after_a_restart_is_the_same_as_without_one(kind: str, tmp_path: Path) -> None:
    prompt, told = conversation(1, 150, 230, 70), []
    for folder in (tmp_path, None):
        engine = start((kind, None), disk=folder)
        run(engine, "a", prompt)
        if folder is not None:
            engine.close()
            engine = start((kind, None), disk=folder)
        told.append(run(engine, "b", [*prompt, 7, 8]))
        engine.close()
    assert [report.tier for _, report in told] == ["disk", "ram"]
    assert told[0][0] == told[1][0]


def test_a_file_holds_no_more_than_memory_did(tmp_path: Path) -> None:
    engine = start(HERE, disk=tmp_path)
    run(engine, "a", conversation(2, 5 * STEP))
    held, raw = engine._loop.run(lambda: sizes(engine))
    assert held < 0.7 * raw
    engine.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < held + 0.1 * raw


def sizes(engine: Engine) -> tuple[int, int]:
    """Bytes of what is kept, as it lies and unpacked."""
    prefix_cache = engine._workload.prefix_cache
    records = [node.record for node in prefix_cache.index.nodes() if node.record is not None]
    return tuple(  # type: ignore[return-value]
        sum(len(raw) for record in records for raw in serialise_record(loose(prefix_cache.rows, record)))
        for loose in (unpage_record_as_stored, unpage_record)
    )


def test_two_that_part_inside_of_a_coded_page_both_go_on_after_a_restart(tmp_path: Path) -> None:
    first = start(HERE, disk=tmp_path)
    prompt = conversation(3, 3 * STEP)
    parting = [*prompt[:100], *conversation(4, 2 * STEP)]
    told = [run(first, f"a{number}", tokens)[0] for number, tokens in enumerate((prompt, parting, prompt))]
    first.close()
    second = start(HERE, disk=tmp_path)
    for number, tokens in enumerate((prompt, parting)):
        text, report = run(second, f"b{number}", tokens)
        assert text == told[2 - number] and report.matched == len(tokens) - 1
        second.check()
    second.close()


def test_what_is_coded_while_it_is_exported_arrives_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    here, there = (start(HERE, folder=folder) for _ in range(2))
    try:
        prompt = conversation(5, STEP + TAIL - 8)
        run(here, "a", prompt)
        before = {path: coded for path, (coded, _) in states(here).items()}
        longer = [*prompt, *conversation(6, 2 * STEP)]
        monkeypatch.setattr("ingot.engine.cache_admin.check_still_wanted", lambda going: run(here, "b", longer))
        path = tmp_path / "kept.safetensors"
        here.kept.export("", path, SECRET)
        monkeypatch.undo()
        monkeypatch.setattr(footprint, "ENCODE_STEP_TOKENS", STEP)
        monkeypatch.setattr(footprint, "RAW_TAIL_TOKENS", TAIL)
        assert sum(coded for coded, _ in states(here).values()) > sum(before.values()), "some were coded meanwhile"
        assert there.kept.adopt("", path, SECRET) > 0
        assert run(there, "c", longer)[1].matched >= len(prompt), "what came meanwhile may be there as well"
        there.check()
    finally:
        here.close()
        there.close()
