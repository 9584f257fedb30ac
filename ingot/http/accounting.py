"""A request's stream of events, watched for its end, so that every request leaves its receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ingot.config import ApiKey
from ingot.engine.request import Ended, Event, Failed
from ingot.errors import ClientLeft, ContextOverflow, Forbidden
from ingot.http.audit import refused
from ingot.http.capture import Capture, seeded
from ingot.http.edge import Reply
from ingot.http.service import Service
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.chat.receipts import CacheReceipt, headers
from ingot.protocol.ours.requests import RequestBody

if TYPE_CHECKING:
    from ingot.engine.engine import Stream


async def opened(job: GenerationTask, answer: Reply, service: Service) -> CountedStream:
    """What the engine makes of a job. Raises what it refuses it with, in the words of the job's protocol."""
    # Whose request it is, and what that may ask for, is the edge's to say: no protocol can forget it.
    key = service.tenants.key_of(answer.tenant)
    refuse_unless_allowed(service.served.card.name, key, answer)
    whose = replace(job.request, tenant=answer.tenant, via=answer.scope["path"], priority=key.priority)
    capture = None
    if service.captures is not None and answer.body:
        whose = seeded(whose)
        capture = service.captures.begin(answer.body, whose)
        answer.body = b""  # of several rounds, the first is what the body asks for
    job = replace(job, request=whose)
    try:
        stream = CountedStream(await service.engine.open(job.request), job, answer, service, capture)
    except ContextOverflow as error:
        error.param = job.prompt_field
        raise
    service.rates.charge(answer.tenant, key, sum(map(len, job.request.prompts)))
    return stream


def refuse_unless_allowed(model: str, key: ApiKey, answer: Reply) -> None:
    """Raises Forbidden where a key is for other models."""
    if key.models and not any(fnmatchcase(model, pattern) for pattern in key.models):
        error = Forbidden(f"This key is not for {model}, but for {', '.join(key.models)}.", param="model")
        refused(answer, error, answer.tenant)
        raise error


class CountedStream:
    """`close` closes the stream, and notes that nobody waited for its end where nobody did."""

    def __init__(
        self, stream: Stream, job: GenerationTask, answer: Reply, service: Service, capture: Capture | None = None
    ) -> None:
        self._stream, self._job, self._answer, self._service = stream, job, answer, service
        self._capture = capture
        self._noted = False

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        turn = self._job.turn
        async for events in self._stream:
            if turn is not None:
                for event in events:
                    turn.take(event)
            if self._capture is not None:
                self._capture.take(events)
            last = events[-1]
            if isinstance(last, Ended | Failed):
                self._note(last)
            yield events

    def close(self) -> None:
        self._stream.close(self._left)

    def _left(self, last: Ended | Failed) -> None:
        """Nobody waited for the end, which has come."""
        if not self._noted:
            gone = self._answer.scope["state"].get("gone", "The client left before the answer was complete.")
            stood = last.stood if isinstance(last, Failed) else None
            self._note(Failed(ClientLeft(gone), last.usage, stood))

    def _note(self, last: Ended | Failed) -> None:
        self._noted = True
        if self._capture is not None:
            self._capture.end(last)
        request, head = self._job.request, self._job.head
        key = self._service.tenants.key_of(request.tenant)
        self._service.rates.charge(request.tenant, key, last.usage.completion_tokens)
        self._service.ended.add(request.tenant, request.id, RequestBody.ended(request.id, head, last))
        if isinstance(last, Ended):
            # Where the answer is a stream, its head is out already and these go nowhere.
            self._answer.headers += headers(CacheReceipt.of(last.cache, None), last.timing)
