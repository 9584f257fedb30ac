"""The loop and its workloads, without mlx: workloads that write down what they are called for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import pytest

from ingot.engine import loop as loops
from ingot.engine.loop import REQUEST_FAILED, Loop
from ingot.errors import DeviceLost, IngotError, Unavailable
from tests.waiting import WAIT_S

LOST = "unspecified launch failure"


def is_lost(error: BaseException) -> bool:
    return isinstance(error, DeviceLost) or LOST in str(error)


class Counting:
    """A workload that ends its requests after `pieces` turns. What is in `broken` fails."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary
        self.waiting: dict[str, threading.Event] = {}
        self.ended: dict[str, IngotError | None] = {}
        self.pieces = 1
        self.broken: set[str] = set()
        self.turns: list[tuple[float, bool]] = []
        self.while_closing: Callable[[], None] = lambda: None

    def ask(self, request: str) -> threading.Event:
        self.diary.append(f"{self.name}: asked")
        return self.waiting.setdefault(request, threading.Event())

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def expire(self, now: float) -> None:
        self._note("expire")

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        self.turns.append((spent_s, shared()))
        self._note("advance")
        self.pieces -= self.busy
        if self.pieces <= 0:
            self._end_all(None)

    def rest(self) -> None:
        self._note("rest")

    def check(self) -> None:
        assert "check" not in self.broken, f"{self.name} has lost something"

    def abandon(self, error: IngotError) -> None:
        self._note("abandon")
        self._end_all(error)

    def reset_after_fault(self, error: IngotError) -> None:
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
        self.loop = Loop("a loop", lambda: (self.first, self.second), self._leave, is_lost)

    def _leave(self) -> None:
        self.diary.append("loop: left the device")

    def ask_both(self, broken: str | None = None) -> None:
        """A request for each, which the same turn finds, and the second may be broken; returns when both ended."""

        def ask() -> list[threading.Event]:
            if broken is not None:
                self.second.broken.add(broken)
            return [self.first.ask("one"), self.second.ask("two")]

        for waits in self.loop.run(ask):
            assert waits.wait(WAIT_S)

    def calls(self, *calls: str) -> list[str]:
        return [line for line in self.diary if line.split(": ")[1] in calls]


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
        world.ask_both()
    advances = world.calls("advance")
    assert advances == ["first: advance", "second: advance"] * (len(advances) // 2)
    assert True in [shared for _, shared in world.first.turns], "the second had something to do as well"
    assert True not in [shared for _, shared in world.second.turns], "by then the first was done"
    for (before, _), (spent, _) in zip(world.first.turns, world.second.turns, strict=True):
        assert 0 <= before <= spent


def test_others_have_turns_while_one_waits_within_its_own() -> None:
    with running() as world:
        world.second.pieces, within = 3, list[int]()

        def advance(spent_s: float, shared: Callable[[], bool]) -> None:
            if world.first.busy:
                before = len(world.calls("advance"))
                world.loop.run_meanwhile()
                within.append(len(world.calls("advance")) - before)
                world.first._end_all(None)

        world.first.advance = advance  # type: ignore[method-assign]
        world.ask_both()
    assert within == [1]
    assert set(world.calls("advance")) == {"second: advance"}


def test_they_rest_while_nobody_has_anything_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "REST_S", inf)
    with running() as world:
        world.second.pieces = 3
        world.ask_both()
        world.loop.run(lambda: None)  # before which they have rested
    calls = world.calls("asked", "advance", "rest")
    since = calls[calls.index("second: asked") + 1 :]
    assert since[:6] == ["first: advance", "second: advance"] * 3
    assert since[6:8] == ["first: rest", "second: rest"]


def test_one_that_has_nothing_to_do_rests_now_and_then_while_another_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "REST_S", -1.0)  # at each turn
    with running() as world:
        world.first.pieces = 3
        for waits in world.loop.run(lambda: [world.first.ask("one")]):
            assert waits.wait(WAIT_S)
    calls = world.calls("asked", "advance", "rest")
    since = calls[calls.index("first: asked") + 1 :]
    turn = ["first: advance", "second: advance", "second: rest"]
    assert since[:7] == [*turn, *turn, "first: advance"]


@pytest.mark.parametrize("call", ["advance", "expire"])
def test_a_fault_ends_the_requests_of_its_workload_and_no_others(call: str) -> None:
    with running() as world:
        world.ask_both(broken=call)
        failed = world.second.ended["two"]
        assert world.first.ended["one"] is None
        assert failed is not None and failed.message == REQUEST_FAILED
        world.loop.run(world.second.broken.clear)
        world.ask_both()
        assert world.second.ended["two"] is None, "it goes on"
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
        world.loop.run(lambda: None)  # before which it has rested
        assert world.loop.pulse().alive
    assert {*world.calls("begin anew")} == {"first: begin anew"}


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
    calls = ("abandon", "farewell", "close")
    assert world.calls(*calls) == [f"{name}: {call}" for call in calls for name in ("first", "second")]
    with pytest.raises(Unavailable):
        world.loop.run(lambda: None)


def test_who_comes_while_the_thread_ends_is_told() -> None:
    world = World()
    came = threading.Event()
    found: list[threading.Event] = []

    def come() -> None:
        found.append(world.first.ask("late"))
        came.set()
        world.loop.post(world.first, lambda: None)

    late = threading.Thread(target=come)

    def meanwhile() -> None:
        late.start()
        assert came.wait(WAIT_S)

    world.first.while_closing = meanwhile
    world.loop.start()
    world.loop.close()
    late.join(WAIT_S)
    assert found[0].is_set() and isinstance(world.first.ended["late"], Unavailable)


