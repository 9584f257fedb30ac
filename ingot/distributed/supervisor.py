"""The parent of a group: it starts every rank, watches that all make progress, and restarts them when one does not.

It never imports mlx, so nothing that can hang a rank can hang it. It owns the port that clients connect to: rank 0
inherits it, and while there is no rank 0, the parent itself answers that the server will be back.

`GroupProcesses` are the processes of one start. A process that has ended, a lost link and every heartbeat become events
in the parent's mailbox.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Protocol

import msgspec

from ingot.distributed.heartbeat import (
    FAREWELL_FRAME,
    HEARTBEAT_FRAME,
    HEARTBEAT_S,
    STATUS_FRAME,
    GroupWatch,
    Heartbeat,
    RankStatus,
    first_rank_problem,
)
from ingot.distributed.hosts import RANK_COMMAND, Hosts, RankAssignment, RankProcess, free_ports, rank_environments
from ingot.distributed.place import CONTROL_VARIABLE, LISTEN_VARIABLE, TOKEN_VARIABLE, WATCH_VARIABLE, HostAddress
from ingot.distributed.wire import Link, UnknownPeer, authenticate_guest, listen_at
from ingot.errors import DeviceLost, Unavailable
from ingot.process import ControllingTerminal, signals_not_ignored

log = logging.getLogger("ingot.distributed")

LAST_WORDS_S: Final = 1.5  # for rank 0 to end its requests with an error that clients can read
SAME_CAUSE_S: Final = 0.2  # ranks that end within this time may have the same cause
SAVING_S: Final = 20.0  # for rank 0 to write cached prefixes, where there is a folder for them
FOLLOWERS_S: Final = 5.0  # for the followers to end after rank 0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
MOST_RESTARTS: Final = 8  # in a row
EXIT_INTERRUPTED: Final = 130
EXIT_FAILED: Final = 1


class FallbackServer(Protocol):
    """Answers clients while no rank does."""

    def open(self, reason: str) -> None:
        """From now on, or with a new reason."""

    def close(self) -> None:
        """Returns when no client is being answered any more."""


@dataclass(slots=True)
class RestartBackoff:
    """How long to wait before the group is restarted, and when to give up."""

    failures: int = 0

    def pause_after(self, *, was_ready: bool) -> float | None:
        """`was_ready`: the failed group had served. None: too many in a row never did."""
        self.failures = 1 if was_ready else self.failures + 1
        if self.failures > MOST_RESTARTS:
            return None
        return min(FIRST_PAUSE_S * 4 ** (self.failures - 1), LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class GroupFault:
    """`final`: a restart would not help."""

    reason: str
    final: bool = False


@dataclass(slots=True)
class SignalCounts:
    stops: int = 0
    reloads: int = 0


@dataclass(slots=True)
class Supervisor:
    hosts: Hosts
    arguments: Sequence[str]
    listening: Sequence[socket.socket]
    fallback: FallbackServer
    stall_s: float
    drain_s: float
    command: Sequence[str] = RANK_COMMAND
    signals: SignalCounts = field(default_factory=SignalCounts)
    _served: bool = False
    _ready: bool = False

    def run(self) -> int:
        """Runs until a signal ends it; returns the exit code. For the main thread."""
        self._take_signals()
        backoff = RestartBackoff()
        reason = "the ranks are being started"
        while True:
            self.fallback.open(reason)
            group = GroupProcesses(self.hosts, self.arguments, self.listening, self.command)
            try:
                fault = self._attend(group)
                if fault is None:
                    return self._stop(group)
                log.error("%s; all ranks are stopped", fault.reason)
                self.fallback.open(fault.reason)
                group.send_farewell(fault.reason, LAST_WORDS_S)
            finally:
                group.end()
            pause = None if fault.final else backoff.pause_after(was_ready=self._ready)
            if pause is None:
                log.critical("given up: %s", fault.reason)
                return EXIT_FAILED
            log.warning("restarting in %.1f s", pause)
            if not self._rest(pause):
                return 0
            reason = f"{fault.reason}; the ranks are being started again"

    def _take_signals(self) -> None:
        terminal = ControllingTerminal()

        def stop(number: int, frame: FrameType | None) -> None:
            self.signals.stops += 1

        def reload(number: int, frame: FrameType | None) -> None:
            if terminal.is_gone:
                self.signals.stops += 1
            else:
                self.signals.reloads += 1

        for number in (signal.SIGTERM, *signals_not_ignored(signal.SIGINT)):
            signal.signal(number, stop)
        signal.signal(signal.SIGHUP, reload)

    def _attend(self, group: GroupProcesses) -> GroupFault | None:
        """Watch the group until something goes wrong; None: a signal asks to stop."""
        self._ready = False
        while not self.signals.stops:
            if self.signals.reloads:
                self.signals.reloads = 0
                group.signal_leader(signal.SIGHUP)
            try:
                event = group.mail.get(timeout=HEARTBEAT_S)
                while True:
                    if isinstance(event, RankGone) or event.heartbeat.trouble:
                        return self._cause(group, event)
                    group.watch.receive(event.rank, event.heartbeat, time.monotonic())
                    event = group.mail.get_nowait()
            except queue.Empty:
                pass
            statuses = group.watch.statuses(time.monotonic())
            problem = first_rank_problem(statuses, self.stall_s)
            if problem is not None:
                return GroupFault(problem)
            if not self._ready and group.watch.ready:
                self._ready = self._served = True
                self.fallback.close()
            if self._ready:  # not before: rank 0 is healthy once it alone accepts connections
                group.send_statuses(statuses)
        return None

    def _cause(self, group: GroupProcesses, first: RankGone | HeartbeatReceived) -> GroupFault:
        """Of several faults at about the same time: a killed rank is more likely the cause than one that ended, and
        that more likely than one that reports trouble."""
        gone = [first] if isinstance(first, RankGone) else []
        deadline = time.monotonic() + SAME_CAUSE_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = group.mail.get(timeout=left)
            except queue.Empty:
                break
            if not isinstance(event, HeartbeatReceived):
                gone.append(event)
        ended = [each for each in gone if each.code is not None]
        killed = [each for each in ended if each.code is not None and each.code < 0]
        cause = next(iter(killed or ended or gone), None)
        reason = first.heartbeat.trouble if cause is None and isinstance(first, HeartbeatReceived) else str(cause)
        lost = any(each.code == DeviceLost.exit_code for each in ended)
        return GroupFault(reason, final=not self._served and not killed and not lost and bool(ended))

    def _rest(self, pause: float) -> bool:
        """False: a signal asks to stop meanwhile."""
        deadline = time.monotonic() + pause
        while not self.signals.stops and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, HEARTBEAT_S))
        return not self.signals.stops

    def _stop(self, group: GroupProcesses) -> int:
        """Let requests finish as a single server would; at a second signal, leave at once."""
        group.signal_leader(signal.SIGTERM)
        deadline = time.monotonic() + self.drain_s + LAST_WORDS_S + FOLLOWERS_S
        while time.monotonic() < deadline:
            if group.wait(HEARTBEAT_S):
                return 0
            if self.signals.stops > 1:
                return EXIT_INTERRUPTED
        return 0


ACCEPT_POLL_S: Final = 0.5
STATUS_SEND_S: Final = 0.2

_encode_statuses = msgspec.msgpack.Encoder().encode
_decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    rank: int
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class RankGone:
    """`code` is the process's exit code; None where only its link is lost."""

    rank: int
    code: int | None

    def __str__(self) -> str:
        match self.code:
            case None:
                return f"rank {self.rank} cannot be reached any more"
            case code if code < 0:
                return f"rank {self.rank} was killed by signal {-code}"
            case DeviceLost.exit_code:
                return f"rank {self.rank} lost its device"
            case code:
                return f"rank {self.rank} ended with code {code}"


