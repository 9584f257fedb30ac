"""`GET /v1/requests`, `GET` and `DELETE /v1/requests/{id}`, and `GET /v1/live`: what runs now, how a request went, how
to stop it, and what the page about the engine draws.

`/v1/live` holds numbers and ids alone. Its counts only grow: whoever asks twice knows what happened between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Failed, ModelCard, Phase, RequestStatus
from ingot.engine.status import Health
from ingot.errors import Cancelled
from ingot.observe.metrics import EngineMetrics, RequestSpan, SpeculationMetrics
from ingot.protocol.chat.answers import AnswerHead, ExpertsBody, Receipt, UsageBody
from ingot.protocol.errors import ErrorBody, ErrorDetail

S = TypeVar("S", bound=Struct)


def _copied(cls: type[S], source: object, **computed: float) -> S:
    """The fields of `source` that `cls` has, and those that are computed; fractions with three digits."""
    values = {name: getattr(source, name) for name in cls.__struct_fields__ if name not in computed} | computed
    return cls(**{name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()})


class RunningRequest(Struct):
    id: str
    phase: Phase
    prompt_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    max_tokens: int
    age_s: float
    tokens_per_second: float
    preemptions: int
    cached_tokens: int

    @classmethod
    def of(cls, status: RequestStatus) -> RunningRequest:
        return _copied(cls, status, tokens_per_second=round(status.tokens_per_second, 2))


class RunningRequestList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[RunningRequest]


class CancelledRequestBody(Struct):
    id: str
    cancelled: Literal[True] = True


class RequestStatusBody(Struct, kw_only=True):
    """A request that runs, with its `progress`; or one that ended a while ago, with its usage and its receipt. Where it
    was cancelled or failed, the error it ended in and how far it was."""

    id: str
    status: Phase | Literal["ended", "cancelled", "failed"]
    progress: RunningRequest | UnsetType = UNSET
    usage: UsageBody | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET

    @classmethod
    def running(cls, status: RequestStatus) -> RequestStatusBody:
        return cls(id=status.id, status=status.phase, progress=RunningRequest.of(status))

    @classmethod
    def ended(cls, id: str, head: AnswerHead | None, last: Ended | Failed) -> RequestStatusBody:
        usage = UsageBody.of(last.usage)
        if isinstance(last, Failed):
            progress = UNSET if last.final_status is None else RunningRequest.of(last.final_status)
            error = ErrorBody.of(last.error).error
            status: Literal["cancelled", "failed"] = "cancelled" if isinstance(last.error, Cancelled) else "failed"
            return cls(id=id, status=status, progress=progress, usage=usage, error=error)
        return cls(id=id, status="ended", usage=usage, ingot=Receipt.of(head or AnswerHead(id, 0, "", ""), last))


def list_requests(statuses: list[RequestStatus]) -> RunningRequestList:
    return RunningRequestList(data=[RunningRequest.of(status) for status in statuses])


PAST_S: Final = 120.0
"""How long ago a listed request may have ended."""
MOST_LISTED_REQUESTS: Final = 128
"""Requests of each kind that are listed."""
MOST_OWNERS: Final = 16


class LiveRequest(Struct):
    """One that waits or runs. `queued_s`, `prompt_s` and `answer_s` are what its phases took so far."""

    id: str
    phase: Phase
    queued_s: float
    prompt_s: float
    answer_s: float
    prompt_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    tokens_per_second: float
    preemptions: int

    @classmethod
    def of(cls, status: RequestStatus) -> LiveRequest:
        answered = 0.0 if status.first_token_s is None else status.age_s - status.first_token_s
        return _copied(
            cls,
            status,
            prompt_s=max(0.0, status.age_s - status.queued_s - answered),
            answer_s=answered,
            tokens_per_second=round(status.tokens_per_second, 2),
        )


class PastRequest(Struct):
    """One that ended lately."""

    id: str
    path: str
    outcome: str
    ended_ago_s: float
    queued_s: float
    prompt_s: float
    answer_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, span: RequestSpan, now: float) -> PastRequest:
        return _copied(cls, span, ended_ago_s=now - span.ended)


class LiveTotals(Struct):
    """Since the start. `computed_tokens` are those of prompts and answers that went through the model."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    steps: int
    step_s: float
    preemptions: int
    refused: int


class OwnerMemory(Struct):
    """What is cached of one key's prompts."""

    owner: str
    kept_bytes: int


class LiveMemory(Struct):
    """`used` is the part of KV memory that running requests have reserved, 1 is all. `active_bytes` are
    all that MLX has in use. `experts` are those of a mixture that are read when they are needed."""

    budget_bytes: int
    weight_bytes: int
    state_bytes: int
    held_bytes: int
    active_bytes: int
    used: float
    owners: list[OwnerMemory]
    experts: ExpertsBody | UnsetType = UNSET


class LiveSpeculation(Struct):
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]


class LiveEngine(Struct):
    """What is of all keys together."""

    model: str
    device: str
    formats: str
    running: int
    waiting: int
    totals: LiveTotals
    memory: LiveMemory
    speculation: LiveSpeculation


class LiveBody(Struct):
    """The asking key's requests: those that wait and run, and those that ended in the last two minutes. The
    administrator, and everybody where there are no keys, sees all keys' and the `engines`, one for each model
    that is loaded."""

    ready: bool
    detail: str
    requests: list[LiveRequest]
    past: list[PastRequest]
    engines: list[LiveEngine] | UnsetType = UNSET


def live_body(
    health: Health,
    statuses: Sequence[RequestStatus],
    spans: Iterable[RequestSpan],
    now: float,
    engines: list[LiveEngine] | UnsetType = UNSET,
) -> LiveBody:
    """At most `MOST_LISTED_REQUESTS` of each kind, whatever is going on."""
    past = [PastRequest.of(span, now) for span, _ in zip(spans, range(MOST_LISTED_REQUESTS), strict=False)]
    return LiveBody(
        health.ready,
        health.detail,
        [LiveRequest.of(status) for status in statuses[:MOST_LISTED_REQUESTS]],
        past,
        engines,
    )


def live_engine_body(card: ModelCard, health: Health, figures: EngineMetrics, counts: SpeculationMetrics) -> LiveEngine:
    cached = sorted(figures.kept_bytes.items(), key=lambda pair: -pair[1])[:MOST_OWNERS]
    return LiveEngine(
        model=card.name,
        device=card.device,
        formats=card.formats or card.dtype,
        running=health.running,
        waiting=health.queued,
        totals=LiveTotals(
            prompt_tokens=figures.prompt_tokens,
            cached_tokens=figures.matched_tokens,
            generated_tokens=figures.generated_tokens,
            computed_tokens=int(figures.step_tokens.sum),
            steps=figures.step_s.cumulative()[-1],
            step_s=round(figures.step_s.sum, 4),
            preemptions=figures.preemptions,
            refused=health.refused,
        ),
        memory=LiveMemory(
            budget_bytes=card.memory_budget,
            weight_bytes=card.weight_bytes,
            state_bytes=figures.state_bytes,
            held_bytes=figures.held_bytes,
            active_bytes=figures.active_bytes,
            used=round(figures.occupied, 4),
            owners=[OwnerMemory(owner, size) for owner, size in cached],
            experts=ExpertsBody.of(figures.experts),
        ),
        speculation=LiveSpeculation(
            counts.drafts, counts.draft_tokens, counts.accepted_tokens, list(counts.accepted_per_position)
        ),
    )
