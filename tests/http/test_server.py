"""Sockets, signals and what a socket alone can show."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ingot.engine.request import TextDelta
from ingot.errors import ConfigError
from ingot.http import http11
from ingot.http import server as servers
from ingot.http.server import UnavailableServer, open_listener
from tests.http.running import connect, everything, make_server, post, running
from tests.http.scripted import ScriptedEngine, expire_once_open, settings
from tests.processes import ROOT, start
from tests.waiting import WAIT_S

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = ASK | {"stream": True}


def test_any_free_port_can_be_asked_for() -> None:
    with running(ScriptedEngine(), settings(port=0)) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_a_port_in_use_is_a_clear_error() -> None:
    taken = open_listener(settings())
    try:
        with pytest.raises(ConfigError, match=f"Port {taken.port} on 127.0.0.1 is in use"):
            open_listener(settings(port=taken.port))
    finally:
        taken.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_off_loopback_a_key_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        open_listener(settings(host=host))
    open_listener(settings(host=host, api_key="k" * 8)).close()
    # A name that is of this machine alone by custom, but not by its addresses.
    monkeypatch.setattr(servers, "resolve_host", lambda name, port: [(socket.AF_INET, "192.0.2.1")])
    with pytest.raises(ConfigError, match="--api-key"):
        open_listener(settings(host="localhost"))


def test_a_host_that_is_not_here_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="not an address of this machine"):
        open_listener(settings(host="203.0.113.7", api_key="k" * 8))
    with pytest.raises(ConfigError, match="not an address of this machine"):
        open_listener(settings(host="no such host", api_key="k" * 8))


def test_a_name_is_listened_to_on_all_its_addresses_and_one_port() -> None:
    listener = open_listener(settings(host="localhost"))
    try:
        assert {one.getsockname()[1] for one in listener.sockets} == {listener.port}
    finally:
        listener.close()


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "streamed"])
def test_a_closed_socket_ends_its_request_before_the_first_token(body: dict[str, Any]) -> None:
    engine = ScriptedEngine(None)
    with running(engine, settings()) as url:
        connection = connect(url)
        connection.sendall(post("/v1/chat/completions", body))
        assert engine.opened.wait(WAIT_S)
        connection.close()
        assert engine.streams[0].closed.wait(WAIT_S)


def test_a_closed_socket_ends_every_request_that_was_pipelined_on_it() -> None:
    engine = ScriptedEngine(None)
    with running(engine, settings(keepalive_s=0.05)) as url:
        connection = connect(url)
        connection.sendall(post("/v1/chat/completions", STREAM) * 2)
        assert engine.opened.wait(WAIT_S)
        connection.close()
        assert engine.streams[0].closed.wait(WAIT_S)


def test_headers_reach_the_client_before_there_is_anything_to_say() -> None:
    engine = ScriptedEngine(None)
    with running(engine, settings()) as url, httpx.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")


def test_a_client_that_does_not_read_is_not_waited_for_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine(lambda request: [[TextDelta(0, "x" * 1_000_000)] for _ in range(40)])
    expire_once_open(engine, monkeypatch)
    with running(engine, settings()) as url:
        connection = connect(url)
        connection.sendall(post("/v1/chat/completions", STREAM))
        assert engine.opened.wait(WAIT_S)
        assert engine.streams[0].closed.wait(WAIT_S)
        connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"x" * 40_000,
    ],
    ids=["path", "one header", "many headers", "a header without end"],
)
def test_a_head_that_is_too_large_is_refused(head: bytes) -> None:
    with running(ScriptedEngine(), settings()) as url, connect(url) as connection:
        connection.sendall(head)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer


def test_what_is_no_http_is_refused_in_our_words() -> None:
    with running(ScriptedEngine(), settings()) as url, connect(url) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"error"' in answer


def test_a_client_that_never_finishes_its_head_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "HEAD_TIMEOUT_S", 0.1)
    with running(ScriptedEngine(), settings()) as url, connect(url) as silent, connect(url) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nhost: ")
        assert everything(silent) == b""
        assert everything(slow) == b""


def test_a_connection_is_kept_for_the_next_request() -> None:
    with running(ScriptedEngine(), settings()) as url, httpx.Client(base_url=url) as client:
        for _ in range(3):
            assert client.post("/v1/chat/completions", json=ASK).status_code == 200
            assert client.post("/v1/chat/completions", json=STREAM).text.endswith("data: [DONE]\n\n")
            assert client.get("/nowhere").status_code == 404


def test_a_chunked_body_is_counted_too() -> None:
    def pieces() -> Iterator[bytes]:
        while True:
            yield b"[" * 1000

    with running(ScriptedEngine(), settings(max_body_bytes=10_000)) as url:
        try:
            made = httpx.post(
                f"{url}/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
            )
        except httpx.WriteError:  # the server closed the connection on a client that kept sending
            return
        assert made.status_code == 413


def test_stopping_waits_for_what_runs_and_then_ends_it_in_words() -> None:
    engine = ScriptedEngine(None)
    with running(engine, settings(drain_s=0.1)) as url:
        connection = connect(url)
        connection.sendall(post("/v1/chat/completions", STREAM))
        assert engine.opened.wait(WAIT_S)
    answer = everything(connection)
    assert b"The server is shutting down." in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert engine.streams[0].closed.is_set()


SERVE = """
import os, signal, sys
from ingot.http.server import open_listener
from tests.http.running import make_server
from tests.http.scripted import ScriptedEngine, settings
if "terminal" in sys.argv:  # the first that whoever leads a session opens is its own
    os.close(os.open(os.ttyname(0), os.O_RDWR))
