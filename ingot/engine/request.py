"""The types at the engine's boundary: a request goes in, a stream of events comes out.

Requests for generation and their options (sampling, stops, grammar, prefix cache, SpecPrefill), the events that answer
them, requests for pooling models (embeddings and rerank scores), and the cards that describe loaded models. All are
plain, frozen values for any thread; none refers to mlx. Protocols and the HTTP edge may import this module,
`speech_request` and `status`, and nothing else of the engine.

A stream ends in exactly one terminal event, `Ended` or `Failed`.
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
from ingot.observe.metrics import ExpertStats
from ingot.quantities import counted
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.events import ToolSchema
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.encoder_inputs import EncoderInput
from ingot.text.tool_formats.format import Format

FinishReason = Literal["stop", "length", "tool_calls"]
Phase = Literal["queued", "prefill", "decode"]
CacheReason = Literal[
    "complete",  # all but the token that always stays to be computed
    "new_turn",  # nothing longer was cached
    "unseen",  # nothing that begins like the prompt was cached
    "diverged",  # what was cached continues differently
    "evicted",  # more was cached before
    "checkpoint",  # more is cached, but this model can resume only at the ends of messages and chunks
    "salt",  # it is cached under another salt of the same tenant
    "adapter",  # it is cached for another adapter, or for the model without one
    "off",  # the request turned the cache off
    "scored",  # prompt logprobs were requested, so the whole prompt is computed
    "disabled",  # the server has no prefix cache
]
"""Why no more of a prompt was reused."""


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
    loop_guard: bool = True  # end an answer that repeats itself without end


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How an answer's text is parsed into thinking, tool calls and content."""

    format: Format
    tools: tuple[ToolSchema, ...] = ()  # without any, no tool calls are parsed
    thinking: ThinkingStart = ThinkingStart.UNOPENED
    one_call: bool = False  # the answer ends with its first call
    must_call: bool = False  # the grammar allows nothing but calls
    past_calls: int = 0  # in the conversation so far, for families that number them


