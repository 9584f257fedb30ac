"""The endpoints that hear: read a form, open a transcript, tell its segments. Leaving ends the work."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.engine.speech_request import Segment, Transcribed
from ingot.http.allowed import refuse_unless_allowed
from ingot.http.body import FORM, Body
from ingot.http.edge import ClientGone, answer_of, as_ingot_error
from ingot.http.multipart import read_form
from ingot.http.request_lifetime import Exchange, beside
from ingot.http.side_request import SideRequest
from ingot.http.side_service import SideService
from ingot.http.streaming import HeldResponse, StreamedResponse
from ingot.http.streaming_sse import BARE_EVENTS
from ingot.protocol.errors import ErrorBody
from ingot.protocol.openai.transcription_answers import TranscriptDelta, TranscriptView
from ingot.protocol.openai.transcriptions import TranscriptionTask
from ingot.protocol.side_served import SideServed

ReadForm = Callable[[Mapping[str, Any], SideServed, str], TranscriptionTask]


class TranscriptionEndpoint:
    """One ASGI endpoint. `read` is the protocol's half: it makes a form into a job."""

    def __init__(self, service: SideService, read: ReadForm) -> None:
        self.service, self.read = service, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.service.bodies.reading(scope, receive, FORM) as body:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
        answer, out = answer_of(scope), StreamedResponse(send, BARE_EVENTS, self.service.settings)
        held = HeldResponse(answer, send, self.service.settings)
        served = self.service.served_to(answer.tenant)

        async def work() -> None:
            job = await self._read(body, scope, served)
            hearing = served.hearing
            assert hearing is not None, "reading refuses what there is no model for"
            refuse_unless_allowed(hearing.name, self.service.tenants.key_of(answer.tenant), answer)
            with SideRequest(self.service, answer, hearing.name, "transcription") as request:
                stream = self.service.engine.transcribe(job.request)
                events = request.watched(stream)
                try:
                    if job.view.streamed:
                        await tell(events, job.view, out)
                    else:
                        # Subtitles and plain text have no place for white space that means nothing.
                        async with held.waiting() if job.view.is_json else nullcontext():
                            told, media_type = await gathered(events, job.view)
                        await Response(told, media_type=media_type)(scope, receive, held.send)
                finally:
                    stream.close()

        try:
            await self.service.live.run(Exchange(receive, self.service.settings.request_timeout_s), work)
        except ClientGone:
            raise
        except Exception as error:  # an answer that has begun ends in words, whatever broke it
            if held.begun:
                await held.fail(as_ingot_error(error, answer.id))
                return
            if not out.started:
                raise
            await out.end(out.framing.framed([ErrorBody.of(as_ingot_error(error, answer.id))]))

    async def _read(self, body: Body, scope: Scope, served: SideServed) -> TranscriptionTask:
        answer, content_type = answer_of(scope), Headers(scope=scope).get("content-type", "")
        raw = body.raw
        # The sound is held until it is heard, and so its bytes count until then.
        body.let_go(kept=True)
        return await self.service.prepare_long(
            lambda: self.read(read_form(raw, content_type), served, answer.id), answer.tenant
        )


async def gathered(stream: AsyncIterable[Segment | Transcribed], view: TranscriptView) -> tuple[bytes, str]:
    segments: list[Segment] = []
    async for event in stream:
        if isinstance(event, Transcribed):
            return view.told(segments, event)
        segments.append(event)
    raise AssertionError("a transcript ends in an event, or raises")


async def tell(stream: AsyncIterable[Segment | Transcribed], view: TranscriptView, out: StreamedResponse) -> None:
    framed, segments = out.framing.framed, list[Segment]()
    await out.start()
    async with beside(out.keep_alive(lambda: [TranscriptDelta(delta="")])):
        async for event in stream:
            if isinstance(event, Transcribed):
                await out.end(framed([view.done(segments, event)]) + out.framing.done)
                return
            await out.write(framed([view.delta(event, first=not segments)]))
            segments.append(event)
