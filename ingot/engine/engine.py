"""The engine: one thread that owns mlx, a mailbox in, streams of events out.

Any thread may call `open`, `cancel`, `status`, `health` and `close`; they exchange plain values with the engine
thread and never touch mlx. A step is plan, launch, collect: the tokens of the step before are read while the new
one runs, except where the next draw depends on them.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ingot.engine import guided
from ingot.engine.budget import Budget
from ingot.engine.costs import StepCosts
from ingot.engine.encoding import OfferedEncoder
from ingot.engine.encoding_request import Encoded, EncodingRequest, Role
from ingot.engine.encodings import Encodings
from ingot.engine.jobs import Job
from ingot.engine.keeping import Keeping
from ingot.engine.request import Event, Failed, Health, ModelCard, Request, RequestStatus
from ingot.engine.runner import Result, Runner, Step
from ingot.engine.sampling import needs_history
from ingot.engine.scheduler import Plan, Scheduler
from ingot.engine.sequence import Sequence
from ingot.engine.stream import BlockingStream, Reader, Stream
from ingot.errors import (
    BadRequest,
    Cancelled,
    ContextOverflow,
    DeadlineExceeded,
    IngotError,
    Overloaded,
    Unavailable,
)
from ingot.models.adapter import Adapter
from ingot.text.tokenizer import Tokenizer

log = logging.getLogger("ingot.engine")
T = TypeVar("T")

BEAT_S = 1.0
"""An idle engine shows that it lives this often."""
STALLED_S = 60.0
"""No beat for this long means that the engine is stuck."""
FIRST_MARKS, LAST_MARKS = 2, 8
"""Messages' ends at which checkpoints are taken: behind the system prompt and the first message, and the newest."""
SCORED_WIDTH = 128
"""Prompt tokens whose logprobs are computed in one launch: each takes a row of logits."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine thread starts with."""

    adapter: Adapter
    tokenizer: Tokenizer
    card: ModelCard
    budget: Budget
    cache_bytes: int = 0  # most that computed prefixes may take
    encoders: Mapping[Role, OfferedEncoder] = field(default_factory=dict)  # further models, for vectors and scores
    folder: Path | None = None  # the model's files


@dataclass(frozen=True, slots=True)
class Limits:
    max_sequences: int = 32
    max_queue: int = 256
    target_itl_ms: float = 100.0


