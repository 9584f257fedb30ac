"""What all generated answers have in common: their head, usage and receipt, and the two views of a request's events.

A request is answered whole (`WholeAnswer`) or streamed (`StreamedAnswer`). Both views get the same events, in order,
without `Failed`: the edge turns that one into an error itself. `Ended` is always the last. The receipt reports on the
prefix cache: how much was reused, why no more, and where the prompt diverged; its texts are from the tenant's own
prompts, as the engine reports no others. A `ConversationTurn` remembers the answer's own tokens for the next prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import (
    CacheReason,
    CacheReport,
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    Failed,
    LoopReport,
    PromptScored,
    Request,
    SequenceEnded,
    SpeculationReport,
    TextDelta,
    ThinkingDelta,
    Timing,
    TokenInfo,
    Usage,
)
from ingot.errors import IngotError
from ingot.observe.metrics import ExpertStats
from ingot.protocol.chat.specprefill import SpecprefillReceipt
from ingot.protocol.errors import ErrorBody
from ingot.protocol.operations import MATCHED_HEADER, REASON_HEADER, TIMING_HEADERS
from ingot.protocol.schema.bounds import LEAST_LOGPROB
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import ServedModel
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.prompt.assembly import Prompt
from ingot.text.prompt.canonical import key_with_answer


@dataclass(slots=True)
class AnswerPart:
    """A run of text or thinking, or a tool call."""

    kind: Literal["text", "thinking", "call"]
    id: str = ""  # of a call
    name: str = ""
    complete: bool = True  # False for a call that ended within its arguments
    pieces: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class SequenceAnswer:
    """The events of one sequence, gathered: parts in the order in which they were generated."""

    parts: list[AnswerPart] = field(default_factory=list)
    calls: list[AnswerPart] = field(default_factory=list)  # those of the parts that are calls
    tokens: list[TokenInfo] = field(default_factory=list)  # with their log-probabilities
    prompt_scores: tuple[TokenInfo | None, ...] = ()
    end: SequenceEnded | None = None

    @property
    def text(self) -> str:
        return "".join(part.content for part in self.parts if part.kind == "text")

    @property
    def thinking(self) -> str:
        return "".join(part.content for part in self.parts if part.kind == "thinking")

    def take(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._append("text", event.text)
            case ThinkingDelta():
                self._append("thinking", event.text)
            case CallBegan():
                self.calls.append(AnswerPart("call", event.id, event.name))
                self.parts.append(self.calls[-1])
            case CallArguments():
                self.calls[event.call].pieces.append(event.fragment)
            case CallEnded():
                self.calls[event.call].complete = event.complete
            case PromptScored():
                self.prompt_scores = event.tokens
            case SequenceEnded():
                self.end = event

    def _append(self, kind: Literal["text", "thinking"], text: str) -> None:
        if text and (not self.parts or self.parts[-1].kind != kind):
            self.parts.append(AnswerPart(kind))
        if text:
            self.parts[-1].pieces.append(text)


class WholeAnswer(ABC):
    """Gathers the events of one request, of `count` sequences, into one body."""

    def __init__(self, head: AnswerHead, count: int = 1) -> None:
        self.head = head
        self.answers = [SequenceAnswer() for _ in range(count)]
        self._ended: Ended | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._ended = event
        elif not isinstance(event, Failed):
            answer = self.answers[event.index]
            answer.take(event)
            if isinstance(event, TextDelta):
                answer.tokens += event.tokens

    @property
    def ended(self) -> Ended:
        assert self._ended is not None, "the body is made after the last event"
        return self._ended

    @abstractmethod
    def body(self) -> Struct | dict[str, Any]:
        """The answer, once `Ended` was taken."""


class StreamedAnswer(ABC):
    """Turns events into chunks."""

    def opening(self) -> list[Struct]:
        """The chunks that are sent before the first event."""
        return []

    @abstractmethod
    def chunks(self, event: Event) -> list[Struct]: ...

    @abstractmethod
    def empty(self) -> list[Struct]:
        """A chunk without content, between the opening and the end, for clients that do not count comments and pings as
        activity. The answer that a client assembles is the same with or without it."""

    def failed(self, error: IngotError) -> list[Struct]:
        """The last chunks of a stream that broke, which clients raise as an error."""
        return [ErrorBody.of(error)]


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A parsed body: the engine's request, the view of its events, and the field that holds the prompt."""

    request: Request
    view: WholeAnswer | StreamedAnswer
    prompt_field: str
    head: AnswerHead | None = None  # for the request's receipt, once it has ended
    turn: ConversationTurn | None = None  # takes every event, to remember the answer for the next turn


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer and each of its chunks repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    ignored: list[str] = field(default_factory=list)
    source: PromptSource | None = None  # of the prompts, for the receipt
    speculate: tuple[str, ...] | None = None  # the proposers that the request names
    adapter: str | None = None  # the LoRA adapter of the answer
    lossy: tuple[str, ...] = ()  # settings of the server that change it
    varies: str | None = None  # why the answer may depend on what else is computed; empty if it does not

    @property
    def common(self) -> dict[str, Any]:
        """The fields of OpenAI's answers and chunks."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    @classmethod
    def of(
        cls,
        id: str,
        created: int,
        served: ServedModel,
        reading: BodyReading,
        prompts: Sequence[Prompt | tuple[int, ...]] | None = None,
        request: Request | None = None,
    ) -> AnswerHead:
        source = None if prompts is None else PromptSource.of(served, prompts)
        card, lossy = served.card, served.card.lossy
        head = cls(id, created, card.name, served.fingerprint, reading.ignored, source, lossy=lossy)
        if request is None:
            return head
        adapter = None if request.lora is None else request.lora.name
        varies = card.varies or ("codec" if card.lossy_kv and not request.exact else "")
        return replace(head, model=adapter or head.model, speculate=request.speculate, adapter=adapter, varies=varies)


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
        cached, thinking = PromptTokensDetails(usage.cached_tokens), CompletionTokensDetails(usage.thinking_tokens)
        return cls(usage.prompt_tokens, usage.completion_tokens, total, cached, thinking)


class TimingBody(Struct):
    """Seconds in the queue, in prefill and in decode."""

    queue_s: float
    prefill_s: float
    decode_s: float


class SpeculationBody(Struct):
    """Draft tokens, those of them that were accepted, the verification passes, and the tokens that each pass gave."""

    proposed: int
    accepted: int
    passes: int
    tokens_per_pass: float

    @classmethod
    def of(cls, report: SpeculationReport, proposers: tuple[str, ...] | None) -> SpeculationBody | UnsetType:
        """UNSET where nothing was proposed and the request names no proposer."""
        if not report.proposed and not proposers:
            return UNSET
        each = 1 + report.accepted / report.passes if report.passes else 0.0
        return cls(report.proposed, report.accepted, report.passes, round(each, 3))


class ExpertsBody(Struct):
    """Of a mixture whose experts do not all fit in memory: of all experts the `share` that fits; of those that were
    needed, how many were in memory, had been read ahead, or had to be waited for; the bytes that were read, and the
    seconds that were spent waiting. In a receipt, while the request ran, with whatever ran beside it; else since the
    start."""

    share: float
    hits: int
    predicted: int
    misses: int
    read_bytes: int
    waited_s: float

    @classmethod
    def of(cls, stats: ExpertStats | None) -> ExpertsBody | UnsetType:
        if stats is None:
            return UNSET
        counts = stats.hits, stats.predicted, stats.misses, stats.bytes_read
        return cls(round(stats.share, 4), *counts, round(stats.waited_s, 6))


class LoopBody(Struct):
    """The answer of this index was ended: its last `period` tokens came `count` times in a row."""

    index: int
    period: int
    count: int

    @classmethod
    def each(cls, loops: Sequence[LoopReport]) -> list[LoopBody] | UnsetType:
        return [cls(loop.index, loop.period, loop.count) for loop in loops] or UNSET


class Receipt(Struct):
    """What the server reports besides the answer: time, prefix cache, speculation, the adapter, how many calls were
    found within thinking, settings that changed the answer, the loops in which answers were ended, which fields had no
    effect, and whether the same request gives the same answer again whatever else is computed or was cached, or why
    not; and what experts cost that had to be read."""

    timing: TimingBody
    cache: CacheReceipt | UnsetType = UNSET
    prompt: PromptReceiptNote | UnsetType = UNSET
    speculation: SpeculationBody | UnsetType = UNSET
    specprefill: SpecprefillReceipt | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    calls_in_thinking: int | UnsetType = UNSET
    lossy: list[str] | UnsetType = UNSET
    loops: list[LoopBody] | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    reproducible: bool | UnsetType = UNSET
    varies: str | UnsetType = UNSET
    experts: ExpertsBody | UnsetType = UNSET

    @classmethod
    def of(cls, head: AnswerHead, ended: Ended) -> Receipt:
        timing = TimingBody(
            *(round(seconds, 6) for seconds in (ended.timing.queue, ended.timing.prefill, ended.timing.decode))
        )
        cache, prompt = CacheReceipt.of(ended.cache, head.source), PromptReceiptNote.of(head.source)
        speculation = SpeculationBody.of(ended.speculation, head.speculate)
        specprefill = SpecprefillReceipt.of(ended.specprefill, ended.timing)
        calls = ended.calls_in_thinking or UNSET
        left_out = ("specprefill",) if any(report.lossy for report in ended.specprefill) else ()
        lossy, loops, ignored = [*head.lossy, *left_out] or UNSET, LoopBody.each(ended.loops), head.ignored or UNSET
        adapter = head.adapter or UNSET
        receipt = cls(timing, cache, prompt, speculation, specprefill, adapter, calls, lossy, loops, ignored)
        receipt.experts = ExpertsBody.of(ended.experts)
        if head.varies is not None:
            varies = "specprefill" if any(report.may_vary for report in ended.specprefill) else head.varies
            receipt.reproducible, receipt.varies = not varies, varies or UNSET
        return receipt


class IgnoredNote(Struct):
    """The receipt of an answer without generation: the fields that had no effect."""

    ignored: list[str]

    @classmethod
    def of(cls, reading: BodyReading) -> IgnoredNote | UnsetType:
        return cls(reading.ignored) if reading.ignored else UNSET


def stop_reason(end: SequenceEnded | None) -> Literal["repetition_detected"] | UnsetType:
    """In OpenAI's choices, as vLLM reports it. Their `finish_reason` is `length`: of those that clients know, it alone
    says that the answer is not complete."""
    return UNSET if end is None or end.loop is None else "repetition_detected"


def finite_logprob(logprob: float) -> float:
    """A log-probability that JSON can hold: it has no infinity."""
    return max(logprob, LEAST_LOGPROB)


class StreamedChoices(StreamedAnswer):
    """OpenAI's streams: one finish per choice, and the usage where it is requested. `make` is the class of the chunks.

    The last chunk carries the receipt, so the last finish waits for `Ended`, which comes in the same batch.
    """

    def __init__(self, make: Callable[..., Any], head: AnswerHead, count: int, *, include_usage: bool) -> None:
        self._make, self.head, self.include_usage = make, head, include_usage
        self._common = head.common
        self.unfinished = set(range(count))
        self._last: Any = None

    def chunk(self, *choices: Struct) -> Any:
        usage = None if self.include_usage else UNSET
        return self._make(**self._common, choices=list(choices), usage=usage)

    def finish(self, index: int, choice: Struct) -> list[Struct]:
        chunk = self.chunk(choice)
        self.unfinished.discard(index)
        if self.unfinished or self.include_usage:
            return [chunk]
        self._last = chunk
        return []

    def close(self, event: Ended) -> list[Struct]:
        last = self._last if self._last is not None else self.chunk()
        last.ingot = Receipt.of(self.head, event)
        if self.include_usage:
            last.usage = UsageBody.of(event.usage)
        return [last]


ReceiptReason = CacheReason | Literal["template_rewrite"]
"""Why no more was reused. `template_rewrite`: the chat template renders an earlier answer differently."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A request's prompts, to describe positions in them."""

    prompts: tuple[Prompt, ...]
    decode: Callable[[Sequence[int]], str]
    thinking: str | None = None  # the tag that opens a model's thinking

    @classmethod
    def of(cls, served: ServedModel, prompts: Sequence[Prompt | tuple[int, ...]]) -> PromptSource:
        sources = tuple(prompt if isinstance(prompt, Prompt) else Prompt(prompt, "") for prompt in prompts)
        tags, tokenizer = served.format.thinking, served.tokenizer
        return cls(sources, lambda ids: tokenizer.decode(ids, skip_special=False), tags.open if tags else None)


