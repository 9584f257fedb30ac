"""The loop and its workloads, without mlx: workloads that write down what they are called for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ingot.engine import loop as loops
from ingot.engine.loop import FAILED, Loop
from ingot.errors import IngotError, Unavailable

WAIT_S = 10


class Counting:
    """A workload that ends each request when it has worked for it once."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary
        self.waiting: dict[str, threading.Event] = {}
        self.ended: dict[str, IngotError | None] = {}
        self.spent: list[float] = []
        self.shared: list[bool] = []
        self.broken: set[str] = set()
        self.while_closing: Callable[[], None] = lambda: None

    def ask(self, request: str) -> threading.Event:
        return self.waiting.setdefault(request, threading.Event())

    def answered(self, request: str) -> bool:
        return self.ask(request).wait(WAIT_S) and self.ended[request] is None

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def expire(self, now: float) -> None:
        self._note("expire")

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        self.spent.append(spent_s)
        self.shared.append(shared())
        self._note("advance")
        self._end_all(None)

    def rest(self) -> None:
        self._note("rest")

    def check(self) -> None:
        assert "check" not in self.broken, f"{self.name} has lost something"

    def abandon(self, error: IngotError) -> None:
        self._note("abandon")
        self._end_all(error)

    def begin_anew(self, error: IngotError) -> None:
        self.broken.discard("advance")
        self._note("begin anew")
        self._end_all(error)

    def farewell(self, error: IngotError) -> None:
        self._note("farewell")
        self._end_all(error)

    def close(self) -> None:
        self._note("close")
        self.while_closing()

    def _note(self, call: str) -> None:
        self.diary.append(f"{self.name}: {call}")
        if call in self.broken:
            raise RuntimeError(f"{call} is broken")

    def _end_all(self, error: IngotError | None) -> None:
        for request in list(self.waiting):
            self.ended[request] = error
            self.waiting.pop(request).set()


class World:
    def __init__(self) -> None:
        self.diary: list[str] = []
        self.first, self.second = Counting("first", self.diary), Counting("second", self.diary)
        self.loop = Loop("a loop", lambda: (self.first, self.second))

    def ask(self, workload: Counting, request: str) -> threading.Event:
        waits = workload.ask(request)
        self.loop.post(workload, lambda: None)
        return waits

    def ask_both(self) -> tuple[threading.Event, threading.Event]:
        """Two requests, one each, which the same turn finds."""
        asked: list[threading.Event] = []
        self.loop.run(lambda: asked.extend((self.first.ask("one"), self.second.ask("two"))))
        return asked[0], asked[1]

    def calls(self, call: str) -> list[str]:
        return [line for line in self.diary if line.endswith(f": {call}")]


@contextmanager
def running() -> Iterator[World]:
    world = World()
    world.loop.start()
    try:
        yield world
    finally:
        world.loop.close()


