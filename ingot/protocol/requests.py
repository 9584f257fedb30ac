"""`GET /v1/requests` and `DELETE /v1/requests/{id}`: what runs now, and how to stop it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ingot.engine.request import Phase, RequestStatus


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

    @classmethod
    def of(cls, status: RequestStatus) -> RunningRequest:
        return cls(
            id=status.id,
            phase=status.phase,
            prompt_tokens=status.prompt_tokens,
            prefilled_tokens=status.prefilled_tokens,
            completion_tokens=status.completion_tokens,
            max_tokens=status.max_tokens,
            age_s=round(status.age_s, 3),
            tokens_per_second=round(status.tokens_per_second, 2),
            preemptions=status.preemptions,
        )


class RunningList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[RunningRequest]


class CancelledBody(Struct):
    id: str
    cancelled: Literal[True] = True


def list_requests(statuses: list[RequestStatus]) -> RunningList:
    return RunningList(data=[RunningRequest.of(status) for status in statuses])
