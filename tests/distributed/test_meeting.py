from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.distributed.wire import MAGIC, VERSION, LinkLate, LinkLost
from ingot.ranks import meeting
from ingot.ranks.meeting import ANSWER, Stranger, gather, join, listen, welcome

TOKEN = "0123456789abcdef"
PATIENCE_S = 60.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as taken:
        taken.settimeout(PATIENCE_S)
        yield taken


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_all_ranks_are_met_in_their_order(listener: socket.socket) -> None:
    with ThreadPoolExecutor() as threads:
        guests = [threads.submit(join, "127.0.0.1", port(listener), TOKEN, rank, "rank 0", 5.0) for rank in (3, 1, 2)]
        links = gather(listener, TOKEN, range(1, 4), 5.0)
        assert [link.peer for link in links] == ["rank 1", "rank 2", "rank 3"]
        for link in links:
            link.send(1, link.peer.encode())
        said = [guest.result(PATIENCE_S).receive(1.0).body for guest in guests]
    assert said == [b"rank 3", b"rank 1", b"rank 2"]


def test_a_guest_tries_again_until_somebody_listens() -> None:
    with listen("127.0.0.1") as taken:
        free = port(taken)
    with ThreadPoolExecutor() as threads:
        guest = threads.submit(join, "127.0.0.1", free, TOKEN, 1, "rank 0", 5.0)
        with listen("127.0.0.1", free) as listener:
            gather(listener, TOKEN, [1], 5.0)
            assert guest.result(PATIENCE_S).peer == "rank 0"


def test_who_does_not_come_is_named(listener: socket.socket) -> None:
    with pytest.raises(LinkLate, match="rank 1, 2 did not come"):
        gather(listener, TOKEN, [1, 2], 0.02)


def test_another_token_is_let_in_by_neither(listener: socket.socket) -> None:
    with ThreadPoolExecutor() as threads:
        guest = threads.submit(join, "127.0.0.1", port(listener), "another token here", 1, "rank 0", 0.3)
        with pytest.raises(LinkLate, match="rank 1 did not come"):
            gather(listener, TOKEN, [1], 0.3)
        with pytest.raises(LinkLate, match="is the token the same"):
            guest.result(PATIENCE_S)


def test_a_host_that_does_not_know_the_token_is_left(listener: socket.socket) -> None:
    def impostor() -> None:
        with listener.accept()[0] as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(meeting.GREETING.pack(MAGIC, VERSION, bytes(32)))
            connection.recv(ANSWER.size)
            connection.sendall(bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(LinkLost, match="does not know the group's token"):
        join("127.0.0.1", port(listener), TOKEN, 1, "rank 0", 5.0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "something else listens"),
        (meeting.GREETING.pack(MAGIC, 9, bytes(32)), "speaks version 9"),
    ],
)
def test_something_else_that_listens_there_is_said_to_be_something_else(
    listener: socket.socket, greeting: bytes, said: str
) -> None:
    def other() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(greeting)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(LinkLost, match=said):
        join("127.0.0.1", port(listener), TOKEN, 1, "rank 0", 5.0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_a_stranger_is_sent_away_whatever_it_says(listener: socket.socket, said: bytes) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(Stranger):
            welcome(listener.accept()[0], TOKEN)


def test_a_silent_stranger_keeps_nobody_waiting_for_long(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "GREETING_S", 0.02)
    with socket.create_connection(listener.getsockname()), ThreadPoolExecutor() as threads:
        guest = threads.submit(join, "127.0.0.1", port(listener), TOKEN, 1, "rank 0", 5.0)
        gather(listener, TOKEN, [1], 5.0)
        guest.result(PATIENCE_S)
