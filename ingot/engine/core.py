"""Generation as a workload: requests become jobs, and jobs are answered step by step.

Any thread may call `enter`, `cancel` and `status`; the rest is the engine thread's. A step is plan, launch, collect:
the tokens of the step before are read while the new one runs. A fault belongs to its request; one of which nobody can
say whose it is goes up to the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ingot.engine import guided
from ingot.engine.admission import Door, Limits
from ingot.engine.books import Books
from ingot.engine.jobs import Job
from ingot.engine.kv_events_news import News
from ingot.engine.loaded import Loaded
from ingot.engine.loop import FAILED, Post
from ingot.engine.loras import gone
from ingot.engine.meter import Meter
from ingot.engine.outbox import Outbox
from ingot.engine.prefix_cache import Reuse
from ingot.engine.request import Failed, Request, RequestStatus
from ingot.engine.results import Result
from ingot.engine.runner import Step
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.rounds import Guesses
from ingot.engine.streams import EventSink
from ingot.engine.telemetry import Journal, outcome_of
from ingot.engine.vision_encoder import LookFailed, Looks
from ingot.errors import Cancelled, DeadlineExceeded, IngotError
from ingot.kernels.device import is_lost
from ingot.observe.logs import about
from ingot.observe.metrics import Figures
from ingot.observe.speculation import SpeculationCounts

log = logging.getLogger("ingot.engine")

LONGEST_LOOK_S = 0.5
"""How long the vision tower may run in one turn, or prompts may be scored, while nobody waits for his next token."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A step whose tokens are still to be read."""

    step: Step
    guesses: Guesses
    began: float