class EndOfTheWorld(BaseException):
    """What no guard catches."""


@pytest.mark.parametrize("fault", [RuntimeError, EndOfTheWorld])
def test_a_thread_that_cannot_go_on_says_farewell_and_its_pulse_says_so(fault: type[BaseException]) -> None:
    with running() as world:
        world.first.broken |= {"begin anew", "farewell"}

        def end() -> None:
            world.second.ask("two")
            raise fault

        world.loop.post(world.first, end)
        world.loop._thread.join(WAIT_S)
        assert isinstance(world.second.ended["two"], Unavailable)
        pulse = world.loop.pulse()
        assert (pulse.alive, pulse.ready, pulse.detail) == (False, False, "the engine has stopped")
        assert world.calls("abandon", "close") == ["first: close", "second: close"]
        with pytest.raises(Unavailable):
            world.loop.refuse_if_stopped()


def test_a_loop_without_a_beat_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as world:
        assert world.loop.pulse().detail == "ok"
        monkeypatch.setattr(loops, "STALLED_S", 0.0)
        pulse = world.loop.pulse()
        assert (pulse.alive, pulse.ready, pulse.detail) == (False, False, "the engine is stuck")


def test_workloads_come_and_go_while_the_loop_runs() -> None:
    with running() as world:
        third = Counting("third", world.diary)
        world.loop.add(lambda: [third])
        ended = world.loop.run(lambda: third.ask("one"))
        assert ended.wait(WAIT_S)
        third.pieces = 1 << 30
        ended = world.loop.run(lambda: third.ask("two"))
        world.loop.run(lambda: world.loop.remove([third], Unavailable("gone")))
        assert ended.is_set() and isinstance(third.ended["two"], Unavailable)
        turns = len(third.turns)
        world.ask_both()
        assert len(third.turns) == turns


def test_the_others_get_turns_while_a_workload_is_made_that_lets_them_breathe() -> None:
    with running() as world:

        def make() -> list[Counting]:
            ended = world.first.ask("meanwhile")
            world.loop.run_other_workloads()
            assert ended.is_set()
            return []

        assert world.loop.add(make) == ()


def test_what_goes_wrong_in_making_a_workload_is_for_who_asked_for_it() -> None:
    def make() -> list[Counting]:
        raise RuntimeError("no memory")

    with running() as world:
        with pytest.raises(RuntimeError, match="no memory"):
            world.loop.add(make)
        world.ask_both()


def lose() -> None:
    raise RuntimeError(LOST)


@contextmanager
def losing() -> Iterator[tuple[World, threading.Event]]:
    """A loop with a request for each workload, and who is told that the device is lost."""
    with running() as world:
        lost = threading.Event()
        world.loop.on_device_lost(lost.set)
        world.first.pieces = world.second.pieces = 1 << 30
        world.loop.run(lambda: (world.first.ask("one"), world.second.ask("two")))
        yield world, lost


def lose_in_a_letter(world: World) -> None:
    world.loop.post(world.second, lose)


def lose_in_a_step(world: World) -> None:
    def advance(spent_s: float, shared: Callable[[], bool]) -> None:
        lose()

    world.second.advance = advance  # type: ignore[method-assign]


def lose_in_work(world: World) -> None:
    with pytest.raises(DeviceLost):
        world.loop.run(lose)


def lose_beside_a_load(world: World) -> None:
    def load() -> tuple[()]:
        lose_in_a_step(world)
        world.loop.run_other_workloads()
        return ()

    with pytest.raises(DeviceLost):
        world.loop.add(load)


def lose_in_beginning_anew(world: World) -> None:
    def reset_after_fault(error: IngotError) -> None:
        lose()

    world.second.reset_after_fault = reset_after_fault  # type: ignore[method-assign]
    world.loop.run(lambda: world.second.broken.add("advance"))


@pytest.mark.parametrize(
    "loses", [lose_in_a_letter, lose_in_a_step, lose_in_work, lose_beside_a_load, lose_in_beginning_anew]
)
def test_a_lost_device_is_the_end_of_all_workloads_and_nothing_reaches_for_it(loses: Callable[[World], None]) -> None:
    with losing() as (world, lost):
        loses(world)
        assert lost.wait(WAIT_S)
        assert isinstance(world.first.ended["one"], DeviceLost) and isinstance(world.second.ended["two"], DeviceLost)
        pulse = world.loop.pulse()
        assert (pulse.alive, pulse.ready) == (False, False) and "device was lost" in pulse.detail
        for refused in (world.loop.refuse_if_stopped, world.loop.check, lambda: world.loop.run(lambda: None)):
            with pytest.raises(DeviceLost):
                refused()
        late = world.second.ask("late")
        world.loop.post(world.second, lambda: None)
        assert late.is_set() and isinstance(world.second.ended["late"], DeviceLost)
        assert not world.calls("begin anew", "abandon", "close", "left the device")
        lost = threading.Event()
        world.loop.on_device_lost(lost.set)
        assert lost.is_set(), "whoever asks late is told at once"
    assert world.calls("close", "left the device") == ["loop: left the device"], "where the process lives on after all"


def test_a_device_that_is_lost_in_the_first_load_is_left_alone() -> None:
    def prepare() -> tuple[()]:
        raise RuntimeError(LOST)

    diary: list[str] = []
    loop = Loop("a loop", prepare, lambda: diary.append("left"), is_lost)
    with pytest.raises(DeviceLost):
        loop.start()
    assert not loop.pulse().alive and diary == []
    loop.close()
