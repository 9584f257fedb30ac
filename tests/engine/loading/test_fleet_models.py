"""What an unload says came back, beside workloads of other models that take memory meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.config import ModelEntry, Settings
from ingot.engine.engine import Engine
from ingot.engine.loading.fleet_models import BlockingModelLoader
from ingot.engine.loop import Loop, engine_loop
from ingot.engine.request import Ended, Request
from ingot.errors import IngotError
from ingot.kernels import device
from ingot.models.experts.kept import KEPT
from tests.engines import answer, start, tiny_folder
from tests.waiting import WAIT_S

MEMORY = 1 << 30


class Greedy:
    """A workload that takes whatever others give back, at its next turn."""

    name, busy = "greedy", True

    def __init__(self) -> None:
        self.seen = mx.get_active_memory()
        self.held: list[mx.array] = []
        self.took = threading.Event()

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        free = self.seen - mx.get_active_memory()
        if free > 0:
            self.held.append(mx.zeros((free,), mx.uint8))
            mx.eval(self.held)
            self.took.set()

    def expire(self, now: float) -> None: ...

    def rest(self) -> None: ...

    def check(self) -> None: ...

    def abandon(self, error: IngotError) -> None:
        self.held.clear()

    reset_after_fault = farewell = abandon

    def close(self) -> None: ...


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = engine_loop()
    made.start()
    yield made
    made.close()


@pytest.fixture
def loading(loop: Loop) -> BlockingModelLoader:
    return BlockingModelLoader(loop, loop.run(device.current_device), MEMORY)


def levels(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in log.records if record.name == "ingot.fleet"]


def test_what_others_take_meanwhile_is_not_what_did_not_come_back(
    loop: Loop, loading: BlockingModelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("llama", loop=loop)
    [greedy] = loop.add(lambda: [Greedy()])
    with caplog.at_level(logging.INFO, "ingot.fleet"):
        loading.unload(engine)
    assert isinstance(greedy, Greedy) and greedy.took.wait(WAIT_S), "nobody took anything"
    assert levels(caplog) == ["INFO"]


def test_weights_that_somebody_still_holds_are_warned_of(
    loop: Loop, loading: BlockingModelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("llama", loop=loop)
    held = engine.kept  # which reads files for the model, and so holds it
    with caplog.at_level(logging.INFO, "ingot.fleet"):
        loading.unload(engine)
    assert held is not None and levels(caplog) == ["WARNING"]


def test_a_mixture_that_does_not_fit_leaves_its_experts_until_another_model_needs_the_memory(
    loop: Loop, loading: BlockingModelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("moe-streamed", loop=loop)
    [text] = [event for event in answer(engine, Request("one", ((1, 2, 3),), max_tokens=2)) if isinstance(event, Ended)]
    assert text.experts is not None
    with caplog.at_level(logging.INFO, "ingot.fleet"):
        loading.unload(engine)
    assert levels(caplog) == ["INFO"]
    assert KEPT.nbytes and "of experts stay until something else needs the memory" in caplog.text
    entry = ModelEntry("other", Settings(model=str(tiny_folder("llama")), context=64, cache_dir=None))
    found = loading.find(entry)
    for claim, stay in ((MEMORY // 2, True), (MEMORY, False)):
        other = loading.load(entry, replace(found, claim=claim), lambda share: None)
        assert bool(KEPT.nbytes) == stay
        loading.unload(other)


def test_what_is_slower_of_a_model_is_in_the_log_where_no_ready_line_tells_it(
    loading: BlockingModelLoader, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(model=str(tiny_folder("moe-streamed")), context=64, cache_dir=None, expert_memory="100KB")
    for resident in (False, True):
        caplog.clear()
        entry = ModelEntry("other", settings, resident=resident)
        with caplog.at_level(logging.INFO, "ingot.fleet"):
            engine = loading.load(entry, loading.find(entry), lambda share: None)
        assert engine.card.notes
        told = [message for message in caplog.messages if message.startswith("other: note: ")]
        assert told == ([] if resident else [f"other: note: {note}" for note in engine.card.notes])
        loading.unload(engine)


def test_a_mixture_claims_no_more_for_experts_than_it_may_have(loading: BlockingModelLoader) -> None:
    settings = Settings(model=str(tiny_folder("moe-streamed")), context=64)
    claims = {
        stated: loading.find(ModelEntry("one", replace(settings, expert_memory=stated))).claim
        for stated in ("all", "100KB", "50KB", "auto")
    }
    assert claims["all"] - claims["100KB"] > 10_000
    assert claims["100KB"] - claims["50KB"] == 50_000
    assert claims["auto"] == claims["all"]  # which fits


VISION = Path(__file__).parents[3] / "foundry/models/vision"


def test_a_model_among_several_encodes_the_images_that_it_encodes_alone(loop: Loop) -> None:
    pytest.importorskip("mlx_vlm")
    settings = Settings(model=str(VISION), cache_dir=None)
    here = loop.run(device.current_device)
    found = []
    for budget, names in (("1GiB", ("one",)), (None, ("one", "other"))):
        entries = [ModelEntry(name, replace(settings, memory=budget)) for name in names]
        loading = BlockingModelLoader(loop, here, MEMORY, entries)
        engine = loading.load(entries[0], loading.find(entries[0]), lambda share: None)
        assert isinstance(engine, Engine) and engine._loaded.vision_encoder is not None
        found.append(engine._loaded.vision_encoder.memory)
        loading.unload(engine)
    assert found[0] == found[1]
