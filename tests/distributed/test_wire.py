from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.distributed import wire
from ingot.distributed.wire import (
    ANSWER,
    FRAME_HEADER,
    LARGEST_BODY,
    MAGIC,
    WIRE_VERSION,
    Link,
    LinkFrame,
    LinkLate,
    LinkLost,
    UnknownPeer,
    accept_ranks,
    authenticate_guest,
    broadcast_frame,
    connect_to_host,
    encode_frame,
    listen_at,
)

SHORT_S = 0.02
PATIENCE_S = 60.0


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, Link]]:
    """A bare socket, and the link at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bare = socket.create_connection(listener.getsockname())
        link = Link(listener.accept()[0], "rank 1")
    with bare:
        try:
            yield bare, link
        finally:
            link.close()


def fill(link: Link) -> None:
    """Until the kernel has had a while to make room, and made none."""
    ready = select.poll()
    ready.register(link, select.POLLOUT)
    while ready.poll(5000 * SHORT_S) or link.send_some(memoryview(bytes(1 << 20))):
        link.send_some(memoryview(bytes(1 << 20)))


@pytest.fixture
def linked() -> Iterator[tuple[Link, Link]]:
    with connected() as (bare, link):
        other = Link(bare, "rank 0")
        yield link, other
        other.close()


frames = st.builds(LinkFrame, st.integers(0, 255), st.integers(0, 2**64 - 1), st.binary(max_size=300))


@given(st.lists(frames, max_size=5))
def test_what_is_sent_is_received_in_order(sent: list[LinkFrame]) -> None:
    with connected() as (bare, link):
        other = Link(bare, "rank 0")
        for kind, step, body in sent:
            other.send(kind, body, step)
        assert [link.receive(1.0) for _ in sent] == sent


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_any_cut_of_a_stream_ends_in_a_lost_link_behind_the_frames_that_came_whole(
    sent: list[LinkFrame], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(kind, body, step) for kind, step, body in sent)
    cut = data.draw(st.integers(0, len(stream) - 1))
    with connected() as (bare, link):
        bare.sendall(stream[:cut])
        bare.close()
        got = []
        with pytest.raises(LinkLost):
            while True:
                got.append(link.receive(1.0))
        assert got == sent[: len(got)]
        assert sum(FRAME_HEADER.size + len(frame.body) for frame in got) <= cut


@given(
    st.binary(min_size=FRAME_HEADER.size, max_size=200).filter(lambda data: data[:5] != MAGIC + bytes((WIRE_VERSION,)))
)
def test_garbage_ends_the_link(garbage: bytes) -> None:
    with connected() as (bare, link):
        bare.sendall(garbage)
        with pytest.raises(LinkLost, match="something else than a frame"):
            link.receive(1.0)


@given(st.integers(LARGEST_BODY + 1, 2**32 - 1))
def test_a_body_that_is_too_large_is_refused_before_it_is_waited_for(length: int) -> None:
    with connected() as (bare, link):
        bare.sendall(FRAME_HEADER.pack(MAGIC, WIRE_VERSION, 1, length, 0))
        with pytest.raises(LinkLost, match="something else than a frame"):
            link.receive(1.0)


def test_a_body_that_is_too_large_is_not_sent(linked: tuple[Link, Link]) -> None:
    with pytest.raises(ValueError, match="larger than"):
        linked[0].send(1, bytes(LARGEST_BODY + 1))


def test_the_largest_body_passes(linked: tuple[Link, Link]) -> None:
    here, there = linked
    body = bytes(range(256)) * (LARGEST_BODY // 256)
    sender = threading.Thread(target=here.send, args=(3, body))
    sender.start()
    assert there.receive(5.0).body == body
    sender.join(PATIENCE_S)


@given(st.integers(0, FRAME_HEADER.size + 9))
def test_what_comes_late_is_said_to_be_late_and_nothing_of_it_is_forgotten(cut: int) -> None:
    stream = encode_frame(7, b"0123456789", 5)
    with connected() as (bare, link):
        bare.sendall(stream[:cut])
        with pytest.raises(LinkLate, match="rank 1 was silent"):
            link.receive(0.001)
        bare.sendall(stream[cut:])
        assert link.receive(1.0) == (7, 5, b"0123456789")


def test_without_a_deadline_the_rest_of_a_message_still_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "REST_S", SHORT_S)
    for cut in (3, FRAME_HEADER.size + 2):
        with connected() as (bare, link):
            bare.sendall(encode_frame(1, b"abcdef")[:cut])
            with pytest.raises(LinkLate):
                link.receive()


def test_a_reader_that_stands_still_makes_sending_late_and_ends_the_link(linked: tuple[Link, Link]) -> None:
    here, _ = linked
    with pytest.raises(LinkLate, match="rank 1"):
        for _ in range(100):
            here.send(1, bytes(1 << 20), within=SHORT_S)
    with pytest.raises(LinkLost):
        here.send(1)


def test_closing_wakes_who_waits(linked: tuple[Link, Link]) -> None:
    here, there = linked
    closer = threading.Timer(SHORT_S, there.close)
    closer.start()
    with pytest.raises(LinkLost):
        here.receive(PATIENCE_S)
    closer.join(PATIENCE_S)


def test_a_broadcast_reaches_the_others_when_one_does_not_read_or_is_gone() -> None:
    with connected() as (_, stuck), connected() as (gone, lost), connected() as (bare, link):
        fill(stuck)
        reader = Link(bare, "rank 0")
        lost.close()
        gone.close()
        with pytest.raises((LinkLate, LinkLost)):
            broadcast_frame((stuck, lost, link), 2, b"plan", 9, within=SHORT_S)
        assert reader.receive(1.0) == (2, 9, b"plan")


def test_a_late_one_is_told_of_once_the_others_have_the_frame(linked: tuple[Link, Link]) -> None:
    here, there = linked
    with connected() as (_, stuck):
        fill(stuck)
        began = time.monotonic()
        with pytest.raises(LinkLate):
            broadcast_frame((stuck, here), 2, bytes(100), 1, within=SHORT_S)
        assert time.monotonic() - began >= SHORT_S
        assert there.receive(1.0).step == 1


TOKEN = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen_at("127.0.0.1") as used:
        used.settimeout(PATIENCE_S)
        yield used


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_all_ranks_are_met_in_their_order(listener: socket.socket) -> None:
    with ThreadPoolExecutor() as threads:
        guests = [
            threads.submit(connect_to_host, "127.0.0.1", port(listener), TOKEN, rank, "rank 0", 5.0)
            for rank in (3, 1, 2)
        ]
        links = accept_ranks(listener, TOKEN, range(1, 4), 5.0)
        assert [link.peer for link in links] == ["rank 1", "rank 2", "rank 3"]
        for link in links:
            link.send(1, link.peer.encode())
        said = [guest.result(PATIENCE_S).receive(1.0).body for guest in guests]
    assert said == [b"rank 3", b"rank 1", b"rank 2"]


def test_a_guest_tries_again_until_somebody_listens() -> None:
    with listen_at("127.0.0.1") as used:
        free = port(used)
    with ThreadPoolExecutor() as threads:
        guest = threads.submit(connect_to_host, "127.0.0.1", free, TOKEN, 1, "rank 0", 5.0)
        with listen_at("127.0.0.1", free) as listener:
            accept_ranks(listener, TOKEN, [1], 5.0)
            assert guest.result(PATIENCE_S).peer == "rank 0"


def test_who_does_not_come_is_named(listener: socket.socket) -> None:
    with pytest.raises(LinkLate, match="rank 1, 2 did not connect"):
        accept_ranks(listener, TOKEN, [1, 2], 0.02)


def test_another_token_is_let_in_by_neither(listener: socket.socket) -> None:
    with ThreadPoolExecutor() as threads:
        guest = threads.submit(connect_to_host, "127.0.0.1", port(listener), "another token here", 1, "rank 0", 0.3)
        with pytest.raises(LinkLate, match="rank 1 did not connect"):
            accept_ranks(listener, TOKEN, [1], 0.3)
        with pytest.raises(LinkLate, match="is the token the same"):
            guest.result(PATIENCE_S)


def test_a_host_that_does_not_know_the_token_is_left(listener: socket.socket) -> None:
    def impostor() -> None:
        with listener.accept()[0] as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(wire.GREETING.pack(MAGIC, WIRE_VERSION, bytes(32)))
            connection.recv(ANSWER.size)
            connection.sendall(bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(LinkLost, match="does not know the group's token"):
        connect_to_host("127.0.0.1", port(listener), TOKEN, 1, "rank 0", 5.0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "something else listens"),
        (wire.GREETING.pack(MAGIC, 9, bytes(32)), "uses version 9"),
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
        connect_to_host("127.0.0.1", port(listener), TOKEN, 1, "rank 0", 5.0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_a_stranger_is_sent_away_whatever_it_says(listener: socket.socket, said: bytes) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(UnknownPeer):
            authenticate_guest(listener.accept()[0], TOKEN)


def test_a_silent_stranger_keeps_nobody_waiting_for_long(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "GREETING_S", 0.02)
    with socket.create_connection(listener.getsockname()), ThreadPoolExecutor() as threads:
        guest = threads.submit(connect_to_host, "127.0.0.1", port(listener), TOKEN, 1, "rank 0", 5.0)
        accept_ranks(listener, TOKEN, [1], 5.0)
        guest.result(PATIENCE_S)
