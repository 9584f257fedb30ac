"""What the engine reports as it goes: its metrics, and the log's lines on each request.

Log lines say that a request began, how far its prompt is, and how it ended. They hold numbers and ids alone:
nothing of what was asked or answered, nor whose key it was. For the engine thread, which says what time it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

from ingot.cache.pages import PAGE
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.output import NOT_SEARCHED, ActiveRequest
from ingot.engine.request import CacheReason, CacheReport, ModelCard, SequenceEnded
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import TokenSequence
from ingot.errors import Cancelled, ClientLeft, IngotError, Stopping
from ingot.observe.logs import log_facts
from ingot.observe.metrics import EngineMetrics

if TYPE_CHECKING:
    from ingot.engine.request import RequestStatus
    from ingot.engine.scheduler import StepPlan


REQUEST_ENDINGS: Final = ("stop", "length", "abort", "error")
"""How requests end, as vLLM calls it: a tool's call is a stop."""
MEASURED_EVERY_S: Final = 0.2
"""How often it is measured how full the memory is, besides when somebody joins."""
MOST_TOKENS: Final = 1 << 30  # that a server is said to hold at once: some models' states do not grow


class MetricsRecorder:
    def __init__(self, card: ModelCard, budget: MemoryBudget, *, has_disk: bool) -> None:
        self.figures = EngineMetrics(card.context, REQUEST_ENDINGS, get_args(CacheReason))
        self.figures.page_tokens, self.figures.most_tokens = PAGE, budget.longest(MOST_TOKENS)
        self._states, self._has_disk = budget.states, has_disk
        self._measured_at = 0.0

    def due(self, now: float) -> bool:
        """Whether the memory was measured a while ago."""
        return now - self._measured_at > MEASURED_EVERY_S

    def measured(
        self, now: float, reserved: int, existing: int, held: int, *, kept: Mapping[str, int], active: int
    ) -> None:
        """Bytes of states: what running sequences have reserved, what exists, what somebody holds of it, and what is
        kept, by tenant. `active` are those that mlx has for everything."""
        self._measured_at = now
        self.figures.occupied = reserved / self._states
        self.figures.state_bytes, self.figures.held_bytes = existing, held
        self.figures.kept_bytes, self.figures.active_bytes = dict(kept), active

    def planned(self, plan: StepPlan) -> None:
        """Who joins a step, and what is computed in it."""
        figures = self.figures
        figures.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            if sequence.preemptions == 0 and sequence.index % sequence.request.n == 0 and sequence.report is not None:
                self._began(sequence.report)
        if not plan.empty:
            figures.step_tokens.add(len(plan.decode) + sum(chunk.count for chunk in plan.chunks))

    def _began(self, report: CacheReport) -> None:
        figures = self.figures
        figures.prompt_tokens += report.prompt_tokens
        figures.reasons[report.reason] += 1
        if report.reason not in NOT_SEARCHED:
            figures.asked_tokens += report.prompt_tokens
            figures.matched_tokens += report.matched
            figures.read_tokens += report.read
            if self._has_disk:
                figures.filed_asked_tokens += report.prompt_tokens - report.matched + report.read

    def count_token(self, sequence: TokenSequence, now: float, *, first: bool) -> None:
        """A new token is known. `first` of those that a step gave the sequence: what comes with it took no time of its
        own."""
        figures = self.figures
        figures.generated_tokens += 1
        if sequence.drawn_at is None:
            figures.first_token_s.add(now - sequence.arrived)
        elif first:
            figures.between_tokens_s.add(now - sequence.drawn_at)
        sequence.drawn_at = now

    def finished(self, job: ActiveRequest, now: float) -> None:
        """All its answers came to their ends."""
        figures, request, usage, timing = self.figures, job.request, job.usage(), job.timing(now)
        figures.endings[_finish_kind(writer.ended for writer in job.writers.values())] += 1
        figures.request_s.add(now - request.arrived)
        figures.queue_s.add(timing.queue)
        figures.prefill_s.add(timing.prefill)
        figures.decode_s.add(timing.decode)
        figures.inference_s.add(timing.prefill + timing.decode)
        figures.prompt_lengths.add(usage.prompt_tokens)
        figures.answer_lengths.add(usage.completion_tokens)
        figures.answers.add(request.n)
        if request.max_tokens is not None:
            figures.answer_limits.add(request.max_tokens)
        longest = max(sequence.produced for sequence in job.sequences)
        figures.longest_answers.add(longest)
        if longest > 1:
            figures.token_s.add(timing.decode / (longest - 1))

    def count_failure(self, error: IngotError) -> None:
        """A request ended before its answers did."""
        self.figures.endings["abort" if isinstance(error, Cancelled | Stopping) else "error"] += 1


def _finish_kind(answers: Iterable[SequenceEnded | None]) -> str:
    return "length" if any(answer is not None and answer.reason == "length" for answer in answers) else "stop"


