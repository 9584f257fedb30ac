"""The ledger, entry by entry: a greedy holder takes all it can get, then a polite one asks; what is counted is how many
of the greedy one's go before the polite one is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from ingot.cache.disk.record_file import RecordOwner
from ingot.cache.disk.store import DiskLimits
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.request import PoolingRequest
from ingot.engine.speech_request import SpeechRequest
from ingot.errors import Cancelled, Overloaded, Unavailable
from ingot.http import capture
from ingot.http.body import RequestBodies
from ingot.http.capture import CaptureFolder
from ingot.http.connections import MOST_WAITING_CONNECTIONS, OpenConnections
from ingot.http.endpoints import cache
from ingot.http.response_store import ResponseStore, StoreLimits
from ingot.http.shared_state import FairTurns, SharedState
from ingot.media import worker
from ingot.media.worker import MediaClient, WorkerPool
from ingot.shares import LEDGER, Shares, SharesPerSecond
from ingot.text.tokenizer.encoder_inputs import EncoderInput
from tests.cache.disk import records
from tests.cache.paper import APPEND, TOKEN, store
from tests.engine import test_admission, test_pooling, test_text_to_speech
from tests.http.scripted import settings
from tests.http.test_connections import Visitor, at_work
from tests.http.test_response_store import ITEMS, response

MOST_BEFORE: Final = 2
"""Of the greedy one's that may go before the polite one, once it asks."""
GREEDY, POLITE = "greedy", "polite"


async def connections(folder: Path) -> int:
    ones = OpenConnections(64)
    at_work(ones, [Visitor(is_sending=True) for _ in range(64)], GREEDY)
    asking = [Visitor() for _ in range(32)]
    for one in asking:
        ones.enter(one)
        if not ones.claim(one, POLITE):
            return 1 << 30
    return 0


async def waiting_connections(folder: Path) -> int:
    ones = OpenConnections(1)
    at_work(ones, [Visitor()])
    polite = Visitor(POLITE)
    for one in [
        *(Visitor(GREEDY) for _ in range(MOST_WAITING_CONNECTIONS)),
        polite,
        *(Visitor(GREEDY) for _ in range(500)),
    ]:
        ones.enter(one)
    return 1 << 30 if polite.sent_away else 0


def per_second(name: str) -> Callable[[Path], Awaitable[int]]:
    async def walk(folder: Path) -> int:
        budget = SharesPerSecond(name, 100, clock=lambda: 0.0)
        while budget.take(GREEDY):
            pass
        return sum(not budget.take(POLITE) for _ in range(50)) << 30

    return walk


def lane(name: str) -> Callable[[Path], Awaitable[int]]:
    async def walk(folder: Path) -> int:
        shared_state = SharedState(settings())
        try:
            return await turns_before(vars(shared_state)[name]._turns)
        finally:
            await shared_state.stop()

    return walk


def archives(at_once: int, name: str) -> Callable[[Path], Awaitable[int]]:
    async def walk(folder: Path) -> int:
        return await turns_before(FairTurns(name, at_once=at_once, each=1, waiting=cache.MOST_WAITING_ARCHIVES))

    return walk


async def turns_before(turns: FairTurns) -> int:
    """Everything that goes ends as soon as another could go on."""
    gone: list[str] = []

    async def go(tenant: str) -> None:
        async with turns.turn(tenant):
            gone.append(tenant)
            await asyncio.sleep(0)

    async def greedily() -> None:
        while POLITE not in gone and len(gone) < 1000:
            try:
                await go(GREEDY)
            except Overloaded:
                await asyncio.sleep(0)

    greedy = [asyncio.create_task(greedily()) for _ in range(300)]
    await asyncio.sleep(0)
    started = len(gone)
    await go(POLITE)
    before = gone[started:].index(POLITE)
    await asyncio.gather(*greedy)
    return before


def workers(pool: WorkerPool) -> Callable[[Path], Awaitable[int]]:
    async def walk(folder: Path) -> int:
        """Whoever would have to wait leaves instead."""
        made = WorkerPool(pool._running.name, pool._running.capacity, pool._each, 1 << 30)
        with ExitStack() as at_work:
            with pytest.raises(Cancelled):
                while True:
                    at_work.enter_context(made._turn(MediaClient(GREEDY, lambda: False), 1))
            with made._turn(MediaClient(POLITE, lambda: False), 1):
                return 0

    return walk


async def queue(folder: Path) -> int:
    door = test_admission.door(8)
    with pytest.raises(Overloaded):
        for number in range(100):
            test_admission.enter(door, f"greedy-{number}", GREEDY)
    for number in range(4):
        test_admission.enter(door, f"polite-{number}", POLITE)
    return 0


