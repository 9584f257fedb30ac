"""The open connections: limited in number, shared equally by keys and addresses; idle ones are closed for new ones. TCP
keep-alive finds clients that vanished, and the kernel buffers little that nobody reads."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from ingot.observe.logs import RareWarning
from ingot.shares import Shares, heaviest_holder

log = logging.getLogger("ingot.http")

MOST_WAITING_CONNECTIONS: Final = 16  # above the limit, whose headers are read to find their key or to answer probes
SPARE_FILES: Final = 32  # for stored responses, cached prompts, tools and grammar processes


class ClientConnection(Protocol):
    @property
    def address(self) -> str:
        """Its client's address, which owns it until the key is known."""

    @property
    def received(self) -> int:
        """Bytes of its request so far."""

    @property
    def is_sending(self) -> bool:
        """Whether its request is incomplete."""

    @property
    def is_stalled(self) -> bool:
        """Whether nothing of an incomplete request arrived for a while."""

    def evict(self) -> None:
        """Close at once."""


@dataclass(slots=True)
class HolderConnections:
    """One owner's connections, the oldest first. One is idle while it has no request in progress."""

    idle: dict[ClientConnection, None] = field(default_factory=dict)
    working: dict[ClientConnection, None] = field(default_factory=dict)


class OpenConnections:
    """Belongs to one event loop. A connection is owned by the key of its request, or by its address until that is
    known."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._shares = Shares("connections", most)
        self._held: dict[str, HolderConnections] = {}
        self._holders: dict[ClientConnection, str] = {}
        self._waiting = Shares("waiting connections", MOST_WAITING_CONNECTIONS)
        self._waiting_connections: dict[ClientConnection, None] = {}
        self._crowded_notice = RareWarning(log)

    def enter(self, one: ClientConnection) -> bool:
        """Whether a new connection is within the limit. At the limit, an idle one of the owner with most is closed for
        it; where all are working, it waits until its headers have its key. Only a few may wait; beyond those, one is
        closed."""
        if self._shares.total >= self.most and not self._close_idle():
            self._wait(one)
            return False
        self._hold(one, one.address)
        return True

    def work(self, one: ClientConnection) -> None:
        """A request on it has begun."""
        if (held := self._held_with(one)) is not None and one in held.idle:
            del held.idle[one]
            held.working[one] = None

    def rest(self, one: ClientConnection) -> None:
        """The last request on it is done."""
        if (held := self._held_with(one)) is not None and one in held.working:
            del held.working[one]
            held.idle[one] = None

    def claim(self, one: ClientConnection, tenant: str) -> bool:
        """Its request has begun, with a tenant's key or without one. Whether it may stay: for one that waits, a
        connection of an owner with more is closed, or one whose request stalls."""
        if one in self._waiting_connections:
            holder = tenant or one.address
            if self._shares.total >= self.most and not self._close_idle() and not self._close_working(one, holder):
                self._crowded_notice.warn("all %d connections are in use; new ones are refused", self.most)
                return False
            self.leave(one)
            self._hold(one, holder)
            self.work(one)
        elif tenant and self._holders.get(one, tenant) != tenant:
            self.leave(one)
            self._hold(one, tenant)
            self.work(one)
        return True

    def leave(self, one: ClientConnection) -> None:
        if one in self._waiting_connections:
            del self._waiting_connections[one]
            self._waiting.add(one.address, -1)
        holder = self._holders.pop(one, None)
        if holder is not None:
            self._shares.add(holder, -1)
            held = self._held[holder]
            held.idle.pop(one, None)
            held.working.pop(one, None)
            if not self._shares.held[holder]:
                del self._held[holder]

    def _held_with(self, one: ClientConnection) -> HolderConnections | None:
        return self._held.get(self._holders.get(one, ""))

    def _hold(self, one: ClientConnection, holder: str) -> None:
        self._shares.add(holder, 1)
        self._holders[one] = holder
        self._held.setdefault(holder, HolderConnections()).idle[one] = None

    def _wait(self, one: ClientConnection) -> None:
        self._waiting_connections[one] = None
        self._waiting.add(one.address, 1)
        if self._waiting.total > MOST_WAITING_CONNECTIONS:
            crowd = heaviest_holder(self._waiting.held)
            theirs = [each for each in self._waiting_connections if each.address == crowd and each is not one]
            self._close(min(theirs, key=_bytes_received))

    def _close_idle(self) -> bool:
        idle = {holder: self._shares.held[holder] for holder, held in self._held.items() if held.idle}
        if idle:
            self._close(next(iter(self._held[heaviest_holder(idle)].idle)))
        return bool(idle)

    def _close_working(self, one: ClientConnection, holder: str) -> bool:
        """Close a working connection for one more of this owner, if another has more than its share: of a key, one of
        the address with most, and of those the oldest that has sent least. Otherwise one whose request stalls."""
        candidates = self._excess(one, holder)
        sending = [each for each in candidates if each.is_sending]
        if not candidates:
            sending = [each for held in self._held.values() for each in held.working if each.is_stalled]
        if sending or candidates:
            self._close(min(sending, key=_bytes_received) if sending else candidates[-1])
        return bool(sending or candidates)

    def _excess(self, one: ClientConnection, holder: str) -> list[ClientConnection]:
        """Working connections of an owner that has more than `holder` with one more; within a key, of an address."""
        crowd = heaviest_holder(self._shares.held)
        theirs = [*self._held[crowd].working]
        by_address = Counter(each.address for each in theirs)
        address = heaviest_holder(by_address)
        if crowd == holder:
            enough = by_address[one.address] + 1 < by_address[address]
        else:
            enough = self._shares.held[holder] + 1 < self._shares.held[crowd]
        return [each for each in theirs if each.address == address] if enough else []

    def _close(self, one: ClientConnection) -> None:
        self.leave(one)
        one.evict()


def _bytes_received(one: ClientConnection) -> int:
    return one.received


def client_address(client: tuple[str, int] | None) -> str:
    """A client's address, as the owner of its connections. A /64 network of IPv6 counts as one."""
    known = "" if client is None else client[0]
    with contextlib.suppress(ValueError):
        if (parsed := ipaddress.ip_address(known.partition("%")[0])).version == 6:
            mapped = parsed.ipv4_mapped
            known = str(mapped or ipaddress.ip_network((parsed, 64), strict=False))
    return f"from {known}"


def affordable_connections(wanted: int) -> int:
    """The number of connections, reduced where the limit of open files, which is raised if possible, is too low."""
    needed = len(list(Path("/dev/fd").iterdir())) + SPARE_FILES + MOST_WAITING_CONNECTIONS + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    with contextlib.suppress(ValueError, OSError):  # the system may have a lower limit of its own
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        soft = more
    most = max(1, wanted - (needed - soft))
    if most < wanted:
        log.warning("the limit of %d open files allows %d connections, not %d", soft, most, wanted)
    return most


PROBE_AFTER_S: Final = 10  # of silence
PROBE_EVERY_S: Final = 5
KEEPALIVE_PROBES: Final = 3  # without an answer, after which the connection is closed
UNANSWERED_MS: Final = 25_000  # that sent data may stay unacknowledged, as there are no probes meanwhile
UNSENT_BYTES: Final = 128 << 10  # in the kernel's buffer, without what was sent


def set_keepalive_options(connection: socket.socket) -> None:
    """Detect a client that vanished within 25 seconds, and one that does not read soon."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for the first of these, and not all of the others.
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPALIVE", PROBE_AFTER_S),
        ("TCP_KEEPINTVL", PROBE_EVERY_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNANSWERED_MS),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
