"""The nouns that cross the engine's door: a request goes in, a stream of events comes out.

All of them are plain, frozen values that any thread may hold; none refers to mlx. A stream ends in exactly one
terminal event, `Ended` or `Failed`, after which nothing follows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from ingot.errors import IngotError

FinishReason = Literal["stop", "length"]
Phase = Literal["queued", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None  # None: off; n: the chosen token's, and the n likeliest
    prompt_logprobs: int | None = None  # the same, for every prompt token but the first

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends a sequence besides `max_tokens`."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # no stop token before this many tokens
    keep: bool = False  # leave the matched stop string in the text


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `len(prompts) * n` sequences under one id.

    Sequence `i * n + j` is the j-th answer to prompt i; that number is the `index` of its events.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int | None = None  # None: as many as the context holds
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = field(default_factory=Stop)
    cache: bool = True  # may take over computed prefixes and leave its own
    salt: str = ""  # requests with different salts share nothing
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    text: str  # the token alone; may hold U+FFFD where the token is part of a character
    raw: bytes  # the token's own bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A generated (or prompt) token, with logprobs where the request asked for them."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; `queue` ends when the first token of the prompt is computed, `prefill` at the first new token."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Comes before a sequence's text when `prompt_logprobs` was asked for. The first token has no entry."""

    index: int
    tokens: tuple[TokenInfo | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence. `tokens` is filled only when logprobs were asked for."""

    index: int
    text: str
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    index: int
    reason: FinishReason
    stopped_by: str | int | None  # the stop string or the stop token
    completion_tokens: int
    logprob_sum: float | None = None  # over the generated tokens, when logprobs were asked for


@dataclass(frozen=True, slots=True)
class Ended:
    """Terminal: every sequence has ended."""

    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the request was refused, cancelled, timed out or broke."""

    error: IngotError
    usage: Usage = field(default_factory=Usage)


Event = PromptScored | TextDelta | SequenceEnded | Ended | Failed


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What one running request is doing now, for `GET /v1/requests`."""

    id: str
    phase: Phase
    prompt_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    max_tokens: int
    age_s: float
    tokens_per_second: float
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the rest of the program may know of the loaded model without touching mlx."""

    name: str
    source: str
    family: str  # the model_type of its config
    context: int
    vocab: int
    device: str
    dtype: str
    weight_bytes: int
    memory_budget: int
    max_sequences: int
    created: int  # unix time of loading
    notes: tuple[str, ...] = ()  # what is slower or different here than it could be


@dataclass(frozen=True, slots=True)
class Health:
    alive: bool
    ready: bool
    detail: str
    stepped_ago_s: float
    running: int
    queued: int
