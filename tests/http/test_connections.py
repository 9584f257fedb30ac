"""How many may be connected at once, and what becomes of those that are one too many or do nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ingot.engine.request import TextDelta
from ingot.http import connections, http11
from ingot.http.connections import OpenConnections, client_address, set_keepalive_options
from tests.http.running import connect, everything, post, running
from tests.http.scripted import ScriptedEngine, settings
from tests.processes import ROOT, start
from tests.waiting import WAIT_S

STREAM = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
ASKED = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


class Visitor:
    def __init__(self, address: str = "here", received: int = 0, *, is_sending: bool = False) -> None:
        self.address, self.received, self.is_sending = address, received, is_sending
        self.is_stalled = False
        self.sent_away = False

    def evict(self) -> None:
        self.sent_away = True


def at_work(open_connections: OpenConnections, visitors: Sequence[Visitor], tenant: str = "") -> None:
    for one in visitors:
        assert open_connections.enter(one)
        open_connections.work(one)
        assert open_connections.claim(one, tenant)


def sent_away(visitors: Sequence[Visitor]) -> list[int]:
    return [position for position, one in enumerate(visitors) if one.sent_away]


def test_the_connection_that_was_idle_for_longest_makes_room() -> None:
    first, second, third, fourth = visitors = [Visitor() for _ in range(4)]
    open_connections = OpenConnections(2)
    for one in (first, second):
        assert open_connections.enter(one)
    open_connections.work(first)
    open_connections.rest(first)
    assert open_connections.enter(third)
    assert open_connections.enter(fourth)
    assert sent_away(visitors) == [0, 1]


def test_of_idle_connections_one_of_whoever_holds_most_makes_room() -> None:
    quiet, *crowd = [Visitor("there"), *(Visitor() for _ in range(3))]
    open_connections = OpenConnections(4)
    for one in (quiet, *crowd):
        assert open_connections.enter(one)
    assert open_connections.enter(Visitor("elsewhere"))
    assert not quiet.sent_away and sent_away(crowd) == [0]


def test_where_all_are_at_work_new_ones_wait_for_a_place_and_of_too_many_the_oldest_goes() -> None:
    open_connections = OpenConnections(1)
    worker, last, *others = [Visitor() for _ in range(connections.MOST_WAITING_CONNECTIONS + 3)]
    at_work(open_connections, [worker])
    assert not any(open_connections.enter(one) for one in others)
    assert sent_away(others) == [0]
    assert not open_connections.claim(others[1], ""), "all others hold as many"
    open_connections.leave(worker)
    assert open_connections.claim(others[1], "")
    open_connections.leave(others[1])
    assert open_connections.enter(last)
    assert not worker.sent_away


def test_one_address_that_keeps_connecting_takes_no_place_of_another_that_waits() -> None:
    open_connections = OpenConnections(1)
    at_work(open_connections, [Visitor()])
    polite, *greedy = [Visitor("there"), *(Visitor() for _ in range(200))]
    for one in (greedy[0], polite, *greedy[1:]):
        open_connections.enter(one)
    assert not polite.sent_away


def test_a_key_that_holds_all_gives_way_to_another_with_the_oldest_that_has_sent_least() -> None:
    open_connections = OpenConnections(4)
    greedy = [Visitor(received=sent, is_sending=True) for sent in (200, 101, 101, 300)]
    at_work(open_connections, greedy, "greedy")
    polite = [Visitor() for _ in range(3)]
    for one in polite:
        assert not open_connections.enter(one)
    assert [open_connections.claim(one, "polite") for one in polite] == [True, True, False], "a half is its share"
    assert sent_away(greedy) == [1, 2]


def test_within_a_key_the_address_with_most_gives_way() -> None:
    open_connections = OpenConnections(4)
    greedy = [Visitor("there", is_sending=True) for _ in range(4)]
    at_work(open_connections, greedy, "shared")
    other = Visitor("here")
    open_connections.enter(other)
    assert open_connections.claim(other, "shared")
    assert sent_away(greedy) == [0]


def test_a_request_that_does_not_come_on_gives_way_to_anybody() -> None:
    open_connections = OpenConnections(2)
    holders = [Visitor(is_sending=True), Visitor("there", is_sending=True)]
    at_work(open_connections, holders)
    other = Visitor("elsewhere")
    open_connections.enter(other)
    assert not open_connections.claim(other, "")
    holders[1].is_stalled = True
    assert open_connections.claim(other, "")
    assert sent_away(holders) == [1]


def test_addresses_of_one_network_are_one() -> None:
    assert (
        client_address(("2001:db8::1", 1))
        == client_address(("2001:db8::ffff:2", 2))
        != client_address(("2001:db8:1::1", 1))
    )
    assert client_address(("::ffff:10.0.0.1", 1)) == client_address(("10.0.0.1", 2)) != client_address(("10.0.0.2", 1))
    assert client_address(None) == client_address(("", 0))


def test_idle_connections_keep_nobody_out() -> None:
    with running(ScriptedEngine(), settings(max_connections=4)) as url, ExitStack() as blocked:
        idle = [blocked.enter_context(connect(url)) for _ in range(20)]
        assert httpx.get(f"{url}/v1/models").status_code == 200
        assert everything(idle[0]) == b""


def test_where_every_connection_is_at_work_a_new_one_is_told_so_and_probes_are_answered() -> None:
    engine = ScriptedEngine(None)
    with running(engine, settings(max_connections=1)) as url, connect(url) as busy:
        busy.sendall(post("/v1/chat/completions", STREAM))
        assert engine.opened.wait(WAIT_S)
        refused = httpx.get(f"{url}/v1/models")
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert "connections of the server are in use" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        probed = httpx.get(f"{url}/health/live")
        assert (probed.status_code, probed.headers["connection"]) == (200, "close")


def test_a_connection_above_the_most_that_says_nothing_is_soon_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "WAITING_HEAD_TIMEOUT_S", 0.1)
    engine = ScriptedEngine(None)
    with running(engine, settings(max_connections=1)) as url, connect(url) as busy:
        busy.sendall(post("/v1/chat/completions", STREAM))
        assert engine.opened.wait(WAIT_S)
        with connect(url) as silent:
            assert everything(silent) == b""


def test_empty_lines_between_requests_do_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "HEAD_TIMEOUT_S", 0.2)
    with running(ScriptedEngine(), settings()) as url, connect(url) as connection:
        connection.sendall(ASKED)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        everything(connection)


def test_a_body_that_nobody_reads_any_more_does_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "HEAD_TIMEOUT_S", 0.2)
    with running(ScriptedEngine(), settings()) as url, connect(url) as connection:
        head = b"POST /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head + b"x" * 10)
        assert everything(connection).startswith(b"HTTP/1.1 404")


def test_a_client_that_reads_nothing_is_dropped_and_its_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "UNREAD_ANSWER_S", 0.2)
    engine = ScriptedEngine(lambda request: [[TextDelta(0, "x" * 1_000_000)] for _ in range(40)])
    with running(engine, settings()) as url, connect(url) as connection:
        connection.sendall(post("/v1/chat/completions", STREAM))
        assert engine.opened.wait(WAIT_S)
        assert engine.streams[0].closed.wait(WAIT_S)
        ended = httpx.get(f"{url}/v1/requests/{engine.requests[0].id}").json()
        assert "did not read" in str(ended)


def test_a_client_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http11, "UNREAD_ANSWER_S", 0.3)
    text = "x" * 200_000
    engine = ScriptedEngine(lambda request: [[TextDelta(0, text)] for _ in range(20)])
    with running(engine, settings()) as url, connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        connection.sendall(post("/v1/chat/completions", STREAM))
        received = 0
        while received < 20 * len(text):
            piece = connection.recv(65_536)
            assert piece
            received += piece.count(b"x")


def test_a_vanished_client_is_looked_for() -> None:
    with socket.socket() as plain:
        set_keepalive_options(plain)
        assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = socket.TCP_KEEPIDLE if hasattr(socket, "TCP_KEEPIDLE") else socket.TCP_KEEPALIVE
        assert plain.getsockopt(socket.IPPROTO_TCP, idle) == connections.PROBE_AFTER_S


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's list of sockets is Linux's")
def test_every_connection_is_probed_while_it_is_silent() -> None:
    with running(ScriptedEngine(), settings()) as url, connect(url) as connection:
        connection.sendall(ASKED)
        connection.recv(65_536)
        ends = (f":{urlsplit(url).port:04X}", f":{connection.getsockname()[1]:04X}")
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (timer,) = [row[5] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])]
        assert timer.startswith("02:"), "no keep-alive timer runs"


FLOODED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from ingot.http.server import open_listener
from tests.http.running import make_server
from tests.http.scripted import ScriptedEngine, settings
def ready(url):
    if "eat" in sys.argv:
        while True:
            try:
                os.open(os.devnull, os.O_RDONLY)
            except OSError:
                break
    print(url, flush=True)
make_server(ScriptedEngine(), settings(), ready, open_listener(settings())).run()
"""


def serving(*words: str) -> subprocess.Popen[str]:
    return start(
        [sys.executable, "-c", FLOODED, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "."},
    )


def test_under_a_low_limit_of_files_health_answers_and_the_log_stays_short() -> None:
    with serving() as process, ExitStack() as blocked:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        for _ in range(150):
            blocked.enter_context(connect(url))
        assert httpx.get(f"{url}/health/live").status_code == 200
        process.terminate()
        _, errors = process.communicate(timeout=WAIT_S)
    assert len(errors.splitlines()) < 10, errors[:2000]


def test_a_server_without_a_file_to_spare_says_so_once() -> None:
    with serving("eat") as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        with connect(url):
            result = process.stderr.readline()
            while "cannot accept a connection" not in result:
                assert result
                result = process.stderr.readline()
            process.terminate()
            _, errors = process.communicate(timeout=WAIT_S)
    assert len(errors.splitlines()) < 10, errors[:2000]
