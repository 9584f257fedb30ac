"""The fields that all protocols share, and the one place where the engine's request is made of them.

Where a protocol has another name for one of these, it has that one alone.
"""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.engine.request import Request, Sampling, SpecPrefillRequest, Stop
from ingot.protocol.chat.ask import ChatInput
from ingot.protocol.chat.preparation import PreparedChat
from ingot.protocol.chat.sampling_defaults import with_sampling_defaults
from ingot.protocol.chat.specprefill import ABOUT_SPECPREFILL, ABOUT_SPECPREFILL_KEEP, specprefill_ask
from ingot.protocol.lora_adapters import ABOUT_ADAPTER, AdapterField, resolve_lora
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Bool, Int, Number, Text, Timeout
from ingot.protocol.schema.model_fields import (
    ABOUT_CACHE_FIELD,
    ABOUT_SPECULATE,
    ABOUT_TTL,
    CACHE_FIELD,
    STOP_FIELD,
    LogitBiasesField,
    ModelNameField,
    ProposersField,
    TimeToLiveField,
    TokenIdsField,
)
from ingot.protocol.schema.objects import Is, IsSet, Never, Not, ObjectOf, accepts, refuses
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import DEFAULT_NAME
from ingot.text.prompt.assembly import Prompt

SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed"),
)
TEMPERATURE = Number(bounds.TEMPERATURE), "0 takes the likeliest token."
TOP_P = Number(bounds.TOP_P), "Sample from this share of the probability."
TOP_K = Int(bounds.TOP_K), "Sample from this many tokens; 0 or -1 is all."
MIN_P = Number(bounds.MIN_P), "Leave out tokens less likely than this share of the likeliest one's."
REPETITION_PENALTY = Number(bounds.REPETITION_PENALTY), "Divides the likelihood of tokens that already occur."
PRESENCE_PENALTY = Number(bounds.PENALTY), "Subtracted from the logit of tokens that were generated."
FREQUENCY_PENALTY = Number(bounds.PENALTY), "Subtracted from the logit for each time a token was generated."
LOGIT_BIAS = LogitBiasesField(bounds.LOGIT_BIAS, bounds.LOGIT_BIAS_ENTRIES), "Added to the logit, by token id."
ABOUT_LOGPROBS = "Return the log-probability of each token."
ABOUT_TOP_LOGPROBS = "Return those of this many likeliest tokens too; needs `logprobs`."
NEEDS_LOGPROBS = Never(
    (IsSet("top_logprobs"), Not(Is("logprobs", True))),
    "top_logprobs needs logprobs to be true.",
    param="top_logprobs",
)
ABOUT_STREAM = "Send the answer as server-sent events while it is generated."
ABOUT_HOLD_CALLS = "Enforce a tool's schema in calls that the model begins by itself; by default the server's setting."


# These have no slots, so that a body can have several of them as bases.
@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """How tokens are sampled. The defaults are those of the model's generation_config.json."""

    temperature: float | None = accepts(*TEMPERATURE)
    top_p: float | None = accepts(*TOP_P)
    top_k: int | None = accepts(*TOP_K)
    min_p: float | None = accepts(*MIN_P)
    repetition_penalty: float | None = accepts(*REPETITION_PENALTY)
    presence_penalty: float = accepts(*PRESENCE_PENALTY, default=0.0)
    frequency_penalty: float = accepts(*FREQUENCY_PENALTY, default=0.0)
    logit_bias: tuple[tuple[int, float], ...] = accepts(*LOGIT_BIAS, default=())
    seed: int | None = accepts(Int(bounds.SEED), "The same seed gives the same text.")

    def sampling(
        self, served: ServedModel, *, logprobs: int | None = None, prompt_logprobs: int | None = None
    ) -> Sampling:
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return with_sampling_defaults(
            served.sampling, values | {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        )


@dataclass(frozen=True, kw_only=True)
class StopFields:
    """What ends an answer, besides stop strings and a number of tokens."""

    stop_token_ids: tuple[int, ...] = accepts(
        TokenIdsField(bounds.STOP_TOKENS, least=0), "Tokens that end the answer, besides the model's own.", default=()
    )
    include_stop_str_in_output: bool = accepts(Bool(), "Leave the stop text in the answer.", default=False)
    ignore_eos: bool = accepts(Bool(), "Do not end at the model's own end tokens.", default=False)
    min_tokens: int = accepts(Int(bounds.MIN_TOKENS), "No end token before this many tokens.", default=0)
    loop_guard: bool | None = accepts(
        Bool(), "End an answer that repeats itself without end; by default the server's setting."
    )

    def stopping(self, served: ServedModel, strings: str | tuple[str, ...], ends: frozenset[int] = frozenset()) -> Stop:
        """`ends` are end tokens of this prompt format, besides the model's own."""
        return Stop(
            # Some clients send an empty string for none.
            strings=tuple(text for text in ((strings,) if isinstance(strings, str) else strings) if text),
            token_ids=frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else ends),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            keep=self.include_stop_str_in_output,
            loop_guard=served.loop_guard if self.loop_guard is None else self.loop_guard,
        )


