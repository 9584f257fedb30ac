"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the forms as OpenAI describes them, the fields whose
values a speech-to-text model sets, and transcripts as clients read them.

A transcript is given whole in five formats (JSON, verbose JSON, text, SubRip and WebVTT subtitles), or segment by
segment as events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from ingot.engine.speech_request import Segment, SpeechTask, TranscribedToken, TranscriptionEnded, TranscriptionRequest
from ingot.errors import BadMedia, BadRequest, Unsupported
from ingot.media.audio import AudioFile
from ingot.media.languages import LANGUAGES
from ingot.protocol.pooling import ComputeTiming
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Bool, FieldKind, ListOf, Number, OneOf, Schema, Text, Timeout
from ingot.protocol.schema.model_fields import ABOUT_TTL, TaskModelField, TimeToLiveField
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.served import ServedTaskModel
from ingot.protocol.terms import DEFAULT_NAME, Terms


@dataclass(frozen=True, slots=True)
class LanguageField(FieldKind):
    """A language that the model transcribes, by its code or its English name."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        known = reading.terms.task("audio").languages
        named = {LANGUAGES[code]: code for code in known if code in LANGUAGES}
        language = value.lower() if isinstance(value, str) else value
        if isinstance(language, str) and language in named:
            return named[language]
        return OneOf(known).parse(language, path, reading)

    def schema(self, terms: Terms) -> Schema:
        languages = terms.task("audio").languages
        return OneOf(languages).schema(terms) if languages else {"type": "string"}

    def wanted(self, terms: Terms) -> str:
        return OneOf(terms.task("audio").languages).wanted(terms)


@dataclass(frozen=True, slots=True)
class AudioFileField(FieldKind):
    """A file in a form."""

    types, words = (bytes,), "a file"

    def parse(self, value: object, path: str, reading: BodyReading) -> bytes:
        if not isinstance(value, bytes):
            raise self.refuse(value, path, reading)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "format": "binary"}


TRANSCRIPT_FORMATS = OneOf(
    ("json", "text", "srt", "verbose_json", "vtt"),
    {"diarized_json": "cannot be honoured: speakers are not told apart here. Send json or verbose_json."},
)
DIARIZATION_REFUSED = "cannot be honoured: speakers are not told apart here."
TRANSCRIPT_PROMPT_CHARS = 16_384
NUMERIC_FORM_FIELDS = ("temperature", "timeout", "ttl")
FORM_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationForm:
    file: bytes = requires(AudioFileField(), "The audio: FLAC, MP3, MP4, M4A, Ogg, WAV, WebM or AAC.")
    model: str = accepts(
        TaskModelField("audio"), "The name of the speech-to-text model, or `default`.", default=DEFAULT_NAME
    )
    prompt: str = accepts(
        Text(TRANSCRIPT_PROMPT_CHARS),
        "Text before it, or names as they are spelled; its end counts most.",
        default="",
    )
    response_format: str = accepts(TRANSCRIPT_FORMATS, "What the answer is.", default="json")
    temperature: float = accepts(
        Number((0.0, 1.0)),
        "0 takes the likeliest text, and higher temperatures where that makes no sense; else it is sampled.",
        default=0.0,
    )
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionForm(TranslationForm):
    language: str | None = accepts(LanguageField(), "Its code, such as `en`; else the first window decides.")
    timestamp_granularities: tuple[str, ...] = accepts(
        ListOf(OneOf(("word", "segment")), 2, least=1),
        "Whose times are given, with `verbose_json`.",
        default=("segment",),
    )
    stream: bool = accepts(Bool(), "Send text as events, window by window.", default=False)
    include: tuple[str, ...] = accepts(
        ListOf(OneOf(("logprobs",)), 1), "`logprobs` adds the probabilities of tokens to `json`.", default=()
    )
    chunking_strategy: None = refuses("cannot be chosen: audio is read in windows of 30 seconds. Send auto.", "auto")
    known_speaker_names: None = refuses(DIARIZATION_REFUSED)
    known_speaker_references: None = refuses(DIARIZATION_REFUSED)


TRANSCRIPTION_FORM = ObjectOf(TranscriptionForm)
TRANSLATION_FORM = ObjectOf(TranslationForm)


@dataclass(frozen=True, slots=True)
class TranscriptionTask:
    """A form, read: what the engine is to transcribe, and how it is sent."""

    request: TranscriptionRequest
    view: TranscriptView


def read_transcription(form: Mapping[str, Any], served: ServedTaskModel, request_id: str) -> TranscriptionTask:
    """The job that a form asks for. Reads the whole file, so it may take a while: not for an event loop."""
    reading = served.reading()
    read: TranscriptionForm = TRANSCRIPTION_FORM.parse(type_form_fields(form), "", reading)
    if "timestamp_granularities" in form and read.response_format != "verbose_json":
        raise BadRequest(
            "timestamp_granularities are for response_format verbose_json.", param="timestamp_granularities"
        )
    if read.include and read.response_format != "json":
        raise BadRequest("include is about response_format json: other formats have no logprobs.", param="include")
    if read.stream and read.response_format not in ("json", "text"):
        raise BadRequest(f"stream is for json and text, not for {read.response_format}.", param="stream")
    view = TranscriptView(
        format=read.response_format,
        task="transcribe",
        granularities=read.timestamp_granularities,
        logprobs=bool(read.include),
        streamed=read.stream,
        ignored=reading.ignored,
    )
    words = "word" in read.timestamp_granularities
    return TranscriptionTask(
        make_transcription_task(read, "transcribe", served, request_id, language=read.language, words=words), view
    )


def read_translation(form: Mapping[str, Any], served: ServedTaskModel, request_id: str) -> TranscriptionTask:
    """The same for text in English, whatever the language."""
    reading = served.reading()
    read: TranslationForm = TRANSLATION_FORM.parse(type_form_fields(form), "", reading)
    if not served.terms.task("audio").translates:
        raise Unsupported(
            f"{served.card.name} knows English alone, so there is nothing it could translate. Serve a "
            "model of several languages.",
            param="model",
        )
    view = TranscriptView(
        format=read.response_format, task="translate", granularities=("segment",), ignored=reading.ignored
    )
    return TranscriptionTask(make_transcription_task(read, "translate", served, request_id), view)


def make_transcription_task(
    read: TranslationForm,
    task: SpeechTask,
    served: ServedTaskModel,
    request_id: str,
    *,
    language: str | None = None,
    words: bool = False,
) -> TranscriptionRequest:
    try:
        audio = AudioFile(read.file)
    except BadMedia as error:
        error.param = "file"
        raise
    deadline = time.monotonic() + (served.terms.timeout_s if read.timeout is None else read.timeout)
    return TranscriptionRequest(
        request_id, audio, task, language, read.prompt, read.temperature, words, served.tenant, deadline
    )


def type_form_fields(form: Mapping[str, Any]) -> dict[str, Any]:
    """A form's texts as the values that they spell. Fields that are left empty say nothing, as pages send them."""
    value = {name: held for name, held in form.items() if held != ""}
    for name in NUMERIC_FORM_FIELDS:
        if isinstance(value.get(name), str):
            value[name] = parse_form_number(value[name])
    if isinstance(value.get("stream"), str):
        value["stream"] = FORM_BOOLEANS.get(value["stream"].lower(), value["stream"])
    for name in ("timestamp_granularities", "include"):
        if isinstance(value.get(name), str):
            value[name] = [value[name]]
    return value