class PromptDivergence(Struct):
    """Where the prompt diverges from the cached one: `character` counts in that message's own text, or in the whole
    prompt where it is not a conversation. `ours` and `theirs` are the next few tokens of both."""

    message: int | None
    role: str | None
    character: int
    token: int
    ours: str
    theirs: str


class PromptCacheReceipt(Struct):
    """One prompt's part of the receipt, where a request has several."""

    matched_tokens: int
    reason: ReceiptReason
    diverged: PromptDivergence | None = None

    @classmethod
    def of(cls, report: CacheReport, number: int, source: PromptSource | None) -> PromptCacheReceipt:
        divergence = locate_divergence(report, number, source)
        rewritten = report.reason == "diverged" and divergence is not None and is_history_rewrite(divergence, source)
        return cls(report.matched, "template_rewrite" if rewritten else report.reason, divergence)


class PromptReceiptNote(Struct):
    """How a conversation was rendered: the history mode, how many past answers are in it with the tokens they were
    generated in, and how messages were adapted to the template."""

    history: TemplateHistory
    recalled: int
    adapted: list[str]

    @classmethod
    def of(cls, source: PromptSource | None) -> PromptReceiptNote | UnsetType:
        if source is None or not source.prompts or not source.prompts[0].spans:
            return UNSET
        prompt = source.prompts[0]
        return cls(prompt.history, prompt.recalled, list(prompt.adapted))


