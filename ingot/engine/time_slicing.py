"""Long work beside steps, done in parts: who has a turn next, and how each ends.

Pure Python: no mlx, tested without it. The contract:

- Any thread may call `open`, `accept`, `cancel` and `status`; the rest is the engine thread's.
- `advance` works for a bounded time, in parts that the model bounds. Tenants take turns, and of a tenant's requests
  each, so that one turn's states are held at a time. The queue is shared as `ingot.shares` says.
- Whoever is next in line is begun while another's turn goes on, so that what it waits for (a sound that has to be
  read) is there when its turn comes.
- A request ends exactly once, in an event that is no piece.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ingot.engine.beside import BesideSteps
from ingot.engine.loop import FAILED, Post
from ingot.engine.piece_stream import PieceStream
from ingot.engine.request import RequestStatus
from ingot.errors import BadRequest, Cancelled, ClientLeft, IngotError, Overloaded
from ingot.kernels.device import is_lost
from ingot.shares import Shares

log = logging.getLogger("ingot.engine")

RETRY_S = 10.0


class Asked(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def arrived(self) -> float: ...

    @property
    def deadline(self) -> float | None: ...


Piece = TypeVar("Piece", covariant=True)


class Doing(Protocol[Piece]):
    """What is done for one request."""

    @property
    def tokens(self) -> int:
        """That came of it so far."""

    def work(self) -> Generator[Sequence[Piece] | None, None, None]:
        """After each part: nothing while a turn goes on, what came of it at its end, None where more has to come first
        and whoever brings it calls `wake`."""


AskedT = TypeVar("AskedT", bound=Asked)
DoingT = TypeVar("DoingT", bound=Doing[object])
EventT = TypeVar("EventT")
StreamT = TypeVar("StreamT", bound=PieceStream[Any, Any])


@dataclass(eq=False, slots=True)
class Turn(Generic[AskedT, DoingT, EventT]):
    """A request under way."""

    request: AskedT
    reply: Callable[[list[EventT]], None]
    doing: DoingT | None = None
    work: Generator[Sequence[EventT] | None, None, None] | None = None
    began: float | None = None  # when its first turn came
    waits: bool = False  # for more that it needs


class Turns(BesideSteps, Generic[AskedT, DoingT, EventT, StreamT]):
    """All requests of one kind that are under way."""

    name: ClassVar[str]
    things: ClassVar[str]  # what waits in the queue, in words
    stream: type[StreamT]

    def __init__(
        self, post: Post, max_queue: int, target_ms: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`post` puts something into the engine thread's mailbox; `target_ms` is the time wanted between two tokens."""
        self._post, self._clock = post, clock
        self._target_ms = target_ms
        # One may always be under way, besides those that wait.
        self._queued = Shares("speech", max_queue + 1)
        self._had: dict[str, int] = {}  # by tenant, which turn was its last,
        self._turns = itertools.count(1)  # of all
        self._jobs: dict[str, Turn[AskedT, DoingT, EventT]] = {}
        self._lock = threading.Lock()
        self._at: Turn[AskedT, DoingT, EventT] | None = None  # whose turn is begun
        self._used = False

    # For whoever knows what is done

    def _begun(self, request: AskedT, wake: Callable[[], None]) -> DoingT:
        """Begin with a request."""
        raise NotImplementedError

    def _ended(self, job: Turn[AskedT, DoingT, EventT], queue_s: float, compute_s: float) -> EventT:
        """What a request that came to its end is told."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Nothing runs any more: what running took is free."""
        raise NotImplementedError

    # For any thread

    def open(self, request: AskedT) -> StreamT:
        """Accept a request from a coroutine. Raises at once what can be known at once."""
        stream = self.stream(lambda: self.cancel(request.id, ClientLeft("The client left")))
        self.accept(request, stream.post)
        return stream

    def accept(self, request: AskedT, reply: Callable[[list[EventT]], None]) -> None:
        """`reply` is called from the engine thread. Raises at once what can be known at once."""
        with self._lock:
            if request.id in self._jobs:
                raise BadRequest(f"A request with the id {request.id} is already running")
            if not self._queued.fits(request.tenant, 1):
                most = self._queued.capacity - 1
                raise Overloaded(
                    f"The queue is full: {len(self._jobs)} {self.things} wait, at most {most} may", retry_after=RETRY_S
                )
            self._queued.add(request.tenant, 1)
            self._jobs[request.id] = Turn(request, reply)
        self._post(lambda: None)  # wakes an idle engine

    def cancel(self, request_id: str, cause: IngotError | None = None) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        if request_id not in self._jobs:
            return False
        self._post(lambda: self._end(request_id, cause or Cancelled("The request was cancelled")))
        return True

    def status(self, now: float) -> list[RequestStatus]:
        return [
            RequestStatus(
                id=job.request.id,
                phase="queued" if job.began is None else "decode",
                prompt_tokens=0,
                prefilled_tokens=0,
                completion_tokens=0 if job.doing is None else job.doing.tokens,
                max_tokens=0,
                age_s=now - job.request.arrived,
                tokens_per_second=0.0,
                tenant=job.request.tenant,
            )
            for job in list(self._jobs.values())
        ]

    # The engine thread

    @property
    def busy(self) -> bool:
        """Whether there is something to do now; what waits comes by mail."""
        return any(not job.waits for job in list(self._jobs.values()))

    def work(self, milliseconds: float) -> None:
        """For about that long, or until somebody waits for more: it may be in the mail already."""
        until = self._clock() + milliseconds / 1000
        while (job := self._next()) is not None:
            self._part(job)
            self._look_ahead()
            if job.waits or self._clock() >= until:
                return

    def _next(self) -> Turn[AskedT, DoingT, EventT] | None:
        """Whoever's turn is begun, else the next in line."""
        return self._at if self._at is not None else self._in_line()

    def _in_line(self) -> Turn[AskedT, DoingT, EventT] | None:
        """Of the tenant that had a turn longest ago, the request that had."""
        ready = [job for job in list(self._jobs.values()) if job is not self._at and not job.waits]
        return min(ready, key=lambda job: self._had.get(job.request.tenant, 0), default=None)

    def _part(self, job: Turn[AskedT, DoingT, EventT]) -> None:
        with self._failing_alone(job):
            if job.work is None:
                self._begin(job)
            if job.began is None:
                job.began = self._clock()
            assert job.work is not None, "it has begun"
            try:
                said = next(job.work)
            except StopIteration:
                self._close(job)
                return
            self._at = job if said == () else None
            job.waits = said is None
            if said:
                self._tell(job, list(said))
            if said is not None and self._at is None:
                self._to_the_end(job)

    def _look_ahead(self) -> None:
        """Begin with whoever has the next turn."""
        job = self._in_line()
        if job is not None and job.work is None:
            with self._failing_alone(job):
                self._begin(job)

    def _begin(self, job: Turn[AskedT, DoingT, EventT]) -> None:
        def wake() -> None:
            job.waits = False

        job.doing = self._begun(job.request, wake)
        job.work, self._used = job.doing.work(), True  # type: ignore[assignment]

    @contextlib.contextmanager
    def _failing_alone(self, job: Turn[AskedT, DoingT, EventT]) -> Iterator[None]:
        """A model or a device may fail in ways nobody foresaw; the request at hand fails, the server goes on."""
        try:
            yield
        except IngotError as error:
            self._end(job.request.id, error)
        except Exception as error:
            if is_lost(error):
                raise
            log.exception("a request of %s failed and is given up", self.name)
            self._end(job.request.id, IngotError(FAILED))

    def _to_the_end(self, job: Turn[AskedT, DoingT, EventT]) -> None:
        """It has had its turn."""
        self._had[job.request.tenant] = next(self._turns)
        with self._lock:
            if self._jobs.pop(job.request.id, None) is not None:
                self._jobs[job.request.id] = job

    def _close(self, job: Turn[AskedT, DoingT, EventT]) -> None:
        assert job.began is not None, "what ends has begun"
        queue_s, compute_s = max(0.0, job.began - job.request.arrived), self._clock() - job.began
        self._end(job.request.id, self._ended(job, queue_s, compute_s))

    def _end(self, request_id: str, last: EventT | IngotError) -> None:
        with self._lock:
            job = self._jobs.pop(request_id, None)
            if job is not None:
                self._queued.add(job.request.tenant, -1)
        if job is None:
            return
        self._had[job.request.tenant] = next(self._turns)
        if not self._jobs:
            self._had.clear()
        if self._at is job:
            self._at = None
        try:
            if job.work is not None:
                job.work.close()
        finally:
            self._tell(job, [last])  # type: ignore[list-item]

    def _tell(self, job: Turn[AskedT, DoingT, EventT], events: list[EventT]) -> None:
        try:
            job.reply(events)
        except Exception:  # whoever waited for it is at fault, and nobody else ends for that
            log.exception("nobody takes what request %s was answered", job.request.id)

    def rest(self) -> None:
        """Nothing runs: see that nothing was lost, and give back what running took."""
        self.check()
        if self._used and not self._jobs:
            self._give_back()
            self._used = False

    def begin_anew(self, error: IngotError) -> None:
        self.abandon(error)

    def close(self) -> None:
        """Nothing is asked any more."""

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""
        jobs = list(self._jobs.values())
        assert self._at is None or self._at in jobs, "a turn is held by nobody"
        assert all(not job.waits or job.doing is not None for job in jobs), "something is waited for and not asked for"