async def speech(folder: Path) -> int:
    world = test_text_to_speech.World(max_queue=8)

    def ask(name: str, tenant: str, piece: str) -> None:
        world.desk.accept(SpeechRequest(name, (piece,) * 9, "af_heart", tenant=tenant), lambda events: None)

    with pytest.raises(Overloaded):
        for number in range(100):
            ask(f"greedy-{number}", GREEDY, "g")
    world.turn()
    before = len(world.mouth.spoken)
    ask(POLITE, POLITE, "p")
    world.finish()
    pieces = [piece for piece, _, _ in world.mouth.spoken[before:]]
    nth = [position for position, piece in enumerate(pieces) if piece == "p"]
    return max(position - 2 * number for number, position in enumerate(nth))


async def encodings(folder: Path) -> int:
    world = test_pooling.World(max_queue=8)

    def ask(name: str, tenant: str) -> None:
        request = PoolingRequest(name, "embedding", (EncoderInput((1, 2)),), tenant=tenant)
        world.desk.accept(request, lambda answer: None)

    with pytest.raises(Overloaded):
        for number in range(100):
            ask(f"greedy-{number}", GREEDY)
    ask(POLITE, POLITE)
    return 0


async def bodies(folder: Path) -> int:
    held = RequestBodies(1000)
    with pytest.raises(Unavailable):
        while True:
            held._take(GREEDY, 50, 0)
    held._take(POLITE, 200, 0)
    return 0


async def captures(folder: Path) -> int:
    writing = CaptureFolder(folder, settings())
    for number, tenant in enumerate([POLITE, *[GREEDY] * 20]):
        writing.write({"id": f"{tenant}-{number}"}, tenant)
    writing.close()
    assert len(list(folder.iterdir())) == capture.MOST_CAPTURES
    return 0 if (folder / f"{POLITE}-0.json").exists() else 1 << 30


async def prefix_cache(folder: Path) -> int:
    index = PrefixIndex(APPEND, float, lambda: 1e6)
    for number, tenant in enumerate([POLITE, *[GREEDY] * 50]):
        store(index, [number] * 10, APPEND, CacheOwner(tenant))
        index.shrink(100 * TOKEN)
    return index.shares.evictions[POLITE] << 30


async def disk_cache(folder: Path) -> int:
    store = records.opened(folder, DiskLimits(4_000_000, sync=False))
    mine = store.write(*records.record([1] * 100, owner=RecordOwner.of(POLITE, "")))
    for number in range(30):
        store.write(*records.record([number] * 100, owner=RecordOwner.of(GREEDY, "")))
    return int(mine.lost) << 30


async def stored_responses(folder: Path) -> int:
    store = ResponseStore(folder / "responses.db", StoreLimits(rows=4, size=1 << 20, age_s=3600.0))
    for number, tenant in enumerate([POLITE, *[GREEDY] * 20]):
        store.keep(tenant, response(f"resp_{number}"), ITEMS)
    found = store.find(POLITE, "resp_0")
    store.close()
    return 0 if found else 1 << 30


WALKS: Final[dict[str, Callable[[Path], Awaitable[int]]]] = {
    "connections": connections,
    "waiting connections": waiting_connections,
    "probes": per_second("probes"),
    "requests without a key": per_second("requests without a key"),
    "read": lane("_readers"),
    "read-long": lane("_long_readers"),
    "fetch": lane("_fetchers"),
    "media headers": workers(worker.header_pool),
    "media pixels": workers(worker.pixel_pool),
    "media sounds": workers(worker.audio_pool),
    "compile": lane("_compilers"),
    "speech": speech,
    "encodings": encodings,
    "bodies": bodies,
    "captures": captures,
    "archive work": archives(1, "archive work"),
    "archive files": archives(cache.MOST_ARCHIVE_FILES, "archive files"),
    "queue": queue,
    "prefix cache": prefix_cache,
    "disk cache": disk_cache,
    "stored responses": stored_responses,
}


@pytest.mark.parametrize("name", LEDGER)
def test_whatever_a_greedy_one_holds_a_polite_one_is_served_soon(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MOST_CAPTURES", 8)

    async def walk() -> int:
        return await WALKS[name](tmp_path)

    assert asyncio.run(walk()) <= MOST_BEFORE


def rows_of(page: Path) -> Iterable[str]:
    return (line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("| "))


def test_the_documents_table_has_every_entry() -> None:
    result = set(rows_of(Path(__file__).parent.parent / "docs" / "operations.md"))
    assert set(LEDGER) <= result, set(LEDGER) - result


def test_what_is_not_in_the_ledger_is_not_shared() -> None:
    with pytest.raises(AssertionError):
        Shares("something else")


def test_one_who_is_alone_may_have_all_and_somebody_else_its_share_then() -> None:
    entry = Shares("queue", 10)
    entry.add(GREEDY, 10)
    assert not entry.fits(GREEDY, 1) and entry.fits(POLITE, 5) and not entry.fits(POLITE, 6)
    assert entry.fits(POLITE, 3, sharing=["another"]) and entry.fits(GREEDY, 1, spare=1)
    entry.add(GREEDY, -10)
    assert dict[str, Any](entry.held) == {} and entry.total == 0
