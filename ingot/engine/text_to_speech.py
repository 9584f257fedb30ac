"""Text-to-speech as a workload of the engine's loop: a turn is a piece of text.

Pure Python over the `TextToSpeechModel` protocol: no mlx, tested without it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingot.engine.speech_request import SpeechAudio, SpeechEnded, SpeechEvent, SpeechRequest, TextToSpeechCard
from ingot.engine.streams import PieceStream
from ingot.engine.time_slicing import TimeSlicedJob, TimeSlicedJobs
from ingot.media.audio import FloatArray
from ingot.text.speech.phonemizer import Phonemizer

LARGEST_SAMPLE = 32767


class TextToSpeechModel(Protocol):
    """A text-to-speech model, as the loop sees it."""

    def speak(self, phonemes: str, voice: str, speed: float) -> Generator[None, None, FloatArray]:
        """Samples from -1 to 1. Yields between parts of bounded time."""

    def rest(self) -> None:
        """Nothing runs: give back what running took."""


@dataclass(frozen=True, slots=True)
class ServedTextToSpeech:
    """A loaded text-to-speech model: its card, and how texts become phonemes."""

    card: TextToSpeechCard
    pronouncer: Phonemizer
    model: TextToSpeechModel


class SpeechStream(PieceStream[SpeechAudio, SpeechEnded]):
    piece = SpeechAudio


class SpeechSynthesis:
    """One text under way."""

    def __init__(self, request: SpeechRequest, model: TextToSpeechModel) -> None:
        self._request, self._model = request, model
        self.tokens = self.samples = 0

    def work(self) -> Generator[Sequence[SpeechEvent] | None, None, None]:
        for piece in self._request.pieces:
            parts = self._model.speak(piece, self._request.voice, self._request.speed)
            while True:
                try:
                    next(parts)
                except StopIteration as end:
                    samples: FloatArray = end.value
                    break
                yield ()
            self.tokens += len(piece)
            self.samples += len(samples)
            yield [SpeechAudio((samples * LARGEST_SAMPLE).astype("<i2").tobytes())]


class SpeechWorkload(TimeSlicedJobs[SpeechRequest, SpeechSynthesis, SpeechEvent, SpeechStream]):
    """The texts under way."""

    name, items = "text-to-speech", "texts to speak"
    stream = SpeechStream
    _served: ServedTextToSpeech

    def _start_task(self, request: SpeechRequest, wake: Callable[[], None]) -> SpeechSynthesis:
        return SpeechSynthesis(request, self._served.model)

    def _ended(
        self, job: TimeSlicedJob[SpeechRequest, SpeechSynthesis, SpeechEvent], queue_s: float, compute_s: float
    ) -> SpeechEnded:
        assert job.task_run is not None, "what ends has begun"
        return SpeechEnded(job.task_run.tokens, job.task_run.samples, queue_s=queue_s, compute_s=compute_s)
