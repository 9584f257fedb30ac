"""Files inside of texts: read as they were written, or refused in words."""

from __future__ import annotations

import base64
import errno
import itertools
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadMedia, Cancelled
from ingot.media import bounds
from ingot.media import fetch as fetching
from ingot.media.fetch import (
    Unfetched,
    decode_base64,
    fetch_file,
    fetched_file,
    host_allowed,
    prefetched_files,
    split_data_url,
)


@given(data=st.binary(max_size=300), width=st.integers(1, 80))
def test_a_file_comes_back_whatever_lines_and_padding_it_was_written_with(data: bytes, width: int) -> None:
    text = base64.b64encode(data).decode()
    lines = "\r\n".join(text[at : at + width] for at in range(0, len(text), width))
    assert decode_base64(text) == decode_base64(lines) == decode_base64(text.rstrip("=")) == data


@given(text=st.text(max_size=40))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    with suppress(BadMedia):
        decode_base64(text)
    with suppress(BadMedia):
        split_data_url("data:" + text)


@pytest.mark.parametrize("text", ["!", "AA=A", "A", "AA==AA==", "Ä", "\ud800"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(BadMedia, match="no base64"):
        decode_base64(text)


def test_a_data_url_states_its_type_and_is_in_base64() -> None:
    assert split_data_url("data:IMAGE/PNG;base64,AAAA") == ("image/png", "AAAA")
    assert split_data_url("data:video/mp4;codecs=avc1;base64,AAAA") == ("video/mp4", "AAAA")
    assert split_data_url("data:;base64,AAAA") == ("", "AAAA")
    for url in ("data:image/png,AAAA", "data:image/png;base64", "data:" + "a" * 300 + ";base64,AAAA", "image/png"):
        with pytest.raises(BadMedia, match="as in data:image/png;base64"):
            split_data_url(url)


LOCAL = ("localhost",)


class Handler(BaseHTTPRequestHandler):
    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["host"]))  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path[4:].replace("=", ":"))
            self.end_headers()
            return
        if self.path == "/gone":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/packed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        size = bounds.FETCHED_BYTES + 1 if self.path == "/long" else 5
        try:
            for _ in range(-(-size // 65536)):
                self.wfile.write(b"x" * min(size, 65536))
        except OSError:
            pass  # whoever asked has read enough

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.daemon_threads = True
    served.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def at(server: ThreadingHTTPServer, path: str, host: str = "localhost") -> str:
    return f"http://{host}:{server.server_port}{path}"


def here(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def test_a_file_is_fetched_under_the_name_that_was_asked_for(server: Any) -> None:
    assert fetch_file(at(server, "/a?b=c"), LOCAL, lookup=here) == b"xxxxx"
    assert server.seen == [("/a?b=c", f"localhost:{server.server_port}")]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://other/", "does not name it"),
        ("ftp://localhost/", "http and https"),
        ("http://user:word@localhost/", "no user"),
        ("http:///a", "must have a host"),
        ("http://localhost:99999/", "cannot be read"),
        ("http://localhost/a b", "ASCII"),
        ("http://localhost/\r\nX: y", "."),
        ("http://[::1/", "cannot be read"),
    ],
)
def test_what_is_not_allowed_is_refused_before_anyone_is_asked(url: str, said: str, server: Any) -> None:
    with pytest.raises(BadMedia, match=said):
        fetch_file(url, LOCAL, lookup=here)
    assert not server.seen


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "2002:7f00:1::", "ff02::1"),
    ],
)
def test_a_public_name_of_a_private_address_is_refused(address: str) -> None:
    with pytest.raises(BadMedia, match="not in the public network"):
        fetch_file(
            "http://images.example.org/a.png", ("*.example.org",), lookup=lambda host, port: ["93.184.216.34", address]
        )


def test_a_private_address_is_asked_where_the_setting_names_it(server: Any) -> None:
    assert fetch_file(at(server, "/a", "127.0.0.1"), ("127.0.0.1",), lookup=here) == b"xxxxx"
    with pytest.raises(BadMedia, match="not in the public network"):
        fetch_file(at(server, "/a", "127.0.0.1"), ("*",), lookup=here)


def test_every_hop_is_checked_again(server: Any) -> None:
    port = server.server_port
    assert fetch_file(at(server, f"/to/http=//localhost={port}/b"), LOCAL, lookup=here) == b"xxxxx"
    with pytest.raises(BadMedia, match="does not name it"):
        fetch_file(at(server, "/to/http=//169.254.169.254/"), LOCAL, lookup=here)
    with pytest.raises(BadMedia, match="http and https"):
        fetch_file(at(server, "/to/file=///etc/passwd"), LOCAL, lookup=here)


def test_a_host_is_looked_up_once_for_each_hop_and_that_address_is_dialled(server: Any) -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    assert fetch_file(at(server, "/a"), LOCAL, lookup=lambda host, port: next(answers)) == b"xxxxx"


