"""A request's stream of events, watched for its end: every request leaves its receipt, its model's metrics are written,
and whoever collects spans gets one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from ingot.config import ApiKey
from ingot.engine.request import Ended, Event, Failed, LoraRef, PoolingOutput, Request, SequenceEnded, Timing
from ingot.engine.speech_request import SpeechEnded, TranscriptionEnded
from ingot.errors import Cancelled, ClientLeft, ContextOverflow, Forbidden, IngotError
from ingot.http.capture import RequestCapture, with_seed
from ingot.http.edge import ClientGone, Reply, audit_refusal
from ingot.http.service import GenerationService, ModelService
from ingot.http.tenants import check_model_allowed
from ingot.http.tracing import generation_span, task_model_span, trace_context
from ingot.observe.metrics import RequestSpan
from ingot.protocol.chat.answers import CacheReceipt, GenerationTask, receipt_headers
from ingot.protocol.ingot_api.requests import RequestStatusBody

if TYPE_CHECKING:
    from ingot.engine.streams import EventStream


async def open_stream(job: GenerationTask, answer: Reply, service: GenerationService) -> AccountedStream:
    """What the engine makes of a job. Raises what it refuses it with, in the words of the job's protocol."""
    # Whose request it is, and what that may ask for, is the edge's to say: no protocol can forget it.
    key = service.shared_state.tenants.key_of(answer.tenant)
    check_model_allowed(model_asked_for(service.served.card.name, job.request.lora), key, answer)
    whose = replace(
        job.request, tenant=answer.tenant, via=answer.scope["path"], priority=request_priority(job.request, key, answer)
    )
    capture = None
    if service.captures is not None and answer.body:  # which is there where it is to be captured
        whose = with_seed(whose)
        capture = service.captures.begin(answer.body, whose, service.served)
        answer.body = b""  # of several rounds, the first is what the body asks for
    job = replace(job, request=whose)
    try:
        stream = AccountedStream(await service.engine.open(job.request), job, answer, service, capture)
    except ContextOverflow as error:
        error.param = job.prompt_field
        raise
    service.shared_state.rates.charge(answer.tenant, key, sum(map(len, job.request.prompts)))
    return stream


def model_asked_for(name: str, lora: LoraRef | None) -> str:
    """An adapter is a model of its own: who may use its base may not use it."""
    return name if lora is None else lora.name


def request_priority(request: Request, key: ApiKey, answer: Reply) -> int:
    """The key's, and what the request makes of it. Raises Forbidden where it would go before what others may."""
    if request.priority > 0 and not answer.admin:
        error = Forbidden("Only the administrator's key may send a priority below 0.", param="priority")
        audit_refusal(answer, error, answer.tenant)
        raise error
    return key.priority + request.priority


class AccountedStream:
    """`close` closes the stream, and notes that nobody waited for its end where nobody did."""

    def __init__(
        self,
        stream: EventStream,
        job: GenerationTask,
        answer: Reply,
        service: GenerationService,
        capture: RequestCapture | None = None,
    ) -> None:
        self._stream, self._job, self._answer, self._service = stream, job, answer, service
        self._capture = capture
        self._reasons: list[str] = []
        self._noted = False

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        turn = self._job.turn
        async for events in self._stream:
            if turn is not None:
                for event in events:
                    turn.take(event)
            if self._capture is not None:
                self._capture.take(events)
            self._reasons += [event.reason for event in events if isinstance(event, SequenceEnded)]
            last = events[-1]
            if isinstance(last, Ended | Failed):
                self._note(last)
            yield events

    def close(self) -> None:
        self._stream.close(self._left, self._answer.ended_by())

    def _left(self, last: Ended | Failed) -> None:
        """Nobody waited for the end, which has come."""
        if not self._noted:
            gone = self._answer.scope["state"].get("gone", "The client left before the answer was complete.")
            final_status = last.final_status if isinstance(last, Failed) else None
            self._note(Failed(self._answer.ended_by() or ClientLeft(gone), last.usage, final_status))

    def _note(self, last: Ended | Failed) -> None:
        self._noted = True
        if self._capture is not None:
            self._capture.end(last)
        request, head = self._job.request, self._job.head
        key = self._service.shared_state.tenants.key_of(request.tenant)
        self._service.shared_state.rates.charge(request.tenant, key, last.usage.completion_tokens)
        self._service.shared_state.ended.add(
            request.tenant, request.id, RequestStatusBody.ended(request.id, head, last)
        )
        span = timeline_span(request, last)
        self._service.shared_state.past.add(span)
        if self._service.traces is not None:
            traced = generation_span(self._service.served.card.name, request, last, tuple(self._reasons), span)
            self._service.traces.send(traced, trace_context(self._answer.scope))
        if isinstance(last, Ended):
            # Where the answer is a stream, its head is out already and these go nowhere.
            self._answer.headers += receipt_headers(CacheReceipt.of(last.cache, None), last.timing)


def timeline_span(request: Request, last: Ended | Failed) -> RequestSpan:
    """How a request that has just ended spent its time."""
    now = time.monotonic()
    if isinstance(last, Ended):
        took, outcome = last.timing, "ended"
    else:
        final_status, age = last.final_status, now - request.arrived
        queued = age if final_status is None else final_status.queued_s
        first = age if final_status is None or final_status.first_token_s is None else final_status.first_token_s
        took, outcome = Timing(queued, first - queued, age - first), last.error.code
    return RequestSpan(
        id=request.id,
        tenant=request.tenant,
        path=request.via,
        outcome=outcome,
        ended=now,
        queued_s=took.queue,
        prompt_s=took.prefill,
        answer_s=took.decode,
        prompt_tokens=last.usage.prompt_tokens,
        cached_tokens=last.usage.cached_tokens,
        completion_tokens=last.usage.completion_tokens,
    )


E = TypeVar("E")
CLIENT_LEFT: Final = (asyncio.CancelledError, ClientGone, Cancelled)
"""What ends a request that nobody waits for any more."""


class TaskAccount:
    """Of a request to a model that does not generate, for as long as its engine computes. `operation` is what
    OpenTelemetry's conventions call it."""

    def __init__(self, service: ModelService, answer: Reply, operation: str) -> None:
        self._service, self._answer, self._operation = service, answer, operation
        self._began = time.monotonic()
        self._last: PoolingOutput | TranscriptionEnded | SpeechEnded | None = None

    def __enter__(self) -> Self:
        return self

    def computed(self, last: PoolingOutput | TranscriptionEnded | SpeechEnded) -> None:
        """It came to its end."""
        self._last = last

    async def watched(self, events: AsyncIterable[E]) -> AsyncIterator[E]:
        """The same events, the last of which says how it went."""
        async for event in events:
            if isinstance(event, TranscriptionEnded | SpeechEnded):
                self.computed(event)
            yield event

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds, last = time.monotonic() - self._began, self._last
        metrics = self._service.task_metrics
        metrics.request_s.add(seconds)
        if last is not None:
            metrics.queue_s.add(last.queue_s)
            metrics.inference_s.add(last.compute_s)
        if isinstance(last, PoolingOutput):
            metrics.read_tokens += last.tokens
        if isinstance(last, TranscriptionEnded):
            metrics.written_tokens += last.tokens
        ending = "stop" if error is None else "abort" if isinstance(error, CLIENT_LEFT) else "error"
        metrics.endings[ending] += 1
        if self._service.traces is not None:
            fault = None if error is None else error.code if isinstance(error, IngotError) else ending
            span = task_model_span(self._service.served.card.name, self._operation, self._answer, last, seconds, fault)
            self._service.traces.send(span, trace_context(self._answer.scope))
