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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ingot.engine.loop import REQUEST_FAILED, PostMessage
from ingot.engine.request import RequestStatus
from ingot.engine.streams import PieceStream
from ingot.errors import BadRequest, Cancelled, ClientLeft, DeadlineExceeded, IngotError, Overloaded
from ingot.kernels.device import is_device_lost
from ingot.shares import Shares

IDLE_SLICE_MS = 1000.0
"""Longest work while nobody streams: how long a cancel or a newcomer may have to wait."""
LEAST_STEP_SHARE = 0.5
"""It gets at least this part of the time that a step took."""


class _HasDeadline(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def deadline(self) -> float | None: ...


class _HasRequest(Protocol):
    @property
    def request(self) -> _HasDeadline: ...


class TimeSlicedWorkload:
    _jobs: Mapping[str, _HasRequest]
    _target_ms: float

    def work(self, milliseconds: float) -> None:
        """For about that long."""
        raise NotImplementedError

    def _end(self, request_id: str, result: Any) -> None:
        """Answer a request, with what came of it or with the error that ended it; nothing where it has ended."""
        raise NotImplementedError

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """Work between two steps of the generating model, of which the one before took `spent_s`.

        Where nobody streams, for as long as a newcomer may have to wait. Else for what the step left of the target,
        but at least a part of what it took, so that this goes on beside the longest steps too.
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


log = logging.getLogger("ingot.engine")

RETRY_AFTER_S = 10.0


class TimeSlicedRequest(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def arrived(self) -> float: ...

    @property
    def deadline(self) -> float | None: ...


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
EventT = TypeVar("EventT")
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


class TimeSlicedJobs(TimeSlicedWorkload, Generic[RequestT, TaskT, EventT, StreamT]):
    """All requests of one kind that are under way."""

    name: ClassVar[str]
    things: ClassVar[str]  # what waits in the queue, in words
    stream: type[StreamT]

    def __init__(
        self, post: PostMessage, max_queue: int, target_ms: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`post` puts something into the engine thread's mailbox; `target_ms` is the time wanted between two tokens."""
        self._post, self._clock = post, clock
        self._target_ms = target_ms
        # One may always be under way, besides those that wait.
        self._queued = Shares("speech", max_queue + 1)
        self._last_turns: dict[str, int] = {}  # by tenant, which turn was its last,
        self._turns = itertools.count(1)  # of all
        self._jobs: dict[str, TimeSlicedJob[RequestT, TaskT, EventT]] = {}
        self._lock = threading.Lock()
        self._at: TimeSlicedJob[RequestT, TaskT, EventT] | None = None  # whose turn is begun
        self._used = False

    # For whoever knows what is done

    def _begun(self, request: RequestT, wake: Callable[[], None]) -> TaskT:
        """Begin with a request."""
        raise NotImplementedError

    def _ended(self, job: TimeSlicedJob[RequestT, TaskT, EventT], queue_s: float, compute_s: float) -> EventT:
        """What a request that came to its end is told."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Nothing runs any more: what running took is free."""
        raise NotImplementedError

    # For any thread

    def open(self, request: RequestT) -> StreamT:
        """Accept a request from a coroutine. Raises at once what can be known at once."""
        stream = self.stream(lambda: self.cancel(request.id, ClientLeft("The client left")))
        self.accept(request, stream.post)
        return stream

    def accept(self, request: RequestT, reply: Callable[[list[EventT]], None]) -> None:
        """`reply` is called from the engine thread. Raises at once what can be known at once."""
        with self._lock:
            if request.id in self._jobs:
                raise BadRequest(f"A request with the id {request.id} is already running")
            if not self._queued.fits(request.tenant, 1):
                most = self._queued.capacity - 1
                raise Overloaded(
                    f"The queue is full: {len(self._jobs)} {self.things} wait, at most {most} may",
                    retry_after=RETRY_AFTER_S,
                )
            self._queued.add(request.tenant, 1)
            self._jobs[request.id] = TimeSlicedJob(request, reply)
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
                completion_tokens=0 if job.task_run is None else job.task_run.tokens,
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
            self._begin_next()
            if job.waits or self._clock() >= until:
                return

    def _next(self) -> TimeSlicedJob[RequestT, TaskT, EventT] | None:
        """Whoever's turn is begun, else the next in line."""
        return self._at if self._at is not None else self._in_line()

    def _in_line(self) -> TimeSlicedJob[RequestT, TaskT, EventT] | None:
        """Of the tenant that had a turn longest ago, the request that had."""
        ready = [job for job in list(self._jobs.values()) if job is not self._at and not job.waits]
        return min(ready, key=lambda job: self._last_turns.get(job.request.tenant, 0), default=None)

    def _part(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> None:
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
                self._move_to_back(job)

    def _begin_next(self) -> None:
        """Begin with whoever has the next turn."""
        job = self._in_line()
        if job is not None and job.work is None:
            with self._failing_alone(job):
                self._begin(job)

    def _begin(self, job: TimeSlicedJob[RequestT, TaskT, EventT]) -> None:
        def wake() -> None:
            job.waits = False

        job.task_run = self._begun(job.request, wake)
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
        with self._lock:
            job = self._jobs.pop(request_id, None)
            if job is not None:
                self._queued.add(job.request.tenant, -1)
        if job is None:
            return
        self._last_turns[job.request.tenant] = next(self._turns)
        if not self._jobs:
            self._last_turns.clear()
        if self._at is job:
            self._at = None
        try:
            if job.work is not None:
                job.work.close()
        finally:
            self._tell(job, [last])  # type: ignore[list-item]

    def _tell(self, job: TimeSlicedJob[RequestT, TaskT, EventT], events: list[EventT]) -> None:
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

    def reset_after_fault(self, error: IngotError) -> None:
        self.abandon(error)

    def close(self) -> None:
        """Nothing is asked any more."""

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""
        jobs = list(self._jobs.values())
        assert self._at is None or self._at in jobs, "a turn is held by nobody"
        assert all(not job.waits or job.task_run is not None for job in jobs), (
            "something is waited for and not asked for"
        )
