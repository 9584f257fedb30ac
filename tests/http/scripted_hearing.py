"""A scripted speech-to-text engine: whatever audio comes, the transcript has the same two segments."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ingot.engine.speech_request import (
    Segment,
    TranscribedToken,
    TranscribedWord,
    TranscriptionEnded,
    TranscriptionRequest,
)
from ingot.engine.speech_to_text import TranscriptStream
from tests.hearing import card
from tests.http.scripted import ScriptedEngine, ScriptedTaskEngine

WORDS = (TranscribedWord(" Hello,", 0.0, 0.4, 0.9), TranscribedWord(" you.", 0.5, 1.0, 0.8))
SEGMENTS = (
    Segment(0, 0, 0.0, 1.0, " Hello, you.", (1, 2), 0.0, -0.2, 1.1, 0.01, (TranscribedToken(b" Hello", -0.1),), WORDS),
    Segment(
        1, 0, 61.0, 3662.5, " <Good> --> bye & é.", (3,), 0.0, -0.3, 1.0, 0.02, (TranscribedToken(b" \xc3", -0.5),)
    ),
)


class ScriptedTranscriber(ScriptedTaskEngine):
    """`held` keeps transcripts from ending."""

    def __init__(self, *, held: bool = False, fails: Exception | None = None, **changes: Any) -> None:
        super().__init__(SimpleNamespace(card=replace(card(), **changes)))
        self.heard: list[TranscriptionRequest] = []
        self.ended: list[str] = []
        self.held, self.fails = held, fails

    def transcribe(self, request: TranscriptionRequest) -> TranscriptStream:
        self.heard.append(request)
        stream = TranscriptStream(lambda: self.ended.append(request.id))
        stream.post([SEGMENTS[0]])
        if self.fails is not None:
            stream.post([self.fails])  # type: ignore[list-item]
        elif not self.held:
            asyncio.get_running_loop().call_later(
                0, stream.post, [SEGMENTS[1], TranscriptionEnded("en", 3662.504, 7, 0.25, 1.5)]
            )
        return stream


class HearingEngine(ScriptedEngine):
    """A model that generates, with a speech-to-text model alongside."""

    def __init__(self, *, held: bool = False, fails: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.transcriber = ScriptedTranscriber(held=held, fails=fails)
        self.alongside = [self.transcriber]
        self.heard, self.ended = self.transcriber.heard, self.transcriber.ended
