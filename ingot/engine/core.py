"""Generation, step by step: requests become sequences, and a step is plan, launch and collect.

`GenerationWorkload` is what the engine loop runs. The tokens of a step are read while the next one runs. An error
that belongs to one request ends that request alone; any other goes up to the loop. `EngineCore` is the state of the
running sequences (scheduler, runner, speculation, SpecPrefill); if it is found inconsistent, it is replaced by a new
one. `LoadedModel` is what the engine thread starts with.

Any thread may call `enter`, `cancel` and `status`; everything else belongs to the engine thread.

The KV of the old core is freed explicitly, and the frames of the exception are cleared: trees, pages and storages refer
to each other, and would otherwise wait for the garbage collector.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

import mlx.core as mx

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
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.media.layout import MediaProcessor
from ingot.models.adapter import ModelAdapter
from ingot.observe.logs import log_facts
from ingot.observe.metrics import EngineMetrics, SpeculationMetrics
from ingot.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("ingot.engine")

SCORED_TOKENS = 128
"""Prompt tokens whose logprobs are computed in one forward pass: each takes a row of logits."""
LONGEST_IDLE_SLICE_S = 0.5
"""How long the vision encoder or prompt scoring may run in one turn while no sequence is decoding."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    adapter: ModelAdapter
    tokenizer: Tokenizer
    card: ModelCard
    budget: MemoryBudget
    cache_bytes: int = 0  # most that cached prefixes may take
    folder: Path | None = None  # the model's files
    proposers: Sequence[Proposer] = ()  # of draft tokens, in order of preference
    fixed_draft_tokens: int | None = None  # how many they propose; None: as many as pays
    processor: MediaProcessor | None = None  # lays out images and video for the model; None: it has no vision encoder
    vision_encoder: VisionEncoder | None = None
    specprefill: SpecPrefillSetup | None = None
    disk: DiskBackend | None = None  # where cached prefixes are offloaded to
    codec: PairCodec = RAW_CODEC  # of cached prefixes
    kv_event_sink: KVEventSink | None = None  # publishes which blocks are cached
    loras: ServedLoras | None = None


