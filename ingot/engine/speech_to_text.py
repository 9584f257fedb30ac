"""A whole sound, written down window by window. Where one ends depends on the last time that was written in it.

Pure Python over the `Hears` protocol: no mlx, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from ingot.engine.hearing.frames import WINDOW, Frames
from ingot.engine.hearing.words import with_words
from ingot.engine.speech_request import HeardToken, Segment, TranscriptionRequest
from ingot.engine.whisper_decoding import Hears, WindowWriter, Written
from ingot.media.mel import FRAMES_A_SECOND, Floats, normalized
from ingot.text.tokenizer.whisper import SECONDS_A_STEP, WhisperVocabulary

T = TypeVar("T")
FRAMES_A_STEP = round(SECONDS_A_STEP * FRAMES_A_SECOND)
TOO_WARM = 0.5
"""What was written at a higher temperature is not told to the windows after it."""
QUIET = -6.5
"""A window in which no band is ever stronger than this power of ten is silence: some 70 dB below the loudest."""

Progress: TypeAlias = "tuple[Segment, ...] | None"
"""After a part of the work: the segments that it ended. None: there is no sound yet to go on with."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of a window, from its first time to its last, in seconds from the window's beginning."""

    start: float
    end: float
    tokens: Sequence[int]
    logprobs: Sequence[float]


class Transcript:
    """One sound's. `work` is run to its end, or closed; the other fields grow meanwhile."""

    def __init__(
        self,
        request: TranscriptionRequest,
        frames: Frames,
        model: Hears,
        vocabulary: WhisperVocabulary,
        writer: WindowWriter,
    ) -> None:
        self.request, self.frames = request, frames
        self._model, self._vocabulary, self._writer = model, vocabulary, writer
        self._before = vocabulary.encode(f" {request.prompt.strip()}") if request.prompt.strip() else []
        self.language = request.language if vocabulary.multilingual else "en"
        self.segments = self.tokens = self.seek = 0

    def work(self) -> Generator[Progress, None, None]:
        """Raises what is wrong with the sound."""
        while True:
            while not self.frames.ready(self.seek):
                yield None
            frames = self.frames.window()
            if not len(frames):
                return
            if frames.max() < QUIET:
                self.seek += len(frames)
                yield ()
                continue
            yield from self._window(frames)

    def _window(self, frames: Floats) -> Generator[Progress, None, None]:
        heard = yield from _quietly(self._model.listen(_padded(normalized(frames))))
        writing = self._model.write(heard)
        if self.language is None:
            self.language = self._writer.language(writing)
            yield ()
        opening = self._vocabulary.opening(self.language, self.request.task)
        written = yield from _quietly(self._writer.write(writing, self._before, opening, self.request.temperature))
        seek = self.seek
        if written.silent:
            self.seek += len(frames)
            yield ()
            return
        spans, used = self._spans(written, len(frames))
        self.seek += used
        segments = tuple(self._segments(spans, written, seek))
        if self.request.words and segments:
            timed = with_words(segments, writing, opening, self._vocabulary, self.language, len(frames))
            segments = yield from _quietly(timed)
        self.segments += len(segments)
        self.tokens += len(written.tokens)
        self._before = [] if written.temperature > TOO_WARM else self._before + [t for s in segments for t in s.tokens]
        yield segments

    def _spans(self, written: Written, frames: int) -> tuple[list[_Span], int]:
        """The parts of a window that have times, and how many frames they cover: what is cut off at the window's end
        is heard again with the next."""
        first, tokens = self._vocabulary.first_time, written.tokens
        times = [token >= first for token in tokens]
        whole = times[-2:] == [False, True]  # nothing follows the last time
        cuts = [at for at in range(1, len(tokens)) if times[at - 1] and times[at]]
        if not cuts:
            said = [token for token in tokens if token >= first]
            last = (said[-1] - first) * SECONDS_A_STEP if said and said[-1] != first else frames / FRAMES_A_SECOND
            return [_Span(0.0, last, tokens, written.logprobs)], frames
        if whole:
            cuts.append(len(tokens))
        spans = []
        for begin, end in zip([0, *cuts], cuts, strict=False):
            start, stop = (tokens[at] - first for at in (begin, end - 1))
            spans.append(
                _Span(start * SECONDS_A_STEP, stop * SECONDS_A_STEP, tokens[begin:end], written.logprobs[begin:end])
            )
        return spans, frames if whole else (tokens[cuts[-1] - 1] - first) * FRAMES_A_STEP

    def _segments(self, spans: Sequence[_Span], written: Written, seek: int) -> Iterator[Segment]:
        """Spans in which something is said."""
        offset, id = seek / FRAMES_A_SECOND, self.segments
        for span in spans:
            text = self._vocabulary.decode(span.tokens)
            if span.start >= span.end or not text.strip():
                continue
            heard = zip(span.tokens, span.logprobs, strict=True)
            yield Segment(
                id,
                seek,
                round(offset + span.start, 2),
                round(offset + span.end, 2),
                text,
                tuple(span.tokens),
                written.temperature,
                written.avg_logprob,
                written.compression_ratio,
                written.no_speech_prob,
                tuple(HeardToken(self._vocabulary.bytes_of(t), log) for t, log in heard if t < self._vocabulary.end),
            )
            id += 1


def _quietly(work: Generator[None, None, T]) -> Generator[Progress, None, T]:
    """The same work, whose parts end no segment."""
    while True:
        try:
            next(work)
        except StopIteration as ended:
            value: T = ended.value
            return value
        yield ()


def _padded(frames: Floats) -> Floats:
    return np.pad(frames, ((0, WINDOW - len(frames)), (0, 0)))
