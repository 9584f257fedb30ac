"""The open connections: at most so many, shared equally by keys and addresses; idle ones make room for new ones. The
kernel is asked to look for clients that vanished and to hold little that nobody reads."""

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

MOST_WAITING_CONNECTIONS: Final = (
    16  # connections above the most whose heads are read, to see whose they are or to answer probes
)
SPARE_FILES: Final = 32  # for stored responses, kept prompts, tools and what grammars are tried in


class ClientConnection(Protocol):
    @property
    def address(self) -> str:
        """Whence it comes: who holds it, until a key says more."""

    @property
    def received(self) -> int:
        """Bytes of its request that have come."""

    @property
    def is_sending(self) -> bool:
        """Whether a part of its request is still to come."""

    @property
    def is_stalled(self) -> bool:
        """Whether that has been so for a while without anything coming."""

    def give_way(self) -> None:
        """Close at once."""


@dataclass(slots=True)
class HolderConnections:
    """One holder's connections, the oldest of each kind first. One is idle while no request on it is under way."""

    idle: dict[ClientConnection, None] = field(default_factory=dict)
    working: dict[ClientConnection, None] = field(default_factory=dict)


class OpenConnections:
    """Belongs to one event loop. Each is held by the key of its request, or by its address until that is known."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._shares = Shares("connections", most)
        self._held: dict[str, HolderConnections] = {}
        self._holders: dict[ClientConnection, str] = {}
        self._waiting = Shares("waiting connections", MOST_WAITING_CONNECTIONS)
        self._waiting_connections: dict[ClientConnection, None] = {}
        self._crowded_notice = RareWarning(log)

    def enter(self, one: ClientConnection) -> bool:
        """Whether a new connection has a place. At the most an idle one is closed for it, of whoever holds most; where
        all are at work it waits until its head says whose it is. A few may, and of more than those one is closed."""
        if self._shares.total >= self.most and not self._close_idle():
            self._wait(one)
            return False
        self._hold(one, one.address)
        return True

    def work(self, one: ClientConnection) -> None:
        """A request on it is under way."""
        if (held := self._held_with(one)) is not None and one in held.idle:
            del held.idle[one]
            held.working[one] = None

    def rest(self, one: ClientConnection) -> None:
        """The last request on it is done."""
        if (held := self._held_with(one)) is not None and one in held.working:
            del held.working[one]
            held.idle[one] = None

    def claim(self, one: ClientConnection, tenant: str) -> bool:
        """Its request is under way, and a tenant's, or nobody's that is known. Whether it has a place: one that waits
        gets that of somebody who holds more, or whose request does not come on."""
        if one in self._waiting_connections:
            holder = tenant or one.address
            if self._shares.total >= self.most and not self._close_idle() and not self._close_working(one, holder):
                self._crowded_notice.warn("all %d connections are at work; new ones are refused", self.most)
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
        """Close one at work for one more of this holder's, if somebody holds more than its share: of a key's one of the
        address with most, and of these the oldest that has sent least. Else one whose request does not come on."""
        given = self._too_many(one, holder)
        sending = [each for each in given if each.is_sending]
        if not given:
            sending = [each for held in self._held.values() for each in held.working if each.is_stalled]
        if sending or given:
            self._close(min(sending, key=_bytes_received) if sending else given[-1])
        return bool(sending or given)

    def _too_many(self, one: ClientConnection, holder: str) -> list[ClientConnection]:
        """Those at work of whoever holds more than `holder` would, with one more; within a key, of an address."""
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
        one.give_way()


def _bytes_received(one: ClientConnection) -> int:
    return one.received


def client_address(client: tuple[str, int] | None) -> str:
    """Who may have as many addresses as there are in a network of IPv6 is one."""
    known = "" if client is None else client[0]
    with contextlib.suppress(ValueError):
        if (parsed := ipaddress.ip_address(known.partition("%")[0])).version == 6:
            mapped = parsed.ipv4_mapped
            known = str(mapped or ipaddress.ip_network((parsed, 64), strict=False))
    return f"from {known}"


def affordable_connections(wanted: int) -> int:
    """As many connections as were wanted, or as the limit of open files leaves room for; it is raised if it may be."""
    needed = len(list(Path("/dev/fd").iterdir())) + SPARE_FILES + MOST_WAITING_CONNECTIONS + wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    with contextlib.suppress(ValueError, OSError):  # the system may have a bound of its own
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        soft = more
    most = max(1, wanted - (needed - soft))
    if most < wanted:
        log.warning("the limit of %d open files leaves room for %d connections, not %d", soft, most, wanted)
    return most


PROBE_AFTER_S: Final = 10  # of silence
PROBE_EVERY_S: Final = 5
KEEPALIVE_PROBES: Final = 3  # that go unanswered before the connection is given up
UNANSWERED_MS: Final = 25_000  # that what was sent may go unacknowledged, while probes have to wait
UNSENT_BYTES: Final = 128 << 10  # that the kernel holds before it takes no more; what was sent does not count


def set_keepalive_options(connection: socket.socket) -> None:
    """Have a client that vanished without a word noticed within 25 seconds, and one that does not read soon."""
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
