"""Worker processes that decode what strangers send: images, video, PDFs and audio.

The server's own process never runs a decoder. It sends a file and a job to a worker (`worker_main`) over a socket and
gets back small facts and raw samples. A worker is started when one is first needed and does one job at a time. Tenants
take turns, none has all workers, and what a job may take is booked before it begins and enforced by the system. A
worker that dies, takes too long, or works for a client that left is killed; that concerns its request alone.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import msgspec

from ingot.errors import BadMedia, Cancelled, Unavailable
from ingot.media import bounds
from ingot.observe.logs import log_facts
from ingot.shares import Shares

log = logging.getLogger("ingot.media")

MESSAGE_HEAD: Final = struct.Struct("<IQ")
"""A message is the lengths of its two parts, then a msgpack value, then raw bytes."""
POLL_S: Final = 0.05
"""How often it is asked whether somebody still waits."""
START_S: Final = 30.0
EXIT_S: Final = 1.0
COPIES: Final = 2
"""Of a file, that a worker holds."""
MOST_FACT_BYTES: Final = 64 << 20
"""The longest msgpack value that is taken from a worker."""
STDERR: Final = 1 << 16
"""Bytes of what a worker said to stderr that are read at a time: as many as a pipe holds."""
STDERR_KEPT: Final = 4096
"""Of which the end is kept."""
WORKER_COMMAND: Final = "import sys; sys.path[:] = sys.argv[1:]; from ingot.media.worker_main import main; main()"
ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All of a worker's. Both keep threads from reserving address space, which is limited."""
GIVEN_UP_REASON: Final = "it takes too long or too much memory, or is damaged"


class MediaClient(NamedTuple):
    """Whom work is done for. `wanted` is asked now and then, from any thread. `request` is what the log calls it."""

    tenant: str = ""
    wanted: Callable[[], bool] = lambda: True
    request: str = ""


NO_CLIENT: Final = MediaClient()
_client: ContextVar[MediaClient] = ContextVar("client", default=NO_CLIENT)


@contextmanager
def working_for(client: MediaClient) -> Iterator[None]:
    """What this thread has unpacked meanwhile is for that client."""
    before = _client.set(client)
    try:
        yield
    finally:
        _client.reset(before)


class DecodedPart(NamedTuple):
    """What a worker answers: a value, and raw bytes that belong to it."""

    value: Any
    data: bytearray


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """`memory` are the bytes that it may take beside the file and what an idle worker has, and `cpu_s` the processor
    time that it may take for each part of its answer. `thing` is what errors call the file. `untouched` is address
    space that a decoder reserves and leaves alone."""

    name: str
    thing: str
    memory: int
    cpu_s: float
    arguments: tuple[Any, ...] = ()
    untouched: int = 0


def require_package(package: str, message: str) -> None:
    """Raises Unavailable where the package that a job needs is not installed."""
    if find_spec(package) is None:
        raise Unavailable(message)


