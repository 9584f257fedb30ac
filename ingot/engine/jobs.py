"""A request while it runs: its sequences, their writers, and what its reader may ask about it."""

from __future__ import annotations

from collections.abc import Iterator

from ingot.engine.output import Writer
from ingot.engine.request import (
    CacheReason,
    CacheReport,
    Ended,
    Phase,
    Request,
    RequestStatus,
    SpeculationReport,
    Timing,
    Usage,
)
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.ask import SparseReport
from ingot.engine.streams import EventSink
from ingot.text.tokenizer.tokenizer import Tokenizer

PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode")
UNSEARCHED: frozenset[CacheReason] = frozenset({"off", "scored", "disabled"})
"""Why no prefix was looked for."""


class Job:
    def __init__(self, request: Request, reader: EventSink, sequences: list[Sequence], tokenizer: Tokenizer) -> None:
        self.request, self.reader, self.sequences = request, reader, sequences
        self.writers = {sequence: Writer(sequence, tokenizer) for sequence in sequences}

    @property
    def phase(self) -> Phase:
        """The phase of the sequence that is furthest on."""
        phases = [sequence.phase for sequence in self.sequences if not sequence.ended]
        return max(phases, key=PHASES.index, default="decode")

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.request.prompts),
            completion_tokens=sum(sequence.produced for sequence in self.sequences),
            cached_tokens=sum(sequence.cached for sequence in self.sequences[:: self.request.n]),
            thinking_tokens=sum(writer.thinking_tokens for writer in self.writers.values()),
        )

    def ended(self, now: float) -> Ended:
        in_thinking = sum(writer.calls_in_thinking for writer in self.writers.values())
        return Ended(self.usage(), self.timing(now), self._reports(), self.speculation(), self._sparse(), in_thinking)

    def speculation(self) -> SpeculationReport:
        return SpeculationReport(
            proposed=sum(sequence.proposed for sequence in self.sequences),
            accepted=sum(sequence.accepted for sequence in self.sequences),
            passes=sum(sequence.passes for sequence in self.sequences),
        )

    def _reports(self) -> tuple[CacheReport, ...]:
        firsts = self.sequences[:: self.request.n]
        return tuple(sequence.report for sequence in firsts if sequence.report is not None)

    def _sparse(self) -> tuple[SparseReport, ...]:
        firsts = self.sequences[:: self.request.n]
        return tuple(sequence.sparse for sequence in firsts if sequence.sparse is not None)

    def timing(self, now: float) -> Timing:
        arrived = self.request.arrived
        began = min((at for s in self.sequences for at in (s.scoring_at, s.admitted_at) if at is not None), default=now)
        first = min((s.first_token_at for s in self.sequences if s.first_token_at is not None), default=now)
        return Timing(queue=began - arrived, prefill=first - began, decode=now - first)

    def status(self, now: float) -> RequestStatus:
        usage = self.usage()
        first = min((s.first_token_at for s in self.sequences if s.first_token_at is not None), default=None)
        since = now - first if first is not None else 0.0
        return RequestStatus(
            id=self.request.id,
            phase=self.phase,
            prompt_tokens=usage.prompt_tokens,
            prefilled_tokens=sum(self._prefilled()),
            completion_tokens=usage.completion_tokens,
            max_tokens=sum(sequence.limit for sequence in self.sequences),
            age_s=now - self.request.arrived,
            tokens_per_second=usage.completion_tokens / since if since > 0 else 0.0,
            preemptions=sum(sequence.preemptions for sequence in self.sequences),
            tenant=self.request.tenant,
            cache=self._reports(),
            first_token_s=None if first is None else first - self.request.arrived,
            queued_s=self.timing(now).queue,
            adapter="" if self.request.lora is None else self.request.lora.name,
        )

    def _prefilled(self) -> Iterator[int]:
        """How much of each prompt is computed, for the answer that is furthest on."""
        for first in range(0, len(self.sequences), self.request.n):
            answers = self.sequences[first : first + self.request.n]
            yield max(answer.position(min(answer.computed, len(answer.prompt))) for answer in answers)

    def outcome(self) -> str:
        """Why its answers ended."""
        reasons = {writer.ended.reason for writer in self.writers.values() if writer.ended is not None}
        return ", ".join(sorted(reasons))
