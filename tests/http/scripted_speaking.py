"""A scripted text-to-speech engine: whatever text comes, each of its pieces is some samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from ingot.engine.speech_request import SpeechAudio, SpeechEnded, SpeechRequest
from ingot.engine.text_to_speech import SpeechStream
from tests.http.scripted import ScriptedEngine, ScriptedTaskEngine
from tests.speaking import ScriptedMouth, offered

SAMPLES = bytes(range(256)) * 20
"""Of a piece: 2560 of them."""


class ScriptedSpeaker(ScriptedTaskEngine):
    """`held` keeps speech from ending after its first piece."""

    def __init__(self, *, held: bool = False, fails: Exception | None = None, **changes: Any) -> None:
        model = offered(ScriptedMouth())
        super().__init__(replace(model, card=replace(model.card, **changes)))
        self.asked: list[SpeechRequest] = []
        self.ended: list[str] = []
        self.held, self.fails = held, fails

    def speak(self, request: SpeechRequest) -> SpeechStream:
        self.asked.append(request)
        stream = SpeechStream(lambda: self.ended.append(request.id))
        if self.fails is not None:
            stream.post([self.fails])  # type: ignore[list-item]
            return stream
        stream.post([SpeechAudio(SAMPLES)])
        if not self.held:
            rest = [SpeechAudio(SAMPLES)] * (len(request.pieces) - 1)
            ended = SpeechEnded(sum(map(len, request.pieces)), 2560 * len(request.pieces), 0.25, 1.5)
            asyncio.get_running_loop().call_later(0, stream.post, [*rest, ended])
        return stream


class SpeakingEngine(ScriptedEngine):
    """A model that generates, with a text-to-speech model alongside."""

    def __init__(self, *, held: bool = False, fails: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.speaker = ScriptedSpeaker(held=held, fails=fails)
        self.alongside = [self.speaker]
        self.asked, self.ended = self.speaker.asked, self.speaker.ended
