"""A request's stream of events, watched for its end, so that every request leaves its receipt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ingot.config import ApiKey
from ingot.engine.request import Ended, Event, Failed, LoraRef, Request, SequenceEnded, Timing
from ingot.errors import ClientLeft, ContextOverflow, Forbidden
from ingot.http.allowed import refuse_unless_allowed
from ingot.http.audit import refused
from ingot.http.capture import Capture, seeded
from ingot.http.edge import Reply
from ingot.http.service import Service
from ingot.http.traces import carried
from ingot.http.tracing import generation_span
from ingot.observe.recent_requests import Span
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.chat.receipts import CacheReceipt, headers
from ingot.protocol.ours.requests import RequestBody

if TYPE_CHECKING:
    from ingot.engine.streams import Stream


async def opened(job: GenerationTask, answer: Reply, service: Service) -> CountedStream:
    """What the engine makes of a job. Raises what it refuses it with, in the words of the job's protocol."""
    # Whose request it is, and what that may ask for, is the edge's to say: no protocol can forget it.
    key = service.tenants.key_of(answer.tenant)
    refuse_unless_allowed(asked_model(service.served.card.name, job.request.lora), key, answer)
    whose = replace(
        job.request, tenant=answer.tenant, via=answer.scope["path"], priority=priority_of(job.request, key, answer)
    )
    capture = None
    if service.captures is not None and answer.body:  # which is there where it is to be captured
        whose = seeded(whose)
        capture = service.captures.begin(answer.body, whose, service.served)
        answer.body = b""  # of several rounds, the first is what the body asks for
    job = replace(job, request=whose)
    try:
        stream = CountedStream(await service.engine.open(job.request), job, answer, service, capture)
    except ContextOverflow as error:
        error.param = job.prompt_field
        raise
    service.rates.charge(answer.tenant, key, sum(map(len, job.request.prompts)))
    return stream


def asked_model(name: str, lora: LoraRef | None) -> str:
    """An adapter is a model of its own: who may use its base may not use it."""
    return name if lora is None else lora.name


def priority_of(request: Request, key: ApiKey, answer: Reply) -> int:
    """The key's, and what the request makes of it. Raises Forbidden where it would go before what others may."""
    if request.priority > 0 and not answer.admin:
        error = Forbidden("Only the administrator's key may send a priority below 0.", param="priority")
        refused(answer, error, answer.tenant)
        raise error
    return key.priority + request.priority


class CountedStream:
    """`close` closes the stream, and notes that nobody waited for its end where nobody did."""

    def __init__(
        self, stream: Stream, job: GenerationTask, answer: Reply, service: Service, capture: Capture | None = None
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
        self._stream.close(self._left, self._answer.cut_by())

    def _left(self, last: Ended | Failed) -> None:
        """Nobody waited for the end, which has come."""
        if not self._noted:
            gone = self._answer.scope["state"].get("gone", "The client left before the answer was complete.")
            stood = last.stood if isinstance(last, Failed) else None
            self._note(Failed(self._answer.cut_by() or ClientLeft(gone), last.usage, stood))

    def _note(self, last: Ended | Failed) -> None:
        self._noted = True
        if self._capture is not None:
            self._capture.end(last)
        request, head = self._job.request, self._job.head
        key = self._service.tenants.key_of(request.tenant)
        self._service.rates.charge(request.tenant, key, last.usage.completion_tokens)
        self._service.ended.add(request.tenant, request.id, RequestBody.ended(request.id, head, last))
        span = span_of(request, last)
        self._service.past.add(span)
        if self._service.traces is not None:
            told = generation_span(self._service.served.card.name, request, last, tuple(self._reasons), span)
            self._service.traces.send(told, carried(self._answer.scope))
        if isinstance(last, Ended):
            # Where the answer is a stream, its head is out already and these go nowhere.
            self._answer.headers += headers(CacheReceipt.of(last.cache, None), last.timing)


def span_of(request: Request, last: Ended | Failed) -> Span:
    """How a request that has just ended spent its time."""
    now = time.monotonic()
    if isinstance(last, Ended):
        took, outcome = last.timing, "ended"
    else:
        stood, age = last.stood, now - request.arrived
        queued = age if stood is None else stood.queued_s
        first = age if stood is None or stood.first_token_s is None else stood.first_token_s
        took, outcome = Timing(queued, first - queued, age - first), last.error.code
    return Span(
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
