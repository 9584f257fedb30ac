"""One life of a group: its processes, from their start until all of them are gone.

A process that has ended, a line that is lost and every sign of life become events in the parent's mailbox.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ingot.distributed.heartbeat import FAREWELL, SIGN, STANDINGS, Sign, Standing, Watch
from ingot.distributed.hosts import Hosts, free_ports, told_to
from ingot.distributed.place import CONTROL, LISTENING, TOKEN, WATCH, Address
from ingot.distributed.wire import Link
from ingot.errors import DeviceLost, Unavailable
from ingot.ranks.meeting import Stranger, listen, welcome
from ingot.ranks.processes import COMMAND, Letter, RankProcess

LOOK_S: Final = 0.5
TELL_S: Final = 0.2

_encoded = msgspec.msgpack.Encoder().encode
_sign = msgspec.msgpack.Decoder(Sign).decode


@dataclass(frozen=True, slots=True)
class Showed:
    rank: int
    sign: Sign


@dataclass(frozen=True, slots=True)
class Gone:
    """`code` is the process's exit code; None where only its line is lost."""

    rank: int
    code: int | None

    def __str__(self) -> str:
        match self.code:
            case None:
                return f"rank {self.rank} is not reached any more"
            case code if code < 0:
                return f"rank {self.rank} was killed by signal {-code}"
            case DeviceLost.exit_code:
                return f"rank {self.rank} lost its device"
            case code:
                return f"rank {self.rank} ended with code {code}"


Event = Showed | Gone


class Life:
    """To be made and ended by the parent's main thread, and used by it alone."""

    def __init__(
        self,
        hosts: Hosts,
        arguments: Sequence[str],
        listening: Sequence[socket.socket],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Starts them. `listening` is handed down to rank 0; `command` is what Python is given to run a rank."""
        self.mail: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.watch = Watch(len(hosts.hosts), time.monotonic())
        self._token = secrets.token_hex(32)
        self._links: dict[int, Link] = {}
        self._over = False
        self._listener = listen(hosts.address)
        address = Address(hosts.address, self._listener.getsockname()[1])
        control = Address(hosts.address, free_ports(1, hosts.address)[0])
        ours = {TOKEN: self._token, CONTROL: str(control), WATCH: str(address)}
        self._processes: list[RankProcess] = []
        self._threads = [threading.Thread(target=self._receive_guests, daemon=True)]
        for rank, (host, told) in enumerate(zip(hosts.hosts, told_to(hosts), strict=True)):
            given = [one.fileno() for one in listening] if rank == 0 else []
            inherited = {LISTENING: ",".join(map(str, given))} if given else {}
            letter = Letter(arguments, {**told.variables, **ours, **inherited}, told.files)
            process = RankProcess(host, letter, given, command)
            self._processes.append(process)
            self._threads.append(threading.Thread(target=self._await_end, args=(rank, process), daemon=True))
        for thread in self._threads:
            thread.start()

    def tell(self, standings: Sequence[Standing]) -> None:
        """Rank 0 how all of them stand. It may be gone, which is noticed elsewhere."""
        self._say(STANDINGS, _encoded(standings))

    def say_farewell(self, reason: str, within: float) -> None:
        """Let rank 0 end its requests with that reason, and wait for it for so long."""
        if 0 in self._links:
            self._say(FAREWELL, reason.encode())
            with contextlib.suppress(TimeoutError):
                self._processes[0].wait(within)

    def ask_to_end(self) -> None:
        """Rank 0 ends its requests as a server that is stopped does, and the others' work with it."""
        self._processes[0].send(signal.SIGTERM)

    def reload(self) -> None:
        """Rank 0 reads its settings again."""
        self._processes[0].send(signal.SIGHUP)

    def wait(self, within: float) -> bool:
        """Whether all have ended by themselves in that time."""
        deadline = time.monotonic() + within
        with contextlib.suppress(TimeoutError):
            for process in self._processes:
                process.wait(max(deadline - time.monotonic(), 0.0))
            return True
        return False

    def end(self) -> None:
        """Kill all that still run, at once. Nothing of it is left when this returns."""
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

    def _say(self, kind: int, body: bytes) -> None:
        with contextlib.suppress(Unavailable):
            if 0 in self._links:
                self._links[0].send(kind, body, within=TELL_S)

    def _await_end(self, rank: int, process: RankProcess) -> None:
        self.mail.put(Gone(rank, process.wait()))

    def _receive_guests(self) -> None:
        self._listener.settimeout(LOOK_S)
        while not self._over:
            with contextlib.suppress(TimeoutError, Stranger):
                connection, _ = self._listener.accept()
                rank = welcome(connection, self._token)
                if rank in self._links or rank >= len(self._processes):
                    connection.close()
                    continue
                link = self._links[rank] = Link(connection, f"rank {rank}")
                threading.Thread(target=self._hear, args=(rank, link), daemon=True).start()

    def _hear(self, rank: int, link: Link) -> None:
        try:
            while True:
                frame = link.receive()
                if frame.kind == SIGN:
                    self.mail.put(Showed(rank, _sign(frame.body)))
        except (Unavailable, msgspec.MsgspecError):
            self.mail.put(Gone(rank, None))
