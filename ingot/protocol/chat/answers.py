"""What every answer has in common: its head, its usage, its receipt, and how a view of the events is asked for it.

A request is answered whole or streamed. Both views are fed the same events, in order, without `Failed`: the edge
turns that one into an error itself. `Ended` is always the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Event, Request, SpeculationReport, Usage
from ingot.errors import IngotError
from ingot.protocol.chat.receipts import CacheReceipt, PromptNote, Source
from ingot.protocol.chat.specprefill import SparseReceipt
from ingot.protocol.chat.turns import Turn
from ingot.protocol.errors import ErrorBody
from ingot.protocol.schema.bounds import LEAST_LOGPROB
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import Served
from ingot.text.prompt.prompt import Prompt


class Whole(ABC):
    """Gathers the events of one request into one body."""

    @abstractmethod
    def take(self, event: Event) -> None: ...

    @abstractmethod
    def body(self) -> Struct | dict[str, Any]:
        """The answer; asked for once, after `Ended` was taken."""


class Streamed(ABC):
    """Turns each event into the chunks that tell of it."""

    @abstractmethod
    def opening(self) -> list[Struct]:
        """The chunks that go out before the first event."""

    @abstractmethod
    def chunks(self, event: Event) -> list[Struct]: ...

    @abstractmethod
    def empty(self) -> list[Struct]:
        """A chunk that says nothing, for clients that take comments and pings for silence; asked for between the
        opening and the end. What a client puts together is the same with or without it."""

    def failed(self, error: IngotError) -> list[Struct]:
        """The last words of a stream that broke, which clients raise."""
        return [ErrorBody.of(error)]


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A body, read: what the engine is to do, how its events are to be told, and which field holds the prompt."""

    request: Request
    view: Whole | Streamed
    prompt_field: str
    head: AnswerHead | None = None  # what the request's receipt is written from, once it has ended
    turn: Turn | None = None  # is given every event, to remember the answer for the next turn


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer and each of its chunks repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    ignored: list[str] = field(default_factory=list)
    source: Source | None = None  # of the prompts, for the receipt
    speculate: tuple[str, ...] | None = None  # who was asked to guess ahead
    adapter: str | None = None  # what the answer went through

    @classmethod
    def of(
        cls,
        id: str,
        created: int,
        served: Served,
        reading: BodyReading,
        prompts: Sequence[Prompt | tuple[int, ...]] | None = None,
        request: Request | None = None,
    ) -> AnswerHead:
        source = None if prompts is None else Source.of(served, prompts)
        made = cls(id, created, served.card.name, served.fingerprint, reading.ignored, source)
        if request is None:
            return made
        adapter = None if request.lora is None else request.lora.name
        return replace(made, model=adapter or made.model, speculate=request.speculate, adapter=adapter)


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        total = usage.prompt_tokens + usage.completion_tokens
        cached, thought = PromptTokensDetails(usage.cached_tokens), CompletionTokensDetails(usage.thinking_tokens)
        return cls(usage.prompt_tokens, usage.completion_tokens, total, cached, thought)


class TimingBody(Struct):
    """Seconds spent waiting, computing the prompt, and generating."""

    queue_s: float
    prefill_s: float
    decode_s: float


class SpeculationBody(Struct):
    """Tokens that were guessed ahead, those of them that were right, the forward passes that drew the rest, and how
    many tokens each of them gave."""

    proposed: int
    accepted: int
    passes: int
    tokens_per_pass: float

    @classmethod
    def of(cls, report: SpeculationReport, asked: tuple[str, ...] | None) -> SpeculationBody | UnsetType:
        """UNSET where nothing was guessed and nobody was asked to."""
        if not report.proposed and not asked:
            return UNSET
        each = 1 + report.accepted / report.passes if report.passes else 0.0
        return cls(report.proposed, report.accepted, report.passes, round(each, 3))


class Receipt(Struct):
    """What the server did beyond the text: how long it took, what it did not have to compute, what was guessed ahead,
    which adapter it went through, how many calls it took out of thinking, and which fields nobody knew."""

    timing: TimingBody
    cache: CacheReceipt | UnsetType = UNSET
    prompt: PromptNote | UnsetType = UNSET
    speculation: SpeculationBody | UnsetType = UNSET
    specprefill: SparseReceipt | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    calls_in_thinking: int | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET

    @classmethod
    def of(cls, head: AnswerHead, ended: Ended) -> Receipt:
        timing = TimingBody(
            *(round(seconds, 6) for seconds in (ended.timing.queue, ended.timing.prefill, ended.timing.decode))
        )
        cache, prompt = CacheReceipt.of(ended.cache, head.source), PromptNote.of(head.source)
        guessed = SpeculationBody.of(ended.speculation, head.speculate)
        sparse = SparseReceipt.of(ended.sparse, ended.timing)
        calls = ended.calls_in_thinking or UNSET
        return cls(timing, cache, prompt, guessed, sparse, head.adapter or UNSET, calls, head.ignored or UNSET)


class Note(Struct):
    """The receipt of an answer that took no engine: which fields nobody knew."""

    ignored: list[str]

    @classmethod
    def of(cls, reading: BodyReading) -> Note | UnsetType:
        return cls(reading.ignored) if reading.ignored else UNSET


def sayable(logprob: float) -> float:
    """A log-probability that JSON can hold: it has no infinity."""
    return max(logprob, LEAST_LOGPROB)
