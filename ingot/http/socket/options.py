"""What the kernel is asked to do for a connection: look for clients that vanished, hold little that nobody reads."""

from __future__ import annotations

import socket
from typing import Final

PROBE_AFTER_S: Final = 10  # of silence
PROBE_EVERY_S: Final = 5
PROBES: Final = 3  # that go unanswered before the connection is given up
UNANSWERED_MS: Final = 25_000  # that what was sent may go unacknowledged, while probes have to wait
UNSENT_BYTES: Final = 128 << 10  # that the kernel holds before it takes no more; what was sent does not count


def watch(connection: socket.socket) -> None:
    """Have a client that vanished without a word noticed within 25 seconds, and one that does not read soon."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first of these, and not all of the others.
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPALIVE", PROBE_AFTER_S),
        ("TCP_KEEPINTVL", PROBE_EVERY_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", UNANSWERED_MS),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
