"""`GET /v1/requests`, `GET` and `DELETE /v1/requests/{id}`: what runs now, how one went, and how to stop it."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Failed, Phase, RequestStatus
from ingot.errors import Cancelled
from ingot.protocol.chat.answers import AnswerHead, Receipt, UsageBody
from ingot.protocol.errors import ErrorBody, ErrorDetail


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
        made = msgspec.convert(status, cls, from_attributes=True)
        made.age_s, made.tokens_per_second = round(status.age_s, 3), round(status.tokens_per_second, 2)
        return made


class RunningList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[RunningRequest]


class CancelledBody(Struct):
    id: str
    cancelled: Literal[True] = True


class RequestBody(Struct, kw_only=True):
    """A request that runs, with its `progress`; or one that ended a while ago, with its usage and its receipt. Where it
    was cancelled or failed, the error it ended in and how far it was."""

    id: str
    status: Phase | Literal["ended", "cancelled", "failed"]
    progress: RunningRequest | UnsetType = UNSET
    usage: UsageBody | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET

    @classmethod
    def running(cls, status: RequestStatus) -> RequestBody:
        return cls(id=status.id, status=status.phase, progress=RunningRequest.of(status))

    @classmethod
    def ended(cls, id: str, head: AnswerHead | None, last: Ended | Failed) -> RequestBody:
        usage = UsageBody.of(last.usage)
        if isinstance(last, Failed):
            progress = UNSET if last.stood is None else RunningRequest.of(last.stood)
            error = ErrorBody.of(last.error).error
            status: Literal["cancelled", "failed"] = "cancelled" if isinstance(last.error, Cancelled) else "failed"
            return cls(id=id, status=status, progress=progress, usage=usage, error=error)
        return cls(id=id, status="ended", usage=usage, ingot=Receipt.of(head or AnswerHead(id, 0, "", ""), last))


def list_requests(statuses: list[RequestStatus]) -> RunningList:
    return RunningList(data=[RunningRequest.of(status) for status in statuses])
