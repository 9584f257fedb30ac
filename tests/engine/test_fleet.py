"""A fleet over models that are numbers: who is loaded when, who waits, and who makes room. Nothing here touches mlx,
and no time passes but that which somebody waits for."""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingot.config import ModelEntry, Settings
from ingot.engine import fleet as fleets
from ingot.engine.fleet import Fleet
from ingot.engine.status import StatedFacts
from ingot.errors import DeadlineExceeded, ModelError, Unavailable

GB = 1_000_000_000
WAIT_S = 10.0
SOON_S = 0.01
SETTINGS = Settings()
pytestmark = pytest.mark.anyio


class Clockwork(selectors.DefaultSelector):
    """Whoever waits for a time is told at once that it has come."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nobody for a time"
        self.now += timeout
        return super().select(0)


class ClockworkLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clockwork = Clockwork()
        super().__init__(self._clockwork)

    def time(self) -> float:
        return self._clockwork.now


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": ClockworkLoop}


class Garage:
    """Loads models by noting that it did. `hold` keeps loads waiting until it is set."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes, self.loads, self.diary = sizes, Counter[str](), list[str]()
        self.hold: asyncio.Event | None = None
        self.broken: dict[str, str] = {}

    def stated(self, entry: ModelEntry) -> StatedFacts | None:
        return None

    async def measure(self, entry: ModelEntry, report: object = None) -> int:
        await asyncio.sleep(0)
        return self.sizes[entry.name]

    async def load(self, entry: ModelEntry, claim: int, told: Callable[[float], None]) -> Any:
        told(0.5)
        self.loads[entry.name] += 1
        self.diary.append(f"+{entry.name}")
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(0)
        if entry.name in self.broken:
            raise ModelError(self.broken[entry.name])
        return f"engine of {entry.name}"

    async def unload(self, engine: Any) -> None:
        await asyncio.sleep(0)
        self.diary.append(f"-{engine.split()[-1]}")


def entry(name: str, **changes: Any) -> ModelEntry:
    return replace(ModelEntry(name, SETTINGS), **changes)


def fleet_of(*entries: ModelEntry, memory: int = 10 * GB, size: int = GB, **options: Any) -> tuple[Fleet, Garage]:
    garage = Garage({each.name: size for each in entries})
    clock = asyncio.get_running_loop().time
    return Fleet(entries, garage, memory, **{"swap_wait_s": WAIT_S, "clock": clock} | options), garage


def state(fleet: Fleet, name: str) -> str:
    return next(each.state for each in fleet.statuses() if each.name == name)


async def use(fleet: Fleet, name: str, unload_after_s: float | None = None) -> str:
    async with fleet.lease(name, unload_after_s) as engine:
        await asyncio.sleep(0)
        return str(engine)


