"""The scripted engine with a mouth: whatever text comes, each of its pieces is some samples."""

from __future__ import annotations

import asyncio
from typing import Any

from ingot.engine.speech_request import SpeechAudio, SpeechEnded, SpeechRequest
from ingot.engine.text_to_speech import SpeechStream
from tests.http.scripted import ScriptedEngine
from tests.speaking import ScriptedMouth, offered

SAMPLES = bytes(range(256)) * 20
"""Of a piece: 2560 of them."""


class SpeakingEngine(ScriptedEngine):
    """`held` keeps speech from ending after its first piece."""

    def __init__(self, *, held: bool = False, fails: Exception | None = None, **told: Any) -> None:
        super().__init__(**told)
        self.speaking = offered(ScriptedMouth())
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
