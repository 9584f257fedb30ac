"""A fault belongs to its request; and if the engine itself ends, nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.forward_pass import SequenceResult
from ingot.engine.output import SequenceOutput
from ingot.engine.pooling import PoolingWorkload
from ingot.engine.request import Ended, Event, Failed, Request, Sampling, Stop
from ingot.engine.streams import BlockingStream, EventBatch
from ingot.errors import DeviceLost, Unavailable
from ingot.kernels.device import Device
from tests import engines
from tests.waiting import WAIT_S

GREEDY = Sampling(temperature=0.0)
LONG = Stop(ignore_eos=True)
PROMPT = tuple((5 * number) % 95 for number in range(80))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start("llama", cache_bytes=1 << 24)
    yield made
    made.close()


def asked(name: str, tokens: int = 40) -> Request:
    return Request(name, (PROMPT,), max_tokens=tokens, sampling=GREEDY, stop=LONG)


def read(stream: BlockingStream) -> list[Event]:
    return [event for batch in stream for event in batch]


def test_a_writer_that_fails_ends_its_own_request_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engines.text_of(engines.answer(engine, asked("before")))
    write = SequenceOutput.write

    def failing(self: SequenceOutput, result: SequenceResult) -> list[Event]:
        if result.sequence.request.id == "broken" and result.sequence.produced == 3:
            raise RuntimeError("this writer is broken")
        return write(self, result)

    monkeypatch.setattr(SequenceOutput, "write", failing)
    fine, broken = engine.generate(asked("fine")), engine.generate(asked("broken"))
    last = read(broken)[-1]
    assert isinstance(last, Failed) and "log says why" in last.error.message
    assert engines.text_of(read(fine)) == expected
    engine.check()
    after = engines.answer(engine, asked("after"))
    assert engines.text_of(after) == expected
    assert isinstance(after[-1], Ended) and after[-1].usage.cached_tokens > 0, "what was kept is still there"


@dataclass
class Deaf:
    """A reader whose end is gone."""

    taken: list[EventBatch] = field(default_factory=list)

    def post(self, batch: EventBatch) -> None:
        if self.taken:
            raise OSError("nobody is there")
        self.taken.append(batch)


def test_a_reader_that_fails_ends_its_own_request_and_no_other(engine: Engine) -> None:
    expected = engines.text_of(engines.answer(engine, asked("before")))
    fine = engine.generate(asked("fine"))
    engine._accept(asked("deaf", 400), Deaf())
    assert engines.text_of(read(fine)) == expected
    engine.check()
    assert not any(status.id == "deaf" for status in engine.status())


def test_a_letter_that_fails_fails_who_runs_and_the_engine_goes_on(engine: Engine) -> None:
    running = engine.generate(asked("running", 1000))
    next(iter(running))

    def broken() -> None:
        raise RuntimeError("this letter is broken")

    engines.post(engine, broken)
    assert isinstance(read(running)[-1], Failed)
    assert engine.health().alive
    assert isinstance(engines.answer(engine, asked("next"))[-1], Ended)
    engine.check()


def test_encoders_that_fail_leave_the_answers_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PoolingWorkload, spent_s: float, shared: Callable[[], bool]) -> None:
        raise RuntimeError("the encoders are broken")

    monkeypatch.setattr(PoolingWorkload, "advance", broken)
    assert isinstance(engines.answer(engine, asked("fine"))[-1], Ended)


class EndOfTheWorld(BaseException):
    """What no guard catches."""


def test_a_thread_that_ends_ends_every_stream_and_health_says_so(engine: Engine) -> None:
    running = [engine.generate(asked(f"running{number}", 1500)) for number in range(3)]
    next(iter(running[0]))

    def end() -> None:
        raise EndOfTheWorld

    engines.post(engine, end)
    for stream in running:
        assert isinstance(read(stream)[-1], Failed)
    engine._loop._thread.join(WAIT_S)
    health = engine.health()
    assert not health.alive and health.detail == "the engine has stopped" and health.running == 0
    with pytest.raises(Unavailable):
        engine.generate(asked("late"))
    with pytest.raises(Unavailable):
        engine.check()


@pytest.mark.parametrize("device", [None, engines.GPU], ids=["cpu", "gpu"])
def test_a_lost_device_ends_those_that_run_and_those_that_wait_and_takes_nobody_else(device: Device | None) -> None:
    def wait(tokens: int) -> None:
        if broken:
            raise RuntimeError(broken.pop())

    broken: list[str] = []
    engine = engines.start("llama", cache_bytes=1 << 24, device=device, wait=wait, limits=EngineLimits(max_sequences=1))
    lost = threading.Event()
    engine.on_device_lost(lost.set)
    running, waiting = engine.generate(asked("running", 1500)), engine.generate(asked("waiting"))
    next(iter(running))
    broken.append("cudaGraphLaunch(graph, stream) failed: an illegal memory access was encountered")
    for stream in (running, waiting):
        last = read(stream)[-1]
        assert isinstance(last, Failed) and isinstance(last.error, DeviceLost) and "device was lost" in str(last.error)
    assert lost.wait(WAIT_S)
    health = engine.health()
    assert (health.alive, health.ready, health.running, health.queued) == (False, False, 0, 0)
    assert "device was lost" in health.detail
    with pytest.raises(DeviceLost):
        engine.generate(asked("late"))
    engine.close()


def test_too_little_memory_is_the_fault_of_who_runs_and_no_end() -> None:
    def wait(tokens: int) -> None:
        if broken:
            raise RuntimeError(broken.pop())

    broken = ["cudaMallocAsync(&data, size, stream) failed: out of memory"]
    engine = engines.start("llama", wait=wait)
    last = engines.answer(engine, asked("large"))[-1]
    assert isinstance(last, Failed) and not isinstance(last.error, DeviceLost)
    assert isinstance(engines.answer(engine, asked("next"))[-1], Ended) and engine.health().ready
    engine.close()
