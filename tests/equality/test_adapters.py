"""Sequences with different adapters share steps and nothing else: each is answered as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Request, Sampling, SequenceEnded
from ingot.errors import ModelNotFound
from tests import engines, tiny
from tests.models.lora.made import matrices, shapes, write_mlx

pytestmark = pytest.mark.usefixtures("rules")
NAMES = ("one", "two", "three")
KINDS = ("llama", "hybrid", "window")
LAYERS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def written(folder: Path, kind: str, names: tuple[str, ...] = NAMES) -> dict[str, Path]:
    sizes = shapes(tiny.build(kind), LAYERS)
    return {
        name: write_mlx(folder / name, matrices(sizes, 4 + seed, seed), rank=4 + seed, scale=0.1)
        for seed, name in enumerate(names)
    }


def request(engine: Engine, id: str, prompt: tuple[int, ...], adapter: str | None, tokens: int = 6) -> Request:
    lora = None if adapter is None else engine.loras[adapter]
    sampling = Sampling(temperature=0.0)
    return Request(id=id, prompts=(prompt,), max_tokens=tokens, sampling=sampling, lora=lora)


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return next(event.tokens for event in events if isinstance(event, SequenceEnded))


def matched(events: list[Event]) -> int:
    assert isinstance(events[-1], Ended), events[-1]
    return events[-1].cache[0].matched


@pytest.fixture
def engine(kind: str, tmp_path: Path) -> Iterator[Engine]:
    made = engines.start(kind, cache_bytes=1 << 26, loras=written(tmp_path, kind))
    yield made
    made.check()
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_adapters_answers_as_each_alone(engine: Engine, kind: str) -> None:
    asked = [(adapter, tuple(range(3 + n, 12 + n))) for n, adapter in enumerate((None, *NAMES, "one", None))]

    def made(id: str, adapter: str | None, prompt: tuple[int, ...]) -> Request:
        return replace(request(engine, id, prompt, adapter), cache=False)

    alone = [tokens_of(engines.answer(engine, made(f"a{n}", *each))) for n, each in enumerate(asked)]
    streams = [engine.generate(made(f"b{n}", *each)) for n, each in enumerate(asked)]
    beside = [tokens_of([event for batch in stream for event in batch]) for stream in streams]
    assert beside == alone
    same = {adapter: tokens_of(engines.answer(engine, made(f"c{adapter}", adapter, asked[0][1]))) for adapter in NAMES}
    assert len({alone[0], *same.values()}) > 2, "the adapters change next to nothing"


@pytest.mark.parametrize("kind", ["llama"])
@pytest.mark.parametrize("switches", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_over_many_switches_nothing_is_taken_over_from_another_adapter(
    engine: Engine, kind: str, switches: int
) -> None:
    dice, prompts = random.Random(5), [tuple(range(7, 80)), tuple(range(40, 90))]
    seen: set[tuple[int, str | None]] = set()
    for turn in range(switches):
        number, adapter = dice.randrange(2), dice.choice((None, *NAMES))
        events = engines.answer(engine, request(engine, f"r{turn}", prompts[number], adapter, tokens=1))
        known = (number, adapter) in seen
        assert (matched(events) > 0) == known, f"turn {turn}: {adapter} took over what it never computed"
        seen.add((number, adapter))
        if not known and any(other == number for other, _ in seen - {(number, adapter)}):
            assert isinstance(events[-1], Ended) and events[-1].cache[0].reason == "adapter"


@pytest.mark.parametrize("kind", ["llama"])
def test_an_adapter_that_is_unloaded_stays_for_those_that_run_with_it(
    engine: Engine, kind: str, tmp_path: Path
) -> None:
    prompt = tuple(range(3, 20))
    lora = engine.loras["two"]
    wanted = tokens_of(engines.answer(engine, request(engine, "alone", prompt, "two", tokens=40)))
    stream = iter(engine.generate(replace(request(engine, "long", prompt, "two", tokens=40), cache=False)))
    first = next(stream)
    engine.unload_lora("two")
    assert "two" not in engine.loras
    with pytest.raises(ModelNotFound, match="'two' is not loaded any more"):
        engine.generate(replace(request(engine, "late", prompt, None), lora=lora))
    assert tokens_of([*first, *(event for batch in stream for event in batch)]) == wanted
    engine.check()
    model = engine._loaded.adapter
    engine._loop.run(engine._workload._drop_unused)
    assert lora.digest not in model.loras and engine.loras["one"].digest in model.loras
    again = engine.load_lora("again", tmp_path / "two")
    assert again.digest == lora.digest
    found = engines.answer(engine, request(engine, "again", prompt, "again", tokens=40))
    assert tokens_of(found) == wanted and matched(found) > 0, "the same files are the same adapter"


@pytest.mark.parametrize("kind", ["llama"])
def test_what_is_on_disk_is_one_adapters_too(kind: str, tmp_path: Path) -> None:
    loras, prompt = written(tmp_path / "loras", kind), tuple(range(5, 90))
    first = engines.start(kind, cache_bytes=1 << 26, disk=tmp_path / "disk", loras=loras)
    wanted = tokens_of(engines.answer(first, request(first, "one", prompt, "one")))
    first.close()
    engine = engines.start(kind, cache_bytes=1 << 26, disk=tmp_path / "disk", loras=loras)
    assert matched(engines.answer(engine, request(engine, "base", prompt, None))) == 0
    assert matched(engines.answer(engine, request(engine, "two", prompt, "two"))) == 0
    found = engines.answer(engine, request(engine, "one", prompt, "one"))
    assert tokens_of(found) == wanted
    assert isinstance(found[-1], Ended) and found[-1].cache[0].tier == "disk"
    engine.close()


def test_an_engine_without_adapters_refuses_them(tmp_path: Path) -> None:
    with_them = engines.start("llama", loras=written(tmp_path, "llama", ("one",)))
    lora = with_them.loras["one"]
    with_them.close()
    engine = engines.start("llama")
    with pytest.raises(ModelNotFound, match="'one' is not loaded"):
        engine.generate(replace(request(engine, "late", (5, 6), None), lora=lora))
    engine.close()