class WorkerPool:
    """So many workers, of which a tenant has at most `each` at a time. For any thread.

    `name` is that of its entry in the ledger. `memory` are the bytes that all jobs together may take, unless models
    that are served have set other sums aside.
    """

    def __init__(self, name: str, workers: int, each: int, memory: int) -> None:
        self._each, self._default = each, memory
        self._changed = threading.Condition()
        self._idle: list[MediaWorker] = []
        self._waiting: list[_Ticket] = []
        self._running = Shares(name, workers)
        self._served: dict[str, int] = {}  # when each tenant had its last turn
        self._turns = itertools.count()
        self._lent = 0
        self.booked = 0
        """Bytes of the jobs that run."""
        self.started = 0
        """Workers so far."""

    @property
    def memory(self) -> int:
        return self._lent or self._default

    def lend(self, nbytes: int) -> None:
        """A model sets so many bytes of its memory aside for jobs; a negative number takes them back."""
        with self._changed:
            self._lent += nbytes
            self._changed.notify_all()

    def run(self, job: DecodeJob, data: bytes) -> DecodedPart:
        """The one part that a job answers with. Raises BadMedia, or Cancelled where nobody waits for it any more."""
        [part] = self.stream(job, data)
        return part

    def stream(self, job: DecodeJob, data: bytes) -> Iterator[DecodedPart]:
        """The parts of an answer, as the worker makes them. It stands still while nobody takes the next, and is killed
        where the iterator is closed before its end. Raises as `run` does."""
        asking = _client.get()
        if job.memory > self.memory:
            raise BadMedia(
                f"unpacking the {job.thing} may take {job.memory // 1_000_000} MB, and this server sets "
                f"{self.memory // 1_000_000} MB aside for that. Send a smaller one."
            )
        with self._turn(asking, job.memory + COPIES * len(data)):
            worker = self._taken()
            ended = False
            try:
                yield from worker.answer(job, data, asking)
                ended = True
            except BadMedia as refused:
                ended = worker.alive
                raise refused
            finally:
                self._give_back(worker, reusable=ended and worker.alive)

    def close(self) -> None:
        """Ends workers that are idle. The others end with their jobs."""
        with self._changed:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _taken(self) -> MediaWorker:
        with self._changed:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.kill()
            self.started += 1
        return MediaWorker()

    def _give_back(self, worker: MediaWorker, *, reusable: bool) -> None:
        if not reusable:
            worker.kill()
            return
        with self._changed:
            self._idle.append(worker)

    @contextmanager
    def _turn(self, asking: MediaClient, memory: int) -> Iterator[None]:
        """Waits until it is the caller's turn, and there are a worker and memory."""
        ticket = _Ticket(asking.tenant, memory)
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._next() is not ticket:
                    self._changed.wait(POLL_S)
                    if not asking.wanted():
                        raise Cancelled("Nobody waits for this any more.")
                self._served[asking.tenant] = next(self._turns)
                self._running.add(asking.tenant, 1)
                self.booked += memory
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running.add(asking.tenant, -1)
                self.booked -= memory
                known = {*self._running.held, *(each.tenant for each in self._waiting)}
                self._served = {tenant: at for tenant, at in self._served.items() if tenant in known}
                self._changed.notify_all()

    def _next(self) -> _Ticket | None:
        """Whose turn it is: of those who may have a worker, who had one longest ago. Where memory is short all wait for
        that one, so that nobody's large picture waits for ever."""
        if self._running.total >= self._running.capacity:
            return None
        able = [ticket for ticket in self._waiting if self._running.held[ticket.tenant] < self._each]
        first = min(able, key=lambda ticket: self._served.get(ticket.tenant, -1), default=None)
        if first is None or (self.booked and self.booked + first.memory > self.memory):
            return None
        return first


@dataclass(eq=False, slots=True)
class _Ticket:
    tenant: str
    memory: int


