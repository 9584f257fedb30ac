"""The real server, on a real socket, with any engine behind it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ingot.config import Settings
from ingot.http.server import HttpServer, Listener, make_app_server, open_listener
from tests.http.scripted import build_app
from tests.waiting import WAIT_S


def make_server(
    engine: Any,
    settings: Settings,
    on_ready: Callable[[str], None],
    listener: Listener,
    settings_again: Callable[[], Settings] | None = None,
) -> HttpServer:
    """A server of one engine and of those alongside, which the caller closes."""
    return make_app_server(build_app(engine, settings), settings, on_ready, listener, settings_again)


@contextmanager
def running(engine: Any, settings: Settings) -> Iterator[str]:
    """Yields the URL of a server that serves `engine` in a thread of its own."""
    ready = threading.Event()
    server = make_server(engine, settings, lambda url: ready.set(), open_listener(settings))
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield server.listener.url
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S)


def post(path: str, body: Any, *lines: str) -> bytes:
    """A POST as bytes."""
    raw = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *lines]
    return "\r\n".join([*head, f"content-length: {len(raw)}", "", ""]).encode() + raw


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)
