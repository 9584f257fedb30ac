"""Speech-to-text as a workload of the engine's loop: audio is transcribed window by window; a turn is a window.

Where a window ends depends on the last timestamp that was written in it. Mel frames are read ahead in a thread,
and forgotten once they are transcribed. Pure Python over the `SpeechToTextModel` protocol: no mlx, tested without
it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from ingot.engine.loop import PostMessage
from ingot.engine.speech_request import (
    Segment,
    SpeechToTextCard,
    TranscribedToken,
    TranscriptEvent,
    TranscriptionEnded,
    TranscriptionRequest,
)
from ingot.engine.streams import PieceStream
from ingot.engine.time_slicing import TimeSlicedJob, TimeSlicedJobs
from ingot.engine.whisper_decoding import DecodedWindow, SpeechToTextModel, WindowDecoder, add_word_times
from ingot.errors import BadMedia, IngotError
from ingot.media import worker
from ingot.media.audio import FRAMES_A_SECOND, MEL_HOP, AudioFile, FloatArray, MelFrames, normalize_mels
from ingot.text.tokenizer.whisper import SECONDS_PER_TIMESTAMP, WhisperVocabulary


class TranscriptStream(PieceStream[Segment, TranscriptionEnded]):
    piece = Segment


log = logging.getLogger("ingot.engine")

WINDOW_FRAMES = 30 * FRAMES_A_SECOND
FRAMES_AHEAD = WINDOW_FRAMES
"""Frames read beyond the current window, so that the next one need not be waited for."""


class MelFrameReader:
    """Belongs to the engine thread, but for what reads in a thread of `executor`; `post` brings back what it found."""

    def __init__(
        self, audio: AudioFile, bands: int, executor: Executor, post: PostMessage, tenant: str = "", request: str = ""
    ) -> None:
        self._pieces = read_mel_frames(audio, bands)
        self._left = threading.Event()
        self._client = worker.MediaClient(tenant, lambda: not self._left.is_set(), request)
        self._lock = threading.Lock()  # whoever reads, or ends reading, has it
        self._executor, self._post = executor, post
        self._frames = np.zeros((0, bands), np.float32)
        self._first = 0  # the number of the first of them
        self._reading = False
        self.ended = False
        self.failure: IngotError | None = None
        self._read_ahead()

    @property
    def known(self) -> int:
        """Frames so far; all of them, where `ended`."""
        return self._first + len(self._frames)

    def ready(self, seek: int) -> bool:
        """Whether a window that begins at `seek` can be transcribed now. Raises what is wrong with the audio."""
        if self.failure is not None:
            raise self.failure
        self._frames, self._first = self._frames[max(0, seek - self._first) :], max(seek, self._first)
        if not self.ended and not self._reading and len(self._frames) < WINDOW_FRAMES + FRAMES_AHEAD:
            self._read_ahead()
        return self.ended or len(self._frames) >= WINDOW_FRAMES

    def window(self) -> FloatArray:
        """The frames from the last `seek` on, fewer at the end."""
        return self._frames[:WINDOW_FRAMES]

    def _read_ahead(self) -> None:
        self._reading = True
        self._executor.submit(self._read).add_done_callback(self._frames_read)

    def _read(self) -> FloatArray | None:
        with self._lock, worker.working_for(self._client):
            return next(self._pieces, None)

    def close(self) -> None:
        """Nobody waits for the transcript any more: stop decoding."""
        self._left.set()
        with contextlib.suppress(RuntimeError):  # no threads are left, and no workers
            self._executor.submit(self._stop)

    def _stop(self) -> None:
        with self._lock:
            self._pieces.close()

    def _frames_read(self, read: Future[FloatArray | None]) -> None:
        if not read.cancelled():
            self._post(lambda: self._append(read))

    def _append(self, read: Future[FloatArray | None]) -> None:
        self._reading = False
        error = read.exception()
        if isinstance(error, IngotError):
            self.failure = error
            return
        if error is not None:
            log.error("audio could not be decoded", exc_info=error)
            self.failure = BadMedia("the audio cannot be decoded.")
            return
        piece = read.result()
        if piece is None:
            self.ended = True
        else:
            self._frames = np.concatenate([self._frames, piece])


def read_mel_frames(audio: AudioFile, bands: int) -> Generator[FloatArray, None, None]:
    """All frames of an audio file, about a window at a time."""
    mel, gathered = MelFrames(bands), 0
    samples_read: list[FloatArray] = []
    for samples in audio.samples():
        samples_read.append(samples)
        gathered += len(samples)
        if gathered >= WINDOW_FRAMES * MEL_HOP:
            yield mel.push(np.concatenate(samples_read))
            samples_read, gathered = [], 0
    samples_read.append(np.zeros(0, np.float32))
    yield np.concatenate([mel.push(np.concatenate(samples_read)), mel.end()])


T = TypeVar("T")
FRAMES_A_STEP = round(SECONDS_PER_TIMESTAMP * FRAMES_A_SECOND)
MOST_CARRIED_TEMPERATURE = 0.5
"""Text decoded at a higher temperature is no prompt for the windows after it."""
SILENCE_LEVEL = -6.5
"""A window in which no band is ever stronger than this power of ten is silence: some 70 dB below the loudest."""

TranscriptionProgress: TypeAlias = "tuple[Segment, ...] | None"
"""After a part of the work: the segments that it ended. None: there is no audio yet to go on with."""


@dataclass(frozen=True, slots=True)
class _TimedTokens:
    """Tokens of a window, from its first time to its last, in seconds from the window's beginning."""

    start: float
    end: float
    tokens: Sequence[int]
    logprobs: Sequence[float]


