"""Transcription as a workload of the engine's loop: a turn is a window of sound.

Pure Python over the `Hears` protocol: no mlx, tested without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from ingot.engine.hearing.frames import Frames
from ingot.engine.hearing.stream import TranscriptStream
from ingot.engine.loop import Post
from ingot.engine.speech_request import HearingCard, Transcribed, TranscriptEvent, TranscriptionRequest
from ingot.engine.speech_to_text import Transcript
from ingot.engine.time_slicing import Turn, Turns
from ingot.engine.whisper_decoding import Hears, WindowWriter
from ingot.errors import IngotError
from ingot.text.tokenizer.whisper import WhisperVocabulary


@dataclass(frozen=True, slots=True)
class OfferedHearing:
    """A model that hears and is served: what it is, and what it writes."""

    card: HearingCard
    bands: int  # of pitches, in a frame of sound
    vocabulary: WhisperVocabulary
    model: Hears


class TranscriptJobs(Turns[TranscriptionRequest, Transcript, TranscriptEvent, TranscriptStream]):
    """All transcripts under way."""

    name, things = "transcription", "sounds"
    stream = TranscriptStream

    def __init__(
        self,
        hearing: OfferedHearing | None,
        post: Post,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
        readers: Executor | None = None,
    ) -> None:
        """`readers` wait for sounds to be unpacked, beside the engine's thread: one for each that may be under way, as
        those that are heard must not wait for those that wait for a worker."""
        super().__init__(post, max_queue, target_ms, clock)
        self._hearing = hearing
        self._writer = None if hearing is None else WindowWriter(hearing.model, hearing.vocabulary)
        self._readers = readers or ThreadPoolExecutor(max_queue + 2, thread_name_prefix="ingot-hear")

    def _begun(self, request: TranscriptionRequest, wake: Callable[[], None]) -> Transcript:
        assert self._hearing is not None and self._writer is not None, "nobody asks where no model hears"

        def post(letter: Callable[[], None]) -> None:
            def woken() -> None:
                letter()
                wake()

            self._post(woken)

        frames = Frames(request.sound, self._hearing.bands, self._readers, post, request.tenant, request.id)
        return Transcript(request, frames, self._hearing.model, self._hearing.vocabulary, self._writer)

    def _ended(
        self, job: Turn[TranscriptionRequest, Transcript, TranscriptEvent], queue_s: float, compute_s: float
    ) -> Transcribed:
        transcript = job.doing
        assert transcript is not None, "what ends has begun"
        return Transcribed(
            transcript.language or "en",
            job.request.sound.seconds,
            transcript.tokens,
            queue_s=queue_s,
            compute_s=compute_s,
        )

    def _end(self, request_id: str, last: TranscriptEvent | IngotError) -> None:
        job = self._jobs.get(request_id)
        super()._end(request_id, last)
        if job is not None and job.doing is not None:
            job.doing.frames.close()

    def _give_back(self) -> None:
        assert self._hearing is not None, "it was used"
        self._hearing.model.rest()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
