"""Worker processes that decode what strangers send: images, video, PDFs and audio.

The server's own process never runs a decoder. It sends a file and a job to a worker (`worker_main`) over a socket and
receives values and raw samples. A worker is started when it is first needed, and does one job at a time. Tenants take
turns, and none gets all workers. What a job may take is reserved before it begins and enforced by the system. A worker
that dies, takes too long, or works for a client that left is killed, which affects only its own request.
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
"""How often it is checked whether the client still waits."""
START_S: Final = 30.0
EXIT_S: Final = 5.0
COPIES: Final = 2
"""Of a file, in a worker's memory."""
MOST_FACT_BYTES: Final = 64 << 20
"""The longest msgpack value that is accepted from a worker."""
STDERR: Final = 1 << 16
"""Bytes of a worker's stderr that are read at a time: the capacity of a pipe."""
STDERR_KEPT: Final = 4096
"""The last bytes of it, which are kept."""
WORKER_COMMAND: Final = "import sys; sys.path[:] = sys.argv[1:]; from ingot.media.worker_main import main; main()"
ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
"""A worker's whole environment. Both variables keep threads from reserving address space, which is limited."""
GIVEN_UP_REASON: Final = "it takes too long or too much memory, or is damaged"


class MediaClient(NamedTuple):
    """For whom work is done. `wanted` is called now and then, from any thread. `request` is the id for the log."""

    tenant: str = ""
    wanted: Callable[[], bool] = lambda: True
    request: str = ""


NO_CLIENT: Final = MediaClient()
_client: ContextVar[MediaClient] = ContextVar("client", default=NO_CLIENT)