GroupEvent = HeartbeatReceived | RankGone


class GroupProcesses:
    """For the parent's main thread alone."""

    def __init__(
        self,
        hosts: Hosts,
        arguments: Sequence[str],
        listening: Sequence[socket.socket],
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        """Starts them. Rank 0 inherits `listening`; `command` are Python's arguments to run a rank."""
        self.mail: queue.SimpleQueue[GroupEvent] = queue.SimpleQueue()
        self.watch = GroupWatch(len(hosts.hosts), time.monotonic())
        self._token = secrets.token_hex(32)
        self._links: dict[int, Link] = {}
        self._over = False
        self._listener = listen_at(hosts.address)
        address = HostAddress(hosts.address, self._listener.getsockname()[1])
        control = HostAddress(hosts.address, free_ports(1, hosts.address)[0])
        group_variables = {TOKEN_VARIABLE: self._token, CONTROL_VARIABLE: str(control), WATCH_VARIABLE: str(address)}
        self._processes: list[RankProcess] = []
        self._threads = [threading.Thread(target=self._accept_ranks, daemon=True)]
        for rank, (host, environment) in enumerate(zip(hosts.hosts, rank_environments(hosts), strict=True)):
            descriptors = [one.fileno() for one in listening] if rank == 0 else []
            inherited = {LISTEN_VARIABLE: ",".join(map(str, descriptors))} if descriptors else {}
            assignment = RankAssignment(
                arguments, {**environment.variables, **group_variables, **inherited}, environment.files
            )
            process = RankProcess(host, assignment, descriptors, command)
            self._processes.append(process)
            self._threads.append(threading.Thread(target=self._await_end, args=(rank, process), daemon=True))
        for thread in self._threads:
            thread.start()

    def send_statuses(self, statuses: Sequence[RankStatus]) -> None:
        """To rank 0. It may be gone, which is noticed elsewhere."""
        self._send_to_leader(STATUS_FRAME, _encode_statuses(statuses))

    def send_farewell(self, reason: str, within: float) -> None:
        """Let rank 0 end its requests with that reason, and wait so long for it."""
        if 0 in self._links:
            self._send_to_leader(FAREWELL_FRAME, reason.encode())
            with contextlib.suppress(TimeoutError):
                self._processes[0].wait(within)

    def signal_leader(self, number: signal.Signals) -> None:
        """SIGTERM: rank 0 drains its requests as a server does, and ends the followers. SIGHUP: it reads its
        settings."""
        self._processes[0].send(number)

    def wait(self, within: float) -> bool:
        """Whether all have ended by themselves in that time."""
        deadline = time.monotonic() + within
        with contextlib.suppress(TimeoutError):
            for process in self._processes:
                process.wait(max(deadline - time.monotonic(), 0.0))
            return True
        return False

    def end(self) -> None:
        """Kill all that still run, at once. Nothing is left when this returns."""
        self._over = True
        for rank, process in enumerate(self._processes):
            process.kill(self.watch.pid(rank))
        for process in self._processes:
            process.wait()
        for link in list(self._links.values()):
            link.close()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _send_to_leader(self, kind: int, body: bytes) -> None:
        with contextlib.suppress(Unavailable):
            if 0 in self._links:
                self._links[0].send(kind, body, within=STATUS_SEND_S)

    def _await_end(self, rank: int, process: RankProcess) -> None:
        self.mail.put(RankGone(rank, process.wait()))

    def _accept_ranks(self) -> None:
        self._listener.settimeout(ACCEPT_POLL_S)
        while not self._over:
            with contextlib.suppress(TimeoutError, UnknownPeer):
                connection, _ = self._listener.accept()
                rank = authenticate_guest(connection, self._token)
                if rank in self._links or rank >= len(self._processes):
                    connection.close()
                    continue
                link = self._links[rank] = Link(connection, f"rank {rank}")
                threading.Thread(target=self._receive_heartbeats, args=(rank, link), daemon=True).start()

    def _receive_heartbeats(self, rank: int, link: Link) -> None:
        try:
            while True:
                frame = link.receive()
                if frame.kind == HEARTBEAT_FRAME:
                    self.mail.put(HeartbeatReceived(rank, _decode_heartbeat(frame.body)))
        except (Unavailable, msgspec.MsgspecError):
            self.mail.put(RankGone(rank, None))
