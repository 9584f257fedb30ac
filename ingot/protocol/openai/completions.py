"""`POST /v1/completions`, OpenAI's legacy completions: the body, its task, and the answer as one body or as chunks."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import (
    Ended,
    Event,
    FinishReason,
    PromptScored,
    SequenceEnded,
    TextDelta,
    TokenInfo,
    TokenLogprob,
)
from ingot.errors import BadRequest
from ingot.protocol.chat.answers import (
    AnswerHead,
    GenerationTask,
    Receipt,
    StreamedChoices,
    UsageBody,
    WholeAnswer,
    finite_logprob,
    stop_reason,
)
from ingot.protocol.chat.generation_fields import GenerationBody
from ingot.protocol.chat.preparation import PreparedChat
from ingot.protocol.chat.prompts import ABOUT_SUFFIX, encode_infill_prompt, encode_text_prompt, find_infill_tokens
from ingot.protocol.schema import bounds, foreign
from ingot.protocol.schema.fields import Bool, Either, Int, ListOf, Text
from ingot.protocol.schema.model_fields import TokenIdsField, TokenLimitField
from ingot.protocol.schema.objects import Is, IsSet, Never, Not, ObjectOf, accepts, requires
from ingot.protocol.served import ServedModel

PROMPT_TOKENS = TokenIdsField(bounds.PROMPT_TOKENS)
COMPLETION_PROMPT = Either(
    (Text(), ListOf(Text(), bounds.PROMPTS, least=1), PROMPT_TOKENS, ListOf(PROMPT_TOKENS, bounds.PROMPTS, least=1))
)
CompletionPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody(GenerationBody):
    prompt: CompletionPrompt | tuple[str, ...] | tuple[tuple[int, ...], ...] = requires(
        COMPLETION_PROMPT, "A text, a list of texts, a list of token ids, or a list of such lists."
    )
    max_tokens: int | None = accepts(
        TokenLimitField(bounds.LEGACY_MAX_TOKENS),
        "Most tokens to generate; -1 is as many as the context holds, 0 only together with `echo`.",
        default=bounds.LEGACY_MAX_TOKENS_DEFAULT,
    )
    best_of: int | None = accepts(
        Int(bounds.BEST_OF), "Generate this many and return the `n` likeliest per token; not with `stream`."
    )
    echo: bool = accepts(Bool(), "Return the prompt before the answer.", default=False)
    logprobs: int | None = accepts(
        Int(bounds.LEGACY_LOGPROBS), "Return each token's log-probability, and those of this many likeliest tokens."
    )
    suffix: str = accepts(Text(), ABOUT_SUFFIX, default="")

    def check(self) -> None:
        """Refuse what no schema can express: numbers that limit each other."""
        if self.best_of is not None and self.best_of < self.n:
            raise BadRequest(f"best_of is {self.best_of} and must be at least n, {self.n}.", param="best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise BadRequest("best_of compares whole answers, which cannot be streamed.", param="best_of")
        sequences = len(self.prompts) * self.candidates
        if sequences > bounds.SEQUENCES:
            raise BadRequest(
                f"The prompts times the answers to each make {sequences} sequences; one request may have "
                f"{bounds.SEQUENCES}.",
                param="prompt",
            )

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def prompts(self) -> tuple[CompletionPrompt, ...]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return (self.prompt,)
        return self.prompt


COMPLETION_BODY = ObjectOf(
    CompletionBody,
    (
        Never(
            (Is("max_tokens", 0), Not(Is("echo", True))),
            "max_tokens may be 0 only with echo.",
            param="max_tokens",
        ),
        Never(
            (IsSet("suffix"), Not(Is("suffix", "")), Is("echo", True)),
            "echo returns the prompt before the answer, and with a suffix the answer is between both.",
            param="echo",
        ),
    ),
    foreign.COMPLETIONS,
)


def read_completion(value: Any, served: ServedModel, request_id: str) -> GenerationTask:
    """The task of a decoded body. Tokenizes, so it may take a while: not for an event loop."""
    reading = served.reading()
    body: CompletionBody = COMPLETION_BODY.parse(value, "", reading)
    body.check()
    prompts = body.prompts
    tokens = tuple(encode_completion_prompt(served, prompt, body.suffix) for prompt in prompts)
    ends = find_infill_tokens(served, path="suffix").ends if body.suffix else frozenset()
    scored = body.logprobs if body.logprobs is not None else (0 if body.candidates > body.n else None)
    request = body.request(
        request_id,
        served,
        [PreparedChat(ids) for ids in tokens],
        model=body.model,
        adapter=body.adapter,
        max_tokens=body.max_tokens,
        n=body.candidates,
        sampling=body.sampling(served, logprobs=scored, prompt_logprobs=body.logprobs if body.echo else None),
        stop=body.stopping(served, body.stop, ends),
    )
    plan = CompletionPlan(
        prompts=len(prompts),
        candidates=body.candidates,
        n=body.n,
        logprobs=body.logprobs is not None,
        echoes=tuple(
            make_echo(served, prompt, ids, with_tokens=body.logprobs is not None)
            for prompt, ids in zip(prompts, tokens, strict=True)
            if body.echo
        ),
    )
    head = AnswerHead.of(request_id, int(time.time()), served, reading, tokens, request)
    streamed = StreamedCompletion(head, plan, include_usage=body.include_usage)
    return GenerationTask(request, streamed if body.stream else WholeCompletion(head, plan), "prompt", head)


def encode_completion_prompt(served: ServedModel, prompt: CompletionPrompt, suffix: str) -> tuple[int, ...]:
    if suffix:
        return encode_infill_prompt(served, prompt, suffix, paths=("prompt", "suffix"))
    return prompt if isinstance(prompt, tuple) else encode_text_prompt(served, prompt)


def make_echo(
    served: ServedModel, prompt: CompletionPrompt, ids: tuple[int, ...], *, with_tokens: bool
) -> EchoedPrompt:
    text = prompt if isinstance(prompt, str) else served.tokenizer.decode(ids, skip_special=False)
    if not with_tokens:
        return EchoedPrompt(text)
    raws = [served.tokenizer.token_bytes(token) for token in ids]
    widths = token_bytes_of_text(served, prompt, ids, raws) if isinstance(prompt, str) else raws
    return EchoedPrompt(
        text, tuple((spell_bytes(raw.decode(errors="replace"), raw), w) for raw, w in zip(raws, widths, strict=True))
    )


def token_bytes_of_text(served: ServedModel, text: str, ids: tuple[int, ...], raws: list[bytes]) -> list[bytes]:
    """The bytes of `text` in each token: none where the tokenizer added the token."""
    plain = tuple(served.tokenizer.encode(text, add_special=False))
    added = len(ids) - len(plain)
    if added < 0 or ids[added:] != plain:
        return raws
    widths = [b""] * added + raws[added:]
    if b"".join(widths) == b" " + text.encode():  # some tokenizers put a space before the first word
        widths[added] = widths[added][1:]
    return widths


class CompletionLogprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(Struct):
    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str
    ingot: Receipt | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt to return: its text, and each token with the bytes it contributes to that text."""

    text: str
    tokens: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """How many sequences run for each prompt, how many of them are returned, and how."""

    prompts: int
    candidates: int
    n: int
    logprobs: bool
    echoes: tuple[EchoedPrompt, ...] = ()  # one for each prompt, or none

    def echo(self, index: int) -> EchoedPrompt | None:
        return self.echoes[index // self.candidates] if self.echoes else None


@dataclass(slots=True)
class TextOffsets:
    """Where in the text each token begins, computed from the tokens' bytes in order."""

    at: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def advance_offset(self, raw: bytes) -> int:
        begins = self.at
        self.at += len(self.decoder.decode(raw))
        return begins


class WholeCompletion(WholeAnswer):
    def __init__(self, head: AnswerHead, plan: CompletionPlan) -> None:
        super().__init__(head, plan.prompts * plan.candidates)
        self.plan = plan

    def body(self) -> Completion:
        return Completion(
            **self.head.common,
            choices=[self._choice(at, sequence) for at, sequence in enumerate(self._best())],
            usage=UsageBody.of(self.ended.usage),
            ingot=Receipt.of(self.head, self.ended),
        )

    def _best(self) -> list[int]:
        """The sequences to answer with: of each prompt's candidates the likeliest per token, best first."""
        width = self.plan.candidates
        groups = (range(first, first + width) for first in range(0, len(self.answers), width))
        if self.plan.n == width:
            return [sequence for group in groups for sequence in group]
        ends = [answer.end for answer in self.answers]
        scores = [(end.logprob_sum or 0.0) / max(1, end.completion_tokens) if end else 0.0 for end in ends]
        return [s for group in groups for s in sorted(group, key=lambda s: -scores[s])[: self.plan.n]]

    def _choice(self, at: int, sequence: int) -> CompletionChoice:
        answer, echo = self.answers[sequence], self.plan.echo(sequence)
        logprobs: CompletionLogprobs | None = None
        if self.plan.logprobs:
            logprobs, offsets = CompletionLogprobs(), TextOffsets()
            if echo is not None and answer.prompt_scores:
                append_prompt_logprobs(logprobs, offsets, echo, answer.prompt_scores)
            append_logprobs(logprobs, offsets, answer.tokens)
        text = answer.text if echo is None else echo.text + answer.text
        reason = answer.end.reason if answer.end else "stop"
        return CompletionChoice(text, at, logprobs, reason, stop_reason(answer.end))


class StreamedCompletion(StreamedChoices):
    """The echoed prompt, then the text."""

    def __init__(self, head: AnswerHead, plan: CompletionPlan, *, include_usage: bool) -> None:
        count = plan.prompts * plan.candidates
        super().__init__(Completion, head, count, include_usage=include_usage)
        self.plan = plan
        self.offsets = [TextOffsets() for _ in range(count)]

    def opening(self) -> list[Struct]:
        if self.plan.logprobs or not self.plan.echoes:
            return []  # an echo with logprobs waits for the prompt's scores
        echoes = [self.plan.echoes[index // self.plan.candidates] for index in range(len(self.offsets))]
        return [self.chunk(CompletionChoice(echo.text, index)) for index, echo in enumerate(echoes)]

    def chunks(self, event: Event) -> list[Struct]:
        match event:
            case PromptScored():
                return self._echo(event)
            case TextDelta():
                return self._text(event)
            case SequenceEnded():
                choice = CompletionChoice("", event.index, None, event.reason, stop_reason(event))
                return self.finish(event.index, choice)
            case Ended():
                return self.close(event)
        return []

    def empty(self) -> list[Struct]:
        return [self.chunk(CompletionChoice("", min(self.unfinished)))] if self.unfinished else []

    def _echo(self, event: PromptScored) -> list[Struct]:
        echo = self.plan.echo(event.index)
        if echo is None:
            return []
        logprobs = CompletionLogprobs()
        append_prompt_logprobs(logprobs, self.offsets[event.index], echo, event.tokens)
        return [self.chunk(CompletionChoice(echo.text, event.index, logprobs))]

    def _text(self, event: TextDelta) -> list[Struct]:
        if not self.plan.logprobs:
            return [self.chunk(CompletionChoice(event.text, event.index))] if event.text else []
        logprobs = CompletionLogprobs()
        append_logprobs(logprobs, self.offsets[event.index], event.tokens)
        return [self.chunk(CompletionChoice(event.text, event.index, logprobs))]


def append_logprobs(into: CompletionLogprobs, offsets: TextOffsets, tokens: Iterable[TokenInfo]) -> None:
    for token in tokens:
        into.tokens.append(token_spelling(token.chosen))
        into.token_logprobs.append(finite_logprob(token.chosen.logprob))
        into.top_logprobs.append(top_logprobs_of(token))
        into.text_offset.append(offsets.advance_offset(token.chosen.raw))


def append_prompt_logprobs(
    into: CompletionLogprobs, offsets: TextOffsets, echo: EchoedPrompt, scores: tuple[TokenInfo | None, ...]
) -> None:
    """The prompt's own tokens: the first has no score, and one that adds no text has no width."""
    for (text, raw), score in zip(echo.tokens, scores, strict=True):
        into.tokens.append(text)
        into.token_logprobs.append(None if score is None else finite_logprob(score.chosen.logprob))
        into.top_logprobs.append(None if score is None else top_logprobs_of(score))
        into.text_offset.append(offsets.advance_offset(raw))


def top_logprobs_of(token: TokenInfo) -> dict[str, float]:
    """The likeliest tokens, and the chosen one, which need not be among them."""
    return {token_spelling(one): finite_logprob(one.logprob) for one in (*token.top, token.chosen)}


def token_spelling(token: TokenLogprob) -> str:
    return spell_bytes(token.text, token.raw)


def spell_bytes(text: str, raw: bytes) -> str:
    """A token as text; one that is only part of a character is written as bytes, so that it can be recognised."""
    if "�" in text and text.encode() != raw:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text