class Client:
    """A request that lasts until it is told to end, or leaves."""

    def __init__(
        self, fleet: Fleet, name: str, within_s: float = inf, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.is_served = False
        self._over = asyncio.Event()
        self._task = (loop or asyncio.get_running_loop()).create_task(self._ask(fleet, name, within_s))

    async def _ask(self, fleet: Fleet, name: str, within_s: float) -> None:
        async with fleet.lease(name, None, within_s):
            self.is_served = True
            await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await self._task
        await asyncio.sleep(SOON_S)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await asyncio.sleep(SOON_S)

    @property
    def is_over(self) -> bool:
        return self._task.done()

    @property
    def error(self) -> BaseException | None:
        return self._task.exception()


async def asked(fleet: Fleet, name: str, within_s: float = inf) -> Client:
    """A client that has had the time to be served, if nothing stands against it."""
    client = Client(fleet, name, within_s)
    await asyncio.sleep(SOON_S)
    return client


async def until(fleet: Fleet, name: str, wanted: str) -> None:
    async with asyncio.timeout(300):
        while state(fleet, name) != wanted:
            await asyncio.sleep(0.1)


async def test_fifty_requests_that_come_at_once_are_one_load() -> None:
    fleet, garage = fleet_of(entry("a"))
    assert await asyncio.gather(*(use(fleet, "a") for _ in range(50))) == ["engine of a"] * 50
    assert garage.loads == {"a": 1}


async def test_states_tell_of_a_load_and_its_progress() -> None:
    fleet, garage = fleet_of(entry("a"))
    garage.hold = asyncio.Event()
    using = asyncio.create_task(use(fleet, "a"))
    async with asyncio.timeout(30):
        while not garage.loads:
            await asyncio.sleep(0)
    [stands] = fleet.statuses()
    assert (stands.state, stands.progress, stands.waiting, stands.claimed) == ("loading", 0.5, 1, GB)
    garage.hold.set()
    await using
    [stands] = fleet.statuses()
    assert (stands.state, stands.progress, stands.waiting, stands.requests) == ("loaded", None, 0, 0)


async def test_idle_time_counts_from_the_end_of_the_last_request() -> None:
    fleet, garage = fleet_of(entry("a", idle_s=0.02))
    async with fleet.lease("a"):
        await asyncio.sleep(0.06)
        assert state(fleet, "a") == "loaded" and fleet.statuses()[0].expires_s is None
    assert state(fleet, "a") == "loaded" and fleet.statuses()[0].expires_s is not None
    await until(fleet, "a", "unloaded")
    assert garage.diary == ["+a", "-a"]


async def test_a_request_that_comes_in_the_idle_time_keeps_the_model() -> None:
    fleet, garage = fleet_of(entry("a", idle_s=0.05))
    await use(fleet, "a")
    async with fleet.lease("a"):
        await asyncio.sleep(0.1)
        assert garage.diary == ["+a"]


async def test_a_request_says_how_long_its_model_stays_and_a_pin_is_stronger() -> None:
    fleet, _ = fleet_of(entry("a"), entry("b", pin=True))
    await use(fleet, "a", unload_after_s=0)
    await until(fleet, "a", "unloaded")
    await use(fleet, "b", unload_after_s=0)
    await asyncio.sleep(0.01)
    assert state(fleet, "b") == "loaded"


async def test_the_idle_model_that_weighs_most_makes_room() -> None:
    fleet, garage = fleet_of(entry("small"), entry("large"), entry("new"), memory=4 * GB)
    garage.sizes |= {"large": 3 * GB}
    await use(fleet, "small")
    await use(fleet, "large")
    await asyncio.sleep(1)
    await use(fleet, "new")
    assert garage.diary == ["+small", "+large", "-large", "+new"]


async def test_a_client_that_leaves_before_there_is_room_makes_nobody_go() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB)
    running, other = await asked(fleet, "a"), await asked(fleet, "b")
    await other.leave()
    await running.end()
    await asyncio.sleep(10 * WAIT_S)
    assert garage.diary == ["+a"] and state(fleet, "b") == "unloaded"
    assert (await asked(fleet, "a")).is_served


async def one_late() -> tuple[Fleet, Garage, Client, Client, Client]:
    """A request of a model that makes room for another one's, that one, and one more of the first, which is late."""
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB)
    running, other = await asked(fleet, "a"), await asked(fleet, "b")
    await asyncio.sleep(WAIT_S)
    late = await asked(fleet, "a")
    assert not late.is_served
    return fleet, garage, running, other, late


async def test_a_client_that_leaves_opens_what_was_closed_for_it() -> None:
    _, garage, running, other, late = await one_late()
    await other.leave()
    assert late.is_served
    await running.end()
    await late.end()
    assert garage.diary == ["+a"]


async def test_a_client_that_leaves_in_a_swap_keeps_what_is_still_there() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), entry("large"), memory=2 * GB)
    garage.sizes["large"] = 2 * GB
    await use(fleet, "a")
    await use(fleet, "b")
    leaving = asyncio.Event()

    async def wait(engine: Any) -> None:
        await leaving.wait()

    fleet.leaving = wait
    client = await asked(fleet, "large")
    newcomer = await asked(fleet, "b")
    assert not newcomer.is_served, "it is about to go"
    await client.leave()
    leaving.set()
    await asyncio.sleep(SOON_S)
    assert newcomer.is_served and garage.diary == ["+a", "+b", "-a"]