class Engine:
    """Started by the constructor, which returns when the model is loaded or raises what went wrong."""

    def __init__(self, load: Callable[[], Loaded], limits: Limits) -> None:
        self._load, self._limits = load, limits
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._tickets = itertools.count()
        self._lock = threading.Lock()
        self._queued = 0  # sequences accepted and not yet running for the first time
        self._mean_request_s = 1.0
        self._beat = time.monotonic()
        self._closing = False
        self._pending: Step | None = None
        self._outbox: dict[Job, list[Event]] = {}
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name="ingot-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    # For any thread

    @property
    def card(self) -> ModelCard:
        return self._loaded.card

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def encoders(self) -> Mapping[Role, OfferedEncoder]:
        return self._loaded.encoders

    async def encode(self, request: EncodingRequest) -> Encoded:
        """Vectors or scores of texts. Raises before any work what can be known then; a cancelled wait ends the work."""
        self._refuse_if_stopped()
        return await self._encodings.encode(request)

    def open(self, request: Request) -> Stream:
        """Accept a request from a coroutine. Raises at once what can be known at once."""
        stream = Stream(lambda: self.cancel(request.id))
        self._accept(request, stream)
        return stream

    def generate(self, request: Request) -> BlockingStream:
        """Accept a request from a plain thread."""
        stream = BlockingStream()
        self._accept(request, stream)
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        if request_id not in self._jobs:
            return self._encodings.cancel(request_id)
        self._mail.put(lambda: self._end_early(request_id, Cancelled("The request was cancelled")))
        return True

    def status(self) -> list[RequestStatus]:
        now = time.monotonic()
        return [*(job.status(now) for job in list(self._jobs.values())), *self._encodings.status(now)]

    def health(self) -> Health:
        ago = time.monotonic() - self._beat
        alive = self._thread.is_alive() and ago < STALLED_S
        detail = "ok" if alive else "the engine has stopped" if not self._thread.is_alive() else "the engine is stuck"
        phases = [status.phase for status in self.status()]
        running = sum(phase != "queued" for phase in phases)
        return Health(alive, alive and not self._closing, detail, ago, running, len(phases) - running)

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self._closing = True
        self._mail.put(lambda: None)
        self._thread.join()

    def check(self) -> None:
        """Run the integrity check on the engine thread and wait for it; raises what it finds."""
        self._on_thread(self._check)

    @property
    def kept(self) -> Keeping:
        """The prefixes that are kept."""
        loaded = self._loaded
        return Keeping(lambda work: self._on_thread(lambda: work(self._runner.reuse)), loaded.adapter, loaded.folder)

    def _on_thread(self, work: Callable[[], T]) -> T:
        self._refuse_if_stopped()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # whoever waits raises it
                done.set_exception(error)

        self._mail.put(run)
        while not wait([done], BEAT_S).done:
            self._refuse_if_stopped()
        return done.result()

    def _accept(self, request: Request, reader: Reader) -> None:
        self._refuse_if_stopped()
        count = len(request.prompts) * request.n
        self._validate(request)
        with self._lock:
            if request.id in self._jobs:
                raise BadRequest(f"A request with the id {request.id} is already running")
            if self._queued + count > self._limits.max_queue + self._free_seats():
                raise Overloaded(
                    f"The queue is full: {self._queued} sequences wait, at most {self._limits.max_queue} may",
                    retry_after=self._retry_after(),
                )
            self._queued += count
            job = Job(request, reader, self._sequences(request), self.tokenizer)
            self._jobs[request.id] = job
        self._mail.put(lambda: self._begin(job))

    def _refuse_if_stopped(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise Unavailable("The engine is not running", retry_after=5)

    def _validate(self, request: Request) -> None:
        context = self.card.context
        for prompt in request.prompts:
            if not prompt:
                raise BadRequest("The prompt is empty: it has no tokens", param="prompt")
            least = min(1, request.max_tokens) if request.max_tokens is not None else 1
            if len(prompt) + least > context:
                raise ContextOverflow(needed=len(prompt) + least, limit=context)
            if max(prompt) >= self._loaded.adapter.vocab or min(prompt) < 0:
                raise BadRequest(
                    f"The prompt holds a token outside the vocabulary of {self._loaded.adapter.vocab}", param="prompt"
                )

    def _sequences(self, request: Request) -> list[Sequence]:
        stop_tokens = request.stop.token_ids | (frozenset() if request.stop.ignore_eos else self.tokenizer.eos_ids)
        seed = request.sampling.seed if request.sampling.seed is not None else random.getrandbits(63)
        made = []
        for index in range(len(request.prompts) * request.n):
            prompt = request.prompts[index // request.n]
            room = self.card.context - len(prompt)
            limit = room if request.max_tokens is None else min(request.max_tokens, room)
            # Answers of one request differ, and the first one is what a request for a single one gives.
            own_seed = seed + (index % request.n) * 0x9E3779B9
            sequence = Sequence(request, index, next(self._tickets), prompt, limit, own_seed, stop_tokens)
            sequence.marks = self._message_ends(request, index // request.n)
            made.append(sequence)
        return made

    def _message_ends(self, request: Request, number: int) -> frozenset[int]:
        """As the request says. Else, templates end messages with a token that also ends answers; the next turn differs
        only after one."""
        ends: Many[int] = [
            place for place, token in enumerate(request.prompts[number], start=1) if token in self.tokenizer.eos_ids
        ]
        ends = request.marks[number] if request.marks else ends
        return frozenset([*ends[:FIRST_MARKS], *ends[-LAST_MARKS:]])

    def _free_seats(self) -> int:
        return self._limits.max_sequences - len(self._scheduler.running)

    def _retry_after(self) -> float:
        return min(60.0, max(1.0, self._mean_request_s * self._queued / self._limits.max_sequences))

    # The engine thread

    def _live(self) -> None:
        try:
            self._loaded = self._load()
            self._encodings = Encodings(
                self._loaded.encoders, self._mail.put, self._limits.max_queue, self._limits.target_itl_ms
            )
            self._make_rooms()
        except BaseException as error:  # handed to the constructor, which raises it
            self._failure = error
            return
        finally:
            self._ready.set()
        while not self._closing:
            self._beat = time.monotonic()
            self._take_mail()
            self._expire()
            self._flush()
            began = time.monotonic()
            self._guarded_step()
            self._encodings.advance(time.monotonic() - began, streaming=bool(self._jobs))
        farewell = Unavailable("The server is shutting down", retry_after=5)
        self._abandon(farewell)
        self._encodings.abandon(farewell)
        self._flush()
        self._runner.close()

    def _make_rooms(self) -> None:
        costs = StepCosts(mixes=self._loaded.adapter.mixed)
        budget = self._loaded.budget
        self._runner = Runner(self._loaded.adapter, budget, costs, self._loaded.cache_bytes)

        def widest(sequence: Sequence) -> int:
            width = budget.widest_launch(sequence.computed)
            return min(width, SCORED_WIDTH) if sequence.scoring else width

        self._scheduler = Scheduler(
            budget.fits, widest, self._runner.reuse, costs, self._limits.max_sequences, self._limits.target_itl_ms
        )

    def _take_mail(self) -> None:
        """Run what other threads sent; with nothing else to do, wait for it."""
        busy = bool(self._jobs) or self._encodings.busy
        if not busy:
            self._rest()
        try:
            self._mail.get(block=not busy, timeout=None if busy else BEAT_S)()
            while True:
                self._mail.get_nowait()()
        except queue.Empty:
            pass

    def _rest(self) -> None:
        """Nothing runs: see that nothing was lost, and give back what running took."""
        self._pending = None
        try:
            self._check()
        except AssertionError:
            log.exception("the idle engine found its books wrong; it starts new ones")
            self._make_rooms()
        self._runner.rest()
        self._encodings.rest()

    def _begin(self, job: Job) -> None:
        if job.request.id not in self._jobs:  # cancelled before it began
            return
        for sequence in job.sequences:
            guided.begin(sequence)
            if sequence.failure is not None:
                self._end_early(job.request.id, sequence.failure)
                return
            if sequence.limit == 0 and sequence.sampling.prompt_logprobs is None:
                self._post(job, job.writers[sequence].finish("length"))
                self._leave(sequence)
            else:
                self._scheduler.add(sequence)
        self._close_if_done(job)

    def _guarded_step(self) -> None:
        try:
            self._step()
        # A model or a device may fail in ways nobody foresaw; the requests at hand fail, the server goes on.
        except Exception:
            log.exception("a step failed; the requests that were running are given up")
            self._pending = None
            self._runner.abandon()
            self._abandon(IngotError("The engine failed while computing this request; the server's log says why"))
            self._flush()
            self._make_rooms()

    def _step(self) -> None:
        if self._pending is not None and self._needs_tokens():
            self._read(None)
        plan = self._scheduler.plan(time.monotonic())
        self._note_admissions(plan)
        step = self._runner.launch(plan)
        self._read(step if step.launched else None)
        if self._loaded.adapter.device.kind == "cpu" or self._encodings.busy:
            # There the launch has already waited for the work: nothing is gained by reading late. And no token waits
            # for an encoder that comes between two steps.
            self._read(None)

    def _needs_tokens(self) -> bool:
        return any(
            needs_history(sequence.sampling) or guided.needs_tokens(sequence) for sequence in self._scheduler.running
        )

    def _read(self, following: Step | None) -> None:
        """Read the tokens of the step before; `following` is the one that now runs."""
        previous, self._pending = self._pending, following
        if previous is None:
            return
        for results in self._runner.collect(previous):
            self._deliver(results)
            self._flush()

    def _deliver(self, results: Iterable[Result]) -> None:
        now = time.monotonic()
        for result in results:
            sequence = result.sequence
            if sequence.ended:
                continue
            job = self._jobs[sequence.request.id]
            if result.token is not None and sequence.limit > 0:
                sequence.tokens.append(result.token)
                sequence.first_token_at = sequence.first_token_at or now
                guided.accept(sequence, result.token)
            if sequence.failure is not None:
                self._end_early(sequence.request.id, sequence.failure)
                continue
            writer = job.writers[sequence]
            self._post(job, writer.write(result))
            if writer.ended is None and guided.is_done(sequence):
                self._post(job, writer.finish("stop"))
            if writer.ended is not None:
                self._leave(sequence)
                self._close_if_done(job)

    def _post(self, job: Job, events: list[Event]) -> None:
        """Hand events out with the rest of the step's: a reader is woken once a step."""
        if events:
            self._outbox.setdefault(job, []).extend(events)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for job, events in outbox.items():
            job.reader.post(events)

    def _leave(self, sequence: Sequence) -> None:
        """Everything that a sequence holds goes back."""
        sequence.ended = True
        self._scheduler.remove(sequence)
        self._runner.release(sequence)
        if sequence.admitted_at is None:
            self._dequeued(1)

    def _close_if_done(self, job: Job) -> None:
        if all(sequence.ended for sequence in job.sequences) and job.request.id in self._jobs:
            with self._lock:
                del self._jobs[job.request.id]
            self._mean_request_s += 0.1 * (time.monotonic() - job.request.arrived - self._mean_request_s)
            self._post(job, [job.ended(time.monotonic())])

    def _end_early(self, request_id: str, error: IngotError) -> None:
        with self._lock:
            job = self._jobs.pop(request_id, None)
        if job is None:
            return
        for sequence in job.sequences:
            if not sequence.ended:
                self._leave(sequence)
        self._post(job, [Failed(error, job.usage())])

    def _expire(self) -> None:
        now = time.monotonic()
        late = [job.request.id for job in self._jobs.values() if job.request.deadline and job.request.deadline < now]
        for request_id in late:
            self._end_early(request_id, DeadlineExceeded("The request took longer than its deadline allows"))
        self._encodings.expire(now)

    def _abandon(self, error: IngotError) -> None:
        for request_id in list(self._jobs):
            self._end_early(request_id, error)

    def _note_admissions(self, plan: Plan) -> None:
        self._dequeued(sum(sequence.preemptions == 0 for sequence in plan.admitted))

    def _dequeued(self, count: int) -> None:
        with self._lock:
            self._queued -= count

    def _check(self) -> None:
        with self._lock:
            self._check_books()

    def _check_books(self) -> None:
        self._scheduler.check()
        self._runner.check()
        self._encodings.check()
        held = {sequence for job in self._jobs.values() for sequence in job.sequences if not sequence.ended}
        assert set(self._scheduler.running) | set(self._scheduler.waiting) <= held, "an unknown sequence runs"
        assert set(self._runner.seats.taken) <= held, "a slot is held by nobody"
        if not self._jobs:
            assert self._queued == 0, "the queue's count is off"
            assert not self._runner.seats.taken and not self._scheduler.waiting, "idle, but something is held"