@dataclass(frozen=True, kw_only=True)
class RequestFields:
    """How a request is served: what it may reuse, when it runs, how long it may take."""

    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    cache: str = accepts(CACHE_FIELD, ABOUT_CACHE_FIELD, default="auto")
    cache_salt: str = accepts(
        Text(bounds.IDENTIFIER_CHARS), "Requests with different salts share nothing that was computed.", default=""
    )
    speculate: tuple[str, ...] | None = accepts(ProposersField(), ABOUT_SPECULATE)
    specprefill: bool | None = accepts(Bool(), ABOUT_SPECPREFILL)
    specprefill_keep_pct: float | None = accepts(Number(bounds.KEPT_SHARE), ABOUT_SPECPREFILL_KEEP)
    priority: int = accepts(
        Int(bounds.PRIORITY),
        "Lower goes first; five seconds of waiting count as one. Only the administrator's may be below 0.",
        default=0,
    )

    def remembering(self, ask: ChatInput) -> ChatInput:
        """`ask` with this request's cache settings, under which past answers are looked up."""
        return replace(ask, salt=self.cache_salt, remembers=self.cache != "off")

    def specprefill_request(
        self, served: ServedModel, prompts: Sequence[Prompt | tuple[int, ...]], path: str = ""
    ) -> SpecPrefillRequest | None:
        auto_from = None if self.cache == "exact" else served.card.specprefill_from
        return specprefill_ask(self.specprefill, self.specprefill_keep_pct, prompts, auto_from=auto_from, prefix=path)

    def request(
        self,
        id: str,
        served: ServedModel,
        prompts: Sequence[PreparedChat],
        *,
        model: str,
        adapter: str | None,
        max_tokens: int | None,
        sampling: Sampling,
        stop: Stop,
        n: int = 1,
        path: str = "",
    ) -> Request:
        """The engine's request. All prompts are parsed and constrained alike; `path` is where in the body these fields
        are."""
        return Request(
            id=id,
            prompts=tuple(each.prompt for each in prompts),
            max_tokens=served.max_tokens if max_tokens is None else max_tokens,
            n=n,
            sampling=sampling,
            stop=stop,
            reading=prompts[0].reading,
            grammar=prompts[0].grammar,
            marks=tuple(marks for each in prompts for marks in each.marks),
            media=tuple(items for each in prompts for items in each.media),
            cache=self.cache != "off",
            exact=self.cache == "exact",
            salt=self.cache_salt,
            lora=resolve_lora(model, adapter, served.terms),
            priority=-self.priority,
            speculate=self.speculate,
            specprefill=self.specprefill_request(served, [source for each in prompts for source in each.sources], path),
            deadline=time.monotonic() + (served.terms.timeout_s if self.timeout is None else self.timeout),
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = accepts(Bool(), "Send one more chunk, with the usage.", default=False)
    include_obfuscation: None = refuses("is not supported: chunks are never padded. Send false.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBody(SamplingFields, StopFields, RequestFields):
    """What OpenAI's protocols share."""

    model: str = accepts(ModelNameField(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterField(), ABOUT_ADAPTER)
    n: int = accepts(Int(bounds.CHOICES), "Answers to each prompt.", default=1)
    stream: bool = accepts(Bool(), ABOUT_STREAM, default=False)
    stream_options: StreamOptions | None = accepts(
        ObjectOf(StreamOptions), "How to stream. An answer that is not streamed always has its usage."
    )
    stop: str | tuple[str, ...] = accepts(STOP_FIELD, "Text that ends the answer.", default=())
    ttl: None = accepts(TimeToLiveField(), ABOUT_TTL)
    user: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The end user; not stored.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
