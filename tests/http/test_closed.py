from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from ingot.http.closed import ClosedDoor
from ingot.http.server import listen
from tests.http.running import connect, everything, post
from tests.http.scripted import settings


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, ...]]:
    listener = listen(settings())
    yield listener.sockets
    listener.close()


@pytest.fixture
def door(sockets: tuple[socket.socket, ...]) -> Iterator[ClosedDoor]:
    made = ClosedDoor(sockets, settings())
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
    door: ClosedDoor, sockets: tuple[socket.socket, ...], path: str, kind: str
) -> None:
    with connect(url(sockets)) as client:
        client.sendall(post(path, {"messages": ["x" * 300_000]}))
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 2\r\n" in head + b"\r\n"
    assert b"\r\nconnection: close" in head
    assert "rank 1 was killed" in str(json.loads(body)[kind])


def test_the_process_is_alive_and_not_ready(door: ClosedDoor, sockets: tuple[socket.socket, ...]) -> None:
    with urllib.request.urlopen(f"{url(sockets)}/health/live") as answer:
        assert json.loads(answer.read())["ok"]
    door.open("another reason")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url(sockets)}/health")
    assert refused.value.code == 503
    assert json.loads(refused.value.read()) == {"ok": False, "detail": "another reason"}


def test_a_door_that_is_left_leaves_the_sockets_to_who_else_listens(
    door: ClosedDoor, sockets: tuple[socket.socket, ...]
) -> None:
    door.close()
    with connect(url(sockets)):
        sockets[0].settimeout(20.0)
        taken, _ = sockets[0].accept()
        taken.close()
    door.open("again")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{url(sockets)}/health")