def test_workloads_take_turns_in_their_order_and_know_of_each_other() -> None:
    with running() as world:
        one, two = world.ask_both()
        assert one.wait(WAIT_S) and two.wait(WAIT_S)
        world.loop.check()
    advances = world.calls("advance")
    assert advances == ["first: advance", "second: advance"] * (len(advances) // 2)
    assert True in world.first.shared, "the second had something to do as well"
    assert not any(world.second.shared), "by then the first was done"
    assert all(spent >= 0.0 for spent in world.second.spent)
    assert all(later >= earlier for earlier, later in zip(world.first.spent, world.second.spent, strict=True))


def test_they_rest_only_while_nobody_has_anything_to_do() -> None:
    with running() as world:
        for number in range(3):
            assert world.ask(world.second, str(number)).wait(WAIT_S)
        world.loop.check()
    rests = world.calls("rest")
    assert rests == ["first: rest", "second: rest"] * (len(rests) // 2) and rests
    busy = world.diary.index("second: advance")
    assert world.diary.index("first: rest") < busy


@pytest.mark.parametrize("call", ["advance", "expire"])
def test_a_fault_ends_the_requests_of_its_workload_and_no_others(call: str) -> None:
    with running() as world:
        world.loop.run(lambda: world.second.broken.add(call))
        one, two = world.ask_both()
        assert one.wait(WAIT_S) and two.wait(WAIT_S)
        world.loop.run(world.second.broken.clear)
        assert world.first.ended["one"] is None
        failed = world.second.ended["two"]
        assert failed is not None and failed.message == FAILED
        assert not world.ask(world.second, "next").wait(0) or world.second.ended["next"] is None
        assert world.second.answered("next") or world.second.ended["next"] is None
    assert "first: begin anew" not in world.diary


def test_a_letter_that_fails_is_the_fault_of_its_workload() -> None:
    def broken() -> None:
        raise RuntimeError("this letter is broken")

    with running() as world:
        world.loop.post(world.second, broken)
        world.loop.check()
        assert world.calls("begin anew") == ["second: begin anew"]


def test_a_workload_that_fails_at_rest_begins_anew() -> None:
    with running() as world:
        world.loop.run(lambda: world.first.broken.add("rest"))
        world.loop.run(lambda: None)
        world.loop.run(world.first.broken.clear)
        assert world.loop.pulse().alive
    assert "first: begin anew" in world.diary and "second: begin anew" not in world.diary


def test_what_is_done_on_the_thread_raises_for_who_asked() -> None:
    with running() as world:
        assert world.loop.run(threading.current_thread).name == "a loop"
        world.loop.run(lambda: world.second.broken.add("check"))
        with pytest.raises(AssertionError, match="second has lost something"):
            world.loop.check()
        assert not world.calls("begin anew")


def test_a_loop_that_cannot_be_prepared_raises_what_went_wrong() -> None:
    def prepare() -> tuple[()]:
        raise ValueError("no model here")

    loop = Loop("a loop", prepare)
    with pytest.raises(ValueError, match="no model here"):
        loop.start()
    assert not loop.pulse().alive


def test_closing_gives_up_what_runs_and_says_farewell_before_it_leaves_the_device() -> None:
    with running() as world:
        pass
    ends = [line for line in world.diary if line.split(": ")[1] in ("abandon", "farewell", "close")]
    calls = ("abandon", "farewell", "close")
    assert ends == [f"{name}: {call}" for call in calls for name in ("first", "second")]
    with pytest.raises(Unavailable):
        world.loop.run(lambda: None)


def test_who_comes_while_the_thread_ends_is_told() -> None:
    world = World()
    late: list[threading.Thread] = []

    def come_late() -> None:
        late.append(threading.Thread(target=lambda: world.ask(world.first, "late")))
        came = threading.Event()
        ask = world.first.ask

        def noting(request: str) -> threading.Event:
            waits = ask(request)
            came.set()
            return waits

        world.first.ask = noting  # type: ignore[method-assign]
        late[0].start()
        assert came.wait(WAIT_S)

    world.first.while_closing = come_late
    world.loop.start()
    world.loop.close()
    late[0].join(WAIT_S)
    told = world.first.ended.get("late")
    assert isinstance(told, Unavailable)


class EndOfTheWorld(BaseException):
    """What no guard catches."""


@pytest.mark.parametrize("broken", ["begin anew", "everything"])
def test_a_thread_that_cannot_go_on_says_farewell_and_its_pulse_says_so(broken: str) -> None:
    def end() -> None:
        raise RuntimeError if broken == "begin anew" else EndOfTheWorld

    with running() as world:
        world.first.broken |= {"begin anew", "farewell"}
        waits: list[threading.Event] = []

        def ask_and_end() -> None:
            waits.append(world.second.ask("two"))
            end()

        world.loop.post(world.first, ask_and_end)
        world.loop._thread.join(WAIT_S)
        assert waits[0].wait(WAIT_S) and isinstance(world.second.ended["two"], Unavailable)
        assert world.loop.pulse().detail == "the engine has stopped" and not world.loop.pulse().alive
        assert "first: abandon" not in world.diary and world.calls("close") == ["first: close", "second: close"]
        with pytest.raises(Unavailable):
            world.loop.refuse_if_stopped()


def test_a_loop_without_a_beat_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as world:
        assert world.loop.pulse().detail == "ok"
        monkeypatch.setattr(loops, "STALLED_S", 0.0)
        pulse = world.loop.pulse()
        assert (pulse.alive, pulse.ready, pulse.detail) == (False, False, "the engine is stuck")
