"""Threads for work that would hold up the event loop: who gets one, who waits, and when it stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import Cancelled, IngotError, Overloaded
from ingot.http.app import build_app
from ingot.http.shared_state import LONG_BODY_BYTES, SharedState, ThreadLane
from ingot.media.fetch import Unfetched
from ingot.text.cancellation import checkpoint
from tests.http.asgi import Call, call
from tests.http.scripted import ByteTokenizer, ScriptedEngine, settings
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio
ASK = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}


class Gate:
    """Work that says when it has begun, and goes on when it is let."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.begun.release()
        assert self.open.wait(WAIT_S)

    async def entered(self, times: int = 1) -> None:
        for _ in range(times):
            assert await asyncio.to_thread(self.begun.acquire, timeout=WAIT_S)


@asynccontextmanager
async def lane(**options: int) -> AsyncIterator[tuple[ThreadLane, Gate]]:
    made, gate = ThreadLane("read", **{"threads": 2, "each": 1, "waiting": 2, **options}), Gate()
    try:
        yield made, gate
    finally:
        gate.open.set()
        made.close()


async def settle() -> None:
    """Every task runs up to where it has to wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_one_tenant_waits_for_no_other_does() -> None:
    async with lane() as (work, gate):
        first, second = (asyncio.create_task(work.run("a", gate)) for _ in range(2))
        await gate.entered()
        assert await work.run("b", lambda: "done") == "done"
        assert not first.done() and not second.done()
        gate.open.set()
        await asyncio.gather(first, second)


async def test_more_than_may_wait_are_refused_with_a_time_to_come_back() -> None:
    async with lane() as (work, gate):
        waiting = [asyncio.create_task(work.run("a", gate)) for _ in range(3)]
        await gate.entered()
        await settle()
        with pytest.raises(Overloaded) as refused:
            await work.run("a", gate)
        assert refused.value.retry_after
        gate.open.set()
        await asyncio.gather(*waiting)


async def test_tenants_take_turns_for_a_thread() -> None:
    done: list[str] = []
    async with lane(threads=1, waiting=9) as (work, gate):
        first = asyncio.create_task(work.run("a", gate))
        await gate.entered()
        tasks = []
        for tenant in "aaabb":
            tasks.append(asyncio.create_task(work.run(tenant, lambda tenant=tenant: done.append(tenant))))
            await settle()
        gate.open.set()
        await asyncio.gather(first, *tasks)
    assert done == ["a", "b", "a", "b", "a"]


async def test_work_whose_caller_left_is_told_so_and_keeps_its_thread_until_it_stops() -> None:
    stopped = threading.Event()
    async with lane(threads=1) as (work, gate):

        def long() -> None:
            gate()
            try:
                checkpoint()
            except Cancelled:
                stopped.set()
                raise

        task = asyncio.create_task(work.run("a", long))
        await gate.entered()
        task.cancel()
        await asyncio.wait([task])
        following = asyncio.create_task(work.run("a", lambda: stopped.is_set()))
        await settle()
        assert not following.done()
        gate.open.set()
        assert await following is True


async def test_a_place_in_the_queue_is_free_again_once_its_owner_left() -> None:
    async with lane(threads=1, waiting=1) as (work, gate):
        first = asyncio.create_task(work.run("a", gate))
        await gate.entered()
        second = asyncio.create_task(work.run("a", gate))
        await settle()
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(work.run("a", lambda: 3))
        await settle()
        gate.open.set()
        assert await third == 3 and await first is None


# Through the application


def keys(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys"
    file.write_text("key-of-a-tenant\nkey-of-another\n")
    file.chmod(0o600)
    return {"api_key_file": file}


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def blocked(pattern: str) -> dict[str, Any]:
    return ASK | {"structured_outputs": {"regex": pattern}}


@asynccontextmanager
async def compiling(tmp_path: Path) -> AsyncIterator[tuple[Any, Gate]]:
    """An application whose compiler takes as long as the test likes over the patterns that begin with `slow`."""
    app = build_app(ScriptedEngine(), settings(**keys(tmp_path)))
    service = next(app.state.service.services())
    gate = Gate()
    service.served.grammars.prepare()
    service.served.grammars._compilers = Trials(gate)  # type: ignore[assignment]
    try:
        yield app, gate
    finally:
        gate.open.set()
        await app.state.service.stop()


class Trials:
    def __init__(self, gate: Callable[[], None]) -> None:
        self._gate = gate

    def problem(self, grammar: str) -> str | None:
        if "slow" in grammar:
            self._gate()
        return None

    def close(self) -> None:
        pass


async def test_plain_chats_do_not_wait_for_grammars_of_their_own_tenant_or_another(tmp_path: Path) -> None:
    async with (
        compiling(tmp_path) as (app, gate),
        Call(app, body=blocked("slow"), headers=of("key-of-a-tenant")) as slow,
    ):
        await gate.entered()
        for key in ("key-of-a-tenant", "key-of-another"):
            assert (await call(app, body=ASK, headers=of(key))).status == 200
        assert not slow.complete
        gate.open.set()
        assert (await slow.done()).status == 200


async def test_a_tenant_s_slow_grammars_delay_its_own_grammars_alone_and_only_so_many_wait(tmp_path: Path) -> None:
    async with compiling(tmp_path) as (app, gate):
        tasks = [
            asyncio.create_task(call(app, body=blocked(f"slow{at}"), headers=of("key-of-a-tenant"))) for at in range(12)
        ]
        await gate.entered()
        assert (await call(app, body=blocked("quick"), headers=of("key-of-another"))).status == 200
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [task.result() for task in done][:1]
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        gate.open.set()
        assert {made.status for made in await asyncio.gather(*tasks)} == {200, 429}


async def test_short_requests_overtake_long_ones_and_only_so_many_long_ones_wait() -> None:
    app = build_app(ScriptedEngine(), settings())
    service = next(app.state.service.services())
    gate = Gate()
    long = b'"' + b"a" * LONG_BODY_BYTES + b'"'
    tasks = [asyncio.create_task(service.read(long, gate, "")) for _ in range(18)]
    await gate.entered(2)
    await settle()
    with pytest.raises(Overloaded):
        await service.read(long, gate, "")
    tasks.append(asyncio.create_task(service.read(long, gate, "another key")))
    await gate.entered()
    assert (await call(app, body=ASK)).status == 200
    gate.open.set()
    await asyncio.gather(*tasks)
    await app.state.service.stop()


async def test_a_client_that_leaves_stops_the_reading_of_its_request() -> None:
    gate, stopped = Gate(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, *args: Any, **options: Any) -> list[int]:
            gate()
            try:
                checkpoint()
            except Cancelled:
                stopped.set()
                raise
            return super().encode(*args, **options)

    app = build_app(ScriptedEngine(tokenizer=Slow()), settings())
    async with Call(app, path="/v1/tokenize", body={"prompt": "Hi"}) as leaving:
        await gate.entered()
        leaving.leave()
        await leaving.done()
    gate.open.set()
    assert await asyncio.to_thread(stopped.wait, WAIT_S)
    await app.state.service.stop()


async def test_a_file_that_is_fetched_for_a_client_that_left_is_given_up() -> None:
    gate, request = Gate(), []

    class Missing(Unfetched):
        def fetch(self, going: Callable[[], bool] = lambda: True) -> bytes | IngotError:
            gate()
            request.append(going())
            gate.begun.release()
            return b""

    def needs_a_file() -> None:
        raise Missing("http://localhost/a", ())

    shared_state = SharedState(settings())
    task = asyncio.create_task(shared_state.prepare(needs_a_file, "a"))
    await gate.entered()
    task.cancel()
    await asyncio.wait([task])
    gate.open.set()
    await gate.entered()
    await shared_state.stop()
    assert request == [False]
