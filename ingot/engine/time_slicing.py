"""Workloads between the steps of a generating model: how long they work at a time, who has a turn next, how each
ends.

They answer each of their requests once, and take what steps leave of the latency target. Pure Python: no mlx,
tested without it. The contract of `TimeSlicedJobs`:
- Any thread may call `open`, `accept`, `cancel` and `status`; the rest is the engine thread's.
- `advance` works for a bounded time, in parts that the model bounds. Tenants take turns, and of a tenant's
  requests each, so that one turn's states are held at a time. The queue is shared as `ingot.shares` says.
- Whoever is next in line is begun while another's turn goes on, so that what it waits for (audio that has to be
  decoded) is there when its turn comes.
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

from ingot.engine.loop import REQUEST_FAILED, PostMessage, do_nothing
from ingot.engine.request import RequestStatus
from ingot.engine.streams import PieceStream
from ingot.errors import BadRequest, Cancelled, ClientLeft, DeadlineExceeded, IngotError, Overloaded
from ingot.kernels.device import is_device_lost
from ingot.shares import Shares

log = logging.getLogger("ingot.engine")
EventT = TypeVar("EventT")

RETRY_AFTER_S = 10.0
IDLE_SLICE_MS = 1000.0
"""Longest work while nobody streams: how long a cancel or a newcomer may have to wait."""
LEAST_STEP_SHARE = 0.5
"""They get at least this part of the time that a step took."""


class TimeSlicedRequest(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def arrived(self) -> float: ...

    @property
    def deadline(self) -> float | None: ...


class _HasRequest(Protocol):
    @property
    def request(self) -> TimeSlicedRequest: ...


JobT = TypeVar("JobT", bound=_HasRequest)


class TimeSlicedWorkload(Generic[JobT]):
    """Requests under way, and how much time they get between two steps of a generating model."""

    items: ClassVar[str]  # what waits in the queue, for the error of a full one
    shares: ClassVar[str] = "speech"  # how the queue is shared between tenants: see `ingot.shares`

    _served: Any

    def __init__(
        self,
        served: Any,
        post: PostMessage,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`served` has the loaded `model`, which rests when nothing runs. `post` puts something into the engine
        thread's mailbox; `target_ms` is the time wanted between two tokens."""
        self._served, self._used = served, False  # whether the model ran since it rested
        self._post, self._clock, self._target_ms = post, clock, target_ms
        self._queued = Shares(self.shares, max_queue + 1)  # one may always be computed, besides those that wait
        self._jobs: dict[str, JobT] = {}
        self._lock = threading.Lock()

    # For whoever knows what is computed

    def work(self, milliseconds: float) -> None:
        """For about that long."""
        raise NotImplementedError

    def _end(self, request_id: str, result: Any) -> None:
        """Answer a request, with its result or with the error that ended it; nothing where it has ended."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""
        raise NotImplementedError

    def _retry_after(self) -> float:
        """Seconds after which a refused client may try again."""
        return RETRY_AFTER_S

    # For any thread

    def _admit(self, job: JobT) -> None:
        """Queue a request. Raises BadRequest or Overloaded."""
        request = job.request
        with self._lock:
            if request.id in self._jobs:
                raise BadRequest(f"A request with the id {request.id} is already running")
            if not self._queued.fits(request.tenant, 1):
                most = self._queued.capacity - 1
                raise Overloaded(
                    f"The queue is full: {len(self._jobs)} {self.items} wait, at most {most} may",
                    retry_after=self._retry_after(),
                )
            self._queued.add(request.tenant, 1)
            self._jobs[request.id] = job
        self._post(do_nothing)  # wakes an idle engine

    def cancel(self, request_id: str, cause: IngotError | None = None) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        if request_id not in self._jobs:
            return False
        self._post(lambda: self._end(request_id, cause or Cancelled("The request was cancelled")))
        return True

    # The engine thread

    def _remove(self, request_id: str) -> JobT | None:
        with self._lock:
            job = self._jobs.pop(request_id, None)
            if job is not None:
                self._queued.add(job.request.tenant, -1)
        return job

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """Work between two steps of the generating model, of which the one before took `spent_s`.

        Where nobody streams, for as long as a newcomer may have to wait. Else for what the step left of the target,
        but at least a part of what it took, so that this goes on alongside the longest steps too.
        """
        spent_ms = 1000 * spent_s
        self.work(max(self._target_ms - spent_ms, LEAST_STEP_SHARE * spent_ms) if shared() else IDLE_SLICE_MS)

    def expire(self, now: float) -> None:
        late = [job.request.id for job in list(self._jobs.values()) if (job.request.deadline or now) < now]
        for request_id in late:
            self._end(request_id, DeadlineExceeded("The request took longer than its deadline allows"))

    def abandon(self, error: IngotError) -> None:
        for request_id in list(self._jobs):
            self._end(request_id, error)

    def farewell(self, error: IngotError) -> None:
        for request_id in list(self._jobs):
            with contextlib.suppress(Exception):
                self._end(request_id, error)

    def rest(self) -> None:
        """Nothing runs: see that nothing was lost, and give back what running took."""
        self.check()
        if self._used and not self._jobs:
            self._served.model.rest()
            self._used = False

    def close(self) -> None:
        """Nothing is held but by requests, which have ended."""


def deliver(request_id: str, reply: Callable[[EventT], None], event: EventT) -> None:
    """A client that cannot take its answer is at fault, and nobody else's request ends for that."""
    try:
        reply(event)
    except Exception:
        log.exception("the answer to request %s could not be delivered", request_id)