class TranscriptionRun:
    """Of one audio file. `work` is run to its end, or closed; the other fields grow meanwhile."""

    def __init__(
        self,
        request: TranscriptionRequest,
        frames: MelFrameReader,
        model: SpeechToTextModel,
        vocabulary: WhisperVocabulary,
        writer: WindowDecoder,
    ) -> None:
        self.request, self.frames = request, frames
        self._model, self._vocabulary, self._writer = model, vocabulary, writer
        self._prompt = vocabulary.encode(f" {request.prompt.strip()}") if request.prompt.strip() else []
        self.language = request.language if vocabulary.multilingual else "en"
        self.segments = self.tokens = self.seek = 0

    def work(self) -> Generator[TranscriptionProgress, None, None]:
        """Raises what is wrong with the audio."""
        while True:
            while not self.frames.ready(self.seek):
                yield None
            frames = self.frames.window()
            if not len(frames):
                return
            if frames.max() < SILENCE_LEVEL:
                self.seek += len(frames)
                yield ()
                continue
            yield from self._window(frames)

    def _window(self, frames: FloatArray) -> Generator[TranscriptionProgress, None, None]:
        encoded = yield from _without_segments(self._model.encode(_pad_window(normalize_mels(frames))))
        decoder_state = self._model.write(encoded)
        if self.language is None:
            self.language = self._writer.language(decoder_state)
            yield ()
        opening = self._vocabulary.opening(self.language, self.request.task)
        decoded = yield from _without_segments(
            self._writer.write(decoder_state, self._prompt, opening, self.request.temperature)
        )
        seek = self.seek
        if decoded.silent:
            self.seek += len(frames)
            yield ()
            return
        spans, used = self._spans(decoded, len(frames))
        self.seek += used
        segments = tuple(self._segments(spans, decoded, seek))
        if self.request.words and segments:
            timed = add_word_times(segments, decoder_state, opening, self._vocabulary, self.language, len(frames))
            segments = yield from _without_segments(timed)
        self.segments += len(segments)
        self.tokens += len(decoded.tokens)
        self._prompt = (
            []
            if decoded.temperature > MOST_CARRIED_TEMPERATURE
            else self._prompt + [t for s in segments for t in s.tokens]
        )
        yield segments

    def _spans(self, decoded: DecodedWindow, frames: int) -> tuple[list[_TimedTokens], int]:
        """The parts of a window that have times, and how many frames they cover: what is cut off at the window's end
        is transcribed again with the next."""
        first, tokens = self._vocabulary.first_time, decoded.tokens
        times = [token >= first for token in tokens]
        whole = times[-2:] == [False, True]  # nothing follows the last time
        cuts = [at for at in range(1, len(tokens)) if times[at - 1] and times[at]]
        if not cuts:
            timestamps = [token for token in tokens if token >= first]
            last = (
                (timestamps[-1] - first) * SECONDS_PER_TIMESTAMP
                if timestamps and timestamps[-1] != first
                else frames / FRAMES_A_SECOND
            )
            return [_TimedTokens(0.0, last, tokens, decoded.logprobs)], frames
        if whole:
            cuts.append(len(tokens))
        spans = []
        for begin, end in zip([0, *cuts], cuts, strict=False):
            start, stop = (tokens[at] - first for at in (begin, end - 1))
            spans.append(
                _TimedTokens(
                    start * SECONDS_PER_TIMESTAMP,
                    stop * SECONDS_PER_TIMESTAMP,
                    tokens[begin:end],
                    decoded.logprobs[begin:end],
                )
            )
        return spans, frames if whole else (tokens[cuts[-1] - 1] - first) * FRAMES_A_STEP

    def _segments(self, spans: Sequence[_TimedTokens], decoded: DecodedWindow, seek: int) -> Iterator[Segment]:
        """Of the spans that have text."""
        offset, id = seek / FRAMES_A_SECOND, self.segments
        for span in spans:
            text = self._vocabulary.decode(span.tokens)
            if span.start >= span.end or not text.strip():
                continue
            pairs = zip(span.tokens, span.logprobs, strict=True)
            yield Segment(
                id,
                seek,
                round(offset + span.start, 2),
                round(offset + span.end, 2),
                text,
                tuple(span.tokens),
                decoded.temperature,
                decoded.avg_logprob,
                decoded.compression_ratio,
                decoded.no_speech_prob,
                tuple(
                    TranscribedToken(self._vocabulary.bytes_of(t), log) for t, log in pairs if t < self._vocabulary.end
                ),
            )
            id += 1


