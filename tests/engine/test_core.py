"""Generation as a workload, one turn at a time: the test is its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ingot.engine.admission import Limits
from ingot.engine.core import Generation
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Failed, Request, Sampling, Stop
from ingot.engine.streams import Batch
from ingot.errors import IngotError
from tests import engines


class Reader:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def post(self, batch: Batch) -> None:
        self.events += batch

    @property
    def failure(self) -> IngotError | None:
        last = self.events[-1]
        return last.error if isinstance(last, Failed) else None


class Deaf(Reader):
    def post(self, batch: Batch) -> None:
        if any(isinstance(event, Failed) for event in batch):
            raise OSError("nobody is there")


class World:
    """A workload over the model of an engine that has nothing to do itself. Lives on that engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self.mail: list[Callable[[], None]] = []
        self.workload = Generation(engine._loaded, Limits(), self.mail.append)

    def ask(self, id: str, tokens: int = 5, reader: Reader | None = None) -> Reader:
        reader = reader or Reader()
        sampling, stop = Sampling(temperature=0.0), Stop(ignore_eos=True)
        self.workload.enter(Request(id, ((1, 2, 3),), max_tokens=tokens, sampling=sampling, stop=stop), reader)
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


def test_beginning_anew_ends_everybody_and_the_next_is_answered(engine: Engine) -> None:
    def run() -> None:
        world = World(engine)
        running = world.ask("running", 100)
        world.turn()
        waiting = world.ask("waiting")
        failed = IngotError("a step failed")
        world.workload.begin_anew(failed)
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
        del world.workload._books
        gone = IngotError("the thread ends")
        world.workload.farewell(gone)
        assert running.failure is gone and waiting.failure is gone

    engine._loop.run(run)
