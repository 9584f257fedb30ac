"""The endpoint that speaks: read a body, write a file or events as sound comes. Leaving ends the work."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from ingot.engine.speaking.request import SpeechEnded, Spoken
from ingot.http.allowed import refuse_unless_allowed
from ingot.http.body import Body
from ingot.http.edge import ClientGone, answer_of, as_ingot_error
from ingot.http.request_lifetime import Exchange, beside
from ingot.http.side_request import SideRequest
from ingot.http.side_service import SideService
from ingot.http.streaming import StreamedResponse
from ingot.http.streaming_framing import Framing
from ingot.http.streaming_sse import BARE_EVENTS, bare
from ingot.media.audio_encoding import MEDIA_TYPES, writer
from ingot.protocol.errors import ErrorBody
from ingot.protocol.openai.speech import SpeechDelta, SpeechDone, SpeechTask, read_speech


class SpeechEndpoint:
    """One ASGI endpoint."""

    def __init__(self, service: SideService) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.service.bodies.reading(scope, receive) as body:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
        answer, settings = answer_of(scope), self.service.settings
        served = self.service.served_to(answer.tenant)
        out = StreamedResponse(send, BARE_EVENTS, settings)

        async def work() -> None:
            job = await self.service.read(body.raw, lambda value: read_speech(value, served, answer.id), answer.tenant)
            body.let_go()
            speaking = served.speaking
            assert speaking is not None, "reading refuses what there is no model for"
            refuse_unless_allowed(speaking.card.name, self.service.tenants.key_of(answer.tenant), answer)
            with SideRequest(self.service, answer, speaking.card.name, "speech") as request:
                stream = self.service.engine.speak(job.request)
                sounds = written(request.watched(stream), job)
                try:
                    if job.events:
                        await tell(sounds, job, out)
                    else:
                        file = Framing(MEDIA_TYPES[job.format], bare)
                        await send_file(sounds, StreamedResponse(send, file, settings))
                finally:
                    stream.close()

        try:
            await self.service.live.run(Exchange(receive, settings.request_timeout_s), work)
        except ClientGone:
            raise
        except Exception as error:  # events that have begun end in words, whatever broke them
            if not out.started:
                raise
            await out.end(out.framing.framed([ErrorBody.of(as_ingot_error(error, answer.id))]))


async def written(stream: AsyncIterable[Spoken | SpeechEnded], job: SpeechTask) -> AsyncIterator[bytes | SpeechEnded]:
    """Bytes of the file as there are some, and the end."""
    file = writer(job.format, job.rate)
    async for event in stream:
        if isinstance(event, SpeechEnded):
            yield await anyio.to_thread.run_sync(file.close)
            yield event
            return
        # Codecs take milliseconds for a second of sound, which would hold up every stream.
        yield await anyio.to_thread.run_sync(file.write, event.samples)


async def send_file(sounds: AsyncIterable[bytes | SpeechEnded], out: StreamedResponse) -> None:
    """What fails before there is sound is told; a file that has begun is cut off, which is all that it can say."""
    async for sound in sounds:
        if not out.started:
            await out.start()
        if isinstance(sound, SpeechEnded):
            await out.end(b"")
        else:
            await out.write(sound)


async def tell(sounds: AsyncIterable[bytes | SpeechEnded], job: SpeechTask, out: StreamedResponse) -> None:
    framed = out.framing.framed
    await out.start()
    async with beside(out.keep_alive(list)):
        async for sound in sounds:
            if isinstance(sound, SpeechEnded):
                await out.end(framed([SpeechDone.of(sound, job.rate)]) + out.framing.done)
                return
            await out.write(framed([SpeechDelta.of(sound)]) if sound else b"")
