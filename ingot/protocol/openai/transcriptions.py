"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the forms as OpenAI describes them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.engine.speech_request import Task, TranscriptionRequest
from ingot.errors import BadMedia, BadRequest, ModelNotFound, Unsupported
from ingot.media.audio import Sound
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.openai.transcription_answers import TranscriptView
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Bool, ListOf, Number, OneOf, Text, Timeout
from ingot.protocol.schema.hearing_fields import File, HearingName, Language
from ingot.protocol.schema.keeping import HOW_LONG, TimeToLive
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.side_served import SideServed

NO_MODEL = (
    "No model that hears is served here. Start ingot with --audio-model MODEL, such as --audio-model whisper-tiny.en, "
    "a folder or a hub id of a Whisper model."
)
FORMATS = OneOf(
    ("json", "text", "srt", "verbose_json", "vtt"),
    {"diarized_json": "cannot be honoured: speakers are not told apart here. Send json or verbose_json."},
)
SPEAKERS = "cannot be honoured: speakers are not told apart here."
PROMPT_CHARS = 16_384
NUMBERS = ("temperature", "timeout", "ttl")
FLAGS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationForm:
    file: bytes = requires(File(), "The sound: FLAC, MP3, MP4, M4A, Ogg, WAV, WebM or AAC.")
    model: str = accepts(HearingName(), "The name of the model that hears, or `default`.", default=DEFAULT_NAME)
    prompt: str = accepts(
        Text(PROMPT_CHARS), "What was said before, or how names in it are spelled; its end counts most.", default=""
    )
    response_format: str = accepts(FORMATS, "What the answer is.", default="json")
    temperature: float = accepts(
        Number((0.0, 1.0)),
        "0 takes the likeliest text, and warmer ones where that makes no sense; else one is drawn.",
        default=0.0,
    )
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    ttl: None = accepts(TimeToLive(), HOW_LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionForm(TranslationForm):
    language: str | None = accepts(Language(), "Its code, such as `en`; else it is found out by the first window.")
    timestamp_granularities: tuple[str, ...] = accepts(
        ListOf(OneOf(("word", "segment")), 2, least=1),
        "Whose times are told, with `verbose_json`.",
        default=("segment",),
    )
    stream: bool = accepts(Bool(), "Send what is heard as events, window by window.", default=False)
    include: tuple[str, ...] = accepts(
        ListOf(OneOf(("logprobs",)), 1), "`logprobs` adds the probabilities of tokens to `json`.", default=()
    )
    chunking_strategy: None = refuses("cannot be chosen: sounds are heard in windows of 30 seconds. Send auto.", "auto")
    known_speaker_names: None = refuses(SPEAKERS)
    known_speaker_references: None = refuses(SPEAKERS)


TRANSCRIPTION_FORM = ObjectOf(TranscriptionForm)
TRANSLATION_FORM = ObjectOf(TranslationForm)


@dataclass(frozen=True, slots=True)
class TranscriptionTask:
    """A form, read: what the engine is to hear, and how it is told."""

    request: TranscriptionRequest
    view: TranscriptView


def read_transcription(form: Mapping[str, Any], served: SideServed, request_id: str) -> TranscriptionTask:
    """The job that a form asks for. Looks through the whole sound, so it may take a while: not for an event loop."""
    reading = begun(served)
    read: TranscriptionForm = TRANSCRIPTION_FORM.parse(typed(form), "", reading)
    if "timestamp_granularities" in form and read.response_format != "verbose_json":
        raise BadRequest(
            "timestamp_granularities are told with response_format verbose_json.", param="timestamp_granularities"
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
    return TranscriptionTask(asked(read, "transcribe", served, request_id, language=read.language, words=words), view)


def read_translation(form: Mapping[str, Any], served: SideServed, request_id: str) -> TranscriptionTask:
    """The same for text in English, whatever the language."""
    reading = begun(served)
    read: TranslationForm = TRANSLATION_FORM.parse(typed(form), "", reading)
    if not served.terms.hearing.translates:
        raise Unsupported(
            f"{served.terms.hearing.models[0]} hears English alone, so there is nothing it could translate. Serve a "
            "model of several languages.",
            param="model",
        )
    view = TranscriptView(
        format=read.response_format, task="translate", granularities=("segment",), ignored=reading.ignored
    )
    return TranscriptionTask(asked(read, "translate", served, request_id), view)


def begun(served: SideServed) -> BodyReading:
    if not served.terms.hearing.models:
        raise ModelNotFound(NO_MODEL, param="model")
    return served.reading()


def asked(
    read: TranslationForm,
    task: Task,
    served: SideServed,
    request_id: str,
    *,
    language: str | None = None,
    words: bool = False,
) -> TranscriptionRequest:
    try:
        sound = Sound(read.file)
    except BadMedia as error:
        error.param = "file"
        raise
    deadline = time.monotonic() + (served.terms.timeout_s if read.timeout is None else read.timeout)
    return TranscriptionRequest(
        request_id, sound, task, language, read.prompt, read.temperature, words, served.tenant, deadline
    )


def typed(form: Mapping[str, Any]) -> dict[str, Any]:
    """A form's texts as the values that they spell. Fields that are left empty say nothing, as pages send them."""
    value = {name: held for name, held in form.items() if held != ""}
    for name in NUMBERS:
        if isinstance(value.get(name), str):
            value[name] = number(value[name])
    if isinstance(value.get("stream"), str):
        value["stream"] = FLAGS.get(value["stream"].lower(), value["stream"])
    for name in ("timestamp_granularities", "include"):
        if isinstance(value.get(name), str):
            value[name] = [value[name]]
    return value


def number(text: str) -> float | str:
    """What `text` says; itself where it is no number, for whoever reads it to refuse."""
    try:
        return float(text)
    except ValueError:
        return text
