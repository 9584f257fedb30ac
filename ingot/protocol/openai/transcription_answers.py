"""Transcripts as OpenAI's clients read them: whole in five formats, or piece by piece as events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from ingot.engine.speech_request import HeardToken, Segment, Transcribed
from ingot.media.languages import LANGUAGES
from ingot.protocol.encoders import EncodingTiming
from ingot.protocol.openai.subtitles import srt, vtt

POSITIONS_A_SECOND = 50
"""What a model sees of a sound."""


class TranscriptReceipt(Struct, kw_only=True):
    """What the server did beyond the answer."""

    timing: EncodingTiming
    ignored: list[str] | UnsetType = UNSET


class DurationUsage(Struct):
    seconds: float
    type: Literal["duration"] = "duration"


class AudioTokens(Struct):
    audio_tokens: int
    text_tokens: int = 0


class TokenUsage(Struct, kw_only=True):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    input_token_details: AudioTokens
    output_tokens: int
    total_tokens: int


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, heard: HeardToken) -> TokenLogprob:
        return cls(heard.bytes.decode(errors="replace"), heard.logprob, list(heard.bytes))


class Transcription(Struct, kw_only=True):
    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    usage: DurationUsage
    ingot: TranscriptReceipt


class SegmentBody(Struct):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float

    @classmethod
    def of(cls, segment: Segment) -> SegmentBody:
        return cls(*(getattr(segment, name) for name in cls.__struct_fields__))


class WordBody(Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(Struct, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    segments: list[SegmentBody] | UnsetType = UNSET
    words: list[WordBody] | UnsetType = UNSET
    usage: DurationUsage
    ingot: TranscriptReceipt


class TranscriptDelta(Struct, kw_only=True):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class TranscriptDone(Struct, kw_only=True):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    usage: TokenUsage
    ingot: TranscriptReceipt


class TranscriptChunk(Struct, kw_only=True):
    """Either event, for the document: a delta has `delta`, the last one `text`."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    usage: TokenUsage | UnsetType = UNSET
    ingot: TranscriptReceipt | UnsetType = UNSET


class TranscriptView(Struct, frozen=True, kw_only=True):
    """How one request wants its transcript told."""

    format: str
    task: str
    granularities: Sequence[str] = ()
    logprobs: bool = False
    streamed: bool = False
    ignored: list[str] = field(default_factory=list)

    @property
    def is_json(self) -> bool:
        """Whether the whole answer is JSON."""
        return self.format not in ("text", "srt", "vtt")

    def told(self, segments: Sequence[Segment], ended: Transcribed) -> tuple[bytes, str]:
        """The whole answer, and its media type."""
        match self.format:
            case "text":
                return f"{whole(segments)}\n".encode(), "text/plain; charset=utf-8"
            case "srt":
                return srt(segments).encode(), "application/x-subrip; charset=utf-8"
            case "vtt":
                return vtt(segments).encode(), "text/vtt; charset=utf-8"
            case "verbose_json":
                body: Struct = self._verbose(segments, ended)
            case _:
                body = Transcription(
                    text=whole(segments),
                    logprobs=self._logprobs(segments),
                    usage=DurationUsage(round(ended.seconds, 3)),
                    ingot=self._receipt(ended),
                )
        return msgspec.json.encode(body), "application/json"

    def delta(self, segment: Segment, *, first: bool) -> TranscriptDelta:
        text = segment.text.lstrip() if first else segment.text
        return TranscriptDelta(delta=text, logprobs=self._logprobs([segment]))

    def done(self, segments: Sequence[Segment], ended: Transcribed) -> TranscriptDone:
        heard = math.ceil(POSITIONS_A_SECOND * ended.seconds)
        return TranscriptDone(
            text=whole(segments),
            logprobs=self._logprobs(segments),
            usage=TokenUsage(
                input_tokens=heard,
                input_token_details=AudioTokens(heard),
                output_tokens=ended.tokens,
                total_tokens=heard + ended.tokens,
            ),
            ingot=self._receipt(ended),
        )

    def _verbose(self, segments: Sequence[Segment], ended: Transcribed) -> VerboseTranscription:
        words = [WordBody(one.text.strip(), one.start, one.end) for segment in segments for one in segment.words]
        return VerboseTranscription(
            task=self.task,
            language=LANGUAGES.get(ended.language, ended.language),
            duration=round(ended.seconds, 3),
            text=whole(segments),
            segments=[SegmentBody.of(one) for one in segments] if "segment" in self.granularities else UNSET,
            words=words if "word" in self.granularities else UNSET,
            usage=DurationUsage(round(ended.seconds, 3)),
            ingot=self._receipt(ended),
        )

    def _logprobs(self, segments: Iterable[Segment]) -> list[TokenLogprob] | UnsetType:
        return [TokenLogprob.of(heard) for one in segments for heard in one.heard] if self.logprobs else UNSET

    def _receipt(self, ended: Transcribed) -> TranscriptReceipt:
        timing = EncodingTiming(round(ended.queue_s, 6), round(ended.compute_s, 6))
        return TranscriptReceipt(timing=timing, ignored=self.ignored or UNSET)


def whole(segments: Iterable[Segment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()
