"""How a server stops, and how it takes new settings: what runs goes on, and whoever asks is told."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ingot.config import Settings
from ingot.errors import ConfigError, DeviceLost
from ingot.http.server import HttpServer, open_listener, reload_settings
from tests.http.asgi import call
from tests.http.running import connect, everything, make_server, post
from tests.http.scripted import ScriptedEngine, build_app, hello, settings
from tests.waiting import WAIT_S

STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
Serving = tuple[ScriptedEngine, HttpServer, threading.Thread]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """A server that waits for whatever runs when it is told to stop, and the thread that it runs in."""
    engine, ready = ScriptedEngine(None), threading.Event()
    wanted = settings(drain_s=WAIT_S)
    server = make_server(engine, wanted, lambda url: ready.set(), open_listener(wanted))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield engine, server, thread
    finally:
        server.force_exit = server.should_exit = True
        thread.join(WAIT_S)


def test_a_stopping_server_says_so_takes_nobody_else_and_finishes_what_runs(serving: Serving) -> None:
    engine, server, thread = serving
    url = server.listener.url
    with connect(url) as connection:
        connection.sendall(post("/v1/chat/completions", STREAM, "connection: close"))
        assert engine.opened.wait(WAIT_S)
        server.should_exit = True
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            while (probe := client.get("/health")).status_code == 200:
                pass  # until the server has noticed
            assert probe.status_code == 503 and probe.json()["detail"] == "draining"
            assert client.get("/health/live").status_code == 200
            refused = client.post("/v1/chat/completions", json=STREAM)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        [stream] = engine.streams
        stream.put(*hello(stream.request))
        assert everything(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_server_that_is_given_up_ends_requests_in_words_and_returns(serving: Serving) -> None:
    engine, server, thread = serving
    with connect(server.listener.url) as connection:
        connection.sendall(post("/v1/chat/completions", STREAM, "connection: close"))
        assert engine.opened.wait(WAIT_S)
        server.give_up(DeviceLost())
        assert b"The device was lost. The server is being started again." in everything(connection)
    thread.join(WAIT_S)
    assert not thread.is_alive() and isinstance(server.fatal_error, DeviceLost) and not server.stopped


@pytest.mark.anyio
async def test_while_a_server_is_given_up_it_says_why_it_takes_nobody() -> None:
    engine = ScriptedEngine(None)
    app = build_app(engine, settings())  # type: ignore[arg-type]
    live = app.state.service.shared_state.live
    live.draining, live.refusal = True, DeviceLost()
    refused = await call(app, body=STREAM)
    assert refused.status == 503 and json.loads(refused.body)["error"]["code"] == "device_lost"
    well = engine.health()
    lost = replace(well, alive=False, ready=False, detail="the device was lost")
    shared_state = app.state.service.shared_state
    assert shared_state.health(lost).detail == "the device was lost" and shared_state.health(well).detail == "draining"


def changed(app: Any, **changes: Any) -> None:
    reload_settings(app.state.service.shared_state, lambda: settings(**changes))


@pytest.mark.anyio
async def test_new_settings_hold_at_once_or_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ingot.http")
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    host = {"host": "models.example.org"}
    assert (await call(app, "GET", "/v1/models", headers=host)).status == 403
    changed(app, allowed_hosts=("models.example.org",), max_queue=7)
    assert (await call(app, "GET", "/v1/models", headers=host)).status == 200
    assert app.state.service.settings.max_queue == settings().max_queue
    assert "changed: allowed_hosts; after a restart: max_queue" in caplog.text


@pytest.mark.anyio
async def test_a_key_can_be_changed_by_the_settings() -> None:
    app = build_app(ScriptedEngine(), settings(api_key="the-first-key"))  # type: ignore[arg-type]
    changed(app, api_key="the-second-key")
    query = [
        await call(app, "GET", "/v1/models", headers={"x-api-key": f"the-{one}-key"}) for one in ("first", "second")
    ]
    assert [made.status for made in query] == [401, 200]


def test_settings_that_are_wrong_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    before = app.state.service.settings

    def broken() -> Settings:
        raise ConfigError("config.toml: unknown key prot")

    reload_settings(app.state.service.shared_state, broken)
    assert app.state.service.settings is before
    assert "the settings stay as they were: config.toml: unknown key prot" in caplog.text


def test_sighup_lets_a_server_read_its_settings_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ingot.http")
    wanted, query = settings(), []

    def ask(url: str) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        while "settings were read again" not in caplog.text:
            httpx.get(f"{url}/health")  # which is answered when the event loop has turned
        query.append(httpx.get(f"{url}/v1/models", headers={"host": "models.example.org"}).status_code)
        server.should_exit = True

    server = make_server(
        ScriptedEngine(),  # type: ignore[arg-type]
        wanted,
        lambda url: threading.Thread(target=ask, args=(url,), daemon=True).start(),
        open_listener(wanted),
        lambda: settings(allowed_hosts=("models.example.org",)),
    )
    assert threading.current_thread() is threading.main_thread(), "signals are for the main thread alone"
    server.run()
    assert query == [200] and "changed: allowed_hosts" in caplog.text


def test_what_loading_left_in_the_heap_goes_before_a_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("ingot.http.server.find_malloc_trim", lambda: lambda: order.append("trimmed"))
    wanted = settings()

    def ready(url: str) -> None:
        order.append("ready")
        server.should_exit = True

    server = make_server(ScriptedEngine(), wanted, ready, open_listener(wanted))  # type: ignore[arg-type]
    server.run()
    assert order[:2] == ["trimmed", "ready"]


def test_a_key_that_is_soon_guessed_is_not_reused(caplog: pytest.LogCaptureFixture) -> None:
    app = build_app(ScriptedEngine(), settings(api_key="the-first-key"))  # type: ignore[arg-type]
    changed(app, api_key="short")
    assert app.state.service.settings.api_key == "the-first-key"
    assert "at least 8 characters" in caplog.text