class CacheReceipt(Struct):
    """`matched_tokens` of all prompts were reused from `tier`; `reason` says why no more. `codec` is how they, or some
    of them, were stored: `raw` where they are as they were computed."""

    matched_tokens: int
    tier: Literal["ram", "disk"] | None
    codec: str | None
    reason: ReceiptReason | Literal["several"]
    diverged: PromptDivergence | None = None
    prompts: list[PromptCacheReceipt] | UnsetType = UNSET

    @classmethod
    def of(cls, reports: Sequence[CacheReport], source: PromptSource | None) -> CacheReceipt | UnsetType:
        """UNSET for a request that ended before any of it ran."""
        if not reports:
            return UNSET
        each = [PromptCacheReceipt.of(report, number, source) for number, report in enumerate(reports)]
        matched = [report for report in reports if report.matched]
        reasons = {one.reason for one in each}
        return cls(
            sum(report.matched for report in matched),
            min((report.tier for report in reports if report.tier is not None), default=None),  # disk before ram
            next((report.codec for report in matched if report.lossy), matched[0].codec if matched else None),
            reasons.pop() if len(reasons) == 1 else "several",
            each[0].diverged if len(each) == 1 else None,
            each if len(each) > 1 else UNSET,
        )


def locate_divergence(report: CacheReport, number: int, source: PromptSource | None) -> PromptDivergence | None:
    if not report.theirs or source is None:
        return None
    position = source.prompts[number].place(report.known, source.decode)
    return PromptDivergence(
        position.message,
        position.role or None,
        position.character,
        report.known,
        source.decode(report.ours),
        source.decode(report.theirs),
    )


