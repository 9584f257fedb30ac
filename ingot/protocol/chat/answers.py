"""What all generated answers have in common: their head, usage and receipt, and the two views of a request's events.

A request is answered whole (`Whole`) or streamed (`Streamed`). Both views are fed the same events, in order, without
`Failed`: the edge turns that one into an error itself. `Ended` is always the last. The receipt tells what came of the
prefix cache: how much was reused, why no more, and where the prompt differs; texts in it are those of the asking
tenant's own prompts, as the engine reports no others. A turn of a conversation watches its events, so that the next
turn's prompt can hold the answer's own tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import (
    CacheReason,
    CacheReport,
    CallArguments,
    CallBegan,
    Ended,
    Event,
    Request,
    SequenceEnded,
    SpeculationReport,
    TextDelta,
    ThinkingDelta,
    Timing,
    Usage,
)
from ingot.errors import IngotError
from ingot.protocol.chat.specprefill import SpecprefillReceipt
from ingot.protocol.errors import ErrorBody
from ingot.protocol.operations import MATCHED_HEADER, REASON_HEADER, TIMING_HEADERS
from ingot.protocol.schema.bounds import LEAST_LOGPROB
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import ServedModel
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.prompt.assembly import Prompt
from ingot.text.prompt.canonical import key_with_answer

if TYPE_CHECKING:
    from ingot.protocol.served import ServedModel


class WholeAnswer(ABC):
    """Gathers the events of one request into one body."""

    @abstractmethod
    def take(self, event: Event) -> None: ...

    @abstractmethod
    def body(self) -> Struct | dict[str, Any]:
        """The answer; asked for once, after `Ended` was taken."""


class StreamedAnswer(ABC):
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
    view: WholeAnswer | StreamedAnswer
    prompt_field: str
    head: AnswerHead | None = None  # what the request's receipt is written from, once it has ended
    turn: ConversationTurn | None = None  # is given every event, to remember the answer for the next turn


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer and each of its chunks repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    ignored: list[str] = field(default_factory=list)
    source: PromptSource | None = None  # of the prompts, for the receipt
    speculate: tuple[str, ...] | None = None  # who was asked to guess ahead
    adapter: str | None = None  # what the answer went through

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
    prompt: PromptReceiptNote | UnsetType = UNSET
    speculation: SpeculationBody | UnsetType = UNSET
    specprefill: SpecprefillReceipt | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    calls_in_thinking: int | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET

    @classmethod
    def of(cls, head: AnswerHead, ended: Ended) -> Receipt:
        timing = TimingBody(
            *(round(seconds, 6) for seconds in (ended.timing.queue, ended.timing.prefill, ended.timing.decode))
        )
        cache, prompt = CacheReceipt.of(ended.cache, head.source), PromptReceiptNote.of(head.source)
        guessed = SpeculationBody.of(ended.speculation, head.speculate)
        sparse = SpecprefillReceipt.of(ended.sparse, ended.timing)
        calls = ended.calls_in_thinking or UNSET
        return cls(timing, cache, prompt, guessed, sparse, head.adapter or UNSET, calls, head.ignored or UNSET)


class IgnoredNote(Struct):
    """The receipt of an answer that took no engine: which fields nobody knew."""

    ignored: list[str]

    @classmethod
    def of(cls, reading: BodyReading) -> IgnoredNote | UnsetType:
        return cls(reading.ignored) if reading.ignored else UNSET


def finite_logprob(logprob: float) -> float:
    """A log-probability that JSON can hold: it has no infinity."""
    return max(logprob, LEAST_LOGPROB)


class StreamedChoices(StreamedAnswer):
    """One finish a choice, and the usage where it was asked for. `make` makes a chunk of its fields.

    The last chunk, whichever it is, carries the receipt; so the last finish waits for `Ended`, which comes in the
    same batch.
    """

    def __init__(self, make: Callable[..., Any], head: AnswerHead, count: int, *, include_usage: bool) -> None:
        self._make, self.head, self.include_usage = make, head, include_usage
        self.unfinished = set(range(count))
        self._last: Any = None

    def chunk(self, *choices: Struct) -> Any:
        return self._make(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=list(choices),
            usage=None if self.include_usage else UNSET,
        )

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
"""Why no more was taken over. `template_rewrite`: the chat template shows an earlier answer otherwise than it came."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What a request's prompts were made of, to name places in them."""

    prompts: tuple[Prompt, ...]
    decode: Callable[[Sequence[int]], str]
    thinking: str | None = None  # what opens a model's thinking

    @classmethod
    def of(cls, served: ServedModel, prompts: Sequence[Prompt | tuple[int, ...]]) -> PromptSource:
        made = tuple(prompt if isinstance(prompt, Prompt) else Prompt(prompt, "") for prompt in prompts)
        tags = served.format.thinking
        tokenizer = served.tokenizer
        return cls(made, lambda ids: tokenizer.decode(ids, skip_special=False), tags.open if tags else None)


class PromptDivergence(Struct):
    """Where the prompt and what was kept part: `character` counts in that message's own text, or in the whole
    prompt where it was no conversation. `ours` and `theirs` go on from there, a little."""

    message: int | None
    role: str | None
    character: int
    token: int
    ours: str
    theirs: str