PieceT = TypeVar("PieceT", covariant=True)


class TimeSlicedTask(Protocol[PieceT]):
    """What is done for one request."""

    @property
    def tokens(self) -> int:
        """That came of it so far."""

    def work(self) -> Generator[Sequence[PieceT] | None, None, None]:
        """After each part: nothing while a turn goes on, what came of it at its end, None where more has to come first
        and whoever brings it calls `wake`."""


RequestT = TypeVar("RequestT", bound=TimeSlicedRequest)
TaskT = TypeVar("TaskT", bound=TimeSlicedTask[object])
StreamT = TypeVar("StreamT", bound=PieceStream[Any, Any])


@dataclass(eq=False, slots=True)
class TimeSlicedJob(Generic[RequestT, TaskT, EventT]):
    """A request under way."""

    request: RequestT
    reply: Callable[[list[EventT]], None]
    task_run: TaskT | None = None
    work: Generator[Sequence[EventT] | None, None, None] | None = None
    began: float | None = None  # when its first turn came
    waits: bool = False  # for more that it needs


class TimeSlicedJobs(
    TimeSlicedWorkload[TimeSlicedJob[RequestT, TaskT, EventT]], Generic[RequestT, TaskT, EventT, StreamT]
):
    """Requests of one kind that are computed by turns."""

    name: ClassVar[str]
    stream: type[StreamT]

    def __init__(
        self,
        served: Any,
        post: PostMessage,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(served, post, max_queue, target_ms, clock)
        self._last_turns: dict[str, int] = {}  # by tenant, which turn was its last,
        self._turns = itertools.count(1)  # of all
        self._current: TimeSlicedJob[RequestT, TaskT, EventT] | None = None  # whose turn is not over

    # For whoever knows what is computed

    def _start_task(self, request: RequestT, wake: Callable[[], None]) -> TaskT:
        """Begin with a request."""
        raise NotImplementedError

    def _ended(self, job: TimeSlicedJob[RequestT, TaskT, EventT], queue_s: float, compute_s: float) -> EventT:
        """What a request that came to its end is told."""
        raise NotImplementedError

    # For any thread

    def open(self, request: RequestT) -> StreamT:
        """Accept a request from a coroutine. Raises at once what can be known at once."""
        stream = self.stream(lambda: self.cancel(request.id, ClientLeft("The client left")))
        self.accept(request, stream.post)
        return stream

    def accept(self, request: RequestT, reply: Callable[[list[EventT]], None]) -> None:
        """`reply` is called from the engine thread. Raises at once what can be known at once."""
        self._admit(TimeSlicedJob(request, reply))

    def status(self, now: float) -> list[RequestStatus]:
        return [
            RequestStatus(
                id=job.request.id,
                phase="queued" if job.began is None else "decode",
                completion_tokens=0 if job.task_run is None else job.task_run.tokens,
                age_s=now - job.request.arrived,
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
            self._run_part(job)
            self._begin_next()
            if job.waits or self._clock() >= until:
                return

    def _next(self) -> TimeSlicedJob[RequestT, TaskT, EventT] | None:
        """Whoever's turn is begun, else the next in line."""
        return self._current if self._current is not None else self._next_in_line()

    def _next_in_line(self) -> TimeSlicedJob[RequestT, TaskT, EventT] | None:
        """Of the tenant that had a turn longest ago, the request that had."""
        ready = [job for job in list(self._jobs.values()) if job is not self._current and not job.waits]
        return min(ready, key=lambda job: self._last_turns.get(job.request.tenant, 0), default=None)

    def _run_part(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> None:
        with self._failing_alone(job):
            if job.work is None:
                self._begin(job)
            if job.began is None:
                job.began = self._clock()
            assert job.work is not None, "it has begun"
            try:
                pieces = next(job.work)
            except StopIteration:
                self._close(job)
                return
            self._current = job if pieces == () else None
            job.waits = pieces is None
            if pieces:
                deliver(job.request.id, job.reply, list(pieces))
            if pieces is not None and self._current is None:
                self._move_to_back(job)

    def _begin_next(self) -> None:
        """Begin with whoever has the next turn."""
        job = self._next_in_line()
        if job is not None and job.work is None:
            with self._failing_alone(job):
                self._begin(job)

    def _begin(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> None:
        def wake() -> None:
            job.waits = False

        job.task_run = self._start_task(job.request, wake)
        job.work, self._used = job.task_run.work(), True  # type: ignore[assignment]

    @contextlib.contextmanager
    def _failing_alone(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> Iterator[None]:
        """A model or a device may fail in ways nobody foresaw; the request at hand fails, the server goes on."""
        try:
            yield
        except IngotError as error:
            self._end(job.request.id, error)
        except Exception as error:
            if is_device_lost(error):
                raise
            log.exception("a request of %s failed and is given up", self.name)
            self._end(job.request.id, IngotError(REQUEST_FAILED))

    def _move_to_back(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> None:
        """It has had its turn."""
        self._last_turns[job.request.tenant] = next(self._turns)
        with self._lock:
            if self._jobs.pop(job.request.id, None) is not None:
                self._jobs[job.request.id] = job

    def _close(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> None:
        assert job.began is not None, "what ends has begun"
        queue_s, compute_s = max(0.0, job.began - job.request.arrived), self._clock() - job.began
        self._end(job.request.id, self._ended(job, queue_s, compute_s))

    def _end(self, request_id: str, last: EventT | IngotError) -> None:
        job = self._remove(request_id)
        if job is None:
            return
        self._last_turns[job.request.tenant] = next(self._turns)
        if not self._jobs:
            self._last_turns.clear()
        if self._current is job:
            self._current = None
        try:
            if job.work is not None:
                job.work.close()
        finally:
            deliver(request_id, job.reply, [last])  # type: ignore[arg-type]

    def reset_after_fault(self, error: IngotError) -> None:
        self.abandon(error)

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""
        jobs = list(self._jobs.values())
        assert self._current is None or self._current in jobs, "a turn is held by nobody"
        assert all(not job.waits or job.task_run is not None for job in jobs), (
            "something is waited for and not asked for"
        )
