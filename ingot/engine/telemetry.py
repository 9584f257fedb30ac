"""What the engine reports: its metrics, and log lines for each request.

Log lines report that a request began, how far its prefill is, and how it ended. They hold numbers and ids alone:
nothing of prompts or answers, nor the key. For the engine thread, which passes the time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from ingot.cache.pages import PAGE
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.output import NOT_SEARCHED, REPETITION, ActiveRequest
from ingot.engine.request import CacheReason, CacheReport, ModelCard, RequestStatus
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import TokenSequence
from ingot.errors import Cancelled, ClientLeft, IngotError, Stopping
from ingot.observe.logs import log_facts
from ingot.observe.metrics import EngineMetrics
from ingot.quantities import counted

REQUEST_ENDINGS: Final = ("stop", "length", REPETITION, "abort", "error")
"""How requests end, by vLLM's names: a tool call is a stop."""
MEASURED_EVERY_S: Final = 0.2
"""How often the use of memory is measured, besides when a sequence joins."""
MOST_TOKENS: Final = 1 << 30  # most that is reported as fitting into memory: some models' KV does not grow


class MetricsRecorder:
    def __init__(self, card: ModelCard, budget: MemoryBudget, *, has_disk: bool) -> None:
        self.metrics = EngineMetrics(card.context, REQUEST_ENDINGS, get_args(CacheReason))
        self.metrics.page_tokens, self.metrics.most_tokens = PAGE, budget.longest(MOST_TOKENS)
        self._kv_budget, self._has_disk = budget.states, has_disk
        self._measured_at = 0.0

    def is_memory_due(self, now: float) -> bool:
        return now - self._measured_at > MEASURED_EVERY_S

    def record_memory(
        self, now: float, reserved: int, allocated: int, used: int, *, cached: Mapping[str, int], active: int
    ) -> None:
        """Bytes of KV: reserved by running sequences, allocated, used of those, and cached, by tenant. `active` is all
        that mlx has allocated."""
        self._measured_at = now
        metrics = self.metrics
        metrics.occupied = reserved / self._kv_budget
        metrics.state_bytes, metrics.held_bytes = allocated, used
        metrics.kept_bytes, metrics.active_bytes = dict(cached), active

    def count_step(self, plan: StepPlan) -> None:
        self.metrics.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            if sequence.preemptions == 0 and sequence.index % sequence.request.n == 0 and sequence.report is not None:
                self._count_prompt(sequence.report)
        if not plan.empty:
            self.metrics.step_tokens.add(len(plan.decode) + sum(chunk.count for chunk in plan.chunks))

    def _count_prompt(self, report: CacheReport) -> None:
        metrics = self.metrics
        metrics.prompt_tokens += report.prompt_tokens
        metrics.reasons[report.reason] += 1
        if report.reason not in NOT_SEARCHED:
            metrics.queried_tokens += report.prompt_tokens
            metrics.matched_tokens += report.matched
            metrics.read_tokens += report.read
            if self._has_disk:
                metrics.disk_queried_tokens += report.prompt_tokens - report.matched + report.read

    def count_token(self, sequence: TokenSequence, now: float, *, first: bool) -> None:
        """`first` of a step's tokens for the sequence: accepted draft tokens after it took no time of their own."""
        self.metrics.generated_tokens += 1
        if sequence.last_token_at is None:
            self.metrics.first_token_s.add(now - sequence.arrived)
        elif first:
            self.metrics.between_tokens_s.add(now - sequence.last_token_at)
        sequence.last_token_at = now

    def count_finished(self, job: ActiveRequest, now: float) -> None:
        """A request whose answers all came to their ends."""
        metrics, request, usage, timing = self.metrics, job.request, job.usage(), job.timing(now)
        metrics.endings[job.ending] += 1
        metrics.request_s.add(now - request.arrived)
        metrics.queue_s.add(timing.queue)
        metrics.prefill_s.add(timing.prefill)
        metrics.decode_s.add(timing.decode)
        metrics.inference_s.add(timing.prefill + timing.decode)
        metrics.prompt_lengths.add(usage.prompt_tokens)
        metrics.answer_lengths.add(usage.completion_tokens)
        metrics.answers.add(request.n)
        if request.max_tokens is not None:
            metrics.answer_limits.add(request.max_tokens)
        longest = max(sequence.produced for sequence in job.sequences)
        metrics.longest_answers.add(longest)
        if longest > 1:
            metrics.token_s.add(timing.decode / (longest - 1))

    def count_failure(self, error: IngotError) -> None:
        """A request ended before its answers did."""
        self.metrics.endings["abort" if isinstance(error, Cancelled | Stopping) else "error"] += 1


PROGRESS_S: Final = 10.0
"""How often the progress of a long prefill is logged."""
SLOW_STEP_S: Final = 2.0
"""Steps that take longer are logged."""
NAMED_REQUESTS: Final = 4  # that such a line names
LOGGED_COUNTS: Final = ("prompt_tokens", "cached_tokens", "prefilled_tokens", "completion_tokens", "preemptions")

