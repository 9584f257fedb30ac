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
from ingot.protocol.chat.answers import AnswerHead, Receipt, StreamedAnswer, WholeAnswer
from ingot.protocol.errors import OllamaError
from ingot.protocol.openai.chat_answers import ChatTokenLogprob, chat_token_logprob
from ingot.text.parser.arguments import answer_arguments

OllamaDoneReason = Literal["stop", "length", "load"]


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


class OllamaTimedBody(Struct, kw_only=True):
    """What every line has; the last one tells why it ended, nanoseconds, and tokens."""

    model: str
    created_at: str
    done: bool
    done_reason: OllamaDoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET


class OllamaChatAnswer(OllamaTimedBody, kw_only=True):
    message: OllamaMessage


class OllamaCompletionAnswer(OllamaTimedBody, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaLineContent(Struct):
    """What a line, or a whole answer, says."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = []
    tokens: list[TokenInfo] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.tokens)


class OllamaAnswerShape:
    """How one of the two protocols writes a line down."""

    def __init__(self, head: AnswerHead, *, logprobs: bool = False) -> None:
        self.head, self.logprobs = head, logprobs

    @abstractmethod
    def line(self, said: OllamaLineContent, *, done: bool) -> OllamaChatAnswer | OllamaCompletionAnswer: ...

    def last(
        self, said: OllamaLineContent, reason: OllamaDoneReason, ended: Ended
    ) -> OllamaChatAnswer | OllamaCompletionAnswer:
        made = self.line(said, done=True)
        timing, usage = ended.timing, ended.usage
        made.done_reason = reason
        made.total_duration = to_nanoseconds(timing.queue + timing.prefill + timing.decode)
        made.load_duration = 0
        made.prompt_eval_count, made.prompt_eval_duration = usage.prompt_tokens, to_nanoseconds(timing.prefill)
        made.eval_count, made.eval_duration = usage.completion_tokens, to_nanoseconds(timing.decode)
        made.ingot = Receipt.of(self.head, ended)
        return made

    def entries(self, said: OllamaLineContent) -> list[ChatTokenLogprob] | UnsetType:
        return [chat_token_logprob(token) for token in said.tokens] if self.logprobs and said.tokens else UNSET


class OllamaChatShape(OllamaAnswerShape):
    def line(self, said: OllamaLineContent, *, done: bool) -> OllamaChatAnswer:
        message = OllamaMessage(
            content=said.text, thinking=said.thinking or UNSET, tool_calls=list(said.calls) or UNSET
        )
        return OllamaChatAnswer(
            model=self.head.model, created_at=utc_timestamp(), done=done, logprobs=self.entries(said), message=message
        )


class OllamaCompletionShape(OllamaAnswerShape):
    def line(self, said: OllamaLineContent, *, done: bool) -> OllamaCompletionAnswer:
        return OllamaCompletionAnswer(
            model=self.head.model,
            created_at=utc_timestamp(),
            done=done,
            logprobs=self.entries(said),
            response=said.text,
            thinking=said.thinking or UNSET,
        )


class OllamaLineBuilder:
    """Events, as things to say. A call is said whole, once it has ended."""

    def __init__(self) -> None:
        self.call: CallBegan | None = None
        self.fragments: list[str] = []
        self.reason: OllamaDoneReason = "stop"

    def take(self, event: Event) -> OllamaLineContent:
        match event:
            case TextDelta():
                return OllamaLineContent(event.text, tokens=list(event.tokens))
            case ThinkingDelta():
                return OllamaLineContent(thinking=event.text)
            case CallBegan():
                self.call, self.fragments = event, []
            case CallArguments():
                self.fragments.append(event.fragment)
            case CallEnded():
                assert self.call is not None
                arguments = answer_arguments("".join(self.fragments), complete=event.complete)
                return OllamaLineContent(calls=[OllamaCall(self.call.id, OllamaFunction(self.call.name, arguments))])
            case SequenceEnded():
                self.reason = "length" if event.reason == "length" else "stop"
        return OllamaLineContent()


class WholeOllamaAnswer(WholeAnswer):
    def __init__(self, shape: OllamaAnswerShape) -> None:
        self.shape, self.gathering = shape, OllamaLineBuilder()
        self.said: list[OllamaLineContent] = []
        self.ended: Ended | None = None

    def take(self, event: Event) -> None:
        self.said.append(self.gathering.take(event))
        if isinstance(event, Ended):
            self.ended = event

    def body(self) -> Struct:
        assert self.ended is not None
        return self.shape.last(merge_line_contents(self.said), self.gathering.reason, self.ended)


class StreamedOllamaAnswer(StreamedAnswer):
    def __init__(self, shape: OllamaAnswerShape) -> None:
        self.shape, self.gathering = shape, OllamaLineBuilder()

    def opening(self) -> list[Struct]:
        return []

    def chunks(self, event: Event) -> list[Struct]:
        if isinstance(event, Ended):
            return [self.shape.last(OllamaLineContent(), self.gathering.reason, event)]
        said = self.gathering.take(event)
        return [self.shape.line(said, done=False)] if said else []

    def empty(self) -> list[Struct]:
        return [self.shape.line(OllamaLineContent(), done=False)]

    def failed(self, error: IngotError) -> list[Struct]:
        return [OllamaError.of(error)]


def merge_line_contents(parts: Iterable[OllamaLineContent]) -> OllamaLineContent:
    parts = list(parts)
    return OllamaLineContent(
        "".join(part.text for part in parts),
        "".join(part.thinking for part in parts),
        [call for part in parts for call in part.calls],
        [token for part in parts for token in part.tokens],
    )


def utc_timestamp() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def to_nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * 1e9))