def parse_form_number(text: str) -> float | str:
    """What `text` says; itself where it is no number, for whoever reads it to refuse."""
    try:
        return float(text)
    except ValueError:
        return text


AUDIO_TOKENS_A_SECOND = 50
"""What a model reads of audio."""


class TranscriptReceipt(Struct, kw_only=True):
    """What the server did beyond the answer."""

    timing: ComputeTiming
    ignored: list[str] | UnsetType = UNSET


class TranscriptDurationUsage(Struct):
    seconds: float
    type: Literal["duration"] = "duration"


class TranscriptAudioTokens(Struct):
    audio_tokens: int
    text_tokens: int = 0


class TranscriptTokenUsage(Struct, kw_only=True):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    input_token_details: TranscriptAudioTokens
    output_tokens: int
    total_tokens: int


class TranscriptTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, token: TranscribedToken) -> TranscriptTokenLogprob:
        return cls(token.bytes.decode(errors="replace"), token.logprob, list(token.bytes))


class Transcription(Struct, kw_only=True):
    text: str
    logprobs: list[TranscriptTokenLogprob] | UnsetType = UNSET
    usage: TranscriptDurationUsage
    ingot: TranscriptReceipt


class TranscriptSegmentBody(Struct):
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
    def of(cls, segment: Segment) -> TranscriptSegmentBody:
        return cls(*(getattr(segment, name) for name in cls.__struct_fields__))


