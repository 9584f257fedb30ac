"""Restored from disk == cold, token for token, for every kind of layer: in the same process and after a restart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.cache.records import serialise_record, unpage_record
from ingot.engine.engine import Engine
from ingot.engine.request import CacheReport, Ended, Request, Sampling, Stop
from ingot.kernels.device import Device, current_device
from tests import engines, tiny
from tests.engines import GPU

KINDS = ["llama", "window", "hybrid", "moe", "mixed"]
EOS = tiny.VOCAB - 1


def start(kind: str, folder: Path, device: Device | None = None, cache_bytes: int = 1 << 24) -> Engine:
    return engines.start(kind, cache_bytes=cache_bytes, device=device, disk=folder)


def ask(name: str, tokens: list[int], **options: object) -> Request:
    sampling = Sampling(temperature=0.0)
    return Request(name, (tuple(tokens),), max_tokens=8, sampling=sampling, stop=Stop(ignore_eos=True), **options)  # type: ignore[arg-type]


def run(engine: Engine, request: Request) -> tuple[str, CacheReport]:
    events = engines.answer(engine, request)
    assert isinstance(events[-1], Ended)
    return engines.text_of(events), events[-1].cache[0]


def message(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(95) for _ in range(length)] + [EOS]


def conversations(seed: int) -> list[list[int]]:
    """Three that share a beginning."""
    rng = random.Random(seed)
    head = message(rng, 150)
    return [[*head, *message(rng, 90), number] for number in range(3)]


def states(engine: Engine) -> dict[tuple[int, ...], list[bytes]]:
    """What is in memory, by its tokens, to the last bit."""

    def read(prefix_cache: Any) -> dict[tuple[int, ...], list[bytes]]:
        nodes = [node for node in prefix_cache.index.nodes() if node.record is not None]
        return {node.path_tokens: serialise_record(unpage_record(prefix_cache.rows, node.record)) for node in nodes}

    return engine._loop.run(lambda: read(engine._workload.prefix_cache))


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_engine_goes_on_where_the_last_one_was(kind: str, tmp_path: Path) -> None:
    first = start(kind, tmp_path)
    asked = [ask(f"a{number}", tokens) for number, tokens in enumerate(conversations(1))]
    for request in asked:
        run(first, request)
    left = states(first)
    first.check()
    first.close()
    second = start(kind, tmp_path)
    for request in asked:
        tokens = [*request.prompts[0], 7, 8]
        warm, report = run(second, ask(f"{request.id}w", tokens))
        cold, _ = run(second, ask(f"{request.id}c", tokens, cache=False))
        assert warm == cold
        assert report.matched >= len(request.prompts[0]) - 1 and report.tier == "disk"
        second.check()
    found = states(second)
    for path in left.keys() & found.keys():
        assert left[path] == found[path]
    assert left.keys() & found.keys()
    totals = second.kept.status("").totals.disk
    assert totals is not None and totals.hits == 3 and totals.promotion_failures == 0
    second.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_memory_has_no_room_for_comes_back_from_disk(kind: str, tmp_path: Path) -> None:
    engine = start(kind, tmp_path, cache_bytes=200_000)
    # Reading is not weighed against computing, whose times vary.
    engines.runner_of(engine).prefix_cache._tier._seconds = lambda tokens: 0.0  # type: ignore[attr-defined]
    runs = [conversations(seed) for seed in range(5)]
    for number, tokens in enumerate(each for run_of in runs for each in run_of):
        run(engine, ask(f"a{number}", tokens))
        engine._loaded.disk.writer.drain(10.0)  # type: ignore[union-attr]
    tiers = set()
    for number, tokens in enumerate(each for run_of in runs for each in run_of):
        longer = [*tokens, 7]
        warm, report = run(engine, ask(f"w{number}", longer))
        assert warm == run(engine, ask(f"c{number}", longer, cache=False))[0]
        tiers.add(report.tier)
        engine.check()
        assert engines.runner_of(engine).prefix_cache.index.nbytes <= 200_000
    assert "disk" in tiers
    engine.close()


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
def test_a_swarm_reads_what_it_shares_once(kind: str, tmp_path: Path) -> None:
    first = start(kind, tmp_path)
    head = conversations(2)[0]
    run(first, ask("a", head))
    first.close()
    files = len(list(tmp_path.glob("*/*.safetensors")))
    second = start(kind, tmp_path)
    asked = [ask(f"s{number}", [*head, number, 5, 6]) for number in range(6)]
    # All at once: who comes when the first one's records are in memory reads nothing.
    streams = second._loop.run(lambda: [second.generate(request) for request in asked])
    warm = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
    for request, text in zip(asked, warm, strict=True):
        assert text == run(second, replace(request, id=request.id + "c", cache=False))[0]
    totals = second.kept.status("").totals.disk
    assert totals is not None and 0 < totals.promotions <= files and totals.hits == len(asked)
    second.check()
    second.close()


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 16
    file.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda file: file.unlink(),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "changed": flip,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_whichever_file_is_damaged_the_answer_is_the_same(kind: str, damage: str, tmp_path: Path) -> None:
    first = start(kind, tmp_path)
    prompt = conversations(3)[0]
    run(first, ask("a", prompt))
    first.close()
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) > 1
    kept = {file: file.read_bytes() for file in files}
    cold, matched = None, []
    for number, file in enumerate(files):
        for each, raw in kept.items():
            each.write_bytes(raw)
        second = start(kind, tmp_path)
        DAMAGE[damage](file)
        text, report = run(second, ask("b", [*prompt, 9]))
        cold = cold or run(second, ask("c", [*prompt, 9], cache=False))[0]
        assert text == cold, number
        matched.append(report.matched)
        second.check()
        second.close()
    assert min(matched) == 0 and max(matched) >= len(prompt) - 1  # the first one, and the one behind the prompt


def test_another_salt_tenant_model_or_device_finds_nothing(tmp_path: Path) -> None:
    prompt = conversations(4)[0]
    first = start("llama", tmp_path)
    run(first, ask("a", prompt, tenant="me", salt="s"))
    first.close()
    second = start("llama", tmp_path)
    assert run(second, ask("b", [*prompt, 1], tenant="you", salt="s"))[1].matched == 0
    assert run(second, ask("c", [*prompt, 1], tenant="me", salt="t"))[1].matched == 0
    assert run(second, ask("d", [*prompt, 1], tenant="me", salt="s"))[1].matched > 100
    second.close()
    elsewhere = replace(GPU, kind="metal" if current_device().kind == "cuda" else "cuda")
    for kind, rules in (("single", None), ("llama", elsewhere)):
        other = start(kind, tmp_path, rules)
        assert run(other, ask("e", [*prompt, 1], tenant="me", salt="s"))[1].matched == 0
        other.close()


def test_arrays_of_every_kind_of_number_come_back_as_they_were() -> None:
    import mlx.core as mx

    from ingot.cache.kv_deltas import KVDelta, LayerDeltas, StateCheckpoint
    from ingot.cache.records import UnpagedRecord, describe_record, deserialise_record

    rng = np.random.default_rng(0)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        whole = mx.array(rng.standard_normal((1, 2, 10, 4))).astype(dtype)
        loose = UnpagedRecord(3, 13, LayerDeltas([KVDelta(3, 13, (whole, whole))]), StateCheckpoint([(whole[:, 0],)]))
        back = deserialise_record(
            describe_record(loose, tuple(range(10)), landmark=False),
            [memoryview(raw) for raw in serialise_record(loose)],
        )
        assert all(mx.array_equal(a, b).item() for a, b in zip(back.arrays(), loose.arrays(), strict=True))
        part = back.before(9).behind(5)
        assert part.checkpoint is None and (part.begin, part.end) == (5, 9)
        delta = part.deltas[0]
        assert delta is not None and mx.array_equal(delta.arrays[0], whole[:, :, 2:6]).item()
