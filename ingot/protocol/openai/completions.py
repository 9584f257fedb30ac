"""`POST /v1/completions`: the body as OpenAI describes it, and the job it becomes."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ingot.errors import BadRequest
from ingot.protocol.chat.answers import AnswerHead, GenerationTask
from ingot.protocol.chat.generation_fields import GenerationBody
from ingot.protocol.chat.preparation import Prepared
from ingot.protocol.chat.prompts import infill_prompt, infill_tokens, text_prompt
from ingot.protocol.openai.completion_answers import CompletionPlan, CompletionStreamed, CompletionWhole, Echo, spell
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Bool, Either, Int, ListOf, Text
from ingot.protocol.schema.model_fields import TokenIds
from ingot.protocol.schema.objects import ObjectOf, accepts, requires
from ingot.protocol.schema.rules import Given, Is, Never, Not
from ingot.protocol.schema.stopping import Limit
from ingot.protocol.served import Served

TOKENS = TokenIds(bounds.PROMPT_TOKENS)
PROMPT = Either((Text(), ListOf(Text(), bounds.PROMPTS, least=1), TOKENS, ListOf(TOKENS, bounds.PROMPTS, least=1)))
OnePrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody(GenerationBody):
    prompt: OnePrompt | tuple[str, ...] | tuple[tuple[int, ...], ...] = requires(
        PROMPT, "A text, a list of texts, a list of token ids, or a list of such lists."
    )
    max_tokens: int | None = accepts(
        Limit(bounds.LEGACY_MAX_TOKENS),
        "Most tokens to generate; -1 is as many as the context holds, 0 only together with `echo`.",
        default=bounds.LEGACY_MAX_TOKENS_DEFAULT,
    )
    best_of: int | None = accepts(
        Int(bounds.BEST_OF), "Generate this many and give the `n` likeliest per token; not with `stream`."
    )
    echo: bool = accepts(Bool(), "Give the prompt back before the answer.", default=False)
    logprobs: int | None = accepts(
        Int(bounds.LEGACY_LOGPROBS), "Give each token's log-probability, and this many likeliest ones."
    )
    suffix: str = accepts(
        Text(), "The text after the gap that is to be filled in after the prompt; for models that can.", default=""
    )

    def check(self) -> None:
        """Refuse what no schema can say: numbers that limit each other."""
        if self.best_of is not None and self.best_of < self.n:
            raise BadRequest(f"best_of is {self.best_of} and must be at least n, {self.n}.", param="best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise BadRequest("best_of compares whole answers, which cannot be streamed.", param="best_of")
        sequences = len(self.each()) * self.candidates
        if sequences > bounds.SEQUENCES:
            raise BadRequest(
                f"The prompts times the answers to each make {sequences} sequences; one request may have "
                f"{bounds.SEQUENCES}.",
                param="prompt",
            )

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    def each(self) -> tuple[OnePrompt, ...]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt


COMPLETION_BODY = ObjectOf(
    CompletionBody,
    (
        Never(
            (Is("max_tokens", 0), Not(Is("echo", True))),
            "max_tokens is 0, which asks for something only with echo.",
            param="max_tokens",
        ),
        Never(
            (Given("suffix"), Not(Is("suffix", "")), Is("echo", True)),
            "echo gives a prompt back before what follows it, and with a suffix that stands in between.",
            param="echo",
        ),
    ),
    foreign.COMPLETIONS,
)


def read_completion(value: Any, served: Served, request_id: str) -> GenerationTask:
    """The job that a decoded body asks for. Tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: CompletionBody = COMPLETION_BODY.parse(value, "", reading)
    body.check()
    prompts = body.each()
    tokens = tuple(prompt_tokens(served, prompt, body.suffix) for prompt in prompts)
    ends = infill_tokens(served, path="suffix").ends if body.suffix else frozenset()
    scored = body.logprobs if body.logprobs is not None else (0 if body.candidates > body.n else None)
    request = body.request(
        request_id,
        served,
        [Prepared(ids, None, None) for ids in tokens],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_tokens,
        n=body.candidates,
        sampling=body.sampling(served, logprobs=scored, prompt_logprobs=body.logprobs if body.echo else None),
        stop=body.stopping(body.stop, ends),
    )
    plan = CompletionPlan(
        prompts=len(prompts),
        candidates=body.candidates,
        n=body.n,
        logprobs=body.logprobs is not None,
        echoes=tuple(
            echo(served, prompt, ids, spelled=body.logprobs is not None)
            for prompt, ids in zip(prompts, tokens, strict=True)
            if body.echo
        ),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, tokens, request)
    streamed = CompletionStreamed(head, plan, include_usage=body.include_usage)
    return GenerationTask(request, streamed if body.stream else CompletionWhole(head, plan), "prompt", head)


def prompt_tokens(served: Served, prompt: OnePrompt, suffix: str) -> tuple[int, ...]:
    if suffix:
        return infill_prompt(served, prompt, suffix, paths=("prompt", "suffix"))
    return prompt if isinstance(prompt, tuple) else text_prompt(served, prompt, path="prompt")


def echo(served: Served, prompt: OnePrompt, ids: tuple[int, ...], *, spelled: bool) -> Echo:
    """`prompt` to be given back, with its tokens where `spelled`."""
    text = prompt if isinstance(prompt, str) else served.tokenizer.decode(ids, skip_special=False)
    if not spelled:
        return Echo(text)
    raws = [served.tokenizer.token_bytes(token) for token in ids]
    widths = text_bytes(served, prompt, ids, raws) if isinstance(prompt, str) else raws
    return Echo(text, tuple((spell(raw.decode(errors="replace"), raw), w) for raw, w in zip(raws, widths, strict=True)))


def text_bytes(served: Served, text: str, ids: tuple[int, ...], raws: list[bytes]) -> list[bytes]:
    """What each token contributes to `text`: nothing where the tokenizer added it by itself."""
    plain = tuple(served.tokenizer.encode(text, add_special=False))
    added = len(ids) - len(plain)
    if added < 0 or ids[added:] != plain:
        return raws
    widths = [b""] * added + raws[added:]
    if b"".join(widths) == b" " + text.encode():  # some tokenizers put a space before the first word
        widths[added] = widths[added][1:]
    return widths