for word in sys.argv:
    if word.startswith("SIG"):
        signal.signal(getattr(signal, word), signal.SIG_IGN)
wanted = settings()
def ready(url):
    print(url, signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)
def again():
    print("read again", flush=True)
    return wanted
make_server(ScriptedEngine(), wanted, ready, open_listener(wanted), again).run()
print("returned", flush=True)
"""


@contextmanager
def serving(*words: str, **how: Any) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server in a process, its URL, and whether it ignores interrupts."""
    command = [sys.executable, "-c", SERVE, *words]
    env = os.environ | {"PYTHONPATH": "."}
    with start(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env, **how) as process:
        try:
            assert process.stdout is not None
            url, ignores = process.stdout.readline().split()
            assert httpx.get(f"{url}/health/live").status_code == 200
            yield process, url, ignores
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_makes_serve_return(number: signal.Signals) -> None:
    with serving() as (process, _, _):
        process.send_signal(number)
        rest, _ = process.communicate(timeout=WAIT_S)
    assert (rest, process.returncode) == ("returned\n", 0)


def test_a_server_that_was_started_to_ignore_interrupts_goes_on_ignoring_them() -> None:
    """So that Ctrl-C, meant for the program in front, does not end a server in the background of the same script."""
    with serving("SIGINT") as (process, _, ignores):
        assert ignores == "True"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=WAIT_S)
    assert (rest, process.returncode) == ("returned\n", 0)


def test_a_server_ends_with_its_terminal() -> None:
    ours, theirs = pty.openpty()
    with serving("terminal", stdin=theirs, start_new_session=True) as (process, _, _):
        os.close(theirs)
        os.close(ours)
        rest, _ = process.communicate(timeout=WAIT_S)
    assert (rest, process.returncode) == ("returned\n", 0)


def test_a_server_under_nohup_outlives_its_terminal_and_still_reads_its_settings_again() -> None:
    ours, theirs = pty.openpty()
    with serving("terminal", "SIGHUP", stdin=theirs, start_new_session=True) as (process, url, _):
        assert process.stdout is not None
        os.close(theirs)
        os.close(ours)
        assert process.stdout.readline() == "read again\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "read again\n"
        assert httpx.get(f"{url}/health/live").status_code == 200


