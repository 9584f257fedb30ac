"""Generation, step by step: requests become sequences, and sequences are answered by plan, launch and collect.

`GenerationWorkload` is what the loop runs. The tokens of the step before are read while the new one runs. A fault
belongs to its request; one of which nobody can say whose it is goes up to the loop. `EngineCore` is what is known
of the sequences that run (scheduler, runner, speculation, SpecPrefill); one that is found wrong is thrown away
whole, and a new one is made. `LoadedModel` is what the engine thread starts with.

Any thread may call `enter`, `cancel` and `status`; the rest is the engine thread's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ingot.cache.codecs.pair import RAW_CODEC, PairCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.footprint import batch_end_limit
from ingot.engine import sampling
from ingot.engine.admission import Admission, EngineLimits, ServedLoras, lora_gone_error
from ingot.engine.forward_pass import SequenceResult
from ingot.engine.kv_events import KVEventSink, KVEventTracker
from ingot.engine.loop import REQUEST_FAILED, PostMessage
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.output import ActiveRequest, Outbox
from ingot.engine.prefix_cache import PrefixCache
from ingot.engine.request import Failed, ModelCard, Request, RequestStatus
from ingot.engine.runner import LaunchedStep, Runner
from ingot.engine.scheduler import Scheduler
from ingot.engine.sequence import TokenSequence
from ingot.engine.specprefill.prefill import SpecPrefill, SpecPrefillSetup
from ingot.engine.speculation.controller import SpeculationController
from ingot.engine.speculation.draft_heads import DraftHeadProposer
from ingot.engine.speculation.proposer import Proposer
from ingot.engine.speculation.rounds import Speculation, StepDrafts
from ingot.engine.step_costs import StepCosts
from ingot.engine.streams import EventSink
from ingot.engine.telemetry import MetricsRecorder, RequestLog, error_outcome
from ingot.engine.vision_encoder import VisionEncoder, VisionEncoderRunner, VisionEncodingFailed
from ingot.errors import Cancelled, DeadlineExceeded, IngotError
from ingot.kernels.device import is_device_lost
from ingot.media.layout import MediaProcessor
from ingot.models.adapter import ModelAdapter
from ingot.observe.logs import log_facts
from ingot.observe.metrics import EngineMetrics, SpeculationMetrics
from ingot.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("ingot.engine")

LONGEST_IDLE_SLICE_S = 0.5
"""How long the vision tower may run in one turn, or prompts may be scored, while nobody waits for his next token."""


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose tokens are still to be read."""

    step: LaunchedStep
    drafts: StepDrafts
    began: float


