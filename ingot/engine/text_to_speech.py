"""Speech as a workload of the engine's loop: a turn is a piece of text.

Pure Python over the `Speaks` protocol: no mlx, tested without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingot.engine.loop import Post
from ingot.engine.piece_stream import PieceStream
from ingot.engine.speaking.request import SpeakingCard, SpeechEnded, SpeechEvent, SpeechRequest, Spoken
from ingot.engine.time_slicing import Turn, Turns
from ingot.media.mel import Floats
from ingot.text.speech.phonemizer import Pronouncer

LOUDEST = 32767


class Speaks(Protocol):
    """A model that speaks."""

    def speak(self, phonemes: str, voice: str, speed: float) -> Generator[None, None, Floats]:
        """Samples from -1 to 1. Yields between parts of bounded time."""

    def rest(self) -> None:
        """Nothing runs: give back what running took."""


@dataclass(frozen=True, slots=True)
class OfferedSpeech:
    """A model that speaks and is served: what it is, and who says how texts are pronounced."""

    card: SpeakingCard
    pronouncer: Pronouncer
    model: Speaks


class SpeechStream(PieceStream[Spoken, SpeechEnded]):
    piece = Spoken


class Speech:
    """One text on its way."""

    def __init__(self, request: SpeechRequest, model: Speaks) -> None:
        self._request, self._model = request, model
        self.tokens = self.samples = 0

    def work(self) -> Generator[Sequence[SpeechEvent] | None, None, None]:
        for piece in self._request.pieces:
            parts = self._model.speak(piece, self._request.voice, self._request.speed)
            while True:
                try:
                    next(parts)
                except StopIteration as end:
                    samples: Floats = end.value
                    break
                yield ()
            self.tokens += len(piece)
            self.samples += len(samples)
            yield [Spoken((samples * LOUDEST).astype("<i2").tobytes())]


class SpeechJobs(Turns[SpeechRequest, Speech, SpeechEvent, SpeechStream]):
    """All texts that are spoken."""

    name, things = "speech", "texts"
    stream = SpeechStream

    def __init__(
        self,
        speaking: OfferedSpeech | None,
        post: Post,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(post, max_queue, target_ms, clock)
        self._speaking = speaking

    def _begun(self, request: SpeechRequest, wake: Callable[[], None]) -> Speech:
        assert self._speaking is not None, "nobody asks where no model speaks"
        return Speech(request, self._speaking.model)

    def _ended(self, job: Turn[SpeechRequest, Speech, SpeechEvent], queue_s: float, compute_s: float) -> SpeechEnded:
        assert job.doing is not None, "what ends has begun"
        return SpeechEnded(job.doing.tokens, job.doing.samples, queue_s=queue_s, compute_s=compute_s)

    def _give_back(self) -> None:
        assert self._speaking is not None, "it was used"
        self._speaking.model.rest()