class Generation:
    name = "generation"

    def __init__(self, loaded: Loaded, limits: Limits, post: Post) -> None:
        """`post` puts something into the engine thread's mailbox. Called on that thread."""
        self._loaded, self._limits, self._post = loaded, limits, post
        self._pending: _Running | None = None
        self._read_at = 0.0  # when the tokens of the newest step that was read were known, and told
        self._graphs = loaded.adapter.graphs  # made until then
        self._learned: list[list[list[Result]]] | None = None  # of the pending step, where its rows know them already
        self._outbox = Outbox()
        self._journal = Journal(loaded.card.name)
        translate = None if loaded.sparse is None else loaded.sparse.translate
        self._door = Door(loaded.card, loaded.tokenizer, limits, self._free_seats, loaded.eyes, loaded.loras, translate)
        self._looks = None if loaded.eyes is None else Looks(loaded.eyes)
        self._meter = Meter(loaded.card, loaded.budget, has_disk=loaded.disk is not None)
        self.speculation = SpeculationCounts()
        self._news = None if loaded.teller is None else News(loaded.teller)
        self._open_books()

    # For any thread

    def enter(self, request: Request, reader: EventSink) -> None:
        """Raises at once what can be known at once: BadRequest, ContextOverflow or Overloaded."""
        job = self._door.enter(request, reader)
        self._post(lambda: self._begin(job))

    def cancel(self, request_id: str, cause: IngotError) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        if request_id not in self._door.jobs:
            return False
        self._post(lambda: self._end_early(request_id, cause))
        return True

    def status(self, now: float) -> list[RequestStatus]:
        return [job.status(now) for job in list(self._door.jobs.values())]

    @property
    def figures(self) -> Figures:
        return self._meter.figures

    @property
    def refused(self) -> int:
        """Requests that found the queue full."""
        return self._door.refused

    # The engine thread: what its loop calls

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that exist for states, and those of them that somebody holds."""
        return self._books.runner.rows.nbytes, self._books.runner.rows.held_bytes

    @property
    def reuse(self) -> Reuse:
        """The prefixes that are kept."""
        return self._books.reuse

    @property
    def busy(self) -> bool:
        return bool(self._door.jobs)

    def expire(self, now: float) -> None:
        jobs = list(self._door.jobs.values())
        late = [job.request.id for job in jobs if job.request.deadline and job.request.deadline < now]
        for request_id in late:
            self._end_early(request_id, DeadlineExceeded("The request took longer than its deadline allows"))

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """One step, however much of the turn is spent: the scheduler minds the time."""
        self._flush()
        self._drop_unused()
        now = time.monotonic()
        self._journal.look(now, lambda: self.status(now))
        self._step(shared)
        self._look(now)
        self._score(now)
        if self._news is not None:
            self._news.look()

    def rest(self) -> None:
        self._forget_step()
        self._drop_unused()
        try:
            self.check()
            self._books.rest()
        except AssertionError:
            log.exception("the idle engine found its books wrong; it starts new ones")
            self._renew_books()
        self._books.runner.rest()
        if self._news is not None:
            self._news.look(now=True)
        self._measure(time.monotonic())  # kept prefixes may have been given up since the last request

    def check(self) -> None:
        self._door.check()
        jobs = list(self._door.jobs.values())
        self._books.check({sequence for job in jobs for sequence in job.sequences if not sequence.ended})
        if self._looks is not None:
            self._looks.check()

    def abandon(self, error: IngotError) -> None:
        for request_id in list(self._door.jobs):
            self._end_early(request_id, error)
        self._flush()

    def begin_anew(self, error: IngotError) -> None:
        self._forget_step()
        self._books.runner.abandon()
        self.abandon(error)
        self._renew_books()

    def farewell(self, error: IngotError) -> None:
        for request_id in list(self._door.jobs):
            job = self._door.close(request_id)
            if job is not None:
                self._outbox.send_off(job, Failed(error))
                with suppress(Exception):
                    self._meter.gave_up(error)
                    self._journal.ended(job.status(time.monotonic()), outcome_of(error))
        with suppress(Exception):
            self._flush()

    def close(self) -> None:
        if self._looks is not None:
            self._looks.close()
        self._books.runner.close()
        self._loaded.adapter.close()
        if self._news is not None:
            self._news.close()

    # Books

    def _open_books(self) -> None:
        self._books = Books(self._loaded, self._limits, self.speculation, self._sees)
        if self._news is not None:
            self._news.of(self.reuse.index, self.reuse.needs)

    def _renew_books(self) -> None:
        """Begin with empty ones. The memory of all that the old ones hold is free before the new ones take any."""
        self._books.runner.free()
        self._open_books()
        self._measure(time.monotonic())

    def _drop_unused(self) -> None:
        if self._loaded.loras is not None:
            self._loaded.loras.drop_unused(self._door.jobs.values())

    def _sees(self, sequence: Sequence) -> bool:
        """Whether the features are there that a sequence needs besides what it takes over."""
        return self._looks is None or sequence.sight is None or self._looks.ready(sequence, self.reuse.known(sequence))

    def _free_seats(self) -> int:
        return self._limits.max_sequences - len(self._books.scheduler.running)

    def _forget_step(self) -> None:
        self._pending = self._learned = None

    # Jobs begin and end

    @contextmanager
    def _on_behalf_of(self, request_id: str) -> Iterator[None]:
        """What fails in here is this request's fault, and it alone ends with it."""
        try:
            yield
        except Exception as error:
            if is_lost(error):
                raise
            log.exception("request %s failed; the others go on", request_id, extra=about(request_id, event="failed"))
            self._end_early(request_id, IngotError(FAILED))

    def _begin(self, job: Job) -> None:
        if self._door.jobs.get(job.request.id) is not job:  # cancelled before it began
            return
        loras, lora = self._loaded.loras, job.request.lora
        if lora is not None and (loras is None or not loras.holds(job.request)):
            self._end_early(job.request.id, gone(lora))  # it went while the request came in
            return
        with self._on_behalf_of(job.request.id):
            for sequence in job.sequences:
                guided.begin(sequence)
                if sequence.failure is not None:
                    self._end_early(job.request.id, sequence.failure)
                    return
                if sequence.limit == 0 and sequence.sampling.prompt_logprobs is None:
                    self._outbox.put(job, job.writers[sequence].finish("length"))
                    self._leave(sequence)
                else:
                    self._books.scheduler.add(sequence)
            self._close_if_done(job)

    def _leave(self, sequence: Sequence) -> None:
        """Everything that a sequence holds goes back."""
        sequence.ended = True
        self._door.left(sequence)
        self._books.leave(sequence)

    def _close_if_done(self, job: Job) -> None:
        if all(sequence.ended for sequence in job.sequences) and self._door.close(job.request.id) is not None:
            now = time.monotonic()
            self._meter.finished(job, now)
            self._measure_if_idle()
            self._door.took(now - job.request.arrived)
            self._journal.ended(job.status(now), job.outcome())
            self._outbox.put(job, [job.ended(now)])

    def _end_early(self, request_id: str, error: IngotError) -> None:
        job = self._door.close(request_id)
        if job is None:
            return
        stood = job.status(time.monotonic())
        self._meter.gave_up(error)
        self._outbox.put(job, [Failed(error, job.usage(), stood)])  # first: whatever comes then, its stream ends
        self._journal.ended(stood, outcome_of(error))
        for sequence in job.sequences:
            if not sequence.ended:
                self._leave(sequence)
        self._measure_if_idle()

    # Steps

    def _step(self, shared: Callable[[], bool]) -> None:
        began = time.monotonic()
        if self._pending is not None and self._books.speculation.tempts(self._books.scheduler.running):
            self._read(None)  # who guesses must know what came before
        plan = self._books.scheduler.plan(began)
        newcomers = [sequence for sequence in plan.admitted if sequence.preemptions == 0]
        self._door.began(newcomers)
        self._meter.planned(plan)
        if newcomers or self._meter.due(began):
            self._measure(began)
        for sequence in newcomers:
            request = sequence.request
            self._journal.began(self._door.jobs[request.id].status(began), request.via, began)
        works_ahead = self._loaded.adapter.device.kind != "cpu"
        guesses = self._books.speculation.guess(plan, waited=works_ahead and self._pending is None)
        step = self._books.runner.launch(plan, self._catch_up, guesses.by_row)
        self._read(_Running(step, guesses, began) if step.launched else None)
        if not step.launched:
            self.reuse.pause()
        if not works_ahead or step.verifies or shared():
            # There the launch has already waited for the work: nothing is gained by reading late. And no token waits
            # for another workload that comes between two steps.
            self._read(None)
        if not plan.empty:
            seconds = time.monotonic() - began
            self.figures.step_s.add(seconds)
            self._journal.stepped(plan, seconds)

    def _measure(self, now: float) -> None:
        reserved = [(sequence, sequence.reserved) for sequence in self._books.scheduler.running]
        kept, active = self.reuse.index.shares.held, self._books.runner.active_bytes
        self._meter.measured(now, self._books.runner.room.needed(reserved), *self.memory, kept=kept, active=active)
        if self._looks is not None:
            self.figures.media_asked, self.figures.media_found = self._looks.asked, self._looks.found

    def _measure_if_idle(self) -> None:
        if not self._door.jobs:
            self._measure(time.monotonic())

    def _left(self, began: float) -> float:
        """Seconds that a turn has left of the latency target, or more while nobody waits for his next token."""
        if not any(sequence.decoding for sequence in self._books.scheduler.running):
            return LONGEST_LOOK_S
        return self._limits.target_itl_ms / 1000 - (time.monotonic() - began)

    def _score(self, began: float) -> None:
        """Score prompts of which not all is to be computed for what a turn has left."""
        sparse = self._books.sparse
        if sparse is not None and (sequence := sparse.next) is not None:
            with self._on_behalf_of(sequence.request.id):
                sparse.advance(sequence, self._left(began))

    def _look(self, began: float) -> None:
        """Run the vision tower for what a turn has left."""
        if self._looks is None:
            return
        try:
            if not self._looks.advance(self._left(began)) and not self._books.scheduler.running:
                self._looks.pause()
        except LookFailed as failed:
            for request_id in failed.requests:
                self._end_early(request_id, failed.error)

    def _catch_up(self) -> None:
        """Let the rows of the step before know their tokens now."""
        if self._pending is not None and self._learned is None:
            self._learned = [list(waves) for waves in self._collected(self._pending.step)]

    def _read(self, following: _Running | None) -> None:
        """Read the tokens of the step before; `following` is the one that now runs."""
        previous, self._pending = self._pending, following
        learned, self._learned = self._learned, None
        if previous is None:
            return
        for waves in learned if learned is not None else self._collected(previous.step):
            for results in waves:
                self._deliver(results)
            self._flush()
        since, self._read_at = max(self._read_at, previous.began), time.monotonic()
        before, self._graphs = self._graphs, self._loaded.adapter.graphs
        self._books.speculation.learn(previous.guesses, self._read_at - since, novel=self._graphs != before)

    def _collected(self, step: Step) -> Iterator[Iterable[list[Result]]]:
        """A step's results, by launches. Each is known to its sequence when it is come to: those behind it may be of
        one that has ended by then."""
        for waves in self._books.runner.collect(step):
            yield (self._known(results, first=not number) for number, results in enumerate(waves))

    def _known(self, results: list[Result], *, first: bool) -> list[Result]:
        """`first` where they hold each sequence's first token of a step."""
        now = time.monotonic()
        for result in results:
            sequence = result.sequence
            if result.token is None or sequence.ended or sequence.limit == 0:
                continue
            sequence.tokens.append(result.token)
            del sequence.unread[:1]
            self._meter.drew(sequence, now, first=first)
            sequence.first_token_at = sequence.first_token_at or now
            guided.accept(sequence, result.token)
        return results

    # Answers go out

    def _deliver(self, results: Iterable[Result]) -> None:
        for result in results:
            if not result.sequence.ended:
                with self._on_behalf_of(result.sequence.request.id):
                    self._write(result)

    def _write(self, result: Result) -> None:
        sequence = result.sequence
        job = self._door.jobs[sequence.request.id]
        if sequence.failure is not None:
            self._end_early(sequence.request.id, sequence.failure)
            return
        writer = job.writers[sequence]
        self._outbox.put(job, writer.write(result))
        if writer.ended is None and guided.is_done(sequence):
            self._outbox.put(job, writer.finish("stop"))
        if writer.ended is not None:
            self._leave(sequence)
            self._close_if_done(job)

    def _flush(self) -> None:
        self._outbox.flush(lambda job: self._end_early(job.request.id, Cancelled("The request was cancelled")))
