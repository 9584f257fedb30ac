"""What an engine remembers of its clients is bounded, however many there are and whatever they call themselves."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.cache.disk.store import DiskLimits
from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.admission import EngineLimits
from ingot.engine.core import GenerationWorkload
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Failed, Request, Sampling, SpecPrefillRequest, Stop
from ingot.engine.specprefill.selection import PromptScores
from ingot.engine.streams import EventBatch
from ingot.errors import IngotError
from tests import engines
from tests.engine.specprefill import world as specprefill

ROUND = 40


def salted() -> int:
    """Owners with a salt of this test that are remembered anywhere."""
    gc.collect()
    return sum(type(each) is CacheOwner and each.salt.startswith("salt-") for each in gc.get_objects())


def test_a_client_with_another_salt_each_time_makes_nothing_grow(tmp_path: Path) -> None:
    engine = engines.start("llama", cache_bytes=1 << 17, disk=tmp_path, disk_limits=DiskLimits(1 << 18, sync=False))
    rng, seen = random.Random(1), []
    for turn in range(3):
        for number in range(ROUND):
            prompt = tuple(rng.randrange(95) for _ in range(100))
            sampling, salt = Sampling(temperature=0.0), f"salt-{turn}-{number}"
            wanted = Request(salt, (prompt,), max_tokens=2, sampling=sampling, salt=salt)
            assert isinstance(engines.answer(engine, wanted)[-1], Ended)
        seen.append(salted())
    engine.check()
    engine.close()
    assert seen[0] > 0 and seen[2] - seen[0] < ROUND, f"of {2 * ROUND} further salts, so many are remembered: {seen}"


class Reader:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def post(self, batch: EventBatch) -> None:
        self.events += batch

    @property
    def failure(self) -> IngotError | None:
        last = self.events[-1]
        return last.error if isinstance(last, Failed) else None


class Deaf(Reader):
    def post(self, batch: EventBatch) -> None:
        if any(isinstance(event, Failed) for event in batch):
            raise OSError("nobody is there")


class World:
    """A workload over the model of an engine that has nothing to do itself. Lives on that engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self.mail: list[Callable[[], None]] = []
        self.workload = GenerationWorkload(engine._loaded, EngineLimits(), self.mail.append)

    def ask(self, id: str, tokens: int = 5, reader: Reader | None = None, **options: Any) -> Reader:
        reader = reader or Reader()
        sampling, stop = Sampling(temperature=0.0), Stop(ignore_eos=True)
        given = {"prompts": ((1, 2, 3),), "max_tokens": tokens, "sampling": sampling, "stop": stop, **options}
        self.workload.enter(Request(id, **given), reader)
        return reader

    def turn(self, *, shared: bool = False) -> None:
        while self.mail:
            self.mail.pop(0)()
        self.workload.advance(0.0, lambda: shared)
        self.workload.check()

    def finish(self) -> None:
        for _ in range(100):
            if not self.workload.busy:
                self.workload.advance(0.0, lambda: False)  # the last words go out
                return
            self.turn()
        raise AssertionError("requests are left over")


@pytest.fixture(params=["cpu", "gpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start("llama", device=engines.GPU if request.param == "gpu" else None)
    yield made
    made.close()


@pytest.mark.parametrize("engine", ["gpu"], indirect=True)
@pytest.mark.parametrize("shared", [True, False])
def test_no_token_waits_for_another_workload(engine: Engine, shared: bool) -> None:
    def run() -> None:
        world = World(engine)
        reader = world.ask("one")
        world.turn(shared=shared)
        assert bool(reader.events) == shared, "read at once, or while the next step runs"
        world.finish()
        assert isinstance(reader.events[-1], Ended)

    engine._loop.run(run)


def test_a_failure_beside_the_step_is_told_in_the_same_turn() -> None:
    def failing(prompt: tuple[int, ...]) -> PromptScores:
        raise RuntimeError("no idea")

    engine = specprefill.start("llama", lambda: specprefill.Told(failing))

    def run() -> None:
        world = World(engine)
        reader = world.ask("scored", prompts=(specprefill.some(400),), specprefill=SpecPrefillRequest())
        while world.workload.busy:
            world.turn()
        assert reader.failure is not None, "the loop waits for the next message now"

    engine._loop.run(run)
    engine.close()


def test_beginning_anew_ends_everybody_and_the_next_is_answered(engine: Engine) -> None:
    def run() -> None:
        world = World(engine)
        running = world.ask("running", 100)
        world.turn()
        waiting = world.ask("waiting")
        failed = IngotError("a step failed")
        world.workload.reset_after_fault(failed)
        assert running.failure is failed and waiting.failure is failed
        assert not world.workload.busy
        following = world.ask("following")
        world.finish()
        assert isinstance(following.events[-1], Ended)
        world.workload.rest()
        world.workload.check()

    engine._loop.run(run)


def test_a_farewell_reaches_everybody_whatever_became_of_the_books(engine: Engine) -> None:
    def run() -> None:
        world = World(engine)
        world.ask("deaf", 100, Deaf())
        running = world.ask("running", 100)
        world.turn()
        waiting = world.ask("waiting")
        del world.workload._core
        gone = IngotError("the thread ends")
        world.workload.farewell(gone)
        assert running.failure is gone and waiting.failure is gone

    engine._loop.run(run)
