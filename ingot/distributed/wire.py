"""Links between the processes of a group: ordered frames of bounded size on a TCP connection; and the handshake by
which both ends prove that they know the group's token.

A frame is a header of fixed size (magic, version, kind, length of the body, step number) and a body: msgpack, by kind,
or nothing. Nothing waits without a deadline but for the beginning of the next frame, and TCP keep-alive ends even that
when a peer is cut off. Anything but a frame counts as a lost connection. No mlx here, and no pickle.

In the handshake one end listens and the others connect. Before either has proved that it knows the token, the other
reads only a fixed number of bytes, within a second. The token itself is never sent: each end answers the other's random
challenge with it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from ingot.errors import Unavailable

MAGIC: Final = b"ingt"
WIRE_VERSION: Final = 1
LARGEST_BODY: Final = 16 << 20  # bytes: a step's plan takes thousands, the longest prompt's tokens a few million
SEND_S: Final = 5.0
REST_S: Final = 10.0  # in which a frame that has begun has to be complete
SILENT_S: Final = 5  # of silence before the first keep-alive probe
ASK_AGAIN_S: Final = 2  # between probes
ASK_TIMES: Final = 3  # probes without an answer after which the peer is gone
SENT_BYTES: Final = 4 << 20  # that the kernel buffers for a late peer, before a sender has to wait

FRAME_HEADER: Final = struct.Struct("!4sBBxxIQ")


class LinkLost(Unavailable):
    """The other end is gone, or sent something else than a frame. The group cannot go on with it."""


class LinkLate(Unavailable):
    """The other end did not send, or did not read, in time."""


class LinkFrame(NamedTuple):
    kind: int
    step: int
    body: bytes


def encode_frame(kind: int, body: bytes = b"", step: int = 0) -> bytes:
    """Raises ValueError where the body is too large."""
    if len(body) > LARGEST_BODY:
        raise ValueError(f"a message of {len(body)} bytes is larger than the {LARGEST_BODY} that a link carries")
    return FRAME_HEADER.pack(MAGIC, WIRE_VERSION, kind, len(body), step) + body


class Link:
    """One end of an authenticated connection, which it owns. One thread sends, and one receives.

    `peer` is the other end's name in errors, which clients may read.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._connection = connection
        self._header = bytearray()
        self._body = bytearray()
        configure_socket(connection)
        self._incoming = select.poll()
        self._incoming.register(connection, select.POLLIN)

    def send(self, kind: int, body: bytes = b"", step: int = 0, within: float = SEND_S) -> None:
        """Raises LinkLost, or LinkLate where the other end does not read; then the link is closed, amid a frame."""
        broadcast_frame((self,), kind, body, step, within)

    def receive(self, within: float | None = None) -> LinkFrame:
        """The next frame, `within` so many seconds, or whenever it begins.

        Raises LinkLost and LinkLate. After the latter it may be called again: nothing that was received is lost.
        """
        deadline = None if within is None else time.monotonic() + within
        self._fill(self._header, FRAME_HEADER.size, deadline)
        deadline = time.monotonic() + REST_S if deadline is None else deadline
        kind, length, step = self._read_header()
        self._fill(self._body, length, deadline)
        frame = LinkFrame(kind, step, bytes(self._body))
        self._header.clear()
        self._body.clear()
        return frame

    def close(self) -> None:
        """A thread that waits in `receive` gets LinkLost."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def send_some(self, data: memoryview) -> int:
        """Send what the kernel takes at once; returns how much. Raises LinkLost."""
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
        magic, version, kind, length, step = FRAME_HEADER.unpack(self._header)
        if (magic, version) != (MAGIC, WIRE_VERSION) or length > LARGEST_BODY:
            self.close()
            raise LinkLost(f"{self.peer} sent something else than a frame of this version of ingot", retry_after=1)
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
        why = "ended its connection" if error is None else f"cannot be reached any more ({error.strerror or error})"
        return LinkLost(f"{self.peer} {why}", retry_after=1)


def broadcast_frame(links: Sequence[Link], kind: int, body: bytes = b"", step: int = 0, within: float = SEND_S) -> None:
    """Send the same frame to each. A late peer does not delay the others.

    Raises LinkLost or LinkLate for the first that fails, once the others have the frame; late links are closed.
    """
    data = memoryview(encode_frame(kind, body, step))
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


def configure_socket(connection: socket.socket) -> None:
    """Send small frames at once, never block, and notice a peer that is cut off."""
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


CHALLENGE: Final = 32
GREETING: Final = struct.Struct(f"!4sB3x{CHALLENGE}s")  # from the listening end
ANSWER: Final = struct.Struct(f"!4sB3xI{CHALLENGE}s32s")  # from the connecting end: rank, challenge, proof
PROOF: Final = 32
GREETING_S: Final = 1.0
TRY_AGAIN_S: Final = 0.05

Role = Literal["host", "guest"]


class UnknownPeer(Exception):
    """The connecting end does not know the token, or the protocol. It learns only that the connection ends."""


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)


def accept_ranks(listener: socket.socket, token: str, ranks: Iterable[int], within: float) -> list[Link]:
    """A link to each of the ranks, in order, once all have connected. Raises LinkLate, which names the missing ones."""
    wanted = list(ranks)
    found: dict[int, Link] = {}
    deadline = time.monotonic() + within
    while missing := [rank for rank in wanted if rank not in found]:
        try:
            connection = _accept_connection(listener, deadline)
            rank = authenticate_guest(connection, token)
        except UnknownPeer:
            continue
        except TimeoutError:
            for link in found.values():
                link.close()
            names = ", ".join(map(str, missing))
            raise LinkLate(f"rank {names} did not connect within {within:.0f} seconds", retry_after=1) from None
        if rank in missing:
            found[rank] = Link(connection, f"rank {rank}")
        else:
            connection.close()
    return [found[rank] for rank in wanted]


def _accept_connection(listener: socket.socket, deadline: float) -> socket.socket:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    listener.settimeout(left)
    return listener.accept()[0]


def authenticate_guest(connection: socket.socket, token: str) -> int:
    """The rank of the connecting end. Raises UnknownPeer, and closes the connection, where it does not know the
    token."""
    try:
        connection.settimeout(GREETING_S)
        own = secrets.token_bytes(CHALLENGE)
        connection.sendall(GREETING.pack(MAGIC, WIRE_VERSION, own))
        magic, version, rank, theirs, proof = ANSWER.unpack(_receive_exactly(connection, ANSWER.size))
        is_proven = hmac.compare_digest(proof, handshake_proof(token, "guest", own, theirs, rank))
        if not is_proven or (magic, version) != (MAGIC, WIRE_VERSION):
            raise UnknownPeer
        connection.sendall(handshake_proof(token, "host", own, theirs, rank))
        return int(rank)
    except (OSError, EOFError) as error:
        connection.close()
        raise UnknownPeer from error
    except UnknownPeer:
        connection.close()
        raise


def connect_to_host(host: str, port: int, token: str, rank: int, peer: str, within: float) -> Link:
    """The link to the host, which may not listen yet. Raises LinkLate, and LinkLost where it is not the right host."""
    deadline = time.monotonic() + within
    reason: Exception | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=left)
        except OSError as error:
            reason = error
            time.sleep(min(TRY_AGAIN_S, left))
            continue
        try:
            _authenticate_to_host(connection, token, rank, peer, left)
        except (OSError, EOFError) as error:
            connection.close()
            reason = error
            time.sleep(min(TRY_AGAIN_S, left))
            continue
        except LinkLost:
            connection.close()
            raise
        return Link(connection, peer)
    raise LinkLate(f"{peer} was not reached within {within:.0f} seconds ({reason})", retry_after=1)


def _authenticate_to_host(connection: socket.socket, token: str, rank: int, peer: str, left: float) -> None:
    connection.settimeout(left)
    magic, version, theirs = GREETING.unpack(_receive_exactly(connection, GREETING.size))
    if magic != MAGIC:
        raise LinkLost(f"{peer} is not at this address: something else listens there")
    if version != WIRE_VERSION:
        raise LinkLost(
            f"{peer} uses version {version} of the protocol between ranks, this one {WIRE_VERSION}: install the same "
            "ingot"
        )
    own = secrets.token_bytes(CHALLENGE)
    connection.sendall(ANSWER.pack(MAGIC, WIRE_VERSION, rank, own, handshake_proof(token, "guest", theirs, own, rank)))
    if not hmac.compare_digest(_receive_exactly(connection, PROOF), handshake_proof(token, "host", theirs, own, rank)):
        raise LinkLost(f"{peer} does not know the group's token")


def handshake_proof(token: str, role: Role, hosts: bytes, guests: bytes, rank: int) -> bytes:
    """The answer to both challenges that takes the token."""
    message = role.encode() + hosts + guests + rank.to_bytes(4, "big")
    return hmac.digest(token.encode(), message, "sha256")


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError where the connection ends before, TimeoutError where it takes too long in all."""
    deadline = time.monotonic() + (connection.gettimeout() or GREETING_S)
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        some = connection.recv(size - len(data))
        if not some:
            raise EOFError("it hung up: is the token the same there?")
        data += some
    return bytes(data)
