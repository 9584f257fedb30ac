"""The nouns that cross the engine's boundary: a request goes in, a stream of events comes out.

Requests for generation and what they may ask for (sampling, stops, grammar, prefix cache, SpecPrefill), the events
that answer them, requests for pooling models (embeddings and rerank scores), and the cards that describe loaded
models. All of them are plain, frozen values that any thread may hold; none refers to mlx. Protocols and the HTTP
edge may import this module, `speech_request` and `status`, and nothing else of the engine.

A stream ends in exactly one terminal event, `Ended` or `Failed`, after which nothing follows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ingot.errors import IngotError
from ingot.media.items import MediaItem
from ingot.media.layout import MediaKind
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.events import ToolSchema
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.encoder_inputs import EncoderInput
from ingot.text.tool_formats.format import Format

FinishReason = Literal["stop", "length", "tool_calls"]
Phase = Literal["queued", "prefill", "decode"]
CacheReason = Literal[
    "complete",  # all but the token that always stays to be computed
    "new_turn",  # nothing that goes on from there was kept
    "unseen",  # nothing that begins like the prompt was kept
    "diverged",  # what was kept goes on otherwise
    "evicted",  # it was kept, and had to go
    "checkpoint",  # more is known, but this model can be resumed only at the ends of messages and chunks
    "salt",  # it is kept under another salt of the same tenant
    "adapter",  # it is kept of another adapter, or of the model without one
    "off",  # the request asked for no cache
    "scored",  # the prompt's logprobs are asked for, so it is computed whole
    "disabled",  # the server keeps nothing
]
"""Why no more of a prompt was taken over from what was computed before."""


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
class AnswerParsing:
    """How an answer's text is to be read: what is thinking, what calls a tool, what is the answer itself."""

    format: Format
    tools: tuple[ToolSchema, ...] = ()  # without any, no call is read out of the text
    thinking: ThinkingStart = ThinkingStart.UNOPENED
    one_call: bool = False  # the answer ends with its first call
    must_call: bool = False  # a guide sees to it that nothing but calls is written
    past_calls: int = 0  # in the conversation so far, for families that number them