@dataclass(frozen=True, slots=True)
class LoraRef:
    """A LoRA adapter, by its name and the digest of its files."""

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
    reading: AnswerParsing | None = None  # None: the text is not parsed
    grammar: CompiledGrammar | None = None  # that each answer must match
    cache: bool = True  # may reuse cached prefixes and add its own
    exact: bool = False  # reuses only KV that is the same as if it were computed anew
    salt: str = ""  # requests with different salts share nothing
    tenant: str = ""  # tenants share nothing and see nothing of each other
    priority: int = 0  # higher goes first, for a while
    pin: bool = False  # its cached prompts are evicted last
    background: bool = False  # runs only while no other request does
    marks: tuple[tuple[int, ...], ...] = ()  # where each prompt's messages end; none: after EOS tokens
    media: tuple[tuple[MediaItem, ...], ...] = ()  # each prompt's images and videos; none: there are none at all
    lora: LoraRef | None = None
    speculate: tuple[str, ...] | None = None  # proposers that may draft for it; None: all
    specprefill: SpecPrefillRequest | None = None  # only the tokens that matter of its prompts are computed
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)
    via: str = ""  # the URL path that it came to, for the log

    @property
    def lora_digest(self) -> str:
        """Of its adapter; empty without one."""
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
    """How much of a prompt was reused, and why no more. Its first `known` tokens equal those of something cached.

    `ours` are a few tokens of the prompt after those, `theirs` those of what is cached where it continues differently,
    of the same tenant alone.
    """

    prompt_tokens: int
    matched: int
    known: int
    reason: CacheReason
    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()
    read: int = 0  # of the matched tokens, those that were read from disk
    codec: str = "raw"  # of the reused KV, or some of it

    @property
    def lossy(self) -> bool:
        return self.codec != "raw"

    @property
    def tier(self) -> Literal["ram", "disk"] | None:
        """Where the reused KV came from, or some of it."""
        if not self.matched:
            return None
        return "disk" if self.read else "ram"


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Draft tokens that were proposed and accepted for a request, and the forward passes that decoded it; each pass
    gives a token of its own besides the accepted ones."""

    proposed: int = 0
    accepted: int = 0
    passes: int = 0


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Comes before a sequence's text if `prompt_logprobs` was requested. The first token has no entry."""

    index: int
    tokens: tuple[TokenInfo | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence. `tokens` is filled only if logprobs were requested.

    Where the answer is parsed, `tokens` are those of all its parts, in order, and may come with an empty text.
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
    """A tool call, announced once. A sequence's calls are numbered from 0 and do not overlap."""

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
class LoopReport:
    """An answer that repeated itself without end: its last `period` tokens came `count` times in a row."""

    index: int
    period: int
    count: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The reason is `tool_calls` where the answer came to its end and called a tool, and `length` with a `loop`."""

    index: int
    reason: FinishReason
    stopped_by: str | int | None  # the stop string or the stop token
    completion_tokens: int
    logprob_sum: float | None = None  # over the generated tokens, if logprobs were requested
    thinking_tokens: int = 0  # of the completion's
    tokens: tuple[int, ...] = ()  # the generated ones, with the stop token that ended them
    missing: str = ""  # what is left to write of the one call that ended it
    loop: LoopReport | None = None  # in which it was ended


@dataclass(frozen=True, slots=True)
class Ended:
    """Terminal: every sequence has ended."""

    usage: Usage
    timing: Timing
    cache: tuple[CacheReport, ...] = ()  # one for each prompt
    speculation: SpeculationReport = field(default_factory=SpeculationReport)
    specprefill: tuple[SpecPrefillReport, ...] = ()  # one for each prompt, if it was requested
    calls_in_thinking: int = 0  # parsed from thinking, the content having none
    loops: tuple[LoopReport, ...] = ()  # in which answers were ended
    experts: ExpertStats | None = None  # what was read while it ran, where experts are read when they are needed


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the request was refused, was cancelled, timed out or failed; `final_status` is its status at the
    end."""

    error: IngotError
    usage: Usage = field(default_factory=Usage)
    final_status: RequestStatus | None = None


AnswerEvent = TextDelta | ThinkingDelta | CallBegan | CallArguments | CallEnded
Event = PromptScored | AnswerEvent | SequenceEnded | Ended | Failed


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What one request is doing now, or was when it ended, for `GET /v1/requests` and the log."""

    id: str
    phase: Phase
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    max_tokens: int = 0
    age_s: float = 0.0
    tokens_per_second: float = 0.0
    preemptions: int = 0
    tenant: str = ""
    cache: tuple[CacheReport, ...] = ()  # one for each prompt that has begun to run
    first_token_s: float | None = None  # from its arrival
    queued_s: float = 0.0  # until its first prompt began to be computed, or now
    adapter: str = ""  # its name, if any

    @property
    def cached_tokens(self) -> int:
        return sum(report.matched for report in self.cache)


TokenRange = tuple[int, int]
"""Tokens [begin, end) of a prompt."""
SpecPrefillSkipped = Literal[
    "below_threshold",  # the prompt is too short
    "cached",  # too little was left to compute
    "unsupported",  # for such a prompt
    "does_not_pay",  # scoring would take longer than it saves, as measured
]
"""Why the whole prompt was computed, though SpecPrefill was requested."""


@dataclass(frozen=True, slots=True)
class SpecPrefillRequest:
    """Asks to compute only the tokens that matter of a prompt. `keep` is the share that is computed, None for the
    server's default; `whole` are the ranges of each prompt that are computed in any case. `forced` ignores the server's
    threshold for the length. `auto`: not the client asks, but the server's policy."""

    keep: float | None = None
    whole: tuple[tuple[TokenRange, ...], ...] = ()
    forced: bool = False
    auto: bool = False


@dataclass(frozen=True, slots=True)
class SpecPrefillReport:
    """Of one prompt: how many of its tokens were `scored`, and `kept` of those; how long scoring took; how many of its
    first tokens an earlier request thinned out, and were `reused` so; or why all of them were computed. `mass` is the
    share of the scorer's attention to the prompt that what is computed of it has; None where nothing was scored."""

    scorer: str
    scored: int = 0
    kept: int = 0
    scoring_s: float = 0.0
    reused: int = 0
    unused: SpecPrefillSkipped | None = None
    mass: float | None = None
    auto: bool = False  # by the server's policy

    @property
    def lossy(self) -> bool:
        """Whether a part of the prompt was left out."""
        return self.unused is None and (self.kept < self.scored or self.reused > 0)

    @property
    def may_vary(self) -> bool:
        """Whether the same prompt may be thinned out otherwise at another time: by what is cached, or what it costs."""
        return self.unused is None or self.unused in ("cached", "does_not_pay")


PoolingTask = Literal["embedding", "rerank"]


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Inputs for the pooling model of one role, under one id."""

    id: str
    role: PoolingTask
    inputs: tuple[EncoderInput, ...]
    tenant: str = ""
    deadline: float | None = None  # on the clock of time.monotonic()
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.inputs)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """For each input, in order, its embedding, or its score before any activation."""

    rows: tuple[array[float], ...]
    tokens: int  # that were computed
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class PoolingModelCard:
    """What the other packages may know of a loaded pooling model without mlx."""

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
    notes: tuple[str, ...] = ()  # what is assumed, or slower than it could be

    @property
    def kind(self) -> str:
        return self.role

    @property
    def context(self) -> int:
        return self.length

    @property
    def at_ready(self) -> str:
        """Its purpose, for the ready line."""
        purpose = f"vectors of {self.dimension} numbers" if self.role == "embedding" else "reranking"
        return f"{purpose} | inputs of {counted(self.length, 'token')}"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the other packages may know of the loaded model without mlx."""

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
    recommended: Mapping[str, Any] = field(default_factory=dict, hash=False)  # sampling parameters
    quantization: str = ""  # of the weights in the model's files
    formats: str = ""  # that, and those of activations and KV
    proposers: tuple[str, ...] = ()  # of draft tokens, in order of preference
    kernels: str = ""  # compiled for the device
    sees: tuple[MediaKind, ...] = ()  # its inputs besides text
    scorer: str = ""  # of prompts for SpecPrefill; empty without it
    specprefill_from: int | None = None  # tokens from which its policy also thins out prompts whose requests do not ask
    lossy: tuple[str, ...] = ()  # settings that change its answers, as the receipt names them
    arithmetic: str = ""  # what the last bits depend on: kernels, instruction sets, codecs
    weights: str = ""  # a fingerprint of their files
    varies: str = ""  # why an answer may depend on what else is computed or was cached; empty if it does not
    lossy_kv: bool = False  # it also does where a request may reuse KV that a codec changed
    exact_context: int | None = None  # for exact requests, where others' KV is quantised: memory holds less

    def context_of(self, *, exact: bool) -> int:
        return self.context if self.exact_context is None or not exact else self.exact_context