class MediaWorker:
    """One process. For one thread at a time. Raises Unavailable where it does not start."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._socket.settimeout(POLL_S)
        with other:
            # -I: neither the environment nor the working directory says what is imported.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", WORKER_COMMAND, *filter(None, sys.path)],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        assert self._process.stderr is not None
        self._stderr, self._said = self._process.stderr, b""
        os.set_blocking(self._stderr.fileno(), False)
        try:
            self._message(MOST_FACT_BYTES, time.monotonic() + START_S, lambda: True)
        except (OSError, TimeoutError):
            log.error("the process that unpacks media does not start: %s", self._ended())
            raise Unavailable("The process that unpacks media does not start.") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._stderr.close()

    def answer(self, job: DecodeJob, data: bytes, client: MediaClient) -> Iterator[DecodedPart]:
        """Raises BadMedia, after which the worker can be used again where it is still alive. Where it died, the log
        says how."""
        wanted = client.wanted
        limit = job.memory + job.untouched + COPIES * len(data)
        question = msgspec.msgpack.encode((job.name, limit, job.cpu_s, job.arguments))
        try:
            self._send(MESSAGE_HEAD.pack(len(question), len(data)) + question, wanted)
            self._send(data, wanted)
            while True:
                deadline = time.monotonic() + bounds.DECODE_WALL_S
                part = self._message(limit, deadline, wanted)
                kind, value, reusable = part.value
                if not reusable:
                    self.kill()
                if kind == "end":
                    return
                if kind == "refused":
                    raise BadMedia(value)
                yield DecodedPart(value, part.data)
        except TimeoutError:
            self._process.kill()
            self._tell(client, job)
            raise BadMedia(f"the {job.thing} took longer than {bounds.DECODE_WALL_S:g} seconds to read.") from None
        except (OSError, ValueError, TypeError, msgspec.DecodeError):
            self._tell(client, job)
            raise BadMedia(f"the {job.thing} cannot be read: {GIVEN_UP_REASON}.") from None

    def _tell(self, client: MediaClient, job: DecodeJob) -> None:
        ended, whose = self._ended(), client.request or "nobody"
        told = log_facts(client.request, event="worker died", job=job.name, ended=ended)
        log.warning("a worker that read a %s for %s ended with %s", job.thing, whose, ended, extra=told)

    def _ended(self) -> str:
        """Ends it, and says with what, and the last line that it said."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)  # its socket closes a moment before it ends
        self._listen()
        self.kill()
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else str(code)
        last = self._said.decode(errors="replace").strip().rpartition("\n")[2]
        return f"{how}: {last[:500]!r}" if last else how

    def _listen(self) -> None:
        """Keeps the end of what it said to stderr, which must not fill up."""
        if not self._stderr.closed:
            self._said = (self._said + (self._stderr.read(STDERR) or b""))[-STDERR_KEPT:]

    def _send(self, data: bytes, wanted: Callable[[], bool]) -> None:
        left = memoryview(data)
        deadline = time.monotonic() + bounds.DECODE_WALL_S
        while left:
            with suppress(TimeoutError):
                left = left[self._socket.send(left) :]
                continue
            self._check(deadline, wanted)

    def _message(self, most: int, deadline: float, wanted: Callable[[], bool]) -> DecodedPart:
        facts, length = MESSAGE_HEAD.unpack(self._received(MESSAGE_HEAD.size, deadline, wanted))
        if facts > MOST_FACT_BYTES or length > most:
            raise ValueError("a worker says more than it was asked")
        value = msgspec.msgpack.decode(self._received(facts, deadline, wanted))
        return DecodedPart(value, self._received(length, deadline, wanted))

    def _received(self, length: int, deadline: float, wanted: Callable[[], bool]) -> bytearray:
        data = bytearray(length)
        left = memoryview(data)
        while left:
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:
                self._check(deadline, wanted)
                continue
            if not count:
                raise ConnectionResetError("the worker ended")
            left = left[count:]
        return data

    def _check(self, deadline: float, wanted: Callable[[], bool]) -> None:
        self._listen()
        if not wanted():
            self.kill()
            raise Cancelled("Nobody waits for this any more.")
        if time.monotonic() > deadline:
            raise TimeoutError


WORKERS: Final = max(2, min(4, (os.cpu_count() or 2) // 2))
"""Streams need processors meanwhile. There are always two, so that one tenant cannot have all."""
header_pool: Final = WorkerPool("media headers", 2, 1, 2 * bounds.HEADER_MEMORY)
"""For what the headers of pictures and sounds say: short work, which waits for nobody's pixels."""
pixel_pool: Final = WorkerPool("media pixels", WORKERS, WORKERS - 1, bounds.PIXEL_MEMORY)
"""For pictures, clips and PDFs."""
audio_pool: Final = WorkerPool(
    "media sounds", bounds.AUDIO_STREAMS, bounds.AUDIO_STREAMS // 2, bounds.AUDIO_STREAMS * bounds.AUDIO_MEMORY
)
"""For sounds, which are heard for as long as they last: each has a worker to itself meanwhile."""
