"""A fleet over models that are numbers: who is loaded when, who waits, and who makes room. Nothing here touches mlx."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ingot.config import ModelEntry, Settings
from ingot.engine.fleet import fleet as fleets
from ingot.engine.fleet.fleet import Fleet
from ingot.errors import ModelError, Unavailable

GB = 1_000_000_000
SETTINGS = Settings()
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Garage:
    """Loads models by noting that it did. `hold` keeps loads waiting until it is set."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes, self.loads, self.diary = sizes, Counter[str](), list[str]()
        self.hold: asyncio.Event | None = None
        self.broken: dict[str, str] = {}

    async def measure(self, entry: ModelEntry) -> int:
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
    return Fleet(entries, garage, memory, **options), garage


def state(fleet: Fleet, name: str) -> str:
    return next(each.state for each in fleet.standings() if each.name == name)


async def use(fleet: Fleet, name: str, kept_s: float | None = None) -> str:
    async with fleet.lease(name, kept_s) as engine:
        await asyncio.sleep(0)
        return str(engine)


async def until(fleet: Fleet, name: str, wanted: str) -> None:
    async with asyncio.timeout(30):
        while state(fleet, name) != wanted:
            await fleet._changed()


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
    [stands] = fleet.standings()
    assert (stands.state, stands.progress, stands.waiting, stands.claimed) == ("loading", 0.5, 1, GB)
    garage.hold.set()
    await using
    [stands] = fleet.standings()
    assert (stands.state, stands.progress, stands.waiting, stands.requests) == ("loaded", None, 0, 0)


async def test_idle_time_counts_from_the_end_of_the_last_request() -> None:
    fleet, garage = fleet_of(entry("a", idle_s=0.02))
    async with fleet.lease("a"):
        await asyncio.sleep(0.06)
        assert state(fleet, "a") == "loaded" and fleet.standings()[0].expires_s is None
    assert state(fleet, "a") == "loaded" and fleet.standings()[0].expires_s is not None
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
    await use(fleet, "a", kept_s=0)
    await until(fleet, "a", "unloaded")
    await use(fleet, "b", kept_s=0)
    await asyncio.sleep(0.01)
    assert state(fleet, "b") == "loaded"


async def test_the_idle_model_that_weighs_most_makes_room() -> None:
    fleet, garage = fleet_of(entry("small"), entry("large"), entry("new"), memory=4 * GB)
    garage.sizes |= {"large": 3 * GB}
    await use(fleet, "small")
    await use(fleet, "large")
    for seat in fleet._seats.values():  # however long a busy machine took in between
        seat.used = 0.0
    await use(fleet, "new")
    assert garage.diary == ["+small", "+large", "-large", "+new"]


async def test_a_model_in_use_finishes_before_it_makes_room_and_takes_on_nobody_else() -> None:
    fleet, garage = fleet_of(entry("a"), entry("b"), memory=GB)
    held = fleet.lease("a")
    await held.__aenter__()
    other = asyncio.create_task(use(fleet, "b"))
    async with asyncio.timeout(30):
        while not fleet._seats["a"].draining:
            await asyncio.sleep(0)
    late = asyncio.create_task(use(fleet, "a"))
    await asyncio.sleep(0.01)
    assert garage.diary == ["+a"] and not late.done()
    await held.__aexit__(None, None, None)
    assert await other == "engine of b" and await late == "engine of a"
    assert garage.diary == ["+a", "-a", "+b", "-b", "+a"]


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
    monkeypatch.setattr(fleets, "RETRY_S", 0.0)
    del garage.broken["a"]
    assert await use(fleet, "a") == "engine of a"


async def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    fleet, garage = fleet_of(entry("a", pin=True), entry("b"), memory=3 * GB, size=2 * GB)
    await use(fleet, "a")
    with pytest.raises(Unavailable, match=r"it takes 2\.00 GB, and the memory budget is 3\.00 GB beside a, which is"):
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
    [stands] = fleet.standings()
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
