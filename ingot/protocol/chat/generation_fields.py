"""The fields that every way of asking for text shares, and what the engine makes of them."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.engine.request import LoraRef, Sampling, Stop
from ingot.engine.sparse.ask import SparseAsk
from ingot.protocol.adapters import WHICH_ADAPTER, AdapterName, lora_of
from ingot.protocol.chat.sampling_defaults import with_defaults
from ingot.protocol.chat.sparse import HOW_MUCH, WHETHER, sparse_ask
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import Bool, Int, Number, Text, Timeout
from ingot.protocol.schema.keeping import HOW_LONG, TimeToLive
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses
from ingot.protocol.schema.proposers import WHO_GUESSES, Proposers
from ingot.protocol.schema.reuse import REUSE, WHAT_IS_REUSED
from ingot.protocol.schema.stopping import STOP, stop_strings
from ingot.protocol.schema.token_ids import Biases, TokenIds
from ingot.protocol.served import Served
from ingot.text.prompt.prompt import Prompt

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed"),
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = accepts(Bool(), "Send one more chunk, with the usage.", default=False)
    include_obfuscation: None = refuses("is not supported: chunks are never padded. Send false.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBody:
    model: str = accepts(ModelName(), "The served model's name, or `default`.", default=DEFAULT_NAME)
    adapter: str | None = accepts(AdapterName(), WHICH_ADAPTER)
    n: int = accepts(Int(bounds.CHOICES), "Answers to each prompt.", default=1)
    stream: bool = accepts(Bool(), "Send the answer as server-sent events while it is made.", default=False)
    stream_options: StreamOptions | None = accepts(
        ObjectOf(StreamOptions), "How to stream. A whole answer always tells its usage."
    )

    # What these leave out is as the model's makers recommend.
    temperature: float | None = accepts(Number(bounds.TEMPERATURE), "0 takes the likeliest token.")
    top_p: float | None = accepts(Number(bounds.TOP_P), "Sample from this share of the probability.")
    top_k: int | None = accepts(Int(bounds.TOP_K), "Sample from this many tokens; 0 or -1 is all.")
    min_p: float | None = accepts(
        Number(bounds.MIN_P), "Leave out tokens less likely than this share of the likeliest one's."
    )
    repetition_penalty: float | None = accepts(
        Number(bounds.REPETITION_PENALTY), "Divides the likelihood of tokens that already occur."
    )
    presence_penalty: float = accepts(
        Number(bounds.PENALTY), "Taken off the logit of tokens that were generated.", default=0.0
    )
    frequency_penalty: float = accepts(
        Number(bounds.PENALTY), "Taken off the logit for each time a token was generated.", default=0.0
    )
    logit_bias: tuple[tuple[int, float], ...] = accepts(
        Biases(bounds.LOGIT_BIAS, bounds.LOGIT_BIAS_ENTRIES), "Added to the logit, by token id.", default=()
    )
    seed: int | None = accepts(Int(bounds.SEED), "The same seed gives the same text.")

    stop: str | tuple[str, ...] = accepts(STOP, "Text that ends the answer.", default=())
    stop_token_ids: tuple[int, ...] = accepts(
        TokenIds(bounds.STOP_TOKENS, least=0), "Tokens that end the answer, besides the model's own.", default=()
    )
    include_stop_str_in_output: bool = accepts(Bool(), "Leave the stop text in the answer.", default=False)
    ignore_eos: bool = accepts(Bool(), "Do not end at the model's own end tokens.", default=False)
    min_tokens: int = accepts(Int(bounds.MIN_TOKENS), "No end token before this many tokens.", default=0)
    timeout: float | None = accepts(Timeout(bounds.LEAST_TIMEOUT_S), "Seconds the request may take in all.")
    cache: str = accepts(REUSE, WHAT_IS_REUSED, default="auto")
    cache_salt: str = accepts(
        Text(bounds.IDENTIFIER_CHARS), "Requests with different salts share nothing that was computed.", default=""
    )
    speculate: tuple[str, ...] | None = accepts(Proposers(), WHO_GUESSES)
    specprefill: bool | None = accepts(Bool(), WHETHER)
    specprefill_keep_pct: float | None = accepts(Number(bounds.KEPT_SHARE), HOW_MUCH)
    ttl: None = accepts(TimeToLive(), HOW_LONG)
    priority: int = accepts(
        Int(bounds.PRIORITY),
        "Who has less goes first; five seconds of waiting are worth one. Only the administrator's may be below 0.",
        default=0,
    )
    user: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "Who asks; kept by nobody.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sparse(self, prompts: Sequence[Prompt | tuple[int, ...]]) -> SparseAsk | None:
        return sparse_ask(self.specprefill, self.specprefill_keep_pct, prompts)

    def lora(self, served: Served) -> LoraRef | None:
        return lora_of(self.model, self.adapter, served.terms)

    def sampling(self, served: Served, *, logprobs: int | None, prompt_logprobs: int | None = None) -> Sampling:
        said = {name: getattr(self, name) for name in SAMPLING}
        return with_defaults(served.sampling, said | {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs})

    def stopping(self) -> Stop:
        return Stop(
            strings=stop_strings(self.stop),
            token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            keep=self.include_stop_str_in_output,
        )

    def deadline(self, served: Served) -> float:
        return time.monotonic() + (served.terms.timeout_s if self.timeout is None else self.timeout)
