"""The endpoints that run the engine: read a body, open a stream, tell its events, close it whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import Any

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from ingot.engine.request import Ended, Event, Failed
from ingot.errors import Unavailable
from ingot.http.accounting import opened
from ingot.http.body import Body
from ingot.http.capture import to_capture
from ingot.http.edge import ClientGone, Json, answer_of, as_ingot_error
from ingot.http.request_lifetime import Exchange, beside
from ingot.http.service import Service
from ingot.http.streaming import HeldResponse, StreamedResponse
from ingot.http.streaming_framing import Framing
from ingot.http.streaming_sse import BARE_EVENTS
from ingot.protocol.chat.answers import GenerationTask, Streamed, Whole
from ingot.protocol.served import Served

# A body that needs no engine is answered at once.
ReadBody = Callable[[Any, Served, str], GenerationTask | Struct]


class Generation:
    """One ASGI endpoint. `read` is the protocol's half: it makes a decoded body into a job."""

    def __init__(self, service: Service, read: ReadBody, framing: Framing = BARE_EVENTS) -> None:
        self.service, self.read, self.framing = service, read, framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.service.bodies.reading(scope, receive) as body:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
        noted = answer_of(scope)
        request_id = noted.id
        out = StreamedResponse(send, self.framing, self.service.settings)
        held = HeldResponse(noted, send, self.service.settings)
        if to_capture(self.service.captures, scope):
            noted.body = body.raw
        telling: Streamed | None = None

        async def answer() -> None:
            nonlocal telling
            served = self.service.served_to(noted.tenant)
            job = await self.service.read(body.raw, lambda value: self.read(value, served, request_id), noted.tenant)
            body.let_go(kept=isinstance(job, GenerationTask) and bool(job.request.media))
            if isinstance(job, Struct):
                await Json(job)(scope, receive, send)
                return
            stream = await opened(job, noted, self.service)
            try:
                if isinstance(job.view, Streamed):
                    telling = job.view
                    await tell(stream, telling, out)
                else:
                    async with held.waiting():
                        told = await gathered(stream, job.view)
                    await Json(told)(scope, receive, held.send)
            finally:
                stream.close()

        exchange = Exchange(receive, self.service.settings.request_timeout_s, noted)
        try:
            await self.service.live.run(exchange, answer)
        except ClientGone:
            raise
        except Exception as error:  # an answer that has begun ends in words, whatever broke it
            if held.begun:
                await held.fail(as_ingot_error(error, request_id))
                return
            if not out.started or telling is None:
                raise
            await out.end(self.framing.framed(telling.failed(as_ingot_error(error, request_id))))


async def gathered(stream: AsyncIterable[list[Event]], view: Whole) -> Struct | dict[str, Any]:
    last: Event | None = None
    async for events in stream:
        for last in events:
            if isinstance(last, Failed):
                raise last.error
            view.take(last)
    if not isinstance(last, Ended):
        raise cut_short()
    return view.body()


async def tell(stream: AsyncIterable[list[Event]], view: Streamed, out: StreamedResponse) -> None:
    """One write a batch, so that a step of many sequences costs one."""
    framed = out.framing.framed
    await out.start()
    await out.write(framed(view.opening()))
    async with beside(out.keep_alive(view.empty)):
        async for events in stream:
            last = events[-1]
            told = events[:-1] if isinstance(last, Failed) else events
            frames = framed(chunk for event in told for chunk in view.chunks(event))
            if isinstance(last, Ended):
                await out.end(frames + out.framing.done)
                return
            await out.write(frames)
            if isinstance(last, Failed):
                raise last.error
    raise cut_short()


def cut_short() -> Unavailable:
    return Unavailable("The engine stopped before the answer was complete.")