class EngineCore:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineLimits,
        counts: SpeculationMetrics,
        has_features: Callable[[TokenSequence], bool],
    ) -> None:
        """`has_features` says whether the image features are there that a sequence needs."""
        coded = loaded.adapter.live is not None

        def pass_end(sequence: TokenSequence) -> float:
            """The length at which its next forward pass has to end at the latest."""
            return batch_end_limit(sequence.computed) if coded and not sequence.request.exact else inf

        def max_chunk(sequence: TokenSequence) -> int:
            width = loaded.budget.widest_pass(sequence.computed)
            width = min(width, SCORED_TOKENS) if sequence.scoring else width
            return int(min(width, pass_end(sequence) - sequence.computed))

        costs = StepCosts(mixes=loaded.adapter.mixed)
        self.runner = Runner(loaded.adapter, loaded.budget, costs, loaded.cache_bytes, loaded.disk, loaded.codec)
        proposers = [*loaded.proposers]
        if loaded.adapter.head is not None:
            self.runner.heads = DraftHeadProposer(loaded.adapter.head, self.runner.rows)
            proposers.append(self.runner.heads)
        controller = SpeculationController(fixed=loaded.fixed_draft_tokens, widest=loaded.adapter.graph_tokens)
        # More tokens of a row are computed as a prompt's are, which takes far longer.
        widest = inf if loaded.adapter.device.kind == "cpu" else MOST_QUERIES
        self.speculation = Speculation(proposers, controller, counts, limits.max_sequences, pass_end, widest=widest)
        window = max((group.window or 0 for group in self.runner.rows.groups), default=0)
        self.specprefill = (
            None
            if loaded.specprefill is None
            else SpecPrefill(loaded.specprefill, costs, self.runner.prefix_cache, window)
        )

        def is_ready(sequence: TokenSequence) -> bool:
            # SpecPrefill first: what it leaves out of a prompt needs no features.
            return (self.specprefill is None or self.specprefill.ready(sequence)) and has_features(sequence)

        self.scheduler = Scheduler(
            self.runner.room.fits,
            max_chunk,
            self.runner.prefix_cache,
            costs,
            limits.max_sequences,
            limits.target_itl_ms,
            is_ready,
        )

    def leave(self, sequence: TokenSequence) -> None:
        """Give back everything that a sequence holds."""
        self.scheduler.remove(sequence)
        self.runner.release(sequence)
        self.speculation.forget(sequence)
        if self.specprefill is not None:
            self.specprefill.forget(sequence)

    def rest(self) -> None:
        """Nothing runs: give back the memory of speculation and scoring."""
        self.speculation.rest()
        if self.specprefill is not None:
            self.specprefill.rest()

    def check(self, active: set[TokenSequence]) -> None:
        """Raises AssertionError if something was lost, or is held by a sequence that is not `active`."""
        self.scheduler.check()
        self.runner.check()
        assert set(self.scheduler.running) | set(self.scheduler.waiting) <= active, "an unknown sequence runs"
        assert set(self.runner.batch) <= active, "a batch row belongs to no active sequence"
        self.speculation.check(active)
        if self.specprefill is not None:
            self.specprefill.check()


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose tokens are still to be read."""

    step: LaunchedStep
    drafts: StepDrafts
    began: float


class GenerationWorkload:
    name = "generation"

    def __init__(self, loaded: LoadedModel, limits: EngineLimits, post: PostMessage) -> None:
        """`post` puts a message into the engine thread's mailbox. Called on that thread."""
        self._loaded, self._limits, self._post = loaded, limits, post
        self._pending: _PendingStep | None = None
        self._read_at = 0.0  # when the tokens of the last step were read
        self._graphs = loaded.adapter.graphs  # captured until then
        # Results of the pending step whose tokens had to be read before it was collected.
        self._early_results: list[list[list[SequenceResult]]] | None = None
        self._outbox = Outbox()
        self._request_log = RequestLog(loaded.card.name)
        translate = None if loaded.specprefill is None else loaded.specprefill.translate
        self._admission = Admission(
            loaded.card, loaded.tokenizer, limits, self._free_sequences, loaded.vision_encoder, loaded.loras, translate
        )
        self._vision = None if loaded.vision_encoder is None else VisionEncoderRunner(loaded.vision_encoder)
        self._metrics = MetricsRecorder(loaded.card, loaded.budget, has_disk=loaded.disk is not None)
        self.speculation = SpeculationMetrics()
        self._kv_events = None if loaded.kv_event_sink is None else KVEventTracker(loaded.kv_event_sink)
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
        return self._metrics.metrics

    @property
    def refused(self) -> int:
        """Requests that found the queue full."""
        return self._admission.refused

    # The engine thread: what its loop calls

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of KV that are allocated, and those of them that are in use."""
        return self._core.runner.rows.nbytes, self._core.runner.rows.held_bytes

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._core.runner.prefix_cache

    @property
    def busy(self) -> bool:
        return bool(self._admission.jobs)

    def expire(self, now: float) -> None:
        jobs = list(self._admission.jobs.values())
        late = [job.request.id for job in jobs if job.request.deadline and job.request.deadline < now]
        for request_id in late:
            self._end_early(request_id, DeadlineExceeded("The request took longer than its deadline allows"))

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """Run one step, however much of the turn is spent: the scheduler accounts for the time."""
        self._flush()
        self._drop_unused()
        now = time.monotonic()
        self._request_log.log_progress(now, lambda: self.status(now))
        self._step(shared)
        if self._loaded.adapter.experts is not None:
            self._metrics.metrics.experts = self._loaded.adapter.experts.stats
        self._run_vision_encoder(now)
        self._score_prompts(now)
        self._flush()  # what failed beside the step: the loop may wait for messages next
        if self._kv_events is not None:
            self._kv_events.publish_changes()

    def rest(self) -> None:
        self._flush()  # what failed behind the last step: the loop may wait for a message now
        self._drop_pending_step()
        self._drop_unused()
        try:
            self.check()
            self._core.rest()
        except AssertionError:
            log.exception("the idle engine found its state inconsistent; it starts with a new one")
            self._renew_core()
        self._core.runner.rest()
        if self._kv_events is not None:
            self._kv_events.publish_changes(now=True)
        self._measure(time.monotonic())  # prefixes may have been evicted since the last request

    def check(self) -> None:
        self._admission.check()
        jobs = list(self._admission.jobs.values())
        self._core.check({sequence for job in jobs for sequence in job.sequences if not sequence.ended})
        if self._vision is not None:
            self._vision.check()

    def abandon(self, error: IngotError) -> None:
        for request_id in list(self._admission.jobs):
            self._end_early(request_id, error)
        self._flush()

    def reset_after_fault(self, error: IngotError) -> None:
        self._drop_pending_step()
        self._core.runner.abandon()
        self.abandon(error)
        self._renew_core()

    def farewell(self, error: IngotError) -> None:
        for request_id in list(self._admission.jobs):
            job = self._admission.close(request_id)
            if job is not None:
                self._outbox.send_last(job, Failed(error))
                with suppress(Exception):
                    self._metrics.count_failure(error)
                    self._request_log.ended(job.status(time.monotonic()), error_outcome(error))
        with suppress(Exception):
            self._flush()

    def close(self) -> None:
        if self._vision is not None:
            self._vision.close()
        self.prefix_cache.close()
        self._loaded.adapter.close()
        if self._kv_events is not None:
            self._kv_events.close()

    # State

    def _make_core(self) -> None:
        self._core = EngineCore(self._loaded, self._limits, self.speculation, self._has_features)
        if self._kv_events is not None:
            self._kv_events.track(self.prefix_cache.index, self.prefix_cache.needs)

    def _renew_core(self) -> None:
        """Start with an empty core. The old one's memory is freed before the new one takes any."""
        self._core.runner.free()
        self._make_core()
        self._measure(time.monotonic())

    def _drop_unused(self) -> None:
        if self._loaded.loras is not None:
            self._loaded.loras.drop_unused(self._admission.jobs.values())

    def _has_features(self, sequence: TokenSequence) -> bool:
        """Whether the image features are there that a sequence needs behind its cached prefix."""
        return (
            self._vision is None
            or sequence.prompt_media is None
            or self._vision.ready(sequence, self.prefix_cache.known(sequence))
        )

    def _free_sequences(self) -> int:
        return self._limits.max_sequences - len(self._core.scheduler.running)

    def _drop_pending_step(self) -> None:
        self._pending = self._early_results = None

    # Requests begin and end

    @contextmanager
    def _blamed_on(self, request_id: str) -> Iterator[None]:
        """What fails in here ends this request alone."""
        try:
            yield
        except Exception as error:
            if is_device_lost(error):
                raise
            facts = log_facts(request_id, event="failed")
            log.exception("request %s failed; the others go on", request_id, extra=facts)
            self._end_early(request_id, IngotError(REQUEST_FAILED))

    def _begin(self, job: ActiveRequest) -> None:
        if self._admission.jobs.get(job.request.id) is not job:  # cancelled before it began
            return
        loras, lora = self._loaded.loras, job.request.lora
        if lora is not None and (loras is None or not loras.holds(job.request)):
            self._end_early(job.request.id, lora_gone_error(lora))  # unloaded while the request came in
            return
        job.experts_before = None if self._loaded.adapter.experts is None else self._loaded.adapter.experts.stats
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
                    self._core.scheduler.add(sequence)
            self._close_if_done(job)

    def _leave(self, sequence: TokenSequence) -> None:
        """Give back everything that a sequence holds."""
        sequence.ended = True
        self._admission.left(sequence)
        self._core.leave(sequence)

    def _close_if_done(self, job: ActiveRequest) -> None:
        if all(sequence.ended for sequence in job.sequences) and self._admission.close(job.request.id) is not None:
            now = time.monotonic()
            self._metrics.count_finished(job, now)
            self._measure_if_idle()
            self._admission.took(now - job.request.arrived)
            self._request_log.ended(job.status(now), job.outcome())
            experts = self._loaded.adapter.experts
            self._outbox.put(job, [job.ended(now, None if experts is None else experts.stats)])

    def _end_early(self, request_id: str, error: IngotError) -> None:
        job = self._admission.close(request_id)
        if job is None:
            return
        status = job.status(time.monotonic())
        self._metrics.count_failure(error)
        self._outbox.put(job, [Failed(error, job.usage(), status)])  # first: whatever fails below, its stream ends
        self._request_log.ended(status, error_outcome(error))
        for sequence in job.sequences:
            if not sequence.ended:
                self._leave(sequence)
        self._measure_if_idle()

    # Steps

    def _step(self, shared: Callable[[], bool]) -> None:
        began = time.monotonic()
        core = self._core
        if self._pending is not None and core.speculation.seems_worthwhile(core.scheduler.running):
            self._postprocess(None)  # proposers need to know the tokens before
        plan = core.scheduler.plan(began)
        newcomers = [sequence for sequence in plan.admitted if sequence.preemptions == 0]
        self._admission.began(newcomers)
        self._metrics.count_step(plan)
        if newcomers or self._metrics.is_memory_due(began):
            self._measure(began)
        for sequence in newcomers:
            request = sequence.request
            self._request_log.began(self._admission.jobs[request.id].status(began), request.via, began)
        works_ahead = self._loaded.adapter.device.kind != "cpu"
        drafts = core.speculation.draft(plan, waited=works_ahead and self._pending is None)
        step = core.runner.launch(plan, self._read_early, drafts.by_row)
        self._postprocess(_PendingStep(step, drafts, began) if step.passes else None)
        if not step.passes:
            self.prefix_cache.pause()
        if not works_ahead or step.verifies or shared():
            # On a CPU the launch has already waited for the work: nothing is gained by reading late. And no token
            # waits for another workload that comes between two steps.
            self._postprocess(None)
        if not plan.empty:
            seconds = time.monotonic() - began
            self.figures.step_s.add(seconds)
            self._request_log.stepped(plan, seconds)

    def _read_early(self) -> None:
        """Let the sequences of the pending step know their tokens now."""
        if self._pending is not None and self._early_results is None:
            self._early_results = [list(waves) for waves in self._collect(self._pending.step)]

    def _postprocess(self, following: _PendingStep | None) -> None:
        """Read the tokens of the pending step and deliver them; `following` is the step that now runs."""
        previous, self._pending = self._pending, following
        early, self._early_results = self._early_results, None
        if previous is None:
            return
        for waves in early if early is not None else self._collect(previous.step):
            for result in (result for results in waves for result in results):
                if not result.sequence.ended:
                    with self._blamed_on(result.sequence.request.id):
                        self._deliver(result)
            self._flush()
        since, self._read_at = max(self._read_at, previous.began), time.monotonic()
        before, self._graphs = self._graphs, self._loaded.adapter.graphs
        self._core.speculation.learn(previous.drafts, self._read_at - since, captured_graph=self._graphs != before)

    def _collect(self, step: LaunchedStep) -> Iterator[Iterable[list[SequenceResult]]]:
        """A step's results, by forward pass and by wave. Tokens are appended to their sequences as a wave is reached:
        a sequence may have ended before its later ones are."""
        for waves in self._core.runner.collect(step):
            yield (self._append_tokens(results, first=not wave) for wave, results in enumerate(waves))

    def _append_tokens(self, results: list[SequenceResult], *, first: bool) -> list[SequenceResult]:
        """`first`: the results hold each sequence's first token of a step."""
        now = time.monotonic()
        for result in results:
            sequence = result.sequence
            if result.token is None or sequence.ended or sequence.limit == 0:
                continue
            sequence.tokens.append(result.token)
            del sequence.unread[:1]
            self._metrics.count_token(sequence, now, first=first)
            sequence.first_token_at = sequence.first_token_at or now
            sampling.accept_token(sequence, result.token)
        return results

    def _deliver(self, result: SequenceResult) -> None:
        """Write a result's events, and end its sequence if they do."""
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

    # What a turn has time for besides a step

    def _time_left(self, began: float) -> float:
        """Seconds left of the latency target in this turn, or more while no sequence is decoding."""
        if not any(sequence.decoding for sequence in self._core.scheduler.running):
            return LONGEST_IDLE_SLICE_S
        return self._limits.target_itl_ms / 1000 - (time.monotonic() - began)

    def _run_vision_encoder(self, began: float) -> None:
        if self._vision is None:
            return
        try:
            if not self._vision.advance(self._time_left(began)) and not self._core.scheduler.running:
                self._vision.pause()
        except VisionEncodingFailed as failed:
            for request_id in failed.requests:
                self._end_early(request_id, failed.error)

    def _score_prompts(self, began: float) -> None:
        """Score prompts for SpecPrefill."""
        specprefill = self._core.specprefill
        if specprefill is not None and (sequence := specprefill.next) is not None:
            with self._blamed_on(sequence.request.id):
                specprefill.advance(sequence, self._time_left(began))

    def _measure(self, now: float) -> None:
        runner = self._core.runner
        reserved = runner.room.needed([(sequence, sequence.reserved) for sequence in self._core.scheduler.running])
        cached, active = self.prefix_cache.index.shares.held, mx.get_active_memory()
        self._metrics.record_memory(now, reserved, *self.memory, cached=cached, active=active)
        if self._vision is not None:
            self.figures.media_queries, self.figures.media_hits = self._vision.asked, self._vision.found

    def _measure_if_idle(self) -> None:
        if not self._admission.jobs:
            self._measure(time.monotonic())
