"""How the processes of a group find each other: one listens, the others come, and both prove that they know the token.

Before either has proved it, the other reads nothing but a fixed number of bytes, within a second. The token itself
never travels: each answers the other's random challenge with it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from typing import Final, Literal

from ingot.distributed.wire import MAGIC, VERSION, Link, LinkLate, LinkLost

CHALLENGE: Final = 32
GREETING: Final = struct.Struct(f"!4sB3x{CHALLENGE}s")  # from who listens
ANSWER: Final = struct.Struct(f"!4sB3xI{CHALLENGE}s32s")  # from who comes: its rank, a challenge of its own, its proof
PROOF: Final = 32
GREETING_S: Final = 1.0
TRY_AGAIN_S: Final = 0.05

Role = Literal["host", "guest"]


class Stranger(Exception):
    """Who came knows no token, or speaks something else. It is not told more than that the connection ends."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=64)


def gather(listener: socket.socket, token: str, ranks: Iterable[int], within: float) -> list[Link]:
    """A link to each of the ranks, in their order, once all have come. Raises LinkLate, which names who did not."""
    wanted = list(ranks)
    found: dict[int, Link] = {}
    deadline = time.monotonic() + within
    while missing := [rank for rank in wanted if rank not in found]:
        try:
            connection = _accept(listener, deadline)
            rank = welcome(connection, token)
        except Stranger:
            continue
        except TimeoutError:
            for link in found.values():
                link.close()
            names = ", ".join(map(str, missing))
            raise LinkLate(f"rank {names} did not come within {within:.0f} seconds", retry_after=1) from None
        if rank in missing:
            found[rank] = Link(connection, f"rank {rank}")
        else:
            connection.close()
    return [found[rank] for rank in wanted]


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    listener.settimeout(left)
    return listener.accept()[0]


def welcome(connection: socket.socket, token: str) -> int:
    """The rank of who came. Raises Stranger, and the connection is closed, where it does not know the token."""
    try:
        connection.settimeout(GREETING_S)
        own = secrets.token_bytes(CHALLENGE)
        connection.sendall(GREETING.pack(MAGIC, VERSION, own))
        magic, version, rank, theirs, proof = ANSWER.unpack(_exactly(connection, ANSWER.size))
        known = hmac.compare_digest(proof, proven(token, "guest", own, theirs, rank))
        if not known or (magic, version) != (MAGIC, VERSION):
            raise Stranger
        connection.sendall(proven(token, "host", own, theirs, rank))
        return int(rank)
    except (OSError, EOFError) as error:
        connection.close()
        raise Stranger from error
    except Stranger:
        connection.close()
        raise


def join(host: str, port: int, token: str, rank: int, peer: str, within: float) -> Link:
    """The link to who listens there, maybe not yet. Raises LinkLate, and LinkLost where it is somebody else."""
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
            _introduce(connection, token, rank, peer, left)
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


def _introduce(connection: socket.socket, token: str, rank: int, peer: str, left: float) -> None:
    connection.settimeout(left)
    magic, version, theirs = GREETING.unpack(_exactly(connection, GREETING.size))
    if magic != MAGIC:
        raise LinkLost(f"{peer} is not where it is said to be: something else listens there")
    if version != VERSION:
        raise LinkLost(f"{peer} speaks version {version} between ranks, this one {VERSION}: install the same ingot")
    own = secrets.token_bytes(CHALLENGE)
    connection.sendall(ANSWER.pack(MAGIC, VERSION, rank, own, proven(token, "guest", theirs, own, rank)))
    if not hmac.compare_digest(_exactly(connection, PROOF), proven(token, "host", theirs, own, rank)):
        raise LinkLost(f"{peer} does not know the group's token")


def proven(token: str, role: Role, hosts: bytes, guests: bytes, rank: int) -> bytes:
    """What only who knows the token can say to these two challenges."""
    said = role.encode() + hosts + guests + rank.to_bytes(4, "big")
    return hmac.digest(token.encode(), said, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError where the connection ends before, TimeoutError where that takes too long in all."""
    deadline = time.monotonic() + (connection.gettimeout() or GREETING_S)
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        some = connection.recv(size - len(data))
        if not some:
            raise EOFError("it hung up: is the token the same there?")
        data += some
    return bytes(data)