def _without_segments(work: Generator[None, None, T]) -> Generator[TranscriptionProgress, None, T]:
    """The same work, whose parts end no segment."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            value: T = ended.value
            return value
        yield ()


def _pad_window(frames: FloatArray) -> FloatArray:
    return np.pad(frames, ((0, WINDOW_FRAMES - len(frames)), (0, 0)))


@dataclass(frozen=True, slots=True)
class ServedSpeechToText:
    """A loaded speech-to-text model: its card, and what it writes."""

    card: SpeechToTextCard
    bands: int  # of frequencies, in a mel frame
    vocabulary: WhisperVocabulary
    model: SpeechToTextModel


class TranscriptionWorkload(TimeSlicedJobs[TranscriptionRequest, TranscriptionRun, TranscriptEvent, TranscriptStream]):
    """The transcripts under way."""

    name, items = "speech-to-text", "audio files"
    stream = TranscriptStream
    _served: ServedSpeechToText

    def __init__(
        self,
        served: ServedSpeechToText,
        post: PostMessage,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
        readers: Executor | None = None,
    ) -> None:
        """`readers` wait for audio to be decoded, outside the engine's thread: one for each that may be under way,
        so that one that runs does not wait for those that wait for a worker."""
        super().__init__(served, post, max_queue, target_ms, clock)
        self._decoder = WindowDecoder(served.model, served.vocabulary)
        self._readers = readers or ThreadPoolExecutor(max_queue + 2, thread_name_prefix="ingot-audio")

    def _start_task(self, request: TranscriptionRequest, wake: Callable[[], None]) -> TranscriptionRun:
        def post(letter: Callable[[], None]) -> None:
            def woken() -> None:
                letter()
                wake()

            self._post(woken)

        served = self._served
        frames = MelFrameReader(request.audio, served.bands, self._readers, post, request.tenant, request.id)
        return TranscriptionRun(request, frames, served.model, served.vocabulary, self._decoder)

    def _ended(
        self,
        job: TimeSlicedJob[TranscriptionRequest, TranscriptionRun, TranscriptEvent],
        queue_s: float,
        compute_s: float,
    ) -> TranscriptionEnded:
        transcript = job.task_run
        assert transcript is not None, "what ends has begun"
        return TranscriptionEnded(
            transcript.language or "en",
            job.request.audio.seconds,
            transcript.tokens,
            queue_s=queue_s,
            compute_s=compute_s,
        )

    def _end(self, request_id: str, last: TranscriptEvent | IngotError) -> None:
        job = self._jobs.get(request_id)
        super()._end(request_id, last)
        if job is not None and job.task_run is not None:
            job.task_run.frames.close()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
