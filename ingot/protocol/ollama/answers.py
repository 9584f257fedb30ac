"""Answers of Ollama's chats and completions: one body, or lines of which the last has the usage."""

from __future__ import annotations

from abc import abstractmethod
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import CallEnded, Ended, Event, SequenceEnded, TextDelta, ThinkingDelta, TokenInfo
from ingot.errors import IngotError
from ingot.protocol.chat.answers import AnswerHead, AnswerPart, Receipt, SequenceAnswer, StreamedAnswer, WholeAnswer
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
    """The fields of every line; the last one has why it ended, nanoseconds, and tokens."""

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
    """The content of a line, or of a whole answer."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = []
    tokens: list[TokenInfo] = []

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.tokens)


class OllamaAnswerShape:
    """How one of the two endpoints writes a line."""

    def __init__(self, head: AnswerHead, *, logprobs: bool = False) -> None:
        self.head, self.logprobs = head, logprobs

    @abstractmethod
    def line(self, content: OllamaLineContent, *, done: bool) -> OllamaChatAnswer | OllamaCompletionAnswer: ...

    def last(
        self, content: OllamaLineContent, end: SequenceEnded | None, ended: Ended
    ) -> OllamaChatAnswer | OllamaCompletionAnswer:
        line = self.line(content, done=True)
        timing, usage = ended.timing, ended.usage
        line.done_reason = "length" if end is not None and end.reason == "length" else "stop"
        line.total_duration = to_nanoseconds(timing.queue + timing.prefill + timing.decode)
        line.load_duration = 0
        line.prompt_eval_count, line.prompt_eval_duration = usage.prompt_tokens, to_nanoseconds(timing.prefill)
        line.eval_count, line.eval_duration = usage.completion_tokens, to_nanoseconds(timing.decode)
        line.ingot = Receipt.of(self.head, ended)
        return line

    def common(self, content: OllamaLineContent, *, done: bool) -> dict[str, Any]:
        """The fields that lines of both endpoints have."""
        logprobs = [*map(chat_token_logprob, content.tokens)] if self.logprobs and content.tokens else UNSET
        created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.head.model, "created_at": created_at, "done": done, "logprobs": logprobs}


class OllamaChatShape(OllamaAnswerShape):
    def line(self, content: OllamaLineContent, *, done: bool) -> OllamaChatAnswer:
        message = OllamaMessage(
            content=content.text, thinking=content.thinking or UNSET, tool_calls=list(content.calls) or UNSET
        )
        return OllamaChatAnswer(**self.common(content, done=done), message=message)


class OllamaCompletionShape(OllamaAnswerShape):
    def line(self, content: OllamaLineContent, *, done: bool) -> OllamaCompletionAnswer:
        return OllamaCompletionAnswer(
            **self.common(content, done=done), response=content.text, thinking=content.thinking or UNSET
        )


def ollama_call(call: AnswerPart) -> OllamaCall:
    arguments = answer_arguments(call.content, complete=call.complete)
    return OllamaCall(call.id, OllamaFunction(call.name, arguments))


class WholeOllamaAnswer(WholeAnswer):
    def __init__(self, shape: OllamaAnswerShape) -> None:
        super().__init__(shape.head)
        self.shape = shape

    def body(self) -> Struct:
        answer = self.answers[0]
        calls = [ollama_call(call) for call in answer.calls]
        content = OllamaLineContent(answer.text, answer.thinking, calls, answer.tokens)
        return self.shape.last(content, answer.end, self.ended)


class StreamedOllamaAnswer(StreamedAnswer):
    """Lines of text and thinking as they come. A call is one line, once it has ended."""

    def __init__(self, shape: OllamaAnswerShape) -> None:
        self.shape, self._answer = shape, SequenceAnswer()

    def chunks(self, event: Event) -> list[Struct]:
        content = OllamaLineContent()
        match event:
            case TextDelta():
                content = OllamaLineContent(event.text, tokens=list(event.tokens))
            case ThinkingDelta():
                content = OllamaLineContent(thinking=event.text)
            case Ended():
                return [self.shape.last(content, self._answer.end, event)]
            case _:
                self._answer.take(event)
                if isinstance(event, CallEnded):
                    content = OllamaLineContent(calls=[ollama_call(self._answer.calls[event.call])])
        return [self.shape.line(content, done=False)] if content else []

    def empty(self) -> list[Struct]:
        return [self.shape.line(OllamaLineContent(), done=False)]

    def failed(self, error: IngotError) -> list[Struct]:
        return [OllamaError.of(error)]


def to_nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * 1e9))