async def test_a_loaded_model_takes_on_everybody_for_a_while_though_another_is_wanted_and_then_finishes() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB)
    running, other = await asked(fleet, "a"), await asked(fleet, "b")
    await asyncio.sleep(WAIT_S - 1)
    early = await asked(fleet, "a")
    await running.end()
    await asyncio.sleep(1)
    late = await asked(fleet, "a")
    assert early.is_served and not late.is_served and not other.is_served
    await early.end()
    assert other.is_served and garage.diary == ["+a", "-a", "+b"]
    await other.end()
    assert late.is_served and garage.diary == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_moment_in_which_nobody_uses_a_model_is_enough_for_it_to_make_room() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB)
    running, other = await asked(fleet, "a"), await asked(fleet, "b")
    await running.end()
    assert other.is_served and garage.diary == ["+a", "-a", "+b"]


async def test_a_long_answer_holds_up_nobody_for_longer_than_the_time_to_make_room() -> None:
    fleet, garage, long, other, late = await one_late()
    await asyncio.sleep(WAIT_S)
    assert late.is_served
    for _ in range(100):
        await asyncio.sleep(WAIT_S)
        guest = await asked(fleet, "a")
        assert guest.is_served
        await guest.end()
    await long.end()
    last = await asked(fleet, "a")
    assert not last.is_served, "who came while others waited for the long answer makes nobody wait for others like it"
    await late.end()
    assert other.is_served and garage.diary == ["+a", "-a", "+b"]
    await other.end()
    assert last.is_served


async def test_a_long_answer_holds_up_nobody_though_others_waited_already_when_it_began() -> None:
    fleet, _ = fleet_of(entry("a"), entry("b"), memory=GB, min_residency_s=5.0)
    first, _long = await asked(fleet, "a"), await asked(fleet, "b")
    await asyncio.sleep(WAIT_S)
    waiting = await asked(fleet, "a")
    await asyncio.sleep(WAIT_S / 2)
    await first.end()
    await asyncio.sleep(WAIT_S)  # b was loaded, and its answer is long; a has waited for its time by now
    late = await asked(fleet, "b")
    await asyncio.sleep(WAIT_S)
    assert late.is_served and not waiting.is_served


async def test_a_model_that_is_loaded_meanwhile_does_not_let_others_wait_for_longer() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), entry("c"), memory=3 * GB, min_residency_s=1.0)
    garage.sizes |= {"a": 2 * GB, "b": 3 * GB}
    long, other = await asked(fleet, "a"), await asked(fleet, "b")
    await asyncio.sleep(2 * WAIT_S)
    guest, third = await asked(fleet, "a"), await asked(fleet, "c")
    assert guest.is_served and third.is_served
    await long.end()
    late = await asked(fleet, "a")
    await asyncio.sleep(10 * WAIT_S)
    assert not late.is_served
    await guest.end()
    await third.end()
    assert other.is_served


async def test_a_client_in_a_hurry_waits_for_half_of_its_time_and_is_refused_at_the_end_of_it() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB)
    running, hurried = await asked(fleet, "a"), await asked(fleet, "b", within_s=4.0)
    await asyncio.sleep(1)
    assert (await asked(fleet, "a", within_s=1.0)).is_served
    await asyncio.sleep(1)
    late = await asked(fleet, "a")
    assert not late.is_served
    await asyncio.sleep(2)
    assert isinstance(hurried.error, DeadlineExceeded) and "b could not be used within the 4 s" in str(hurried.error)
    assert late.is_served and garage.diary == ["+a"]
    await running.end()


async def test_nobody_is_let_in_beside_a_long_answer_when_a_deadline_is_near() -> None:
    fleet, _ = fleet_of(entry("a"), entry("b"), memory=GB)
    long, other = await asked(fleet, "a"), await asked(fleet, "b", within_s=5 * WAIT_S)
    await asyncio.sleep(3 * WAIT_S)
    guest = await asked(fleet, "a")
    assert guest.is_served
    await guest.end()
    await asyncio.sleep(WAIT_S)
    late = await asked(fleet, "a")
    assert not late.is_served
    await long.end()
    assert other.is_served


