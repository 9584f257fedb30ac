"""Events as Ollama's chats and completions: one body, or lines of which the last tells the usage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    SequenceEnded,
    TextDelta,
    ThinkingDelta,
    TokenInfo,
)
from ingot.errors import IngotError
from ingot.protocol.chat.answers import AnswerHead, Receipt, Streamed, Whole
from ingot.protocol.ollama.errors import OllamaError
from ingot.protocol.openai.chat_answers import TokenEntry, entry
from ingot.text.parse.call_arguments import arguments_object

DoneReason = Literal["stop", "length", "load"]


class OllamaFunction(Struct):
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct):
    id: str
    function: OllamaFunction


class OllamaMessage(Struct):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class Timed(Struct, kw_only=True):
    """What every line has; the last one tells why it ended, nanoseconds, and tokens."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenEntry] | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET


class OllamaChat(Timed, kw_only=True):
    message: OllamaMessage


class OllamaCompletion(Timed, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class LineContent(Struct):
    """What a line, or a whole answer, says."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = []
    tokens: list[TokenInfo] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.tokens)


class Shape:
    """How one of the two protocols writes a line down."""

    def __init__(self, head: AnswerHead, *, logprobs: bool = False) -> None:
        self.head, self.logprobs = head, logprobs

    @abstractmethod
    def line(self, said: LineContent, *, done: bool) -> OllamaChat | OllamaCompletion: ...

    def last(self, said: LineContent, reason: DoneReason, ended: Ended) -> OllamaChat | OllamaCompletion:
        made = self.line(said, done=True)
        timing, usage = ended.timing, ended.usage
        made.done_reason = reason
        made.total_duration = nanoseconds(timing.queue + timing.prefill + timing.decode)
        made.load_duration = 0
        made.prompt_eval_count, made.prompt_eval_duration = usage.prompt_tokens, nanoseconds(timing.prefill)
        made.eval_count, made.eval_duration = usage.completion_tokens, nanoseconds(timing.decode)
        made.ingot = Receipt.of(self.head, ended)
        return made

    def entries(self, said: LineContent) -> list[TokenEntry] | UnsetType:
        return [entry(token) for token in said.tokens] if self.logprobs and said.tokens else UNSET


class ChatShape(Shape):
    def line(self, said: LineContent, *, done: bool) -> OllamaChat:
        message = OllamaMessage(
            content=said.text, thinking=said.thinking or UNSET, tool_calls=list(said.calls) or UNSET
        )
        return OllamaChat(
            model=self.head.model, created_at=now(), done=done, logprobs=self.entries(said), message=message
        )


class CompletionShape(Shape):
    def line(self, said: LineContent, *, done: bool) -> OllamaCompletion:
        return OllamaCompletion(
            model=self.head.model,
            created_at=now(),
            done=done,
            logprobs=self.entries(said),
            response=said.text,
            thinking=said.thinking or UNSET,
        )


class LineBuilder:
    """Events, as things to say. A call is said whole, once it has ended."""

    def __init__(self) -> None:
        self.call: CallBegan | None = None
        self.fragments: list[str] = []
        self.reason: DoneReason = "stop"

    def take(self, event: Event) -> LineContent:
        match event:
            case TextDelta():
                return LineContent(event.text, tokens=list(event.tokens))
            case ThinkingDelta():
                return LineContent(thinking=event.text)
            case CallBegan():
                self.call, self.fragments = event, []
            case CallArguments():
                self.fragments.append(event.fragment)
            case CallEnded():
                assert self.call is not None
                arguments = arguments_object("".join(self.fragments), complete=event.complete)
                return LineContent(calls=[OllamaCall(self.call.id, OllamaFunction(self.call.name, arguments))])
            case SequenceEnded():
                self.reason = "length" if event.reason == "length" else "stop"
        return LineContent()


class OllamaWhole(Whole):
    def __init__(self, shape: Shape) -> None:
        self.shape, self.gathering = shape, LineBuilder()
        self.said: list[LineContent] = []
        self.ended: Ended | None = None

    def take(self, event: Event) -> None:
        self.said.append(self.gathering.take(event))
        if isinstance(event, Ended):
            self.ended = event

    def body(self) -> Struct:
        assert self.ended is not None
        return self.shape.last(merge_lines(self.said), self.gathering.reason, self.ended)


class OllamaStreamed(Streamed):
    def __init__(self, shape: Shape) -> None:
        self.shape, self.gathering = shape, LineBuilder()

    def opening(self) -> list[Struct]:
        return []

    def chunks(self, event: Event) -> list[Struct]:
        if isinstance(event, Ended):
            return [self.shape.last(LineContent(), self.gathering.reason, event)]
        said = self.gathering.take(event)
        return [self.shape.line(said, done=False)] if said else []

    def empty(self) -> list[Struct]:
        return [self.shape.line(LineContent(), done=False)]

    def failed(self, error: IngotError) -> list[Struct]:
        return [OllamaError.of(error)]


def merge_lines(parts: Iterable[LineContent]) -> LineContent:
    parts = list(parts)
    return LineContent(
        "".join(part.text for part in parts),
        "".join(part.thinking for part in parts),
        [call for part in parts for call in part.calls],
        [token for part in parts for token in part.tokens],
    )


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * 1e9))
