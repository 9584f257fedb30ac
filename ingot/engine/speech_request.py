"""The nouns of speech that cross the engine's boundary: audio in and segments of text out, phonemes in and audio out.

All of them are plain, frozen values that any thread may hold; none refers to mlx. Light to import: the HTTP edge
needs some of them before any model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ingot.errors import IngotError

if TYPE_CHECKING:
    from ingot.media.audio import AudioFile

SpeechTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """One audio file, and what is to be made of it."""

    id: str
    audio: AudioFile
    task: SpeechTask = "transcribe"
    language: str | None = None  # None: the one that is spoken, by the first window
    prompt: str = ""  # text before it
    temperature: float = 0.0  # 0: the likeliest, and warmer where that makes no sense
    words: bool = False  # the times of words, too
    tenant: str = ""  # whose it is
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class TranscribedWord:
    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, slots=True)
class TranscribedToken:
    """A token of text, and the logarithm of its probability."""

    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Segment:
    """What is spoken from `start` to `end`, in seconds from the beginning."""

    id: int
    seek: int  # where its window begins, in hundredths of a second
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    text_tokens: tuple[TranscribedToken, ...] = ()
    words: tuple[TranscribedWord, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptionEnded:
    """The end of a transcript that came to its end."""

    language: str
    seconds: float  # of audio
    tokens: int  # that were written
    queue_s: float
    compute_s: float


class TranscribedText(str):
    """The transcript of audio in a message, in its place."""

    __slots__ = ()


cached_transcripts: ContextVar[dict[bytes, TranscribedText] | None] = ContextVar("transcripts", default=None)
"""By the digest of the audio. What is not found here raises UntranscribedAudio; without it, audio is refused."""


class UntranscribedAudio(Exception):
    """Audio is to be read as text that is not transcribed yet."""

    def __init__(self, digest: bytes, audio: AudioFile) -> None:
        super().__init__("audio is not transcribed yet")
        self.digest, self.audio = digest, audio


TranscriptEvent: TypeAlias = Segment | TranscriptionEnded | IngotError
"""The last one is no segment, and the others are."""
OnTranscriptEvents = Callable[[list[TranscriptEvent]], None]


@dataclass(frozen=True, slots=True)
class SpeechToTextCard:
    """What the rest of the program may know of a loaded model without touching mlx."""

    kind: ClassVar[str] = "audio"
    family: ClassVar[str] = "whisper"
    name: str
    source: str
    languages: tuple[str, ...]  # that it transcribes
    translates: bool  # into English
    context: int  # most tokens of a window, with what came before it
    dtype: str
    weight_bytes: int
    created: int  # unix time of loading
    notes: tuple[str, ...] = ()

    @property
    def at_ready(self) -> str:
        """What it is for, as the server says it when it is ready."""
        languages = "English" if len(self.languages) == 1 else f"{len(self.languages)} languages"
        return f"transcription | {languages}"


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """The phonemes of a text, and how they are to be spoken."""

    id: str
    pieces: tuple[str, ...]  # phonemes; each is spoken at once
    voice: str
    speed: float = 1.0
    tenant: str = ""  # whose it is
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class SpeechAudio:
    """The audio of one piece: samples of 16 bits, the lower byte first."""

    samples: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The end of a text that was spoken to its end."""

    phonemes: int
    samples: int
    queue_s: float
    compute_s: float


SpeechEvent: TypeAlias = SpeechAudio | SpeechEnded | IngotError
"""The last one is no audio, and the others are."""


@dataclass(frozen=True, slots=True)
class TextToSpeechCard:
    """What the rest of the program may know of a loaded model without touching mlx."""

    kind: ClassVar[str] = "speech"
    family: ClassVar[str] = "kokoro"
    name: str
    source: str
    voices: tuple[str, ...]
    rate: int  # samples a second
    context: int  # most phonemes of a piece
    dtype: str
    weight_bytes: int
    created: int  # unix time of loading
    notes: tuple[str, ...] = ()

    @property
    def at_ready(self) -> str:
        """What it is for, as the server says it when it is ready."""
        return f"speech | {len(self.voices)} voices"