async def test_a_third_model_that_fits_is_loaded_at_once_while_two_others_wait_for_each_other() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), entry("c"), memory=3 * GB, size=2 * GB)
    garage.sizes["c"] = GB
    running, other = await asked(fleet, "a"), await asked(fleet, "b")
    await asyncio.sleep(WAIT_S)
    assert (await asked(fleet, "c")).is_served and not other.is_served
    await running.end()
    assert other.is_served and garage.diary == ["+a", "+c", "-a", "+b"]


async def test_memory_is_kept_for_a_model_whose_time_has_come_unless_a_long_answer_holds_it_up() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), entry("c"), memory=3 * GB)
    garage.sizes |= {"a": 2 * GB, "b": 3 * GB}
    running, other = await asked(fleet, "a"), await asked(fleet, "b")
    await asyncio.sleep(WAIT_S)
    third = await asked(fleet, "c")
    assert not third.is_served
    await asyncio.sleep(WAIT_S)
    assert third.is_served
    await running.end()
    await third.end()
    assert other.is_served and garage.diary == ["+a", "+c", "-a", "-c", "+b"]


async def test_nobody_goes_until_all_are_unused_whose_room_is_needed_and_nobody_else_does() -> None:
    fleet, garage = fleet_of(entry("small"), entry("idle"), entry("used"), entry("new"), memory=5 * GB)
    garage.sizes |= {"idle": 2 * GB, "used": 2 * GB, "new": 4 * GB}
    await use(fleet, "small")
    await use(fleet, "idle")
    running = await asked(fleet, "used")
    await asyncio.sleep(1)
    other = await asked(fleet, "new")
    await asyncio.sleep(WAIT_S)
    assert garage.diary == ["+small", "+idle", "+used"]
    await running.end()
    assert other.is_served and garage.diary[3:] == ["-idle", "-used", "+new"]


async def test_a_model_stays_for_its_least_time_though_nobody_uses_it() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB, min_residency_s=5.0)
    await use(fleet, "a")
    other = await asked(fleet, "b")
    await asyncio.sleep(4.9)
    assert garage.diary == ["+a"]
    await asyncio.sleep(0.1)
    assert other.is_served


async def test_who_waits_for_longest_has_the_room_first() -> None:
    fleet, garage = fleet_of(*map(entry, "abc"), memory=GB)
    running = await asked(fleet, "a")
    first, second, hurried = await asked(fleet, "b"), await asked(fleet, "c"), await asked(fleet, "c", within_s=8.0)
    await running.end()
    assert second.is_served and hurried.is_served and not first.is_served
    await second.end()
    await hurried.end()
    assert first.is_served and garage.diary == ["+a", "-a", "+c", "-c", "+b"]


async def test_whoever_waits_for_a_load_has_the_model_though_it_is_to_be_unloaded_by_then() -> None:
    fleet, garage = fleet_of(entry("a"))
    garage.hold = asyncio.Event()
    client = await asked(fleet, "a")
    unloading = asyncio.create_task(fleet.unload("a"))
    await asyncio.sleep(SOON_S)
    garage.hold.set()
    await asyncio.sleep(SOON_S)
    assert client.is_served and not unloading.done()
    await client.end()
    await unloading
    assert garage.diary == ["+a", "-a"]


async def test_unloading_that_nobody_waits_for_any_more_does_not_happen() -> None:
    fleet, garage = fleet_of(entry("a"))
    running = await asked(fleet, "a")
    unloading = asyncio.create_task(fleet.unload("a"))
    late = await asked(fleet, "a")
    assert not late.is_served
    unloading.cancel()
    await asyncio.sleep(SOON_S)
    assert late.is_served
    await running.end()
    await late.end()
    assert garage.diary == ["+a"]


async def test_two_models_that_exclude_each_other_serve_all_their_clients_in_bounded_swaps() -> None:
    residency = 0.05
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB, min_residency_s=residency)
    loop = asyncio.get_running_loop()
    waited = Counter[int]()

    async def client(number: int) -> None:
        for turn in range(5):
            before = garage.loads.total()
            async with fleet.lease("ab"[(number + turn) % 2]):
                waited[garage.loads.total() - before] += 1
                await asyncio.sleep(0.001)

    began = loop.time()
    async with asyncio.timeout(30):
        await asyncio.gather(*map(client, range(20)))
    swaps = garage.loads.total() - 1
    assert swaps <= (loop.time() - began) / residency
    assert waited.total() == 100 and max(waited) <= 2, "somebody waited for more than the next turn of a model"


