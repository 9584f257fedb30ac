"""Messages between the processes of a group: frames on a TCP connection, each way in order, none of them unbounded.

A frame is a header of a fixed size (magic, version, kind, length of the body, number of the step that it belongs to)
and a body: msgpack of whatever the two ends agreed on for that kind, or nothing. Nothing here waits without a deadline
but for the beginning of the next message, and a peer that is cut off ends even that (TCP's keep-alive). Whatever else
comes than a frame is as good as a lost connection. No mlx here, and no pickle.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from ingot.errors import Unavailable

MAGIC: Final = b"ingt"
VERSION: Final = 1
LARGEST: Final = 16 << 20  # bytes of a body: a step's plan has thousands; the longest prompt's tokens, a few million
SEND_S: Final = 5.0
REST_S: Final = 10.0  # what has begun to come has to be there by then
SILENT_S: Final = 5  # then the kernel asks whether the other end is still there,
ASK_AGAIN_S: Final = 2
ASK_TIMES: Final = 3  # and after so many questions without an answer it is not
SENT_BYTES: Final = 4 << 20  # that the kernel takes for a peer that reads late, before a sender has to wait for it

HEADER: Final = struct.Struct("!4sBBxxIQ")


class LinkLost(Unavailable):
    """The other end is gone, or says what is no message. The group cannot go on with it."""


class LinkLate(Unavailable):
    """The other end did not send, or did not read, in time."""


class Frame(NamedTuple):
    kind: int
    step: int
    body: bytes


def packed(kind: int, body: bytes = b"", step: int = 0) -> bytes:
    """A frame's bytes. Raises ValueError where a body is larger than any may be."""
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes is larger than the {LARGEST} that a link carries")
    return HEADER.pack(MAGIC, VERSION, kind, len(body), step) + body


class Link:
    """One end of a connection whose other end is known (`meeting`). One thread sends, and one receives.

    Owns the connection. `peer` is what errors call the other end; clients may read it.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._header = bytearray()
        self._body = bytearray()
        steady(connection)
        self._incoming = select.poll()
        self._incoming.register(connection, select.POLLIN)

    def send(self, kind: int, body: bytes = b"", step: int = 0, within: float = SEND_S) -> None:
        """Raises LinkLost, or LinkLate when the other end does not read, and is closed: it may have half a frame."""
        broadcast((self,), kind, body, step, within)

    def receive(self, within: float | None = None) -> Frame:
        """The next frame. `within` so many seconds, or whenever it begins to come, and then soon.

        Raises LinkLost and LinkLate. After the latter it may be called again: nothing that came is forgotten.
        """
        deadline = None if within is None else time.monotonic() + within
        self._fill(self._header, HEADER.size, deadline)
        deadline = time.monotonic() + REST_S if deadline is None else deadline
        kind, length, step = self._read_header()
        self._fill(self._body, length, deadline)
        frame = Frame(kind, step, bytes(self._body))
        self._header.clear()
        self._body.clear()
        return frame

    def close(self) -> None:
        """Whoever waits for a message meanwhile is told that the link is lost."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def send_some(self, data: memoryview) -> int:
        """What the kernel takes at once. Raises LinkLost."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error

    def fileno(self) -> int:
        return self._connection.fileno()

    def late(self, seconds: float) -> LinkLate:
        return LinkLate(f"{self.peer} was silent for {seconds:.1f} seconds", retry_after=1)

    def _read_header(self) -> tuple[int, int, int]:
        magic, version, kind, length, step = HEADER.unpack(self._header)
        if (magic, version) != (MAGIC, VERSION) or length > LARGEST:
            self.close()
            raise LinkLost(f"{self.peer} sent what is no message of this version of ingot", retry_after=1)
        return kind, length, step

    def _fill(self, buffer: bytearray, size: int, deadline: float | None) -> None:
        began = time.monotonic()
        while len(buffer) < size:
            try:
                data = self._connection.recv(size - len(buffer))
            except BlockingIOError:
                if deadline is None and buffer:
                    deadline = time.monotonic() + REST_S
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self.late(time.monotonic() - began) from None
                self._incoming.poll(None if left is None else left * 1000)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not data:
                raise self._lost(None)
            buffer += data

    def _lost(self, error: OSError | None) -> LinkLost:
        why = "ended its connection" if error is None else f"is not reached any more ({error.strerror or error})"
        return LinkLost(f"{self.peer} {why}", retry_after=1)


def broadcast(links: Sequence[Link], kind: int, body: bytes = b"", step: int = 0, within: float = SEND_S) -> None:
    """The same frame to each. Who does not read at once keeps none of the others waiting for theirs.

    Raises LinkLost or LinkLate for the first that fails, once the others have the frame; a late one is closed.
    """
    data = memoryview(packed(kind, body, step))
    lost: LinkLost | None = None
    left: dict[int, tuple[Link, int]] = {}
    for link in links:
        try:
            sent = link.send_some(data)
        except LinkLost as error:
            lost = lost or error
            continue
        if sent < len(data):
            left[link.fileno()] = link, sent
    if left:
        _send_rest(left, data, within)
    if lost is not None:
        raise lost


def _send_rest(left: dict[int, tuple[Link, int]], data: memoryview, within: float) -> None:
    deadline = time.monotonic() + within
    ready = select.poll()
    for descriptor in left:
        ready.register(descriptor, select.POLLOUT)
    lost: LinkLost | None = None
    while left:
        open_for = deadline - time.monotonic()
        if open_for <= 0:
            late = [link for link, _ in left.values()]
            for link in late:
                link.close()
            raise lost or late[0].late(within)
        for descriptor, _ in ready.poll(open_for * 1000):
            link, sent = left[descriptor]
            try:
                sent += link.send_some(data[sent:])
            except LinkLost as error:
                lost, sent = lost or error, len(data)
            left[descriptor] = link, sent
            if sent == len(data):
                del left[descriptor]
                ready.unregister(descriptor)
    if lost is not None:
        raise lost


def steady(connection: socket.socket) -> None:
    """Small messages leave at once, nothing waits inside of the kernel, and a peer that is cut off is noticed."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_S),
            ("TCP_KEEPALIVE", SILENT_S),  # what macOS calls it
            ("TCP_KEEPINTVL", ASK_AGAIN_S),
            ("TCP_KEEPCNT", ASK_TIMES),
            ("TCP_USER_TIMEOUT", 1000 * (SILENT_S + ASK_AGAIN_S * ASK_TIMES)),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
