"""The endpoints that generate: read a body, open a stream, tell its events, close it whatever happens; and those of
pooling models, which wait for vectors or scores; and those that only read a body and answer, without the engine."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio.to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.engine.request import Ended, Event, Failed
from ingot.errors import Unavailable
from ingot.http.accounting import TaskAccount, open_stream
from ingot.http.body import FORM_TYPE, JSON_TYPE, RequestBody
from ingot.http.capture import wants_capture
from ingot.http.edge import JsonResponse, reply_of
from ingot.http.request_lifetime import RequestLifetime, background_task
from ingot.http.service import GenerationService, ModelService
from ingot.http.streaming import StreamedResponse, WholeResponse, framing_of, reporting_errors
from ingot.http.tenants import check_model_allowed
from ingot.protocol.chat.answers import GenerationTask, StreamedAnswer, WholeAnswer
from ingot.protocol.operations import Operation, load
from ingot.protocol.pooling import EncodingTask
from ingot.protocol.served import ServedModel, ServedTaskModel

if TYPE_CHECKING:
    from ingot.engine.engine import PoolingEngine


# A body that needs no engine is answered at once.
ReadGenerationBody = Callable[[Any, ServedModel, str], GenerationTask | Struct]


S = TypeVar("S", bound=ModelService)
R = TypeVar("R")


class BodyEndpoint(Generic[S, R]):
    """One ASGI endpoint of a model. The operation's reader is the protocol's half: it makes a body into a job."""

    def __init__(self, service: S, operation: Operation) -> None:
        assert operation.reader is not None
        self.service, self.operation = service, operation
        self.read: R = load(operation.reader)
        self._media_type = FORM_TYPE if operation.takes == "form" else JSON_TYPE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.service.shared_state.bodies.reading(scope, receive, self._media_type) as body:
            await self.answer(body, scope, receive, send)

    async def answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class GenerationEndpoint(BodyEndpoint[GenerationService, ReadGenerationBody]):
    async def answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        noted = reply_of(scope)
        request_id = noted.id
        out = StreamedResponse(send, framing_of(self.operation), self.service.shared_state.settings)
        whole = WholeResponse(noted, send, self.service.shared_state.settings)
        if wants_capture(self.service.captures, scope):
            noted.body = body.raw
        telling: StreamedAnswer | None = None

        async def answer() -> None:
            nonlocal telling
            served = self.service.served_for(noted.tenant)
            job = await self.service.read(body.raw, lambda value: self.read(value, served, request_id), noted.tenant)
            body.release(kept=isinstance(job, GenerationTask) and bool(job.request.media))
            if isinstance(job, Struct):
                await JsonResponse(job)(scope, receive, send)
                return
            stream = await open_stream(job, noted, self.service)
            try:
                if isinstance(job.view, StreamedAnswer):
                    telling = job.view
                    await stream_answer(stream, telling, out)
                else:
                    async with whole.waiting():
                        content = await gather_answer(stream, job.view)
                    await JsonResponse(content)(scope, receive, whole.send)
            finally:
                stream.close()

        exchange = RequestLifetime(receive, self.service.shared_state.settings.request_timeout_s, noted)
        async with reporting_errors(noted, whole, out, lambda error: telling.failed(error) if telling else ()):
            await self.service.shared_state.live.run(exchange, answer)


async def gather_answer(stream: AsyncIterable[list[Event]], view: WholeAnswer) -> Struct | dict[str, Any]:
    last: Event | None = None
    async for events in stream:
        for last in events:
            if isinstance(last, Failed):
                raise last.error
            view.take(last)
    if not isinstance(last, Ended):
        raise engine_stopped_error()
    return view.body()


async def stream_answer(stream: AsyncIterable[list[Event]], view: StreamedAnswer, out: StreamedResponse) -> None:
    """One write a batch, so that a step of many sequences costs one."""
    framed = out.framing.framed
    await out.start()
    await out.write(framed(view.opening()))
    async with background_task(out.keep_alive(view.empty)):
        async for events in stream:
            last = events[-1]
            complete = events[:-1] if isinstance(last, Failed) else events
            frames = framed(chunk for event in complete for chunk in view.chunks(event))
            if isinstance(last, Ended):
                await out.end(frames + out.framing.done)
                return
            await out.write(frames)
            if isinstance(last, Failed):
                raise last.error
    raise engine_stopped_error()


def engine_stopped_error() -> Unavailable:
    return Unavailable("The engine stopped before the answer was complete.")


def reading_endpoint(service: ModelService, translate: Callable[[Any, Any], Any]) -> Callable[[Request], Any]:
    """An endpoint whose answer is `translate` of the body and of what the service serves."""

    async def endpoint(request: Request) -> Response:
        tenant = reply_of(request.scope).tenant
        served = service.served_for(tenant)

        async def work() -> Any:
            return await service.read(body.raw, lambda value: translate(value, served), tenant)

        async with service.shared_state.bodies.reading(request.scope, request.receive) as body:
            return JsonResponse(await service.shared_state.attended(request.receive, work))

    return endpoint


ReadEncodingBody = Callable[[Any, ServedTaskModel, str], EncodingTask]


class EncodingEndpoint(BodyEndpoint[ModelService, ReadEncodingBody]):
    async def answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        answer = reply_of(scope)
        served = self.service.served_for(answer.tenant)
        whole = WholeResponse(answer, send, self.service.shared_state.settings)
        captured = body.raw if wants_capture(self.service.captures, scope) else b""

        async def work() -> None:
            task = await self.service.read(body.raw, lambda value: self.read(value, served, answer.id), answer.tenant)
            body.release()
            key, tokens = self.service.shared_state.tenants.key_of(answer.tenant), task.request.tokens
            card = served.card
            check_model_allowed(card.name, key, answer)
            with TaskAccount(self.service, answer, self.operation.span) as request:
                async with whole.waiting():
                    encoded = await cast("PoolingEngine", self.service.engine).encode(task.request)
                request.computed(encoded)
            if self.service.captures is not None and captured:
                self.service.captures.encoded(captured, scope["path"], task.request, card, encoded)
            self.service.shared_state.rates.charge(answer.tenant, key, tokens)
            # A thousand vectors are megabytes of JSON, which would hold up every stream.
            content = await anyio.to_thread.run_sync(task.make_body, encoded)
            await Response(content, media_type="application/json")(scope, receive, whole.send)

        async with reporting_errors(answer, whole):
            await self.service.shared_state.live.run(
                RequestLifetime(receive, self.service.shared_state.settings.request_timeout_s), work
            )
