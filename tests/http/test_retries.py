"""A client that leaves while its prompt is computed finds what was computed when it comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ingot.engine.engine import Engine
from ingot.kernels.device import Device
from tests import engines, scripted
from tests.http.asgi import Call, call
from tests.http.scripted import build_app, settings
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio

LONG = "word " * 6000  # three launches at least
SAID = {"model": "default", "messages": [{"role": "user", "content": LONG}], "stream": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": LONG, "stream": True},
    "/v1/messages": {**SAID, "max_tokens": 9},
    "/v1/responses": {"input": LONG, "stream": True},
    "/api/chat": SAID,
    "/api/generate": {"model": "default", "prompt": LONG, "stream": True},
}
PLACES = [("llama", None), ("llama", engines.GPU), ("hybrid", None), ("hybrid", engines.GPU)]


class Gate:
    """Holds the engine up before the launch that comes after `least` tokens of a prompt."""

    def __init__(self, least: int) -> None:
        self.least, self.done = least, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, width: int) -> None:
        if self.done >= self.least:
            self.reached.set()
            self.opened.wait(WAIT_S)
        self.done += width if width > 1 else 0


@contextmanager
def held(start: Callable[[Gate], Engine], least: int) -> Iterator[tuple[Engine, Gate]]:
    gate = Gate(least)
    engine = start(gate)
    try:
        yield engine, gate
    finally:
        gate.opened.set()
        engine.close()


async def left_and_retried(engine: Engine, gate: Gate, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """How the request stood that its client left, and the receipt of the next one."""
    app = build_app(engine, settings())
    async with Call(app, path=path, body=body) as made:
        await asyncio.to_thread(gate.reached.wait, WAIT_S)
        await made.until(lambda: bool(made.status))
        made.leave()
        await made.done()
    gate.opened.set()
    again = await call(app, path=path, body=body)
    found = [await call(app, "GET", f"/v1/requests/{one.headers['x-request-id']}") for one in (made, again)]
    return found[0].json(), found[1].json()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", [None, engines.GPU], ids=["here", "as on a GPU"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_retry_goes_on_where_the_prompt_was_left(path: str, device: Device | None) -> None:
    def start(gate: Gate) -> Engine:
        return scripted.start(lambda prompt: "Hello.", wait=gate, device=device)

    with held(start, 8000) as (engine, gate):
        left, again = await left_and_retried(engine, gate, path, BODIES[path])
    assert left["status"] == "cancelled" and left["error"]["code"] == "cancelled"
    cached, prompt = again["usage"]["prompt_tokens_details"]["cached_tokens"], again["usage"]["prompt_tokens"]
    assert 8000 <= cached < prompt
    assert cached == left["progress"]["prefilled_tokens"], "all of it"


@pytest.mark.parametrize(("kind", "device"), PLACES)
async def test_layers_of_every_kind_are_left_where_they_can_be_taken_up(kind: str, device: Device | None) -> None:
    def start(gate: Gate) -> Engine:
        return engines.start(kind, wait=gate, device=device, cache_bytes=1 << 26)

    body = {"prompt": [5 + at % 90 for at in range(1500)], "stream": True, "max_tokens": 1}
    with held(start, 700) as (engine, gate):
        left, again = await left_and_retried(engine, gate, "/v1/completions", body)
    assert left["progress"]["prefilled_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 700 <= left["progress"]["prefilled_tokens"] < 1500
