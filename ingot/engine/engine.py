"""The engine: one thread that owns mlx, a mailbox in, streams of events out.

Any thread may call `open`, `generate`, `cancel`, `status`, `health` and `close`; they exchange plain values with the
engine thread and never touch mlx. A step is plan, launch, collect: the tokens of the step before are read while the
new one runs.

A fault belongs to its request. Where nobody can say whose it is, the requests that run are given up and the books are
begun anew; the thread goes on, and if it cannot, every stream ends and `health` says so.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ingot.engine import guided
from ingot.engine.budget import Budget
from ingot.engine.costs import StepCosts
from ingot.engine.door import Door, Limits
from ingot.engine.encoder_batches import OfferedEncoder
from ingot.engine.encoder_jobs import FAILED, EncoderJobs
from ingot.engine.encoder_request import Encoded, EncodingRequest, Role
from ingot.engine.jobs import Job
from ingot.engine.journal import Journal, outcome_of
from ingot.engine.kept_prefixes import KeptPrefixes
from ingot.engine.request import Event, Failed, Health, ModelCard, Request, RequestStatus
from ingot.engine.runner import Result, Runner, Step, leave_device
from ingot.engine.scheduler import Scheduler, StepPlan
from ingot.engine.sequence import Sequence
from ingot.engine.stream import BlockingStream, EventSink, Stream
from ingot.errors import Cancelled, ClientLeft, DeadlineExceeded, IngotError, Unavailable
from ingot.models.adapter import Adapter
from ingot.text.tokens.tokenizer import Tokenizer

__all__ = ["Engine", "Limits", "Loaded", "Stream"]

log = logging.getLogger("ingot.engine")
T = TypeVar("T")

BEAT_S = 1.0
"""An idle engine shows that it lives this often."""
STALLED_S = 60.0
"""No beat for this long means that the engine is stuck."""
SLOW_STEP_S = 2.0
"""A step that takes longer than this is worth a line in the log."""
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


class Engine:
    """Started by the constructor, which returns when the model is loaded or raises what went wrong."""

    def __init__(self, load: Callable[[], Loaded], limits: Limits) -> None:
        self._load, self._limits = load, limits
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._beat = time.monotonic()
        self._closing = False
        self._pending: Step | None = None
        self._learned: list[list[Result]] | None = None  # of the pending step, where its rows know them already
        self._outbox: dict[Job, list[Event]] = {}
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name="ingot-engine", daemon=True)
        # A process that ends while this thread has mlx's streams open is aborted by them.
        atexit.register(self.close)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self.close()
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

    async def open(self, request: Request) -> Stream:
        """Accept a request from a coroutine. Raises at once what can be known at once.

        A long prompt takes a while to look at, which must not hold up the loop.
        """
        stream = Stream(lambda: self._cancel(request.id, ClientLeft("The client left")))
        left = threading.Event()

        def accept() -> None:
            self._accept(request, stream)
            if left.is_set():
                stream.close()

        try:
            await asyncio.to_thread(accept)
        except asyncio.CancelledError:  # which does not stop the thread: whichever comes second closes the stream
            left.set()
            self._cancel(request.id, ClientLeft("The client left"))
            raise
        return stream

    def generate(self, request: Request) -> BlockingStream:
        """Accept a request from a plain thread."""
        stream = BlockingStream()
        self._accept(request, stream)
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        return self._cancel(request_id, Cancelled("The request was cancelled"))

    def _cancel(self, request_id: str, cause: Cancelled) -> bool:
        if request_id not in self._door.jobs:
            return self._encodings.cancel(request_id)
        self._mail.put(lambda: self._end_early(request_id, cause))
        return True

    def status(self) -> list[RequestStatus]:
        now = time.monotonic()
        return [*(job.status(now) for job in list(self._door.jobs.values())), *self._encodings.status(now)]

    def health(self) -> Health:
        ago = time.monotonic() - self._beat
        alive = self._thread.is_alive() and ago < STALLED_S
        detail = "ok" if alive else "the engine has stopped" if not self._thread.is_alive() else "the engine is stuck"
        phases = [status.phase for status in self.status()]
        running = sum(phase != "queued" for phase in phases)
        return Health(alive, alive and not self._closing, detail, ago, running, len(phases) - running)

    def memory(self) -> tuple[int, int]:
        """Bytes that exist for states, and those of them that running sequences and kept prefixes hold."""
        return self._on_thread(lambda: (self._runner.rows.nbytes, self._runner.rows.held_bytes))

    def close(self) -> None:
        """Cancel what runs and end the thread. A process that leaves without it does it on its way out."""
        atexit.unregister(self.close)
        self._closing = True
        self._mail.put(lambda: None)
        self._thread.join()

    def check(self) -> None:
        """Run the integrity check on the engine thread and wait for it; raises what it finds."""
        self._on_thread(self._check)

    @property
    def kept(self) -> KeptPrefixes:
        """The prefixes that are kept."""
        loaded = self._loaded
        return KeptPrefixes(
            lambda work: self._on_thread(lambda: work(self._runner.reuse)), loaded.adapter, loaded.folder
        )

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

    def _accept(self, request: Request, reader: EventSink) -> None:
        self._refuse_if_stopped()
        job = self._door.enter(request, reader)
        self._mail.put(lambda: self._begin(job))
        if not self._thread.is_alive():  # it ended meanwhile, and may have missed this one
            self._tell_all(Unavailable("The engine is not running", retry_after=5))

    def _refuse_if_stopped(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise Unavailable("The engine is not running", retry_after=5)

    # The engine thread

    def _live(self) -> None:
        try:
            self._loaded = self._load()
            self._encodings = EncoderJobs(
                self._loaded.encoders, self._mail.put, self._limits.max_queue, self._limits.target_itl_ms
            )
            self._make_rooms()
            self._journal = Journal(self._loaded.card.name)
            self._door = Door(
                self._loaded.card,
                self._loaded.tokenizer,
                self._limits,
                lambda: self._limits.max_sequences - len(self._scheduler.running),
            )
        except BaseException as error:  # handed to the constructor, which raises it
            self._failure = error
            leave_device()
            return
        finally:
            self._ready.set()
        farewell = Unavailable("The server is shutting down", retry_after=5)
        try:
            while not self._closing:
                self._turn()
            self._abandon(farewell)
            self._flush()
        except BaseException:
            log.critical("the engine's thread ends, and with it every answer", exc_info=True)
        finally:
            self._tell_all(farewell)
            with suppress(Exception):
                self._runner.close()

    def _turn(self) -> None:
        self._beat = time.monotonic()
        self._take_mail()
        self._guarded(self._expire)
        self._flush()
        self._journal.look(self._beat, lambda: [job.status(self._beat) for job in list(self._door.jobs.values())])
        began = time.monotonic()
        self._guarded(self._step)
        try:
            self._encodings.advance(time.monotonic() - began, streaming=bool(self._door.jobs))
        except Exception:
            log.exception("the encoders failed; their requests are given up")
            self._encodings.abandon(IngotError(FAILED))

    def _guarded(self, work: Callable[[], None]) -> None:
        """A model or a device may fail in ways nobody foresaw; the requests at hand fail, the server goes on."""
        try:
            work()
        except Exception:
            log.exception("the engine failed; the requests that were running are given up")
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._pending = self._learned = None
        self._runner.abandon()
        self._abandon(IngotError(FAILED))
        self._flush()
        self._make_rooms()

    @contextmanager
    def _on_behalf_of(self, request_id: str) -> Iterator[None]:
        """What fails in here is this request's fault, and it alone ends with it."""
        try:
            yield
        except Exception:
            log.exception("request %s failed; the others go on", request_id)
            self._end_early(request_id, IngotError(FAILED))

    def _make_rooms(self) -> None:
        costs = StepCosts(mixes=self._loaded.adapter.mixed)
        budget = self._loaded.budget
        self._runner = Runner(self._loaded.adapter, budget, costs, self._loaded.cache_bytes)

        def widest(sequence: Sequence) -> int:
            width = budget.widest_launch(sequence.computed)
            return min(width, SCORED_WIDTH) if sequence.scoring else width

        self._scheduler = Scheduler(
            self._runner.room.fits,
            widest,
            self._runner.reuse,
            costs,
            self._limits.max_sequences,
            self._limits.target_itl_ms,
        )

    def _take_mail(self) -> None:
        """Run what other threads sent; with nothing else to do, wait for it."""
        busy = bool(self._door.jobs) or self._encodings.busy
        if not busy:
            self._guarded(self._rest)
        try:
            letter = self._mail.get(block=not busy, timeout=None if busy else BEAT_S)
            while True:
                self._guarded(letter)
                letter = self._mail.get_nowait()
        except queue.Empty:
            pass

    def _rest(self) -> None:
        """Nothing runs: see that nothing was lost, and give back what running took."""
        self._pending = self._learned = None
        try:
            self._check()
        except AssertionError:
            log.exception("the idle engine found its books wrong; it starts new ones")
            self._make_rooms()
        self._runner.rest()
        self._encodings.rest()

    def _begin(self, job: Job) -> None:
        if self._door.jobs.get(job.request.id) is not job:  # cancelled before it began
            return
        with self._on_behalf_of(job.request.id):
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

    def _step(self) -> None:
        began = time.monotonic()
        plan = self._scheduler.plan(began)
        newcomers = [sequence for sequence in plan.admitted if sequence.preemptions == 0]
        self._door.began(newcomers)
        for sequence in newcomers:
            request = sequence.request
            self._journal.began(self._door.jobs[request.id].status(began), request.via, began)
        step = self._runner.launch(plan, self._catch_up)
        self._read(step if step.launched else None)
        if self._loaded.adapter.device.kind == "cpu" or self._encodings.busy:
            # There the launch has already waited for the work: nothing is gained by reading late. And no token waits
            # for an encoder that comes between two steps.
            self._read(None)
        _log_if_slow(plan, time.monotonic() - began)

    def _catch_up(self) -> None:
        """Let the rows of the step before know their tokens now."""
        if self._pending is not None and self._learned is None:
            self._learned = list(self._collected(self._pending))

    def _read(self, following: Step | None) -> None:
        """Read the tokens of the step before; `following` is the one that now runs."""
        previous, self._pending = self._pending, following
        learned, self._learned = self._learned, None
        if previous is None:
            return
        for results in learned if learned is not None else self._collected(previous):
            self._deliver(results)
            self._flush()

    def _collected(self, step: Step) -> Iterator[list[Result]]:
        """A step's results, each known to its sequence."""
        for results in self._runner.collect(step):
            now = time.monotonic()
            for result in results:
                sequence = result.sequence
                if result.token is None or sequence.ended or sequence.limit == 0:
                    continue
                sequence.tokens.append(result.token)
                sequence.first_token_at = sequence.first_token_at or now
                guided.accept(sequence, result.token)
            yield results

    def _deliver(self, results: Iterable[Result]) -> None:
        for result in results:
            if not result.sequence.ended:
                with self._on_behalf_of(result.sequence.request.id):
                    self._tell(result)

    def _tell(self, result: Result) -> None:
        sequence = result.sequence
        job = self._door.jobs[sequence.request.id]
        if sequence.failure is not None:
            self._end_early(sequence.request.id, sequence.failure)
            return
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
            try:
                job.reader.post(events)
            except Exception:
                log.exception("nobody takes the events of request %s; it ends", job.request.id)
                self._end_early(job.request.id, Cancelled("The request was cancelled"))
                self._outbox.pop(job, None)

    def _leave(self, sequence: Sequence) -> None:
        """Everything that a sequence holds goes back."""
        sequence.ended = True
        self._door.left(sequence)
        self._scheduler.remove(sequence)
        self._runner.release(sequence)

    def _close_if_done(self, job: Job) -> None:
        if all(sequence.ended for sequence in job.sequences) and self._door.close(job.request.id) is not None:
            now = time.monotonic()
            self._door.took(now - job.request.arrived)
            self._journal.ended(job.status(now), job.outcome())
            self._post(job, [job.ended(now)])

    def _end_early(self, request_id: str, error: IngotError) -> None:
        job = self._door.close(request_id)
        if job is None:
            return
        stood = job.status(time.monotonic())
        self._post(job, [Failed(error, job.usage(), stood)])  # first: whatever comes then, its stream ends
        self._journal.ended(stood, outcome_of(error))
        for sequence in job.sequences:
            if not sequence.ended:
                self._leave(sequence)

    def _expire(self) -> None:
        now = time.monotonic()
        jobs = list(self._door.jobs.values())
        late = [job.request.id for job in jobs if job.request.deadline and job.request.deadline < now]
        for request_id in late:
            self._end_early(request_id, DeadlineExceeded("The request took longer than its deadline allows"))
        self._encodings.expire(now)

    def _abandon(self, error: IngotError) -> None:
        for request_id in list(self._door.jobs):
            self._end_early(request_id, error)

    def _tell_all(self, error: IngotError) -> None:
        """The last words of every stream. Whatever became of the books, nobody is left waiting."""
        for request_id in list(self._door.jobs):
            job = self._door.close(request_id)
            if job is not None:
                with suppress(Exception):
                    job.reader.post([*self._outbox.pop(job, ()), Failed(error)])
        self._flush()
        with suppress(Exception):
            self._encodings.abandon(error)

    def _check(self) -> None:
        self._scheduler.check()
        self._runner.check()
        self._encodings.check()
        self._door.check()
        jobs = list(self._door.jobs.values())
        held = {sequence for job in jobs for sequence in job.sequences if not sequence.ended}
        assert set(self._scheduler.running) | set(self._scheduler.waiting) <= held, "an unknown sequence runs"
        assert set(self._runner.seated) <= held, "a row is held by nobody"


def _log_if_slow(plan: StepPlan, seconds: float) -> None:
    if seconds > SLOW_STEP_S:
        prompt = sum(chunk.count for chunk in plan.chunks)
        log.warning(
            "a step took %.1f s: %d rows decoding, %d prompt tokens of %d sequences, %d joined, %d preempted",
            *(seconds, len(plan.decode), prompt, len(plan.chunks), len(plan.admitted), len(plan.preempted)),
        )