PROGRESS_S: Final = 10.0
"""How often a prompt that takes long is told of."""
SLOW_STEP_S: Final = 2.0
"""A step that takes longer than this is worth a line in the log."""
NAMED_REQUESTS: Final = 4  # requests of such a step

log = logging.getLogger("ingot.requests")


@dataclass(slots=True)
class LoggedProgress:
    """What was last told of a request, and when."""

    at: float
    prefilled: int


class RequestLog:
    """For one thread, which says what time it is."""

    def __init__(self, model: str, every_s: float = PROGRESS_S) -> None:
        self._model, self._every_s = model, every_s
        self._watched: dict[str, LoggedProgress] = {}

    def began(self, status: RequestStatus, via: str, now: float) -> None:
        """It runs for the first time; said once. `via` is the address that it came to."""
        if status.id in self._watched:
            return
        self._watched[status.id] = LoggedProgress(now, status.cached_tokens)
        log.info(
            "%s began: %s, model %s, %d prompt tokens, %d of them cached",
            *(status.id, via or "no client", self._model, status.prompt_tokens, status.cached_tokens),
            extra=_status_facts(status, "began", path=via, model=self._model),
        )

    def look(self, now: float, statuses: Callable[[], Iterable[RequestStatus]]) -> None:
        """Tells of the prompts that are due. Cheap where none is, as it is called between all steps."""
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
        """A step took so long. Said where that was too long, with whose it was."""
        if seconds <= SLOW_STEP_S:
            return
        prompt = sum(chunk.count for chunk in plan.chunks)
        rows = [*(chunk.sequence for chunk in plan.chunks), *plan.decode]
        ids = list(dict.fromkeys(row.request.id for row in rows))
        more = f" and {len(ids) - NAMED_REQUESTS} more" if len(ids) > NAMED_REQUESTS else ""
        log.warning(
            "a step took %.1f s: %d rows decoding, %d prompt tokens of %d sequences, %d joined, %d preempted; of %s%s",
            *(seconds, len(plan.decode), prompt, len(plan.chunks), len(plan.admitted), len(plan.preempted)),
            *(", ".join(ids[:NAMED_REQUESTS]), more),
            extra={"facts": {"event": "slow_step", "took_s": round(seconds, 3), "request_ids": ids}},
        )

    def ended(self, status: RequestStatus, outcome: str) -> None:
        self._watched.pop(status.id, None)
        told = _status_facts(status, "ended", outcome=outcome)
        log.info("%s ended, %s: %s", status.id, outcome, ", ".join(_summary_parts(status)), extra=told)


def error_outcome(error: IngotError) -> str:
    """How a request ended that did not come to its end."""
    if isinstance(error, ClientLeft):
        return f"the client left ({error.status})"
    if isinstance(error, Stopping):
        return f"cut off, as the server stops ({error.status})"
    return f"{'cancelled' if isinstance(error, Cancelled) else 'failed'} ({error.status} {error.code})"


def _log_progress(status: RequestStatus, watched: LoggedProgress, now: float) -> None:
    speed = (status.prefilled_tokens - watched.prefilled) / (now - watched.at)
    left = status.prompt_tokens - status.prefilled_tokens
    estimate = f"about {left / speed:.0f} s left" if speed > 0 else "no telling how long"
    log.info(
        "%s prompt: %d of %d tokens, %.1f tokens/s, %s",
        *(status.id, status.prefilled_tokens, status.prompt_tokens, max(speed, 0.0), estimate),
        extra=_status_facts(status, "prefill"),
    )


def _status_facts(status: RequestStatus, event: str, **more: object) -> dict[str, Any]:
    """What a line says of a request, for machines."""
    return log_facts(
        status.id,
        event=event,
        prompt_tokens=status.prompt_tokens,
        cached_tokens=status.cached_tokens,
        prefilled_tokens=status.prefilled_tokens,
        completion_tokens=status.completion_tokens,
        preemptions=status.preemptions,
        age_s=round(status.age_s, 3),
        first_token_s=None if status.first_token_s is None else round(status.first_token_s, 4),
        **more,
    )


def _summary_parts(status: RequestStatus) -> Iterable[str]:
    share = status.cached_tokens / status.prompt_tokens if status.prompt_tokens else 0.0
    yield f"{status.prompt_tokens} prompt tokens ({share:.0%} cached)"
    if status.first_token_s is None:
        yield f"{status.prefilled_tokens} of them computed or cached, no token after {status.age_s:.2f} s"
        return
    yield f"first token after {status.first_token_s:.2f} s"
    yield f"{status.completion_tokens} answer tokens"
    seconds = status.age_s - status.first_token_s
    if status.completion_tokens > 1 and seconds > 0:
        yield f"{(status.completion_tokens - 1) / seconds:.1f} tokens/s"