log = logging.getLogger("ingot.requests")


@dataclass(slots=True)
class LoggedProgress:
    """What was last logged of a request, and when."""

    at: float
    prefilled: int


class RequestLog:
    def __init__(self, model: str, every_s: float = PROGRESS_S) -> None:
        self._model, self._every_s = model, every_s
        self._watched: dict[str, LoggedProgress] = {}

    def began(self, status: RequestStatus, via: str, now: float) -> None:
        """It runs for the first time; logged once. `via` is the URL path that it came to."""
        if status.id in self._watched:
            return
        self._watched[status.id] = LoggedProgress(now, status.cached_tokens)
        log.info(
            "%s began: %s, model %s, %d prompt tokens, %d of them cached",
            *(status.id, via or "no client", self._model, status.prompt_tokens, status.cached_tokens),
            extra=_status_facts(status, "began", path=via, model=self._model),
        )

    def log_progress(self, now: float, statuses: Callable[[], Iterable[RequestStatus]]) -> None:
        """Log the prompts that are due. Cheap where none is, as it is called between all steps."""
        if not any(now - watched.at >= self._every_s for watched in self._watched.values()):
            return
        for status in statuses():
            watched = self._watched.get(status.id)
            if watched is None or now - watched.at < self._every_s:
                continue
            if status.phase == "decode":
                watched.at = math.inf
                continue
            if status.phase == "prefill":
                _log_progress(status, watched, now)
            watched.at, watched.prefilled = now, status.prefilled_tokens

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Log a step that took too long, and its requests."""
        if seconds <= SLOW_STEP_S:
            return
        prompt = sum(chunk.count for chunk in plan.chunks)
        rows = [*(chunk.sequence for chunk in plan.chunks), *plan.decode]
        ids = list(dict.fromkeys(row.request.id for row in rows))
        more = f" and {len(ids) - NAMED_REQUESTS} more" if len(ids) > NAMED_REQUESTS else ""
        log.warning(
            "a step took %.1f s: %s decoding, %s of %s, %d joined, %d preempted; of %s%s",
            *(seconds, counted(len(plan.decode), "row"), counted(prompt, "prompt token")),
            *(counted(len(plan.chunks), "sequence"), len(plan.admitted), len(plan.preempted)),
            *(", ".join(ids[:NAMED_REQUESTS]), more),
            extra={"facts": {"event": "slow_step", "took_s": round(seconds, 3), "request_ids": ids}},
        )

    def ended(self, status: RequestStatus, outcome: str) -> None:
        self._watched.pop(status.id, None)
        facts = _status_facts(status, "ended", outcome=outcome)
        log.info("%s ended, %s: %s", status.id, outcome, ", ".join(_summary_parts(status)), extra=facts)


def error_outcome(error: IngotError) -> str:
    """How a request ended that failed or was cancelled."""
    if isinstance(error, ClientLeft):
        return f"the client left ({error.status})"
    if isinstance(error, Stopping):
        return f"cut off, as the server stops ({error.status})"
    return f"{'cancelled' if isinstance(error, Cancelled) else 'failed'} ({error.status} {error.code})"


def _log_progress(status: RequestStatus, watched: LoggedProgress, now: float) -> None:
    speed = (status.prefilled_tokens - watched.prefilled) / (now - watched.at)
    left = status.prompt_tokens - status.prefilled_tokens
    estimate = f"about {left / speed:.0f} s left" if speed > 0 else "time left unknown"
    log.info(
        "%s prompt: %d of %d tokens, %.1f tokens/s, %s",
        *(status.id, status.prefilled_tokens, status.prompt_tokens, max(speed, 0.0), estimate),
        extra=_status_facts(status, "prefill"),
    )


def _status_facts(status: RequestStatus, event: str, **more: object) -> dict[str, Any]:
    """The facts of a log line in JSON."""
    counts = {name: getattr(status, name) for name in LOGGED_COUNTS}
    first = None if status.first_token_s is None else round(status.first_token_s, 4)
    return log_facts(status.id, event=event, **counts, age_s=round(status.age_s, 3), first_token_s=first, **more)


def _summary_parts(status: RequestStatus) -> Iterable[str]:
    share = status.cached_tokens / status.prompt_tokens if status.prompt_tokens else 0.0
    yield f"{counted(status.prompt_tokens, 'prompt token')} ({share:.0%} cached)"
    if status.first_token_s is None:
        yield f"{status.prefilled_tokens} of them computed or cached, no token after {status.age_s:.2f} s"
        return
    yield f"first token after {status.first_token_s:.2f} s"
    yield counted(status.completion_tokens, "answer token")
    seconds = status.age_s - status.first_token_s
    if status.completion_tokens > 1 and seconds > 0:
        yield f"{(status.completion_tokens - 1) / seconds:.1f} tokens/s"