STOPPED_TWICE = """
from ingot.cli.serve import exit_at_once
from ingot.http.server import open_listener
from tests.http.running import make_server
from tests.http.scripted import ScriptedEngine, settings
wanted = settings(drain_s=600.0)
server = make_server(ScriptedEngine(None), wanted, lambda url: print(url, flush=True), open_listener(wanted))
server.leave = exit_at_once
server.run()
exit_at_once()
"""


def test_who_interrupts_a_server_is_told_at_once_what_it_still_does_and_ends_it_with_a_second_interrupt() -> None:
    process = start(
        [sys.executable, "-c", STOPPED_TWICE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        with connect(process.stdout.readline().strip()) as connection:
            connection.sendall(post("/v1/chat/completions", STREAM))
            assert connection.recv(64)
            process.send_signal(signal.SIGINT)
            stopping = "stopping: 1 request running, waiting up to 600 s; press Ctrl-C again to stop now\n"
            assert process.stderr.readline() == stopping
            process.send_signal(signal.SIGINT)
            assert b"The server is shutting down." in everything(connection)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()


def test_a_second_interrupt_ends_a_server_that_is_still_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started, left = threading.Event(), threading.Event()

    async def load() -> None:
        started.set()
        while not left.is_set():
            await asyncio.sleep(0)

    wanted = settings()
    server = make_server(ScriptedEngine(), wanted, lambda url: None, open_listener(wanted))  # type: ignore[arg-type]
    monkeypatch.setattr(server._models, "start", load)
    server.leave = left.set
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(WAIT_S)
        server.handle_exit(signal.SIGINT, None)
        assert not left.is_set()
        server.handle_exit(signal.SIGINT, None)
        assert left.wait(WAIT_S)
    finally:
        left.set()
        thread.join(WAIT_S)
    assert caplog.messages == ["stopping: no requests running"]


def test_the_http_side_is_imported_without_mlx() -> None:
    check = (
        "import sys, ingot.http.server, ingot.http.app;"
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, ...]]:
    listener = open_listener(settings())
    yield listener.sockets
    listener.close()


@pytest.fixture
def door(sockets: tuple[socket.socket, ...]) -> Iterator[UnavailableServer]:
    made = UnavailableServer(sockets, settings())
    made.open("rank 1 was killed")
    yield made
    made.close()


def url(sockets: tuple[socket.socket, ...]) -> str:
    return f"http://127.0.0.1:{sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "error"), ("/v1/messages", "error"), ("/api/chat", "error"), ("/anything", "error")],
)
def test_every_request_is_answered_with_what_can_be_tried_again(
    door: UnavailableServer, sockets: tuple[socket.socket, ...], path: str, kind: str
) -> None:
    with connect(url(sockets)) as client:
        client.sendall(post(path, {"messages": ["x" * 300_000]}))
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 2\r\n" in head + b"\r\n"
    assert b"\r\nconnection: close" in head
    assert "rank 1 was killed" in str(json.loads(body)[kind])


def test_the_process_is_alive_and_not_ready(door: UnavailableServer, sockets: tuple[socket.socket, ...]) -> None:
    with urllib.request.urlopen(f"{url(sockets)}/health/live") as answer:
        assert json.loads(answer.read())["ok"]
    door.open("another reason")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url(sockets)}/health")
    assert refused.value.code == 503
    assert json.loads(refused.value.read()) == {"ok": False, "detail": "another reason"}


def test_a_door_that_is_left_leaves_the_sockets_to_who_else_listens(
    door: UnavailableServer, sockets: tuple[socket.socket, ...]
) -> None:
    door.close()
    with connect(url(sockets)):
        sockets[0].settimeout(20.0)
        taken, _ = sockets[0].accept()
        taken.close()
    door.open("again")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{url(sockets)}/health")
