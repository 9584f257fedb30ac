"""The endpoints for speech: transcriptions and translations read a form and send segments of text; text-to-speech reads
a body and sends a file or events as audio comes. Leaving ends the work."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.engine.speech_request import Segment, SpeechAudio, SpeechEnded, TranscriptionEnded
from ingot.http.accounting import TaskAccount
from ingot.http.body import RequestBody, read_form
from ingot.http.edge import reply_of
from ingot.http.endpoints.generation import BodyEndpoint
from ingot.http.request_lifetime import RequestLifetime, background_task
from ingot.http.service import ModelService
from ingot.http.streaming import (
    BARE_EVENTS,
    StreamedResponse,
    StreamFraming,
    WholeResponse,
    frame_bare_event,
    reporting_errors,
)
from ingot.http.tenants import check_model_allowed
from ingot.media.audio import AUDIO_MEDIA_TYPES, audio_writer
from ingot.protocol.openai.speech import SpeechDelta, SpeechDone, SpeechTask
from ingot.protocol.openai.transcriptions import TranscriptDelta, TranscriptionTask, TranscriptView
from ingot.protocol.served import ServedTaskModel

if TYPE_CHECKING:
    from ingot.engine.engine import SpeechToTextEngine, TextToSpeechEngine

ReadTranscriptionForm = Callable[[Mapping[str, Any], ServedTaskModel, str], TranscriptionTask]


class TranscriptionEndpoint(BodyEndpoint[ModelService, ReadTranscriptionForm]):
    async def answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        answer, out = reply_of(scope), StreamedResponse(send, BARE_EVENTS, self.service.shared_state.settings)
        whole = WholeResponse(answer, send, self.service.shared_state.settings)
        served = self.service.served_for(answer.tenant)

        async def work() -> None:
            job = await self._read(body, scope, served)
            check_model_allowed(served.card.name, self.service.shared_state.tenants.key_of(answer.tenant), answer)
            with TaskAccount(self.service, answer, self.operation.span) as request:
                stream = cast("SpeechToTextEngine", self.service.engine).transcribe(job.request)
                events = request.watched(stream)
                try:
                    if job.view.streamed:
                        await stream_transcript(events, job.view, out)
                    else:
                        # Subtitles and plain text have no place for white space that means nothing.
                        async with whole.waiting() if job.view.is_json else nullcontext():
                            content, media_type = await gather_transcript(events, job.view)
                        await Response(content, media_type=media_type)(scope, receive, whole.send)
                finally:
                    stream.close()

        async with reporting_errors(answer, whole, out):
            await self.service.shared_state.live.run(
                RequestLifetime(receive, self.service.shared_state.settings.request_timeout_s), work
            )

    async def _read(self, body: RequestBody, scope: Scope, served: ServedTaskModel) -> TranscriptionTask:
        answer, content_type = reply_of(scope), Headers(scope=scope).get("content-type", "")
        raw = body.raw
        # The audio is held until it is transcribed, and its bytes count until then.
        body.release(kept=True)
        return await self.service.shared_state.prepare_slow(
            lambda: self.read(read_form(raw, content_type), served, answer.id), answer.tenant
        )


async def gather_transcript(
    stream: AsyncIterable[Segment | TranscriptionEnded], view: TranscriptView
) -> tuple[bytes, str]:
    segments: list[Segment] = []
    async for event in stream:
        if isinstance(event, TranscriptionEnded):
            return view.render(segments, event)
        segments.append(event)
    raise AssertionError("a transcript ends in an event, or raises")


async def stream_transcript(
    stream: AsyncIterable[Segment | TranscriptionEnded], view: TranscriptView, out: StreamedResponse
) -> None:
    framed, segments = out.framing.framed, list[Segment]()
    await out.start()
    async with background_task(out.keep_alive(lambda: [TranscriptDelta(delta="")])):
        async for event in stream:
            if isinstance(event, TranscriptionEnded):
                await out.end(framed([view.done(segments, event)]) + out.framing.done)
                return
            await out.write(framed([view.delta(event, first=not segments)]))
            segments.append(event)


ReadSpeech = Callable[[Any, ServedTaskModel, str], SpeechTask]


class SpeechEndpoint(BodyEndpoint[ModelService, ReadSpeech]):
    async def answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        answer, settings = reply_of(scope), self.service.shared_state.settings
        served = self.service.served_for(answer.tenant)
        out = StreamedResponse(send, BARE_EVENTS, settings)

        async def work() -> None:
            job = await self.service.read(body.raw, lambda value: self.read(value, served, answer.id), answer.tenant)
            body.release()
            check_model_allowed(served.card.name, self.service.shared_state.tenants.key_of(answer.tenant), answer)
            with TaskAccount(self.service, answer, self.operation.span) as request:
                stream = cast("TextToSpeechEngine", self.service.engine).speak(job.request)
                pieces = encode_audio(request.watched(stream), job)
                try:
                    if job.events:
                        await stream_speech_events(pieces, job, out)
                    else:
                        file = StreamFraming(AUDIO_MEDIA_TYPES[job.format], frame_bare_event)
                        await send_audio_file(pieces, StreamedResponse(send, file, settings))
                finally:
                    stream.close()

        async with reporting_errors(answer, WholeResponse(answer, send, settings), out):
            await self.service.shared_state.live.run(RequestLifetime(receive, settings.request_timeout_s), work)


async def encode_audio(
    stream: AsyncIterable[SpeechAudio | SpeechEnded], job: SpeechTask
) -> AsyncIterator[bytes | SpeechEnded]:
    """Bytes of the file as there are some, and the end."""
    file = audio_writer(job.format, job.rate)
    async for event in stream:
        if isinstance(event, SpeechEnded):
            yield await anyio.to_thread.run_sync(file.close)
            yield event
            return
        # Codecs take milliseconds for a second of audio, which would hold up every stream.
        yield await anyio.to_thread.run_sync(file.write, event.samples)


async def send_audio_file(pieces: AsyncIterable[bytes | SpeechEnded], out: StreamedResponse) -> None:
    """An error before the first audio is answered as one; after that, the file is cut off."""
    async for piece in pieces:
        if not out.started:
            await out.start()
        if isinstance(piece, SpeechEnded):
            await out.end(b"")
        else:
            await out.write(piece)


async def stream_speech_events(
    pieces: AsyncIterable[bytes | SpeechEnded], job: SpeechTask, out: StreamedResponse
) -> None:
    framed = out.framing.framed
    await out.start()
    async with background_task(out.keep_alive(list)):
        async for piece in pieces:
            if isinstance(piece, SpeechEnded):
                await out.end(framed([SpeechDone.of(piece, job.rate)]) + out.framing.done)
                return
            await out.write(framed([SpeechDelta.of(piece)]) if piece else b"")