def is_history_rewrite(divergence: PromptDivergence, source: PromptSource | None) -> bool:
    """Whether one of both has thinking where the other has none, in an assistant's message."""
    if source is None or source.thinking is None or divergence.role != "assistant":
        return False
    ours, theirs = (text.lstrip().startswith(source.thinking) for text in (divergence.ours, divergence.theirs))
    return ours != theirs


def receipt_headers(cache: CacheReceipt | UnsetType, timing: Timing) -> list[tuple[str, str]]:
    seconds = (timing.queue, timing.prefill, timing.decode)
    headers = [(name, f"{value:.6f}") for name, value in zip(TIMING_HEADERS, seconds, strict=True)]
    if cache is UNSET:
        return headers
    return [(MATCHED_HEADER, str(cache.matched_tokens)), (REASON_HEADER, cache.reason), *headers]


class ConversationTurn:
    """Takes every event of a request's stream, and remembers each answer once it has ended. Belongs to one thread.

    An answer is stored under what the client got: only a client that sends back the same will find it.
    """

    def __init__(self, served: ServedModel, prompt: Prompt) -> None:
        self._served, self._prompt = served, prompt
        self._answers: defaultdict[int, SequenceAnswer] = defaultdict(SequenceAnswer)

    def take(self, event: Event) -> None:
        if not self._prompt.thread or isinstance(event, Ended | Failed):
            return
        self._answers[event.index].take(event)
        if isinstance(event, SequenceEnded):
            self._remember(self._answers.pop(event.index), event)

    def _remember(self, answer: SequenceAnswer, end: SequenceEnded) -> None:
        text = answer.text
        tokens = self._answer_tokens(end, text)
        if not tokens:
            return
        calls = [(call.id, call.name, call.content) for call in answer.calls]
        thread = key_with_answer(
            self._prompt.thread, self._prompt.continued_text + text, calls, ids=self._prompt.call_ids
        )
        self._served.answers.keep(thread, self._prompt.opening, tokens, answer.thinking, end.missing)

    def _answer_tokens(self, end: SequenceEnded, answer: str) -> Sequence[int]:
        """The answer's tokens without the stop string or token, which the client did not get.

        Empty where they cannot be separated: a stop string may begin within a token.
        """
        if isinstance(end.stopped_by, int):
            return end.tokens[:-1]
        if end.stopped_by is None or answer.endswith(end.stopped_by):
            return end.tokens
        text = self._decode(end.tokens)
        before_stop = text[: text.rfind(end.stopped_by)]
        for count in range(len(end.tokens), -1, -1):
            prefix = self._decode(end.tokens[:count])
            if len(prefix) <= len(before_stop):
                return end.tokens[:count] if prefix == before_stop else ()
        return ()

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._served.tokenizer.decode(tokens, skip_special=False)