@dataclass(frozen=True, slots=True)
class LoraRef:
    """An adapter: what it is called, and what its files are, by which all that depends on it is known."""

    name: str
    digest: str
    rank: int = 0


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
    reading: AnswerParsing | None = None  # None: the text is delivered as it stands
    guide: CompiledGrammar | None = None  # what each answer is held to
    cache: bool = True  # may take over computed prefixes and leave its own
    exact: bool = False  # takes over only what is the very same as if it were computed anew
    salt: str = ""  # requests with different salts share nothing
    tenant: str = ""  # whose request it is; tenants share nothing and see nothing of each other
    priority: int = 0  # who has more goes first, for a while
    pin: bool = False  # what is computed of its prompts is kept while anything else can go
    background: bool = False  # runs only while nothing else does
    marks: tuple[tuple[int, ...], ...] = ()  # where each prompt's messages end; none: after tokens that end answers
    media: tuple[tuple[MediaItem, ...], ...] = ()  # each prompt's pictures and clips; none: there are none at all
    lora: LoraRef | None = None  # the adapter that it goes through
    speculate: tuple[str, ...] | None = None  # which proposers may guess for it; None: all that there are
    sparse: SpecPrefillRequest | None = None  # only what matters of its prompts is to be computed
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)
    via: str = ""  # the address that it came to, for the log

    @property
    def lora_digest(self) -> str:
        """Of the adapter that it goes through; empty where it goes through none."""
        return "" if self.lora is None else self.lora.digest


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
    thinking_tokens: int = 0  # of the completion's


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; `queue` ends when the first token of the prompt is computed, `prefill` at the first new token."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How much of a prompt was taken over, and why no more. `known` of its tokens are those of something kept.

    `ours` are the prompt's next tokens behind those, `theirs` the ones of what is kept where it goes on otherwise; a
    few of each, and of the same tenant's alone.
    """

    prompt_tokens: int
    matched: int
    known: int
    reason: CacheReason
    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()
    read: int = 0  # of the matched tokens, those that were read from disk
    codec: str = "raw"  # what they went through, or some of them

    @property
    def lossy(self) -> bool:
        return self.codec != "raw"

    @property
    def tier(self) -> Literal["ram", "disk"] | None:
        """Where what was taken over lay, or some of it."""
        if not self.matched:
            return None
        return "disk" if self.read else "ram"


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What guessing ahead did for a request: tokens that were proposed and accepted, and the forward passes that its
    answers took behind their prompts; each pass gives a token of its own besides the accepted ones."""

    proposed: int = 0
    accepted: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Comes before a sequence's text when `prompt_logprobs` was asked for. The first token has no entry."""

    index: int
    tokens: tuple[TokenInfo | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence. `tokens` is filled only when logprobs were asked for.

    Where the answer is read for thinking and calls, `tokens` are those of all its parts, in order, and may come
    with an empty text.
    """

    index: int
    text: str
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """New text of one sequence's thinking."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A tool call, announced once. A sequence's calls are numbered from 0 and follow one another."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; together the pieces are one JSON object."""

    index: int
    call: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """One for each call that began. Not `complete`: the answer ended within the arguments."""

    index: int
    call: int
    complete: bool


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The reason is `tool_calls` where the answer came to its end and called a tool."""

    index: int
    reason: FinishReason
    stopped_by: str | int | None  # the stop string or the stop token
    completion_tokens: int
    logprob_sum: float | None = None  # over the generated tokens, when logprobs were asked for
    thinking_tokens: int = 0  # of the completion's
    tokens: tuple[int, ...] = ()  # the generated ones, with the stop token that ended them
    missing: str = ""  # what is left to write of the one call that ended it


@dataclass(frozen=True, slots=True)
class Ended:
    """Terminal: every sequence has ended."""

    usage: Usage
    timing: Timing
    cache: tuple[CacheReport, ...] = ()  # one for each prompt
    speculation: SpeculationReport = field(default_factory=SpeculationReport)
    sparse: tuple[SpecPrefillReport, ...] = ()  # one for each prompt, where less than all was asked for
    calls_in_thinking: int = 0  # that were read out of thinking, the answer having none


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the request was refused, cancelled, timed out or broke; `stood` says how far it was."""

    error: IngotError
    usage: Usage = field(default_factory=Usage)
    stood: RequestStatus | None = None


AnswerEvent = TextDelta | ThinkingDelta | CallBegan | CallArguments | CallEnded
Event = PromptScored | AnswerEvent | SequenceEnded | Ended | Failed


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What one request is doing now, or was when it ended, for `GET /v1/requests` and the log."""

    id: str
    phase: Phase
    prompt_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    max_tokens: int
    age_s: float
    tokens_per_second: float
    preemptions: int = 0
    tenant: str = ""
    cache: tuple[CacheReport, ...] = ()  # one for each prompt that has begun to run
    first_token_s: float | None = None  # from its arrival
    queued_s: float = 0.0  # until its first prompt began to be computed, or now
    adapter: str = ""  # the one that it goes through, if any

    @property
    def cached_tokens(self) -> int:
        return sum(report.matched for report in self.cache)


TokenRange = tuple[int, int]
"""Tokens [begin, end) of a prompt."""
SpecPrefillSkipped = Literal[
    "below_threshold",  # the prompt is too short for it
    "cached",  # too little of it was left to compute
    "unsupported",  # of such a prompt, all is computed
    "does_not_pay",  # scoring it would take longer than what it saves, as measured
]
"""Why all of a prompt was computed, though less was asked for."""


@dataclass(frozen=True, slots=True)
class SpecPrefillRequest:
    """Asks for an answer to what matters of a prompt. `keep` is the share of the rest that is computed, or the
    server's; `whole` says for each prompt what is computed in any case. `forced` asks for it also where the prompt, or
    what is new of it, is shorter than the server's threshold."""

    keep: float | None = None
    whole: tuple[tuple[TokenRange, ...], ...] = ()
    forced: bool = False


@dataclass(frozen=True, slots=True)
class SpecPrefillReport:
    """Of one prompt: how many of its tokens were `scored`, those that were not taken over, and `kept` of them; how long
    scoring took; how many of its first tokens were thinned out by an earlier request, and are `reused` as they are
    left; or why all of them were computed."""

    scorer: str
    scored: int = 0
    kept: int = 0
    scoring_s: float = 0.0
    reused: int = 0
    unused: SpecPrefillSkipped | None = None


PoolingTask = Literal["embedding", "rerank"]


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Inputs for the encoder of one role, under one id."""

    id: str
    role: PoolingTask
    inputs: tuple[EncoderInput, ...]
    tenant: str = ""  # whose it is
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.inputs)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The answer: for each input, in order, its vector, or its one score before any squashing."""

    rows: tuple[array[float], ...]
    tokens: int  # that were computed
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class PoolingModelCard:
    """What the rest of the program may know of a loaded encoder without touching mlx."""

    role: PoolingTask
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

    @property
    def kind(self) -> str:
        return self.role

    @property
    def context(self) -> int:
        return self.length

    @property
    def at_ready(self) -> str:
        """What it is for, as the server says it when it is ready."""
        purpose = f"vectors of {self.dimension} numbers" if self.role == "embedding" else "reranking"
        return f"{purpose} | inputs of {self.length} tokens"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the rest of the program may know of the loaded model without touching mlx."""

    kind: ClassVar[str] = "chat"
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
    recommended: Mapping[str, Any] = field(default_factory=dict, hash=False)  # how to generate, as its makers say
    quantization: str = ""  # what the weights are in the model's files, as people call it
    formats: str = ""  # that, and what activations and states are
    proposers: tuple[str, ...] = ()  # by whom tokens are guessed ahead, in the order in which they are asked
    kernels: str = ""  # what was compiled for the device, where that is ours to do
    sees: tuple[MediaKind, ...] = ()  # what it is shown besides text
    scorer: str = ""  # who scores long prompts, of which only what matters is computed when a request asks for it
    exact_context: int | None = None  # of requests for exact states, where others' are in fewer bits: memory holds less

    def context_of(self, *, exact: bool) -> int:
        return self.context if self.exact_context is None or not exact else self.exact_context
