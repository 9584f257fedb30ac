from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.distributed import wire
from ingot.distributed.wire import HEADER, LARGEST, MAGIC, VERSION, Frame, Link, LinkLate, LinkLost, broadcast, packed

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


frames = st.builds(Frame, st.integers(0, 255), st.integers(0, 2**64 - 1), st.binary(max_size=300))


@given(st.lists(frames, max_size=5))
def test_what_is_sent_is_received_in_order(sent: list[Frame]) -> None:
    with connected() as (bare, link):
        other = Link(bare, "rank 0")
        for kind, step, body in sent:
            other.send(kind, body, step)
        assert [link.receive(1.0) for _ in sent] == sent


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_any_cut_of_a_stream_ends_in_a_lost_link_behind_the_frames_that_came_whole(
    sent: list[Frame], data: st.DataObject
) -> None:
    stream = b"".join(packed(kind, body, step) for kind, step, body in sent)
    cut = data.draw(st.integers(0, len(stream) - 1))
    with connected() as (bare, link):
        bare.sendall(stream[:cut])
        bare.close()
        got = []
        with pytest.raises(LinkLost):
            while True:
                got.append(link.receive(1.0))
        assert got == sent[: len(got)]
        assert sum(HEADER.size + len(frame.body) for frame in got) <= cut


@given(st.binary(min_size=HEADER.size, max_size=200).filter(lambda data: data[:5] != MAGIC + bytes((VERSION,))))
def test_garbage_ends_the_link(garbage: bytes) -> None:
    with connected() as (bare, link):
        bare.sendall(garbage)
        with pytest.raises(LinkLost, match="no message"):
            link.receive(1.0)


@given(st.integers(LARGEST + 1, 2**32 - 1))
def test_a_body_that_is_too_large_is_refused_before_it_is_waited_for(length: int) -> None:
    with connected() as (bare, link):
        bare.sendall(HEADER.pack(MAGIC, VERSION, 1, length, 0))
        with pytest.raises(LinkLost, match="no message"):
            link.receive(1.0)


def test_a_body_that_is_too_large_is_not_sent(linked: tuple[Link, Link]) -> None:
    with pytest.raises(ValueError, match="larger than"):
        linked[0].send(1, bytes(LARGEST + 1))


def test_the_largest_body_passes(linked: tuple[Link, Link]) -> None:
    here, there = linked
    body = bytes(range(256)) * (LARGEST // 256)
    sender = threading.Thread(target=here.send, args=(3, body))
    sender.start()
    assert there.receive(5.0).body == body
    sender.join(PATIENCE_S)


@given(st.integers(0, HEADER.size + 9))
def test_what_comes_late_is_said_to_be_late_and_nothing_of_it_is_forgotten(cut: int) -> None:
    stream = packed(7, b"0123456789", 5)
    with connected() as (bare, link):
        bare.sendall(stream[:cut])
        with pytest.raises(LinkLate, match="rank 1 was silent"):
            link.receive(0.001)
        bare.sendall(stream[cut:])
        assert link.receive(1.0) == (7, 5, b"0123456789")


def test_without_a_deadline_the_rest_of_a_message_still_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "REST_S", SHORT_S)
    for cut in (3, HEADER.size + 2):
        with connected() as (bare, link):
            bare.sendall(packed(1, b"abcdef")[:cut])
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
            broadcast((stuck, lost, link), 2, b"plan", 9, within=SHORT_S)
        assert reader.receive(1.0) == (2, 9, b"plan")


def test_a_late_one_is_told_of_once_the_others_have_the_frame(linked: tuple[Link, Link]) -> None:
    here, there = linked
    with connected() as (_, stuck):
        fill(stuck)
        began = time.monotonic()
        with pytest.raises(LinkLate):
            broadcast((stuck, here), 2, bytes(100), 1, within=SHORT_S)
        assert time.monotonic() - began >= SHORT_S
        assert there.receive(1.0).step == 1