class GenerationWorkload:
    name = "generation"

    def __init__(self, loaded: LoadedModel, limits: EngineLimits, post: PostMessage) -> None:
        """`post` puts something into the engine thread's mailbox. Called on that thread."""
        self._loaded, self._limits, self._post = loaded, limits, post
        self._pending: _PendingStep | None = None
        self._read_at = 0.0  # when the tokens of the newest step that was read were known, and told
        self._graphs = loaded.adapter.graphs  # made until then
        self._learned: list[list[list[SequenceResult]]] | None = (
            None  # of the pending step, where its rows know them already
        )
        self._outbox = Outbox()
        self._journal = RequestLog(loaded.card.name)
        translate = None if loaded.sparse is None else loaded.sparse.translate
        self._admission = Admission(
            loaded.card, loaded.tokenizer, limits, self._free_sequences, loaded.vision_encoder, loaded.loras, translate
        )
        self._looks = None if loaded.vision_encoder is None else VisionEncoderRunner(loaded.vision_encoder)
        self._meter = MetricsRecorder(loaded.card, loaded.budget, has_disk=loaded.disk is not None)
        self.speculation = SpeculationMetrics()
        self._kv_events = None if loaded.teller is None else KVEventTracker(loaded.teller)
        self._make_core()

    # For any thread

    def enter(self, request: Request, reader: EventSink) -> None:
        """Raises at once what can be known at once: BadRequest, ContextOverflow or Overloaded."""
        job = self._admission.enter(request, reader)
        self._post(lambda: self._begin(job))

    def cancel(self, request_id: str, cause: IngotError) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        if request_id not in self._admission.jobs:
            return False
        self._post(lambda: self._end_early(request_id, cause))
        return True

    def status(self, now: float) -> list[RequestStatus]:
        return [job.status(now) for job in list(self._admission.jobs.values())]

    @property
    def figures(self) -> EngineMetrics:
        return self._meter.figures

    @property
    def refused(self) -> int:
        """Requests that found the queue full."""
        return self._admission.refused

    # The engine thread: what its loop calls

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that exist for states, and those of them that somebody holds."""
        return self._books.runner.rows.nbytes, self._books.runner.rows.held_bytes

    @property
    def reuse(self) -> PrefixCache:
        """The prefixes that are kept."""
        return self._books.reuse

    @property
    def busy(self) -> bool:
        return bool(self._admission.jobs)

    def expire(self, now: float) -> None:
        jobs = list(self._admission.jobs.values())
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
        if self._kv_events is not None:
            self._kv_events.look()

    def rest(self) -> None:
        self._drop_pending_step()
        self._drop_unused()
        try:
            self.check()
            self._books.rest()
        except AssertionError:
            log.exception("the idle engine found its books wrong; it starts new ones")
            self._renew_core()
        self._books.runner.rest()
        if self._kv_events is not None:
            self._kv_events.look(now=True)
        self._measure(time.monotonic())  # kept prefixes may have been given up since the last request

    def check(self) -> None:
        self._admission.check()
        jobs = list(self._admission.jobs.values())
        self._books.check({sequence for job in jobs for sequence in job.sequences if not sequence.ended})
        if self._looks is not None:
            self._looks.check()

    def abandon(self, error: IngotError) -> None:
        for request_id in list(self._admission.jobs):
            self._end_early(request_id, error)
        self._flush()

    def reset_after_fault(self, error: IngotError) -> None:
        self._drop_pending_step()
        self._books.runner.abandon()
        self.abandon(error)
        self._renew_core()

    def farewell(self, error: IngotError) -> None:
        for request_id in list(self._admission.jobs):
            job = self._admission.close(request_id)
            if job is not None:
                self._outbox.send_off(job, Failed(error))
                with suppress(Exception):
                    self._meter.count_failure(error)
                    self._journal.ended(job.status(time.monotonic()), error_outcome(error))
        with suppress(Exception):
            self._flush()

    def close(self) -> None:
        if self._looks is not None:
            self._looks.close()
        self._books.runner.close()
        self._loaded.adapter.close()
        if self._kv_events is not None:
            self._kv_events.close()

    # Books

    def _make_core(self) -> None:
        self._books = EngineCore(self._loaded, self._limits, self.speculation, self._has_features)
        if self._kv_events is not None:
            self._kv_events.of(self.reuse.index, self.reuse.needs)

    def _renew_core(self) -> None:
        """Begin with empty ones. The memory of all that the old ones hold is free before the new ones take any."""
        self._books.runner.free()
        self._make_core()
        self._measure(time.monotonic())

    def _drop_unused(self) -> None:
        if self._loaded.loras is not None:
            self._loaded.loras.drop_unused(self._admission.jobs.values())

    def _has_features(self, sequence: TokenSequence) -> bool:
        """Whether the features are there that a sequence needs besides what it takes over."""
        return self._looks is None or sequence.sight is None or self._looks.ready(sequence, self.reuse.known(sequence))

    def _free_sequences(self) -> int:
        return self._limits.max_sequences - len(self._books.scheduler.running)

    def _drop_pending_step(self) -> None:
        self._pending = self._learned = None

    # Jobs begin and end

    @contextmanager
    def _blamed_on(self, request_id: str) -> Iterator[None]:
        """What fails in here is this request's fault, and it alone ends with it."""
        try:
            yield
        except Exception as error:
            if is_device_lost(error):
                raise
            log.exception(
                "request %s failed; the others go on", request_id, extra=log_facts(request_id, event="failed")
            )
            self._end_early(request_id, IngotError(REQUEST_FAILED))

    def _begin(self, job: ActiveRequest) -> None:
        if self._admission.jobs.get(job.request.id) is not job:  # cancelled before it began
            return
        loras, lora = self._loaded.loras, job.request.lora
        if lora is not None and (loras is None or not loras.holds(job.request)):
            self._end_early(job.request.id, lora_gone_error(lora))  # it went while the request came in
            return
        with self._blamed_on(job.request.id):
            for sequence in job.sequences:
                sampling.begin_grammar(sequence)
                if sequence.failure is not None:
                    self._end_early(job.request.id, sequence.failure)
                    return
                if sequence.limit == 0 and sequence.sampling.prompt_logprobs is None:
                    self._outbox.put(job, job.writers[sequence].finish("length"))
                    self._leave(sequence)
                else:
                    self._books.scheduler.add(sequence)
            self._close_if_done(job)

    def _leave(self, sequence: TokenSequence) -> None:
        """Everything that a sequence holds goes back."""
        sequence.ended = True
        self._admission.left(sequence)
        self._books.leave(sequence)

    def _close_if_done(self, job: ActiveRequest) -> None:
        if all(sequence.ended for sequence in job.sequences) and self._admission.close(job.request.id) is not None:
            now = time.monotonic()
            self._meter.finished(job, now)
            self._measure_if_idle()
            self._admission.took(now - job.request.arrived)
            self._journal.ended(job.status(now), job.outcome())
            self._outbox.put(job, [job.ended(now)])

    def _end_early(self, request_id: str, error: IngotError) -> None:
        job = self._admission.close(request_id)
        if job is None:
            return
        stood = job.status(time.monotonic())
        self._meter.count_failure(error)
        self._outbox.put(job, [Failed(error, job.usage(), stood)])  # first: whatever comes then, its stream ends
        self._journal.ended(stood, error_outcome(error))
        for sequence in job.sequences:
            if not sequence.ended:
                self._leave(sequence)
        self._measure_if_idle()

    # Steps

    def _step(self, shared: Callable[[], bool]) -> None:
        began = time.monotonic()
        if self._pending is not None and self._books.speculation.seems_worthwhile(self._books.scheduler.running):
            self._read(None)  # who guesses must know what came before
        plan = self._books.scheduler.plan(began)
        newcomers = [sequence for sequence in plan.admitted if sequence.preemptions == 0]
        self._admission.began(newcomers)
        self._meter.planned(plan)
        if newcomers or self._meter.due(began):
            self._measure(began)
        for sequence in newcomers:
            request = sequence.request
            self._journal.began(self._admission.jobs[request.id].status(began), request.via, began)
        works_ahead = self._loaded.adapter.device.kind != "cpu"
        drafts = self._books.speculation.guess(plan, waited=works_ahead and self._pending is None)
        step = self._books.runner.launch(plan, self._catch_up, drafts.by_row)
        self._read(_PendingStep(step, drafts, began) if step.launched else None)
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
        if not self._admission.jobs:
            self._measure(time.monotonic())

    def _left(self, began: float) -> float:
        """Seconds that a turn has left of the latency target, or more while nobody waits for his next token."""
        if not any(sequence.decoding for sequence in self._books.scheduler.running):
            return LONGEST_IDLE_SLICE_S
        return self._limits.target_itl_ms / 1000 - (time.monotonic() - began)

    def _score(self, began: float) -> None:
        """Score prompts of which not all is to be computed for what a turn has left."""
        sparse = self._books.sparse
        if sparse is not None and (sequence := sparse.next) is not None:
            with self._blamed_on(sequence.request.id):
                sparse.advance(sequence, self._left(began))

    def _look(self, began: float) -> None:
        """Run the vision tower for what a turn has left."""
        if self._looks is None:
            return
        try:
            if not self._looks.advance(self._left(began)) and not self._books.scheduler.running:
                self._looks.pause()
        except VisionEncodingFailed as failed:
            for request_id in failed.requests:
                self._end_early(request_id, failed.error)

    def _catch_up(self) -> None:
        """Let the rows of the step before know their tokens now."""
        if self._pending is not None and self._learned is None:
            self._learned = [list(waves) for waves in self._collected(self._pending.step)]

    def _read(self, following: _PendingStep | None) -> None:
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
        self._books.speculation.learn(previous.drafts, self._read_at - since, made_graph=self._graphs != before)

    def _collected(self, step: LaunchedStep) -> Iterator[Iterable[list[SequenceResult]]]:
        """A step's results, by launches. Each is known to its sequence when it is come to: those behind it may be of
        one that has ended by then."""
        for waves in self._books.runner.collect(step):
            yield (self._known(results, first=not number) for number, results in enumerate(waves))

    def _known(self, results: list[SequenceResult], *, first: bool) -> list[SequenceResult]:
        """`first` where they hold each sequence's first token of a step."""
        now = time.monotonic()
        for result in results:
            sequence = result.sequence
            if result.token is None or sequence.ended or sequence.limit == 0:
                continue
            sequence.tokens.append(result.token)
            del sequence.unread[:1]
            self._meter.count_token(sequence, now, first=first)
            sequence.first_token_at = sequence.first_token_at or now
            sampling.accept_token(sequence, result.token)
        return results

    # Answers go out

    def _deliver(self, results: Iterable[SequenceResult]) -> None:
        for result in results:
            if not result.sequence.ended:
                with self._blamed_on(result.sequence.request.id):
                    self._write(result)

    def _write(self, result: SequenceResult) -> None:
        sequence = result.sequence
        job = self._admission.jobs[sequence.request.id]
        if sequence.failure is not None:
            self._end_early(sequence.request.id, sequence.failure)
            return
        writer = job.writers[sequence]
        self._outbox.put(job, writer.write(result))
        if writer.ended is None and sampling.grammar_is_done(sequence):
            self._outbox.put(job, writer.finish("stop"))
        if writer.ended is not None:
            self._leave(sequence)
            self._close_if_done(job)

    def _flush(self) -> None:
        self._outbox.flush(lambda job: self._end_early(job.request.id, Cancelled("The request was cancelled")))


