"""`POST /v1/audio/speech` and `GET /v1/audio/voices`: the body as OpenAI has it, the fields whose values a
text-to-speech model sets, and what clients get."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import Struct

from ingot.engine.speech_request import SpeechEnded, SpeechRequest, TextToSpeechCard
from ingot.media.audio import AUDIO_MEDIA_TYPES
from ingot.protocol.pooling import ComputeTiming
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Either, FieldKind, Number, OneOf, Schema, Text, Timeout
from ingot.protocol.schema.model_fields import ABOUT_TTL, TaskModelField, TimeToLiveField
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses, requires
from ingot.protocol.served import AnyServedModel, ServedTaskModel
from ingot.protocol.terms import DEFAULT_NAME, Terms
from ingot.text.speech.phonemizer import accent_of

if TYPE_CHECKING:
    from ingot.engine.text_to_speech import ServedTextToSpeech


@dataclass(frozen=True, slots=True)
class VoiceField(FieldKind):
    """A voice by its name, or by what stands behind the underscore in it, where that is one voice alone."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        known = reading.terms.task("speech").voices
        if isinstance(value, str) and value not in known:
            meant = [voice for voice in known if voice.partition("_")[2] == value]
            if len(meant) == 1:
                return meant[0]
        return OneOf(known).parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "examples": list(terms.task("speech").voices)}

    def wanted(self, terms: Terms) -> str:
        return OneOf(terms.task("speech").voices).wanted(terms)


SPEECH_INPUT_CHARS = 4096
SPEECH_SPEEDS = (0.25, 4.0)
SPEECH_FRAMES_A_SECOND = 40
"""How usage counts audio."""
VOICE_LANGUAGES = {"us": "en-US", "gb": "en-GB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceObject:
    id: str = requires(VoiceField(), "The voice's name.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechBody:
    input: str = requires(Text(SPEECH_INPUT_CHARS, least=1), "What is to be spoken, in English.")
    model: str = accepts(
        TaskModelField("speech"), "The name of the text-to-speech model, or `default`.", default=DEFAULT_NAME
    )
    voice: str | VoiceObject | None = accepts(
        Either((VoiceField(), ObjectOf(VoiceObject))),
        "Whose voice: a name that /v1/audio/voices lists (default: the first of them), or an object with it as `id`.",
    )
    response_format: str = accepts(
        OneOf(tuple(AUDIO_MEDIA_TYPES)),
        "What the answer is; `pcm` is samples of 16 bits, the lower byte first.",
        default="mp3",
    )
    speed: float = accepts(Number(SPEECH_SPEEDS), "How fast: 2 takes half the time.", default=1.0)
    stream_format: str = accepts(
        OneOf(("audio", "sse")), "`sse` sends events with audio, `audio` the file itself.", default="audio"
    )
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)
    instructions: None = refuses("cannot be honoured: the voice decides how a text is spoken. Choose another.", "")


SPEECH_BODY = ObjectOf(SpeechBody)


@dataclass(frozen=True, slots=True)
class SpeechTask:
    """A body, read: what the engine is to speak, and how it is sent."""

    request: SpeechRequest
    format: str
    events: bool
    rate: int


class SpeechUsage(Struct):
    """Phonemes that were read, and frames of audio that were made of them."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechReceipt(Struct):
    timing: ComputeTiming


class SpeechDelta(Struct, kw_only=True):
    type: Literal["speech.audio.delta"] = "speech.audio.delta"
    audio: str  # base64

    @classmethod
    def of(cls, audio: bytes) -> SpeechDelta:
        return cls(audio=base64.b64encode(audio).decode())


class SpeechDone(Struct, kw_only=True):
    type: Literal["speech.audio.done"] = "speech.audio.done"
    usage: SpeechUsage
    ingot: SpeechReceipt

    @classmethod
    def of(cls, ended: SpeechEnded, rate: int) -> SpeechDone:
        frames = ended.samples * SPEECH_FRAMES_A_SECOND // rate
        usage = SpeechUsage(ended.phonemes, frames, ended.phonemes + frames)
        return cls(usage=usage, ingot=SpeechReceipt(ComputeTiming(round(ended.queue_s, 6), round(ended.compute_s, 6))))


SPEECH_CHUNKS = (SpeechDelta, SpeechDone)


class VoiceBody(Struct):
    id: str
    name: str
    language: str
    model: str
    object: Literal["voice"] = "voice"


class VoiceList(Struct):
    data: list[VoiceBody]
    object: Literal["list"] = "list"


def read_speech(value: Any, served: ServedTaskModel, request_id: str) -> SpeechTask:
    """The task that a body asks for. Looks up each word: not for an event loop."""
    model = cast("ServedTextToSpeech", served.loaded)
    read: SpeechBody = SPEECH_BODY.parse(value, "", served.reading())
    voice = read.voice.id if isinstance(read.voice, VoiceObject) else read.voice or model.card.voices[0]
    deadline = time.monotonic() + (served.terms.timeout_s if read.timeout is None else read.timeout)
    pieces = model.pronouncer.pieces(read.input, voice, read.speed)
    request = SpeechRequest(request_id, pieces, voice, read.speed, served.tenant, deadline)
    return SpeechTask(request, read.response_format, read.stream_format == "sse", model.card.rate)


def list_voices(served: AnyServedModel) -> VoiceList:
    """Empty for a model that does not speak."""
    card = served.card
    if not isinstance(card, TextToSpeechCard):
        return VoiceList([])
    return VoiceList([VoiceBody(voice, voice, VOICE_LANGUAGES[accent_of(voice)], card.name) for voice in card.voices])
