"""The log of requests that came over the wire: how each began and ended, and nothing of what was said."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from types import NoneType
from typing import Any

import pytest

from ingot.engine import core
from ingot.engine.telemetry import RequestLog
from ingot.errors import DeadlineExceeded, Stopping
from ingot.http import request_lifetime
from ingot.http.edge import ClientGone, Reply
from ingot.http.endpoints.responses import receive_never
from ingot.http.guard import shutting_down_error
from ingot.http.request_lifetime import RequestLifetime
from tests import scripted
from tests.http.asgi import Call, call
from tests.http.scripted import build_app, settings
from tests.http.test_retries import held
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio

SECRET = "a secret of mine"
ASK = {"messages": [{"role": "user", "content": SECRET * 2000}], "stream": True}
KEY = {"authorization": "Bearer sk-long-enough"}


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ingot")


def about(caplog: pytest.LogCaptureFixture, id: str) -> list[str]:
    return [message for message in caplog.messages if id in message]


async def test_a_request_is_logged_from_its_beginning_to_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "RequestLog", partial(RequestLog, every_s=0.0))
    engine = scripted.start(lambda prompt: "Hello.")
    try:
        made = await call(build_app(engine, settings(api_key="sk-long-enough")), body=ASK, headers=KEY)
    finally:
        engine.close()
    id = made.headers["x-request-id"]
    began, *progress, ended, edge = about(caplog, id)
    assert began.startswith(f"{id} began: /v1/chat/completions, model scripted, ") and "0 of them cached" in began
    assert progress and all(f"{id} prompt: " in line for line in progress)
    assert ended.startswith(f"{id} ended, stop: ") and "7 answer tokens" in ended
    assert edge.startswith("POST '/v1/chat/completions' 200 ")
    assert SECRET not in caplog.text and "sk-long" not in caplog.text and "Hello." not in caplog.text


async def test_a_client_that_left_is_no_200_and_its_receipt_tells_what_was_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with held(lambda gate: scripted.start(lambda prompt: "Hello.", wait=gate), 8000) as (engine, gate):
        app = build_app(engine, settings())
        async with Call(app, body=ASK) as made:
            await asyncio.to_thread(gate.reached.wait, WAIT_S)
            await made.until(lambda: bool(made.status))
            made.leave()
            await made.done()
        id = made.headers["x-request-id"]
        gate.opened.set()
        while engine.status():
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.check)  # what the engine told is told when it has turned to something else
        receipt = (await call(app, "GET", f"/v1/requests/{id}")).json()
    assert made.status == 200, "which is what went out before it left"
    [edge] = [line for line in about(caplog, id) if line.startswith("POST")]
    assert edge.startswith("POST '/v1/chat/completions' 499 ")
    [ended] = [line for line in about(caplog, id) if "ended" in line]
    assert ended.startswith(f"{id} ended, the client left (499): ") and "no token after" in ended
    progress = receipt["progress"]
    assert (receipt["status"], receipt["error"]["code"]) == ("cancelled", "cancelled")
    assert 8000 <= progress["prefilled_tokens"] < progress["prompt_tokens"] == receipt["usage"]["prompt_tokens"]
    assert receipt["usage"]["completion_tokens"] == 0


async def test_a_stream_that_the_server_cuts_off_is_no_client_that_left(caplog: pytest.LogCaptureFixture) -> None:
    with held(lambda gate: scripted.start(lambda prompt: "Hello.", wait=gate), 8000) as (engine, gate):
        app = build_app(engine, settings())
        async with Call(app, body=ASK) as made:
            await asyncio.to_thread(gate.reached.wait, WAIT_S)
            await made.until(lambda: bool(made.status))
            app.state.service.shared_state.live.abandon_all(shutting_down_error())
            await made.done()
        id = made.headers["x-request-id"]
        gate.opened.set()
        while engine.status():
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.check)
        receipt = (await call(app, "GET", f"/v1/requests/{id}")).json()
        assert engine.figures.endings["abort"] == 1
    assert b"The server is shutting down." in made.body
    assert [line for line in about(caplog, id) if f"{id} ended, cut off, as the server stops (503): " in line]
    assert "client left" not in caplog.text and "499" not in caplog.text.replace(id, "")
    assert (receipt["status"], receipt["error"]["message"]) == ("failed", "The server is shutting down.")


@pytest.mark.parametrize(
    ("cause", "result"), [(None, DeadlineExceeded), (ClientGone(), NoneType), (shutting_down_error(), Stopping)]
)
async def test_a_request_that_is_cut_off_knows_by_what(cause: Any, result: type[object]) -> None:
    answer = Reply({"path": "/", "type": "http"}, asyncio.sleep)
    exchange = RequestLifetime(receive_never, -request_lifetime.DEADLINE_GRACE_S if cause is None else WAIT_S, answer)
    known: list[object] = [answer.ended_by()]

    async def work() -> None:
        try:
            if cause is not None:
                exchange.abandon(cause)
            await asyncio.sleep(WAIT_S)
        finally:
            known.append(answer.ended_by())

    with pytest.raises((DeadlineExceeded, ClientGone, Stopping)):
        await exchange.run(work)
    assert [*map(type, known)] == [NoneType, result]


async def test_a_quiet_server_says_nothing_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ingot")
    engine = scripted.start(lambda prompt: "Hello.")
    try:
        await call(build_app(engine, settings()), body=ASK)
    finally:
        engine.close()
    assert caplog.messages == []


async def test_a_request_that_was_cancelled_by_its_id_is_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    with held(lambda gate: scripted.start(lambda prompt: "Hello.", wait=gate), 8000) as (engine, gate):
        app = build_app(engine, settings())
        async with Call(app, body=ASK) as made:
            await asyncio.to_thread(gate.reached.wait, WAIT_S)
            await made.until(lambda: bool(made.status))
            id = made.headers["x-request-id"]
            assert (await call(app, "DELETE", f"/v1/requests/{id}")).status == 200
            gate.opened.set()
            await made.done()
    assert [line for line in about(caplog, id) if f"{id} ended, cancelled (499 cancelled): " in line]