def test_redirects_in_a_circle_end(server: Any) -> None:
    around = f"/to/http=//localhost={server.server_port}"
    with pytest.raises(BadMedia, match="redirects"):
        fetch_file(at(server, around * 8), LOCAL, lookup=here)
    assert len(server.seen) == bounds.REDIRECTS + 1


@pytest.mark.parametrize(
    ("path", "said"), [("/gone", "status 404"), ("/packed", "compressed"), ("/long", "most that is")]
)
def test_what_comes_back_is_taken_whole_and_plain_or_not_at_all(path: str, said: str, server: Any) -> None:
    with pytest.raises(BadMedia, match=said):
        fetch_file(at(server, path), LOCAL, lookup=here)


def test_a_server_that_cannot_be_reached_is_told_of_without_its_address() -> None:
    with pytest.raises(BadMedia, match="the connection failed") as refused:
        fetch_file("http://localhost:1/a", LOCAL, lookup=here)
    assert "127.0.0.1" not in refused.value.message


def test_time_runs_out(server: Any) -> None:
    with pytest.raises(BadMedia, match="longer than"):
        fetch_file(at(server, "/a"), LOCAL, lookup=here, timeout_s=-1)


class Dripping:
    """A server that answers with a beginning, and then with a byte whenever the time is asked for, which goes on by a
    second then."""

    def __init__(self, beginning: bytes) -> None:
        self.now, self._beginning, self._asked = 0.0, beginning, threading.Semaphore(0)
        self.asked, self.left = threading.Event(), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Dripping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.release(1000)  # so that it notices that nobody reads any more
        self._listening.close()
        self._thread.join()

    def clock(self) -> float:
        self.now += 1
        self._asked.release()
        return self.now

    def url(self, scheme: str = "http", host: str = "localhost") -> str:
        return f"{scheme}://{host}:{self._listening.getsockname()[1]}/a"

    def _run(self) -> None:
        connection, _ = self._listening.accept()
        self.asked.set()
        with connection, suppress(OSError):
            connection.sendall(self._beginning)
            while self._beginning and self._asked.acquire():
                connection.sendall(b"x")
            connection.recv(1 << 16)
            connection.recv(1)  # until it is closed
        self.left.set()


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "beginning",
    [HEAD, HEAD + b"a: ", HEAD + b"\r\n", HEAD + b"content-length: 99\r\n\r\n"]
    + [HEAD + b"transfer-encoding: chunked\r\n\r\n" + ending for ending in (b"1;", b"ff\r\n")],
)
def test_one_limit_holds_for_head_and_body_however_slowly_they_come(beginning: bytes) -> None:
    with Dripping(beginning) as server, pytest.raises(BadMedia, match="longer than"):
        fetch_file(server.url(), LOCAL, lookup=here, timeout_s=20, clock=server.clock)
    assert server.now <= 22  # the limit, and where it begins


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_says_nothing_is_waited_for_no_longer(scheme: str) -> None:
    with Dripping(b"") as server, pytest.raises(BadMedia, match="longer than"):
        fetch_file(server.url(scheme), LOCAL, lookup=here, timeout_s=5, clock=server.clock)


@pytest.mark.parametrize(("beginning", "scheme"), [(b"", "http"), (b"", "https"), (HEAD, "http")])
def test_nothing_is_fetched_for_a_client_that_left(beginning: bytes, scheme: str) -> None:
    asked = itertools.count()
    with Dripping(beginning) as server, pytest.raises(Cancelled):
        fetch_file(
            server.url(scheme), LOCAL, lookup=here, timeout_s=99, clock=server.clock, going=lambda: next(asked) < 4
        )
    assert next(asked) == 5


def test_an_address_that_does_not_answer_is_left_when_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: errno.EINPROGRESS)
    monkeypatch.setattr(selectors.DefaultSelector, "select", lambda self, timeout: [])
    asked = itertools.count()
    with pytest.raises(Cancelled):
        fetch_file("http://localhost:1/", LOCAL, lookup=here, going=lambda: next(asked) < 4)


def test_hosts_are_named_one_by_one_or_by_what_they_are_below() -> None:
    assert host_allowed("A.example.org", ("*.example.org",)) and host_allowed("x", ("*",))
    assert not host_allowed("example.org", ("*.example.org",)) and not host_allowed(
        "badexample.org", ("*.example.org",)
    )
    assert host_allowed("example.org.", ("Example.ORG",))


def test_who_reads_a_body_does_not_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "host_addresses", None)
    token = prefetched_files.set({})
    try:
        with pytest.raises(Unfetched) as missing:
            fetched_file("http://other/a", LOCAL)
        found = missing.value.fetch()
        assert isinstance(found, BadMedia)
        prefetched_files.set({"http://other/a": found, "http://localhost/b": b"file"})
        with pytest.raises(BadMedia, match="does not name it"):
            fetched_file("http://other/a", LOCAL)
        assert fetched_file("http://localhost/b", LOCAL) == b"file"
    finally:
        prefetched_files.reset(token)
