"""The nouns of encoding that cross the engine's door: texts go in as tokens, a few numbers for each come out.

All of them are plain, frozen values that any thread may hold; none refers to mlx.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Literal

from ingot.text.tokenizer.encoder_inputs import EncoderInput

Role = Literal["embedding", "rerank"]


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """Inputs for the encoder of one role, under one id."""

    id: str
    role: Role
    inputs: tuple[EncoderInput, ...]
    tenant: str = ""  # whose it is
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.inputs)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The answer: for each input, in order, its vector, or its one score before any squashing."""

    rows: tuple[array[float], ...]
    tokens: int  # that were computed
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class EncoderCard:
    """What the rest of the program may know of a loaded encoder without touching mlx."""

    role: Role
    name: str
    source: str
    family: str  # the model_type of its config
    length: int  # longest input, in tokens
    dimension: int  # numbers of a vector; 1 for a score
    unit: bool  # vectors have length 1
    vocab: int
    dtype: str
    weight_bytes: int
    batch_tokens: int  # most that are computed together
    created: int  # unix time of loading
    notes: tuple[str, ...] = ()  # what is guessed, or slower than it could be
