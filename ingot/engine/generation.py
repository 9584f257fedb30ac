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
from math import inf

from ingot.cache.tail import launch_end
from ingot.engine import guided
from ingot.engine.costs import StepCosts
from ingot.engine.door import Door, Limits
from ingot.engine.jobs import Job
from ingot.engine.journal import Journal, outcome_of
from ingot.engine.loaded import Loaded
from ingot.engine.looks import LookFailed, Looks
from ingot.engine.loop import FAILED, Post
from ingot.engine.meter import Meter
from ingot.engine.request import Event, Failed, Request, RequestStatus
from ingot.engine.results import Result
from ingot.engine.reuse import Reuse
from ingot.engine.runner import Runner, Step
from ingot.engine.scheduler import Scheduler
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.prefill import SparsePrefill
from ingot.engine.speculation.controller import Controller
from ingot.engine.speculation.heads import HeadStates
from ingot.engine.speculation.speculation import Guesses, Speculation
from ingot.engine.stream import EventSink
from ingot.errors import Cancelled, DeadlineExceeded, IngotError
from ingot.observe.figures import Figures
from ingot.observe.logs import about
from ingot.observe.speculation import SpeculationCounts

log = logging.getLogger("ingot.engine")

LONGEST_LOOK_S = 0.5
"""How long the vision tower may run in one turn, or prompts may be scored, while nobody waits for his next token."""
SCORED_WIDTH = 128
"""Prompt tokens whose logprobs are computed in one launch: each takes a row of logits."""


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
        self._outbox: dict[Job, list[Event]] = {}
        self._journal = Journal(loaded.card.name)
        self._door = Door(loaded.card, loaded.tokenizer, limits, self._free_seats, loaded.eyes)
        self._looks = None if loaded.eyes is None else Looks(loaded.eyes)
        self._meter = Meter(loaded.card, loaded.budget)
        self.speculation = SpeculationCounts()
        self._make_rooms()

    # For any thread

    def enter(self, request: Request, reader: EventSink) -> None:
        """Raises at once what can be known at once: BadRequest, ContextOverflow or Overloaded."""
        job = self._door.enter(request, reader)
        self._post(lambda: self._begin(job))

    def cancel(self, request_id: str, cause: Cancelled) -> bool:
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
        return self._runner.rows.nbytes, self._runner.rows.held_bytes

    @property
    def reuse(self) -> Reuse:
        """The prefixes that are kept."""
        return self._runner.reuse

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
        now = time.monotonic()
        self._journal.look(now, lambda: self.status(now))
        self._step(shared)
        self._look(now)
        self._score(now)

    def rest(self) -> None:
        self._forget_step()
        try:
            self.check()
            self._speculation.rest()
            if self._sparse is not None:
                self._sparse.rest()
        except AssertionError:
            log.exception("the idle engine found its books wrong; it starts new ones")
            self._make_rooms()
        self._runner.rest()

    def check(self) -> None:
        self._scheduler.check()
        self._runner.check()
        self._door.check()
        jobs = list(self._door.jobs.values())
        held = {sequence for job in jobs for sequence in job.sequences if not sequence.ended}
        assert set(self._scheduler.running) | set(self._scheduler.waiting) <= held, "an unknown sequence runs"
        assert set(self._runner.seated) <= held, "a row is held by nobody"
        self._speculation.check(held)
        if self._looks is not None:
            self._looks.check()
        if self._sparse is not None:
            self._sparse.check()

    def abandon(self, error: IngotError) -> None:
        for request_id in list(self._door.jobs):
            self._end_early(request_id, error)
        self._flush()

    def begin_anew(self, error: IngotError) -> None:
        self._forget_step()
        self._runner.abandon()
        self.abandon(error)
        self._make_rooms()

    def farewell(self, error: IngotError) -> None:
        for request_id in list(self._door.jobs):
            job = self._door.close(request_id)
            if job is not None:
                with suppress(Exception):
                    job.reader.post([*self._outbox.pop(job, ()), Failed(error)])
        with suppress(Exception):
            self._flush()

    def close(self) -> None:
        if self._looks is not None:
            self._looks.close()
        self._runner.close()

    # Books

    def _make_rooms(self) -> None:
        costs = StepCosts(mixes=self._loaded.adapter.mixed)
        budget = self._loaded.budget
        loaded = self._loaded
        self._runner = Runner(loaded.adapter, budget, costs, loaded.cache_bytes, loaded.disk, loaded.codec)
        proposers = [*self._loaded.proposers]
        if self._loaded.adapter.head is not None:
            self._runner.heads = HeadStates(self._loaded.adapter.head, self._runner.rows)
            proposers.append(self._runner.heads)
        controller = Controller(fixed=loaded.guessed_tokens, widest=loaded.adapter.graph_tokens)
        coded = loaded.adapter.live is not None

        def end(sequence: Sequence) -> float:
            return launch_end(sequence.computed) if coded and not sequence.request.exact else inf

        def widest(sequence: Sequence) -> int:
            width = budget.widest_launch(sequence.computed)
            width = min(width, SCORED_WIDTH) if sequence.scoring else width
            return int(min(width, end(sequence) - sequence.computed))

        self._speculation = Speculation(proposers, controller, self.speculation, self._limits.max_sequences, end)

        self._scheduler = Scheduler(
            self._runner.room.fits,
            widest,
            self._runner.reuse,
            costs,
            self._limits.max_sequences,
            self._limits.target_itl_ms,
            lambda sequence: self._sees(sequence) and (self._sparse is None or self._sparse.ready(sequence)),
        )
        self._sparse: SparsePrefill | None = None
        if loaded.sparse is not None:
            window = max((group.window or 0 for group in self._runner.rows.groups), default=0)
            self._sparse = SparsePrefill(loaded.sparse, costs, self.reuse.known, window)

    def _sees(self, sequence: Sequence) -> bool:
        """Whether the features are there that a sequence needs besides what it takes over."""
        return self._looks is None or sequence.sight is None or self._looks.ready(sequence, self.reuse.known(sequence))

    def _free_seats(self) -> int:
        return self._limits.max_sequences - len(self._scheduler.running)

    def _forget_step(self) -> None:
        self._pending = self._learned = None

    # Jobs begin and end

    @contextmanager
    def _on_behalf_of(self, request_id: str) -> Iterator[None]:
        """What fails in here is this request's fault, and it alone ends with it."""
        try:
            yield
        except Exception:
            log.exception("request %s failed; the others go on", request_id, extra=about(request_id, event="failed"))
            self._end_early(request_id, IngotError(FAILED))

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
                    self._tell(job, job.writers[sequence].finish("length"))
                    self._leave(sequence)
                else:
                    self._scheduler.add(sequence)
            self._close_if_done(job)

    def _leave(self, sequence: Sequence) -> None:
        """Everything that a sequence holds goes back."""
        sequence.ended = True
        self._door.left(sequence)
        self._scheduler.remove(sequence)
        self._runner.release(sequence)
        self._speculation.forget(sequence)
        if self._sparse is not None:
            self._sparse.forget(sequence)

    def _close_if_done(self, job: Job) -> None:
        if all(sequence.ended for sequence in job.sequences) and self._door.close(job.request.id) is not None:
            now = time.monotonic()
            self._meter.finished(job, now)
            self._measure_if_idle()
            self._door.took(now - job.request.arrived)
            self._journal.ended(job.status(now), job.outcome())
            self._tell(job, [job.ended(now)])

    def _end_early(self, request_id: str, error: IngotError) -> None:
        job = self._door.close(request_id)
        if job is None:
            return
        stood = job.status(time.monotonic())
        self._meter.gave_up(error)
        self._tell(job, [Failed(error, job.usage(), stood)])  # first: whatever comes then, its stream ends
        self._journal.ended(stood, outcome_of(error))
        for sequence in job.sequences:
            if not sequence.ended:
                self._leave(sequence)
        self._measure_if_idle()

    # Steps

    def _step(self, shared: Callable[[], bool]) -> None:
        began = time.monotonic()
        if self._pending is not None and self._speculation.tempts(self._scheduler.running):
            self._read(None)  # who guesses must know what came before
        plan = self._scheduler.plan(began)
        newcomers = [sequence for sequence in plan.admitted if sequence.preemptions == 0]
        self._door.began(newcomers)
        self._meter.planned(plan)
        if newcomers or self._meter.due(began):
            self._measure(began)
        for sequence in newcomers:
            request = sequence.request
            self._journal.began(self._door.jobs[request.id].status(began), request.via, began)
        works_ahead = self._loaded.adapter.device.kind != "cpu"
        guesses = self._speculation.guess(plan, waited=works_ahead and self._pending is None)
        step = self._runner.launch(plan, self._catch_up, guesses.by_row)
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
        reserved = [(sequence, sequence.reserved) for sequence in self._scheduler.running]
        self._meter.measured(now, self._runner.room.needed(reserved), *self.memory)

    def _measure_if_idle(self) -> None:
        if not self._door.jobs:
            self._measure(time.monotonic())

    def _left(self, began: float) -> float:
        """Seconds that a turn has left of the latency target, or more while nobody waits for his next token."""
        if not any(sequence.decoding for sequence in self._scheduler.running):
            return LONGEST_LOOK_S
        return self._limits.target_itl_ms / 1000 - (time.monotonic() - began)

    def _score(self, began: float) -> None:
        """Score prompts of which not all is to be computed for what a turn has left."""
        sequence = None if self._sparse is None else self._sparse.next
        if self._sparse is not None and sequence is not None:
            with self._on_behalf_of(sequence.request.id):
                self._sparse.advance(sequence, self._left(began))

    def _look(self, began: float) -> None:
        """Run the vision tower for what a turn has left."""
        if self._looks is None:
            return
        try:
            if not self._looks.advance(self._left(began)) and not self._scheduler.running:
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
        self._speculation.learn(previous.guesses, self._read_at - since, novel=self._graphs != before)

    def _collected(self, step: Step) -> Iterator[Iterable[list[Result]]]:
        """A step's results, by launches. Each is known to its sequence when it is come to: those behind it may be of
        one that has ended by then."""
        for waves in self._runner.collect(step):
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
        self._tell(job, writer.write(result))
        if writer.ended is None and guided.is_done(sequence):
            self._tell(job, writer.finish("stop"))
        if writer.ended is not None:
            self._leave(sequence)
            self._close_if_done(job)

    def _tell(self, job: Job, events: list[Event]) -> None:
        """Hand events out with the rest of the step's: a reader is woken once a step."""
        if events:
            self._outbox.setdefault(job, []).extend(events)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for job, events in outbox.items():
            try:
                job.reader.post(events)
            except Exception:
                id = job.request.id
                log.exception("nobody takes the events of request %s; it ends", id, extra=about(id, event="failed"))
                self._end_early(job.request.id, Cancelled("The request was cancelled"))
                self._outbox.pop(job, None)
