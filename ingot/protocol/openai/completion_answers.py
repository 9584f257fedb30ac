"""Events as OpenAI's (legacy) completions: one body, or chunks."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

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
from ingot.protocol.chat.answers import AnswerHead, Receipt, UsageBody, Whole, sayable
from ingot.protocol.openai.choices import ChoicesStreamed


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
class Echo:
    """A prompt to give back: its text, and each token with the bytes it contributes to that text."""

    text: str
    tokens: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """How many sequences run for each prompt, how many of them are told, and how."""

    prompts: int
    candidates: int
    n: int
    logprobs: bool
    echoes: tuple[Echo, ...] = ()  # one a prompt, or none

    def echo(self, index: int) -> Echo | None:
        return self.echoes[index // self.candidates] if self.echoes else None


@dataclass(slots=True)
class Offsets:
    """Where in the text each token begins, given the tokens' bytes in order."""

    at: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def pass_over(self, raw: bytes) -> int:
        begins = self.at
        self.at += len(self.decoder.decode(raw))
        return begins


class CompletionWhole(Whole):
    def __init__(self, head: AnswerHead, plan: CompletionPlan) -> None:
        self.head, self.plan = head, plan
        count = plan.prompts * plan.candidates
        self.texts: list[list[str]] = [[] for _ in range(count)]
        self.logprobs = [CompletionLogprobs() for _ in range(count)]
        self.offsets = [Offsets() for _ in range(count)]
        self.reasons: list[FinishReason] = ["stop"] * count
        self.scores = [0.0] * count
        self.ended: Ended | None = None
        for index in range(count):
            if (echo := plan.echo(index)) is not None:
                self.texts[index].append(echo.text)

    def take(self, event: Event) -> None:
        match event:
            case PromptScored():
                echo = self.plan.echo(event.index)
                if echo is not None:
                    score_prompt(self.logprobs[event.index], self.offsets[event.index], echo, event.tokens)
            case TextDelta():
                self.texts[event.index].append(event.text)
                if self.plan.logprobs:
                    score(self.logprobs[event.index], self.offsets[event.index], event.tokens)
            case SequenceEnded():
                self.reasons[event.index] = event.reason
                self.scores[event.index] = mean_logprob(event)
            case Ended():
                self.ended = event

    def body(self) -> Completion:
        assert self.ended is not None
        return Completion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[self._choice(at, sequence) for at, sequence in enumerate(self._told())],
            usage=UsageBody.of(self.ended.usage),
            system_fingerprint=self.head.fingerprint,
            ingot=Receipt.of(self.head, self.ended),
        )

    def _told(self) -> list[int]:
        """The sequences that are told: of each prompt's candidates the likeliest per token, best first."""
        width = self.plan.candidates
        groups = (range(first, first + width) for first in range(0, len(self.texts), width))
        if self.plan.n == width:
            return [sequence for group in groups for sequence in group]
        return [s for group in groups for s in sorted(group, key=lambda s: -self.scores[s])[: self.plan.n]]

    def _choice(self, at: int, sequence: int) -> CompletionChoice:
        logprobs = self.logprobs[sequence] if self.plan.logprobs else None
        return CompletionChoice("".join(self.texts[sequence]), at, logprobs, self.reasons[sequence])


class CompletionStreamed(ChoicesStreamed):
    """The echoed prompt, then the text."""

    def __init__(self, head: AnswerHead, plan: CompletionPlan, *, include_usage: bool) -> None:
        count = plan.prompts * plan.candidates
        super().__init__(Completion, head, count, include_usage=include_usage)
        self.plan = plan
        self.offsets = [Offsets() for _ in range(count)]

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
                return self.finish(event.index, CompletionChoice("", event.index, None, event.reason))
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
        score_prompt(logprobs, self.offsets[event.index], echo, event.tokens)
        return [self.chunk(CompletionChoice(echo.text, event.index, logprobs))]

    def _text(self, event: TextDelta) -> list[Struct]:
        if not self.plan.logprobs:
            return [self.chunk(CompletionChoice(event.text, event.index))] if event.text else []
        logprobs = CompletionLogprobs()
        score(logprobs, self.offsets[event.index], event.tokens)
        return [self.chunk(CompletionChoice(event.text, event.index, logprobs))]


def mean_logprob(ended: SequenceEnded) -> float:
    return (ended.logprob_sum or 0.0) / max(1, ended.completion_tokens)


def score(into: CompletionLogprobs, offsets: Offsets, tokens: Iterable[TokenInfo]) -> None:
    for token in tokens:
        into.tokens.append(spelled(token.chosen))
        into.token_logprobs.append(sayable(token.chosen.logprob))
        into.top_logprobs.append(likeliest(token))
        into.text_offset.append(offsets.pass_over(token.chosen.raw))


def score_prompt(into: CompletionLogprobs, offsets: Offsets, echo: Echo, scores: tuple[TokenInfo | None, ...]) -> None:
    """The prompt's own tokens: the first has no score, and one that adds no text has no width."""
    for (text, raw), scored in zip(echo.tokens, scores, strict=True):
        into.tokens.append(text)
        into.token_logprobs.append(None if scored is None else sayable(scored.chosen.logprob))
        into.top_logprobs.append(None if scored is None else likeliest(scored))
        into.text_offset.append(offsets.pass_over(raw))


def likeliest(token: TokenInfo) -> dict[str, float]:
    """The likeliest tokens, and the chosen one, which need not be among them."""
    return {spelled(one): sayable(one.logprob) for one in (*token.top, token.chosen)}


def spelled(token: TokenLogprob) -> str:
    return spell(token.text, token.raw)


def spell(text: str, raw: bytes) -> str:
    """A token as text; one that is only part of a character is spelled out, as it would look like any other."""
    if "�" in text and text.encode() != raw:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text