async def test_a_load_that_fails_fails_its_requests_in_words_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"))
    garage.broken["a"] = "its weights are not there"
    outcomes = await asyncio.gather(use(fleet, "a"), use(fleet, "a"), use(fleet, "b"), return_exceptions=True)
    assert all(isinstance(each, Unavailable) and "its weights are not there" in each.message for each in outcomes[:2])  # type: ignore[union-attr]
    assert outcomes[2] == "engine of b" and garage.loads["a"] == 1
    assert state(fleet, "a") == "failed"
    with pytest.raises(Unavailable, match="its weights are not there"):
        await use(fleet, "a")
    assert garage.loads["a"] == 1, "nothing is tried so soon"
    monkeypatch.setattr(fleets, "RETRY_LOAD_S", 0.0)
    del garage.broken["a"]
    assert await use(fleet, "a") == "engine of a"


async def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    fleet, garage = fleet_of(entry("a", pin=True), entry("b"), memory=3 * GB, size=2 * GB)
    await use(fleet, "a")
    with pytest.raises(Unavailable, match=r"it takes 2\.0 GB, and the memory budget is 3\.0 GB alongside a, which"):
        await use(fleet, "b")
    assert garage.loads == {"a": 1} and state(fleet, "a") == "loaded"


async def test_a_client_that_leaves_while_it_waits_leaves_the_load_to_the_others() -> None:
    fleet, garage = fleet_of(entry("a"))
    garage.hold = asyncio.Event()
    first, second = asyncio.create_task(use(fleet, "a")), asyncio.create_task(use(fleet, "a"))
    await asyncio.sleep(0.01)
    first.cancel()
    garage.hold.set()
    assert await second == "engine of a"
    [stands] = fleet.statuses()
    assert (stands.requests, stands.waiting) == (0, 0) and garage.loads == {"a": 1}


async def test_a_load_that_nobody_waits_for_any_more_is_idle_at_its_end() -> None:
    fleet, garage = fleet_of(entry("a", idle_s=0.01))
    garage.hold = asyncio.Event()
    leaving = asyncio.create_task(use(fleet, "a"))
    await asyncio.sleep(0.01)
    leaving.cancel()
    garage.hold.set()
    await until(fleet, "a", "unloaded")


async def test_the_start_loads_what_is_asked_for_as_far_as_memory_holds_it() -> None:
    fleet, garage = fleet_of(entry("a", preload=True), entry("b"), entry("c", preload=True), memory=GB)
    await fleet.preload()
    assert garage.diary == ["+a"]


async def test_unloading_waits_for_who_uses_it_and_swapping_leaves_the_pinned_alone() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b", pin=True), entry("c"))
    await use(fleet, "b")
    async with fleet.lease("a"):
        unloading = asyncio.create_task(fleet.unload("a"))
        await asyncio.sleep(0.01)
        assert not unloading.done()
    await unloading
    await use(fleet, "a")
    await fleet.swap("c")
    assert garage.diary == ["+b", "+a", "-a", "+a", "-a", "+c"]


async def test_whoever_made_something_for_an_engine_is_told_before_it_goes() -> None:
    fleet, garage = fleet_of(entry("a"))

    async def leaving(engine: Any) -> None:
        garage.diary.append(f"left {engine}")

    fleet.leaving = leaving
    await use(fleet, "a")
    await fleet.unload("a")
    assert garage.diary == ["+a", "left engine of a", "-a"]


SIZES = {"a": GB, "b": GB, "short": 2 * GB, "large": 3 * GB, "broken": GB}
names = st.sampled_from([*SIZES])
few = st.integers(0, 7)
"""Numbers a client, where there are so many."""