class TranscriptWordBody(Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(Struct, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptSegmentBody] | UnsetType = UNSET
    words: list[TranscriptWordBody] | UnsetType = UNSET
    usage: TranscriptDurationUsage
    ingot: TranscriptReceipt


class TranscriptDelta(Struct, kw_only=True):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str
    logprobs: list[TranscriptTokenLogprob] | UnsetType = UNSET


class TranscriptDone(Struct, kw_only=True):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    logprobs: list[TranscriptTokenLogprob] | UnsetType = UNSET
    usage: TranscriptTokenUsage
    ingot: TranscriptReceipt


TRANSCRIPT_CHUNKS = (TranscriptDelta, TranscriptDone)


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

    def render(self, segments: Sequence[Segment], ended: TranscriptionEnded) -> tuple[bytes, str]:
        """The whole answer, and its media type."""
        match self.format:
            case "text":
                return f"{transcript_text(segments)}\n".encode(), "text/plain; charset=utf-8"
            case "srt":
                return format_srt(segments).encode(), "application/x-subrip; charset=utf-8"
            case "vtt":
                return format_vtt(segments).encode(), "text/vtt; charset=utf-8"
            case "verbose_json":
                body: Struct = self._verbose(segments, ended)
            case _:
                body = Transcription(
                    text=transcript_text(segments),
                    logprobs=self._logprobs(segments),
                    usage=TranscriptDurationUsage(round(ended.seconds, 3)),
                    ingot=self._receipt(ended),
                )
        return msgspec.json.encode(body), "application/json"

    def delta(self, segment: Segment, *, first: bool) -> TranscriptDelta:
        text = segment.text.lstrip() if first else segment.text
        return TranscriptDelta(delta=text, logprobs=self._logprobs([segment]))

    def done(self, segments: Sequence[Segment], ended: TranscriptionEnded) -> TranscriptDone:
        audio_tokens = math.ceil(AUDIO_TOKENS_A_SECOND * ended.seconds)
        return TranscriptDone(
            text=transcript_text(segments),
            logprobs=self._logprobs(segments),
            usage=TranscriptTokenUsage(
                input_tokens=audio_tokens,
                input_token_details=TranscriptAudioTokens(audio_tokens),
                output_tokens=ended.tokens,
                total_tokens=audio_tokens + ended.tokens,
            ),
            ingot=self._receipt(ended),
        )

    def _verbose(self, segments: Sequence[Segment], ended: TranscriptionEnded) -> VerboseTranscription:
        words = [
            TranscriptWordBody(one.text.strip(), one.start, one.end) for segment in segments for one in segment.words
        ]
        return VerboseTranscription(
            task=self.task,
            language=LANGUAGES.get(ended.language, ended.language),
            duration=round(ended.seconds, 3),
            text=transcript_text(segments),
            segments=[TranscriptSegmentBody.of(one) for one in segments] if "segment" in self.granularities else UNSET,
            words=words if "word" in self.granularities else UNSET,
            usage=TranscriptDurationUsage(round(ended.seconds, 3)),
            ingot=self._receipt(ended),
        )

    def _logprobs(self, segments: Iterable[Segment]) -> list[TranscriptTokenLogprob] | UnsetType:
        return (
            [TranscriptTokenLogprob.of(token) for one in segments for token in one.text_tokens]
            if self.logprobs
            else UNSET
        )

    def _receipt(self, ended: TranscriptionEnded) -> TranscriptReceipt:
        timing = ComputeTiming(round(ended.queue_s, 6), round(ended.compute_s, 6))
        return TranscriptReceipt(timing=timing, ignored=self.ignored or UNSET)


def transcript_text(segments: Iterable[Segment]) -> str:
    """The text of all segments."""
    return "".join(segment.text for segment in segments).strip()


def format_srt(segments: Iterable[Segment]) -> str:
    return "".join(
        f"{number}\n{format_timestamp(one.start, ',')} --> "
        f"{format_timestamp(one.end, ',')}\n{subtitle_line(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def format_vtt(segments: Iterable[Segment]) -> str:
    cues = (
        f"{format_timestamp(one.start, '.')} --> "
        f"{format_timestamp(one.end, '.')}\n{subtitle_line(one.text).replace('&', '&amp;').replace('<', '&lt;')}\n\n"
        for one in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def format_timestamp(seconds: float, point: str) -> str:
    """`00:01:02.030`, with the point that the format wants."""
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def subtitle_line(text: str) -> str:
    """On one line, and without what would be taken for the line of times."""
    return " ".join(text.split()).replace("-->", "->")
