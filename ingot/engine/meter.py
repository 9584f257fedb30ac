"""The engine's figures, written as it goes. For the engine thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, get_args

from ingot.cache.pages import PAGE
from ingot.engine.jobs import UNSEARCHED, Job
from ingot.engine.memory_budget import Budget
from ingot.engine.model_card import ModelCard
from ingot.engine.request import CacheReason, CacheReport, SequenceEnded
from ingot.engine.scheduler import StepPlan
from ingot.engine.sequence import Sequence
from ingot.errors import Cancelled, IngotError, Stopping
from ingot.observe.metrics import Figures

ENDINGS: Final = ("stop", "length", "abort", "error")
"""How requests end, as vLLM calls it: a tool's call is a stop."""
MEASURED_S: Final = 0.2
"""How often it is measured how full the memory is, besides when somebody joins."""
MOST_TOKENS: Final = 1 << 30  # that a server is said to hold at once: some models' states do not grow


class Meter:
    def __init__(self, card: ModelCard, budget: Budget, *, has_disk: bool) -> None:
        self.figures = Figures(card.context, ENDINGS, get_args(CacheReason))
        self.figures.page_tokens, self.figures.most_tokens = PAGE, budget.longest(MOST_TOKENS)
        self._states, self._has_disk = budget.states, has_disk
        self._measured_at = 0.0

    def due(self, now: float) -> bool:
        """Whether the memory was measured a while ago."""
        return now - self._measured_at > MEASURED_S

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
        if report.reason not in UNSEARCHED:
            figures.asked_tokens += report.prompt_tokens
            figures.matched_tokens += report.matched
            figures.read_tokens += report.read
            if self._has_disk:
                figures.filed_asked_tokens += report.prompt_tokens - report.matched + report.read

    def drew(self, sequence: Sequence, now: float, *, first: bool) -> None:
        """A new token is known. `first` of those that a step gave the sequence: what comes with it took no time of its
        own."""
        figures = self.figures
        figures.generated_tokens += 1
        if sequence.drawn_at is None:
            figures.first_token_s.add(now - sequence.arrived)
        elif first:
            figures.between_tokens_s.add(now - sequence.drawn_at)
        sequence.drawn_at = now

    def finished(self, job: Job, now: float) -> None:
        """All its answers came to their ends."""
        figures, request, usage, timing = self.figures, job.request, job.usage(), job.timing(now)
        figures.endings[_ending(writer.ended for writer in job.writers.values())] += 1
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

    def gave_up(self, error: IngotError) -> None:
        """A request ended before its answers did."""
        self.figures.endings["abort" if isinstance(error, Cancelled | Stopping) else "error"] += 1


def _ending(answers: Iterable[SequenceEnded | None]) -> str:
    return "length" if any(answer is not None and answer.reason == "length" for answer in answers) else "stop"
