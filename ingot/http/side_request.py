"""A request for vectors, scores, a transcript or speech, watched for its end: its model's figures are written, and
whoever collects spans gets one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator
from types import TracebackType
from typing import Final, Self, TypeVar

from ingot.engine.encoder_request import Encoded
from ingot.engine.speaking.request import SpeechEnded
from ingot.engine.speech_request import Transcribed
from ingot.errors import Cancelled, IngotError
from ingot.http.edge import ClientGone, Reply
from ingot.http.side_service import SideService
from ingot.http.traces import carried
from ingot.http.tracing import side_span

E = TypeVar("E")
LEFT: Final = (asyncio.CancelledError, ClientGone, Cancelled)
"""What ends a request that nobody waits for any more."""


class SideRequest:
    """For as long as the engine has to do with it. `operation` is what OpenTelemetry's conventions call it."""

    def __init__(self, service: SideService, answer: Reply, model: str, operation: str) -> None:
        self._service, self._answer, self._model, self._operation = service, answer, model, operation
        self._began = time.monotonic()
        self._last: Encoded | Transcribed | SpeechEnded | None = None

    def __enter__(self) -> Self:
        return self

    def computed(self, last: Encoded | Transcribed | SpeechEnded) -> None:
        """It came to its end."""
        self._last = last

    async def watched(self, events: AsyncIterable[E]) -> AsyncIterator[E]:
        """The same events, the last of which says how it went."""
        async for event in events:
            if isinstance(event, Transcribed | SpeechEnded):
                self.computed(event)
            yield event

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took_s, last = time.monotonic() - self._began, self._last
        figures = self._service.side_figures(self._model)
        figures.request_s.add(took_s)
        if last is not None:
            figures.queue_s.add(last.queue_s)
            figures.inference_s.add(last.compute_s)
        if isinstance(last, Encoded):
            figures.read_tokens += last.tokens
        if isinstance(last, Transcribed):
            figures.written_tokens += last.tokens
        ending = "stop" if error is None else "abort" if isinstance(error, LEFT) else "error"
        figures.endings[ending] += 1
        if self._service.traces is not None:
            fault = None if error is None else error.code if isinstance(error, IngotError) else ending
            span = side_span(self._model, self._operation, self._answer, last, took_s, fault)
            self._service.traces.send(span, carried(self._answer.scope))