@contextmanager
def working_for(client: MediaClient) -> Iterator[None]:
    """While this is open, this thread's jobs are for that client."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)


class DecodedPart(NamedTuple):
    """A part of a worker's answer: a value and raw bytes."""

    value: Any
    data: bytearray


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """`memory` is what it may use in addition to the file and to an idle worker, and `cpu_s` the processor time for
    each part of its answer. `thing` is the noun for errors. `untouched` is address space that a decoder reserves and
    does not use."""

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
    """A pool of workers, of which a tenant has at most `each` at a time. For any thread.

    `name` is that of its shares. `memory` is for all jobs together, unless served models have reserved other amounts.
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
        """Bytes that running jobs have reserved."""
        self.started = 0
        """Workers started so far."""

    @property
    def memory(self) -> int:
        return self._lent or self._default

    def lend(self, nbytes: int) -> None:
        """A model reserves so many bytes of its memory for jobs; a negative number takes them back."""
        with self._changed:
            self._lent += nbytes
            self._changed.notify_all()

    def run(self, job: DecodeJob, data: bytes) -> DecodedPart:
        """The only part of a job's answer. Raises BadMedia, or Cancelled where the client has left."""
        [part] = self.stream(job, data)
        return part

    def stream(self, job: DecodeJob, data: bytes) -> Iterator[DecodedPart]:
        """The parts of an answer, as the worker makes them. It waits until the next is requested, and is killed where
        the iterator is closed early. Raises as `run` does."""
        client = _client.get()
        if job.memory > self.memory:
            raise BadMedia(
                f"unpacking the {job.thing} may take {job.memory // 1_000_000} MB, and this server sets "
                f"{self.memory // 1_000_000} MB aside for that. Send a smaller one."
            )
        with self._turn(client, job.memory + COPIES * len(data)):
            worker = self._acquire()
            reusable = False
            try:
                yield from worker.answer(job, data, client)
                reusable = True
            except BadMedia as refused:
                reusable = worker.alive
                raise refused
            finally:
                self._release(worker, reusable=reusable and worker.alive)

    def close(self) -> None:
        """End idle workers. Others end with their jobs."""
        with self._changed:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()

    def _acquire(self) -> MediaWorker:
        with self._changed:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.kill()
            self.started += 1
        return MediaWorker()

    def _release(self, worker: MediaWorker, *, reusable: bool) -> None:
        if not reusable:
            worker.kill()
            return
        with self._changed:
            self._idle.append(worker)

    @contextmanager
    def _turn(self, client: MediaClient, memory: int) -> Iterator[None]:
        """Waits until it is the caller's turn, and a worker and memory are free."""
        ticket = _Ticket(client.tenant, memory)
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._next() is not ticket:
                    self._changed.wait(POLL_S)
                    if not client.wanted():
                        raise Cancelled("The client is gone.")
                self._served[client.tenant] = next(self._turns)
                self._running.add(client.tenant, 1)
                self.booked += memory
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running.add(client.tenant, -1)
                self.booked -= memory
                active = {*self._running.held, *(each.tenant for each in self._waiting)}
                self._served = {tenant: at for tenant, at in self._served.items() if tenant in active}
                self._changed.notify_all()

    def _next(self) -> _Ticket | None:
        """Whose turn it is: of those who may have a worker, the one who had one longest ago. If there is not enough
        memory for it, all others wait too, so that a large image does not wait forever."""
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
    """A worker process, for one thread at a time. Raises Unavailable where it does not start."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._socket.settimeout(POLL_S)
        with other:
            # -I: neither the environment nor the working directory affects imports.
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
        self._stderr, self._output = self._process.stderr, b""
        os.set_blocking(self._stderr.fileno(), False)
        try:
            self._message(MOST_FACT_BYTES, time.monotonic() + START_S, lambda: True)
        except (OSError, TimeoutError):
            log.error("the process that decodes media does not start: %s", self._end())
            raise Unavailable("The process that decodes media does not start.") from None

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
        """Raises BadMedia, after which the worker can be reused if it is alive. If it died, that is logged."""
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
            self._log_death(client, job)
            raise BadMedia(f"the {job.thing} took longer than {bounds.DECODE_WALL_S:g} seconds to read.") from None
        except (OSError, ValueError, TypeError, msgspec.DecodeError):
            self._log_death(client, job)
            raise BadMedia(f"the {job.thing} cannot be read: {GIVEN_UP_REASON}.") from None

    def _log_death(self, client: MediaClient, job: DecodeJob) -> None:
        ended, request = self._end(), client.request or "nobody"
        facts = log_facts(client.request, event="worker died", job=job.name, ended=ended)
        log.warning("a worker that read a %s for %s ended with %s", job.thing, request, ended, extra=facts)

    def _end(self) -> str:
        """End the process. Returns its exit status or signal, and its last line on stderr."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)  # its socket closes a moment before it ends
        self._drain_stderr()
        self.kill()
        code = self._process.returncode
        status = signal.Signals(-code).name if code < 0 else str(code)
        last = self._output.decode(errors="replace").strip().rpartition("\n")[2]
        return f"{status}: {last[:500]!r}" if last else status

    def _drain_stderr(self) -> None:
        """Read stderr, so that its pipe does not fill up, and keep the end."""
        if not self._stderr.closed:
            self._output = (self._output + (self._stderr.read(STDERR) or b""))[-STDERR_KEPT:]

    def _send(self, data: bytes, wanted: Callable[[], bool]) -> None:
        left = memoryview(data)
        deadline = time.monotonic() + bounds.DECODE_WALL_S
        while left:
            with suppress(TimeoutError):
                left = left[self._socket.send(left) :]
                continue
            self._check(deadline, wanted)

    def _message(self, most: int, deadline: float, wanted: Callable[[], bool]) -> DecodedPart:
        facts, length = MESSAGE_HEAD.unpack(self._receive(MESSAGE_HEAD.size, deadline, wanted))
        if facts > MOST_FACT_BYTES or length > most:
            raise ValueError("a worker sent too much")
        value = msgspec.msgpack.decode(self._receive(facts, deadline, wanted))
        return DecodedPart(value, self._receive(length, deadline, wanted))

    def _receive(self, length: int, deadline: float, wanted: Callable[[], bool]) -> bytearray:
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
        self._drain_stderr()
        if not wanted():
            self.kill()
            raise Cancelled("The client is gone.")
        if time.monotonic() > deadline:
            raise TimeoutError


WORKERS: Final = max(2, min(4, (os.cpu_count() or 2) // 2))
"""Other cores are left to running requests. There are always two, so that one tenant cannot have all."""
header_pool: Final = WorkerPool("media headers", 2, 1, 2 * bounds.HEADER_MEMORY)
"""For the headers of images and audio: short jobs, which do not wait for pixels."""
pixel_pool: Final = WorkerPool("media pixels", WORKERS, WORKERS - 1, bounds.PIXEL_MEMORY)
"""For images, videos and PDFs."""
audio_pool: Final = WorkerPool(
    "media sounds", bounds.AUDIO_STREAMS, bounds.AUDIO_STREAMS // 2, bounds.AUDIO_STREAMS * bounds.AUDIO_MEMORY
)
"""For audio: each stream has a worker to itself while it is transcribed."""
