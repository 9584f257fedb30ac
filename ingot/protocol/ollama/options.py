"""Ollama's `options`: how tokens are chosen, when an answer ends, and much that is settled when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.engine.request import Sampling
from ingot.errors import BadRequest
from ingot.protocol.chat.generation_fields import BIASES, WHAT_IS_ADDED, RequestFields, StopFields
from ingot.protocol.chat.sampling_defaults import with_defaults
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Bool, Int, Number
from ingot.protocol.schema.objects import accepts, refuses
from ingot.protocol.schema.stopping import STOP

SIZE = Int((-(2**31), 2**31 - 1))
SETTLED = "Settled when the model was loaded; without effect."
NO_SUCH_SAMPLER = "is not supported: tokens are chosen by temperature, top_k, top_p, min_p and penalties."
LOADING = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
    *("use_mlock", "embedding_only", "num_thread", "num_keep"),
)


class PromptTooLong(BadRequest):
    code = "context_length_exceeded"


def fixed_at_load(kind: Any) -> Any:
    return accepts(kind, SETTLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StopFields, RequestFields):
    num_predict: int | None = accepts(
        Int((-2, bounds.MAX_TOKENS[1])), "Most tokens to generate; below 1, as many as the context holds."
    )
    # What these leave out is as the model's makers recommend.
    temperature: float | None = accepts(Number(bounds.TEMPERATURE), "0 takes the likeliest token.")
    top_k: int | None = accepts(Int(bounds.TOP_K), "Sample from this many tokens; 0 or -1 is all.")
    top_p: float | None = accepts(Number(bounds.TOP_P), "Sample from this share of the probability.")
    min_p: float | None = accepts(
        Number(bounds.MIN_P), "Leave out tokens less likely than this share of the likeliest one's."
    )
    repeat_penalty: float | None = accepts(
        Number(bounds.REPETITION_PENALTY), "Divides the likelihood of tokens that already occur."
    )
    repeat_last_n: int | None = accepts(
        Int((-1, bounds.MAX_TOKENS[1])), "0 switches repeat_penalty off; else it counts all tokens."
    )
    presence_penalty: float = accepts(
        Number(bounds.PENALTY), "Taken off the logit of tokens that were generated.", default=0.0
    )
    frequency_penalty: float = accepts(
        Number(bounds.PENALTY), "Taken off the logit for each time a token was generated.", default=0.0
    )
    seed: int | None = accepts(Int(bounds.SEED), "The same seed gives the same text; -1 is none.")
    stop: str | tuple[str, ...] = accepts(STOP, "Text that ends the answer.", default=())
    num_ctx: int | None = accepts(
        Int((0, bounds.PROMPT_TOKENS)),
        "Most tokens of prompt and answer together; without effect above the model's context, 0 is that.",
    )
    logit_bias: tuple[tuple[int, float], ...] = accepts(BIASES, WHAT_IS_ADDED, default=())

    mirostat: None = refuses(NO_SUCH_SAMPLER, 0)
    mirostat_tau: float | None = accepts(Number((0.0, 1e6)), "Means nothing without mirostat.")
    mirostat_eta: float | None = accepts(Number((0.0, 1e6)), "Means nothing without mirostat.")
    typical_p: None = refuses(NO_SUCH_SAMPLER, 1.0, 1)
    tfs_z: None = refuses(NO_SUCH_SAMPLER, 1.0, 1)
    penalize_newline: None = refuses("is not supported: penalties count every token alike. Send true.", True)

    numa: bool | None = fixed_at_load(Bool())
    num_batch: int | None = fixed_at_load(SIZE)
    num_gpu: int | None = fixed_at_load(SIZE)
    main_gpu: int | None = fixed_at_load(SIZE)
    low_vram: bool | None = fixed_at_load(Bool())
    f16_kv: bool | None = fixed_at_load(Bool())
    logits_all: bool | None = fixed_at_load(Bool())
    vocab_only: bool | None = fixed_at_load(Bool())
    use_mmap: bool | None = fixed_at_load(Bool())
    use_mlock: bool | None = fixed_at_load(Bool())
    embedding_only: bool | None = fixed_at_load(Bool())
    num_thread: int | None = fixed_at_load(SIZE)
    num_keep: int | None = accepts(SIZE, "No prompt is ever cut; without effect.")

    def limit(self, prompt: int) -> int | None:
        """Most tokens to generate after a prompt of this many. Raises PromptTooLong where num_ctx leaves room for none:
        prompts are never cut here."""
        asked = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        if not self.num_ctx:
            return asked
        if prompt >= self.num_ctx:
            raise PromptTooLong(
                f"The prompt has {prompt} tokens, and options.num_ctx leaves {self.num_ctx} for it and the answer. "
                "Raise num_ctx, or shorten the prompt: it is never cut here.",
                param="options.num_ctx",
            )
        room = self.num_ctx - prompt
        return room if asked is None else min(asked, room)

    def sampling(self, defaults: Sampling, *, logprobs: int | None) -> Sampling:
        said = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
            "logit_bias": self.logit_bias,
            "seed": None if self.seed == -1 else self.seed,
            "logprobs": logprobs,
        }
        return with_defaults(defaults, said)


def note_unheeded(given: Any, options: Options, context: int, reading: BodyReading) -> None:
    """Names in the receipt what in `given`, the options as they were sent, had no effect."""
    unheeded = [name for name in LOADING if given.get(name) is not None]
    if options.num_ctx is not None and options.num_ctx > context:
        unheeded.append("num_ctx")
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_penalty not in (None, 1.0):
        unheeded.append("repeat_last_n")
    for name in unheeded:
        reading.ignore(f"options.{name}")