SCORED_TOKENS = 128
"""Prompt tokens whose logprobs are computed in one launch: each takes a row of logits."""


class EngineCore:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineLimits,
        counts: SpeculationMetrics,
        seen: Callable[[TokenSequence], bool],
    ) -> None:
        """`seen` says whether all is there that a sequence has to see."""
        coded = loaded.adapter.live is not None

        def end(sequence: TokenSequence) -> float:
            """The place at which a launch of it has to end."""
            return batch_end_limit(sequence.computed) if coded and not sequence.request.exact else inf

        def widest(sequence: TokenSequence) -> int:
            width = loaded.budget.widest_pass(sequence.computed)
            width = min(width, SCORED_TOKENS) if sequence.scoring else width
            return int(min(width, end(sequence) - sequence.computed))

        costs = StepCosts(mixes=loaded.adapter.mixed)
        self.runner = Runner(loaded.adapter, loaded.budget, costs, loaded.cache_bytes, loaded.disk, loaded.codec)
        proposers = [*loaded.proposers]
        if loaded.adapter.head is not None:
            self.runner.heads = DraftHeadProposer(loaded.adapter.head, self.runner.rows)
            proposers.append(self.runner.heads)
        controller = SpeculationController(fixed=loaded.fixed_draft_tokens, widest=loaded.adapter.graph_tokens)
        self.speculation = Speculation(proposers, controller, counts, limits.max_sequences, end)
        sparse = self.sparse = self._make_specprefill(loaded, costs)
        self.scheduler = Scheduler(
            self.runner.room.fits,
            widest,
            self.reuse,
            costs,
            limits.max_sequences,
            limits.target_itl_ms,
            # What is left out of a prompt is not looked at.
            lambda sequence: (sparse is None or sparse.ready(sequence)) and seen(sequence),
        )

    def _make_specprefill(self, loaded: LoadedModel, costs: StepCosts) -> SpecPrefill | None:
        if loaded.sparse is None:
            return None
        window = max((group.window or 0 for group in self.runner.rows.groups), default=0)
        return SpecPrefill(loaded.sparse, costs, self.reuse, window)

    @property
    def reuse(self) -> PrefixCache:
        """The prefixes that are kept."""
        return self.runner.reuse

    def leave(self, sequence: TokenSequence) -> None:
        """Everything that a sequence holds goes back."""
        self.scheduler.remove(sequence)
        self.runner.release(sequence)
        self.speculation.forget(sequence)
        if self.sparse is not None:
            self.sparse.forget(sequence)

    def rest(self) -> None:
        """Nothing runs: give back what guesses and scores took."""
        self.speculation.rest()
        if self.sparse is not None:
            self.sparse.rest()

    def check(self, held: set[TokenSequence]) -> None:
        """Raises AssertionError if anything was lost, or is held by none of those that have not ended."""
        self.scheduler.check()
        self.runner.check()
        assert set(self.scheduler.running) | set(self.scheduler.waiting) <= held, "an unknown sequence runs"
        assert set(self.runner.seated) <= held, "a row is held by nobody"
        self.speculation.check(held)
        if self.sparse is not None:
            self.sparse.check()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    adapter: ModelAdapter
    tokenizer: Tokenizer
    card: ModelCard
    budget: MemoryBudget
    cache_bytes: int = 0  # most that computed prefixes may take
    folder: Path | None = None  # the model's files
    proposers: Sequence[Proposer] = ()  # who guess tokens ahead, in the order in which they are preferred
    fixed_draft_tokens: int | None = None  # how many they are to guess; None: as many as pays
    processor: MediaProcessor | None = None  # how the model is shown pictures and clips; None: it has no vision tower
    vision_encoder: VisionEncoder | None = None  # what it sees them with
    sparse: SpecPrefillSetup | None = None  # who scores long prompts of which not all is to be computed
    disk: DiskBackend | None = None  # where computed prefixes are kept beside memory
    codec: PairCodec = RAW_CODEC  # what they are put into
    teller: KVEventSink | None = None  # who tells routers of them
    loras: ServedLoras | None = None  # adapters beside the model, where some may be