class PromptCacheReceipt(Struct):
    """One prompt's part in the receipt of a request that has several."""

    matched_tokens: int
    reason: ReceiptReason
    diverged: PromptDivergence | None = None

    @classmethod
    def of(cls, report: CacheReport, number: int, source: PromptSource | None) -> PromptCacheReceipt:
        parted = locate_divergence(report, number, source)
        rewritten = report.reason == "diverged" and parted is not None and is_history_rewrite(parted, source)
        return cls(report.matched, "template_rewrite" if rewritten else report.reason, parted)


class PromptReceiptNote(Struct):
    """How a conversation became a prompt: which rendering of past turns, how many past answers stand in it in the
    tokens they were generated in, and what was done to messages that the template does not take as they were."""

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
    """`matched_tokens` of all prompts were taken over from `tier`; `reason` says why no more. `codec` is what they went
    through, or some of them: `raw` where they are as they were computed."""

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
        matched = sum(report.matched for report in reports)
        reasons = {one.reason for one in each}
        return cls(
            matched,
            min((report.tier for report in reports if report.tier is not None), default=None),  # disk before ram
            _shared_codec([report for report in reports if report.matched]),
            reasons.pop() if len(reasons) == 1 else "several",
            each[0].diverged if len(each) == 1 else None,
            each if len(each) > 1 else UNSET,
        )


def _shared_codec(reports: Sequence[CacheReport]) -> str | None:
    """Of several prompts', the one that is lossy, if one is."""
    return next((report.codec for report in reports if report.lossy), reports[0].codec if reports else None)


def locate_divergence(report: CacheReport, number: int, source: PromptSource | None) -> PromptDivergence | None:
    if not report.theirs or source is None:
        return None
    place = source.prompts[number].place(report.known, source.decode)
    return PromptDivergence(
        place.message,
        place.role or None,
        place.character,
        report.known,
        source.decode(report.ours),
        source.decode(report.theirs),
    )


def is_history_rewrite(parted: PromptDivergence, source: PromptSource | None) -> bool:
    """Whether one side has thinking where the other has none, in an answer that came from here."""
    if source is None or source.thinking is None or parted.role != "assistant":
        return False
    thinks = [side.lstrip().startswith(source.thinking) for side in (parted.ours, parted.theirs)]
    return thinks[0] != thinks[1]


def receipt_headers(cache: CacheReceipt | UnsetType, timing: Timing) -> list[tuple[str, str]]:
    seconds = (timing.queue, timing.prefill, timing.decode)
    told = [(name, f"{value:.6f}") for name, value in zip(TIMING_HEADERS, seconds, strict=True)]
    if cache is UNSET:
        return told
    return [(MATCHED_HEADER, str(cache.matched_tokens)), (REASON_HEADER, cache.reason), *told]


@dataclass(slots=True)
class _AnswerSoFar:
    """What the client was told of one answer."""

    content: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)


class ConversationTurn:
    """Given every event of a request's stream, it keeps each answer once that has ended. Belongs to one thread.

    What is kept is bound to what the client was told: only a client that sends the same back gets it.
    """

    def __init__(self, served: ServedModel, prompt: Prompt) -> None:
        self._served, self._prompt = served, prompt
        self._said: dict[int, _AnswerSoFar] = {}

    def take(self, event: Event) -> None:
        if not self._prompt.thread:
            return
        match event:
            case TextDelta():
                self._of(event.index).content.append(event.text)
            case ThinkingDelta():
                self._of(event.index).thought.append(event.text)
            case CallBegan():
                self._of(event.index).calls.append((event.id, event.name, []))
            case CallArguments():
                self._of(event.index).calls[event.call][2].append(event.fragment)
            case SequenceEnded():
                self._keep(self._said.pop(event.index, _AnswerSoFar()), event)

    def _of(self, index: int) -> _AnswerSoFar:
        return self._said.setdefault(index, _AnswerSoFar())

    def _keep(self, said: _AnswerSoFar, end: SequenceEnded) -> None:
        text = "".join(said.content)
        tokens = self._answer_tokens(end, text)
        if not tokens:
            return
        calls = [(id, name, "".join(arguments)) for id, name, arguments in said.calls]
        thread = key_with_answer(self._prompt.thread, self._prompt.begun + text, calls, ids=self._prompt.call_ids)
        self._served.answers.keep(thread, self._prompt.opening, tokens, "".join(said.thought), end.missing)

    def _answer_tokens(self, end: SequenceEnded, said: str) -> Sequence[int]:
        """The answer's tokens without what ended it, which the client was not told of.

        None where that cannot be told apart: a stop string may begin within a token.
        """
        if isinstance(end.stopped_by, int):
            return end.tokens[:-1]
        if end.stopped_by is None or said.endswith(end.stopped_by):
            return end.tokens
        text = self._decoded(end.tokens)
        kept = text[: text.rfind(end.stopped_by)]
        for count in range(len(end.tokens), -1, -1):
            before = self._decoded(end.tokens[:count])
            if len(before) <= len(kept):
                return end.tokens[:count] if before == kept else ()
        return ()

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._served.tokenizer.decode(tokens, skip_special=False)
