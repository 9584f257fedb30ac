"""Engines that come and go on one loop: what a model took is given back, and the others' answers go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ingot.engine.loop import Loop, engine_loop
from ingot.engine.request import Ended, Failed, Request, Sampling
from ingot.errors import Unavailable
from ingot.kernels.device import Device
from tests.engines import GPU, start, text_of
from tests.memory import settled
from tests.waiting import WAIT_S

KINDS = ("llama", "tied", "moe", "hybrid", "window")
PROMPT = tuple(range(3, 40))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = engine_loop()
    made.start()
    yield made
    made.close()


def active(loop: Loop) -> int:
    return loop.run(settled)


def cycle(loop: Loop, kind: str, device: Device | None = None) -> int:
    """Load a model, let it answer, unload it; returns its weights' bytes."""
    engine = start(kind, cache_bytes=1 << 24, device=device, loop=loop)
    last = [*engine.generate(Request(id="one", prompts=(PROMPT,), max_tokens=8))][-1][-1]
    assert isinstance(last, Ended)
    weights = engine.card.weight_bytes
    engine.close()
    return weights


@pytest.mark.parametrize("device", [None, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unloaded_model_leaves_nothing_behind(loop: Loop, kind: str, device: Device | None) -> None:
    before = active(loop)
    weights = cycle(loop, kind, device)
    assert active(loop) - before < weights // 100


def test_many_cycles_take_no_more_than_one(loop: Loop) -> None:
    cycle(loop, "llama")
    once = active(loop)
    for _ in range(5):
        cycle(loop, "llama")
    assert active(loop) <= once


def test_unloading_one_model_leaves_another_ones_answer_alone(loop: Loop) -> None:
    kept = start("llama", loop=loop)
    asked = Request(id="alone", prompts=(PROMPT,), max_tokens=40, sampling=Sampling(temperature=0.0))
    alone = text_of([event for batch in kept.generate(asked) for event in batch])
    stream = iter(kept.generate(replace(asked, id="beside")))
    first = next(stream)
    cycle(loop, "tied")
    assert text_of([*first, *(event for batch in stream for event in batch)]) == alone
    kept.check()


def test_what_still_runs_on_an_unloaded_model_is_told_so(loop: Loop) -> None:
    entered, released = threading.Event(), threading.Event()

    def wait(tokens: int) -> None:
        entered.set()
        assert released.wait(WAIT_S)

    engine = start("llama", wait=wait, loop=loop)
    stream = engine.generate(Request(id="late", prompts=(PROMPT,), max_tokens=2000))
    assert entered.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    released.set()
    last = [*stream][-1][-1]
    closing.join()
    assert isinstance(last, Failed) and isinstance(last.error, Unavailable)


def test_a_model_that_cannot_be_loaded_takes_no_other_down(loop: Loop) -> None:
    kept = start("llama", loop=loop)
    with pytest.raises(KeyError):
        start("no such kind", loop=loop)
    assert isinstance([*kept.generate(Request(id="one", prompts=(PROMPT,), max_tokens=4))][-1][-1], Ended)