class Crowd(RuleBasedStateMachine):
    """Clients that come, leave and stay as they like, at models of which memory never holds all."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = ClockworkLoop()
        self.clients: list[tuple[str, Client]] = []
        self.unloading: dict[str, asyncio.Task[None]] = {}
        self.has: dict[str, int] = {}  # bytes, from the begin of a load to the end of an unloading
        self.run(self._start())

    async def _start(self) -> None:
        entries = [entry(name, idle_s=7.0 if name == "short" else None) for name in SIZES]
        self.fleet, self.garage = fleet_of(*entries, memory=3 * GB, min_residency_s=2.0)
        self.garage.sizes, self.fleet.leaving = SIZES, self._leaving
        self.garage.broken["broken"] = "it is broken"
        load, unload = self.garage.load, self.garage.unload

        async def counted_load(entry: ModelEntry, claim: int, told: Callable[[float], None]) -> Any:
            assert self._waiting(entry.name), "it is loaded for nobody"
            self.has[entry.name] = claim
            assert sum(self.has.values()) <= 3 * GB
            await asyncio.sleep(1)
            try:
                return await load(entry, claim, told)
            except ModelError:
                del self.has[entry.name]
                raise

        async def counted_unload(engine: Any) -> None:
            await asyncio.sleep(1)
            await unload(engine)
            del self.has[engine.split()[-1]]

        self.garage.load, self.garage.unload = counted_load, counted_unload  # type: ignore[method-assign]

    async def _leaving(self, engine: Any) -> None:
        name = engine.split()[-1]
        assert not any(client.is_served and not client.is_over for model, client in self.clients if model == name)
        others = [each for each in SIZES if each not in self.has and self._waiting(each)]
        assert others or name in self.unloading or name == "short", f"{name} goes, and nobody has the room"

    def _waiting(self, name: str) -> list[Client]:
        return [
            client for model, client in self.clients if model == name and not client.is_served and not client.is_over
        ]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @rule(name=names, within_s=st.sampled_from([inf, 3600.0, 30.0, 5.0]))
    def ask(self, name: str, within_s: float) -> None:
        if len(self.clients) < 8:
            client = Client(self.fleet, name, within_s, self.loop)
            self.clients.append((name, client))
            self.wait(SOON_S)

    @rule(number=few)
    def leave(self, number: int) -> None:
        if number < len(self.clients):
            self.run(self.clients.pop(number)[1].leave())

    @rule(number=few)
    def end(self, number: int) -> None:
        if number < len(self.clients) and self.clients[number][1].is_served:
            self.run(self.clients.pop(number)[1].end())

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, WAIT_S, 100.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(name=names)
    def unload(self, name: str) -> None:
        self.unload_nothing()
        self.unloading[name] = self.loop.create_task(self.fleet.unload(name))
        self.wait(SOON_S)

    @rule()
    def unload_nothing(self) -> None:
        for task in self.unloading.values():
            task.cancel()
        self.wait(SOON_S)
        self.unloading.clear()

    @invariant()
    def whoever_is_served_has_a_model(self) -> None:
        loaded = {entry.name for entry, _ in self.fleet.loaded}
        assert all(name in loaded for name, client in self.clients if client.is_served and not client.is_over)

    @invariant()
    def nobody_waits_for_nobody(self) -> None:
        """Who asks for a model that is loaded waits because of others who wait, or because it is to be unloaded."""
        self.unloading = {name: task for name, task in self.unloading.items() if not task.done()}
        loaded = {each.name for each in self.fleet.statuses() if each.state == "loaded"}
        if not any(self._waiting(name) for name in SIZES if name not in loaded) and not self.unloading:
            assert not any(self._waiting(name) for name in loaded)

    def teardown(self) -> None:
        self.unload_nothing()
        for _ in range(2 * len(SIZES)):
            self.wait(2 * WAIT_S)
            for _, client in self.clients:
                if client.is_served and not client.is_over:
                    self.run(client.end())
        for name, client in self.clients:
            assert client.is_over, f"{name} is waited for in vain"
            refused = (DeadlineExceeded, Unavailable) if name == "broken" else DeadlineExceeded
            assert client.is_served or isinstance(client.error, refused)
        assert not any(each.waiting or each.requests for each in self.fleet.statuses())
        self.fleet.close()
        self.loop.close()


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
