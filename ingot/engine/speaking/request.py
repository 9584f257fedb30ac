"""The nouns of speech that cross the engine's door: phonemes go in, sound comes out piece by piece.

All of them are plain, frozen values that any thread may hold; none refers to mlx.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeAlias

from ingot.errors import IngotError


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A text as it is pronounced, and how it is to be spoken."""

    id: str
    pieces: tuple[str, ...]  # phonemes; each is spoken at once
    voice: str
    speed: float = 1.0
    tenant: str = ""  # whose it is
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Spoken:
    """The sound of one piece: samples of 16 bits, the lower byte first."""

    samples: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The end of a text that was spoken to its end."""

    phonemes: int
    samples: int
    queue_s: float
    compute_s: float


SpeechEvent: TypeAlias = Spoken | SpeechEnded | IngotError
"""The last one is no sound, and the others are."""


@dataclass(frozen=True, slots=True)
class SpeakingCard:
    """What the rest of the program may know of a loaded model without touching mlx."""

    name: str
    source: str
    voices: tuple[str, ...]
    rate: int  # samples a second
    context: int  # most phonemes of a piece
    dtype: str
    weight_bytes: int
    created: int  # unix time of loading
    notes: tuple[str, ...] = ()
