"""Events as OpenAI's chat completions: one body, or chunks."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    FinishReason,
    SequenceEnded,
    TextDelta,
    ThinkingDelta,
    TokenInfo,
    TokenLogprob,
)
from ingot.protocol.chat.answers import (
    AnswerHead,
    AnswerPart,
    Receipt,
    SequenceAnswer,
    StreamedChoices,
    UsageBody,
    WholeAnswer,
    finite_logprob,
    stop_reason,
)
from ingot.protocol.chat.ask import CustomInputDecoder


class ChatTopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatCalledFunction(Struct):
    name: str
    arguments: str


class ChatCalledCustom(Struct):
    name: str
    input: str


class ChatToolCall(Struct):
    id: str
    type: Literal["function", "custom"]
    function: ChatCalledFunction | UnsetType = UNSET
    custom: ChatCalledCustom | UnsetType = UNSET


class ChatAnswerMessage(Struct):
    """The content is null where the answer only has calls. The thinking is given under both names in use."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str
    service_tier: Literal["default"] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    ingot: Receipt


class ChatFunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ChatCustomDelta(Struct):
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ChatToolCallDelta(Struct):
    """The first has a call's id, type and name; later ones add to its arguments, or to a custom tool's input."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: ChatFunctionDelta | UnsetType = UNSET
    custom: ChatCustomDelta | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    ingot: Receipt | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswerOptions:
    """The request's options for its answer."""

    logprobs: bool = False
    tiered: bool = False  # the request names a service tier, which is returned
    include_usage: bool = False  # in a stream
    metadata: dict[str, str] | None = None  # returned in a whole answer
    hides_thinking: bool = False
    custom: Container[str] = ()  # the names of tools that take a text


class WholeChat(WholeAnswer):
    def __init__(self, head: AnswerHead, n: int, options: ChatAnswerOptions) -> None:
        super().__init__(head, n)
        self.options = options

    def body(self) -> ChatCompletion:
        return ChatCompletion(
            **self.head.common,
            choices=[self._choice(index, answer) for index, answer in enumerate(self.answers)],
            usage=UsageBody.of(self.ended.usage),
            service_tier="default" if self.options.tiered else UNSET,
            metadata=UNSET if self.options.metadata is None else self.options.metadata,
            ingot=Receipt.of(self.head, self.ended),
        )

    def _choice(self, index: int, answer: SequenceAnswer) -> ChatChoice:
        text, thinking = answer.text, (not self.options.hides_thinking and answer.thinking) or UNSET
        message = ChatAnswerMessage(
            "assistant",
            text if text or not answer.calls else None,
            reasoning_content=thinking,
            reasoning=thinking,
            tool_calls=[self._call(call) for call in answer.calls] or UNSET,
        )
        logprobs = ChatLogprobs(list(map(chat_token_logprob, answer.tokens))) if self.options.logprobs else None
        reason = answer.end.reason if answer.end else "stop"
        return ChatChoice(index, message, logprobs, reason, stop_reason(answer.end))

    def _call(self, call: AnswerPart) -> ChatToolCall:
        if call.name not in self.options.custom:
            return ChatToolCall(call.id, "function", ChatCalledFunction(call.name, call.content))
        decoder = CustomInputDecoder()
        text = decoder.push(call.content) + decoder.finish()
        return ChatToolCall(call.id, "custom", custom=ChatCalledCustom(call.name, text))


class StreamedChat(StreamedChoices):
    """The role, then thinking, text and calls."""

    def __init__(self, head: AnswerHead, n: int, options: ChatAnswerOptions) -> None:
        make = partial(ChatChunk, service_tier="default" if options.tiered else UNSET)
        super().__init__(make, head, n, include_usage=options.include_usage)
        self.options = options
        self.inputs: dict[tuple[int, int], CustomInputDecoder] = {}

    def opening(self) -> list[Struct]:
        role = ChatDelta(role="assistant", content="")
        return [self.chunk(ChatChunkChoice(index, role)) for index in sorted(self.unfinished)]

    def chunks(self, event: Event) -> list[Struct]:
        match event:
            case TextDelta():
                return self._text(event)
            case ThinkingDelta() if not self.options.hides_thinking:
                return self._delta(event.index, ChatDelta(reasoning_content=event.text, reasoning=event.text))
            case CallBegan() if event.name in self.options.custom:
                self.inputs[event.index, event.call] = CustomInputDecoder()
                custom = ChatCustomDelta(event.name, "")
                return self._call(event.index, ChatToolCallDelta(event.call, event.id, "custom", custom=custom))
            case CallBegan():
                function = ChatFunctionDelta(event.name, "")
                return self._call(event.index, ChatToolCallDelta(event.call, event.id, "function", function))
            case CallArguments() if (argument := self.inputs.get((event.index, event.call))) is not None:
                return self._input(event.index, event.call, argument.push(event.fragment))
            case CallArguments():
                function = ChatFunctionDelta(arguments=event.fragment)
                return self._call(event.index, ChatToolCallDelta(event.call, function=function))
            case CallEnded() if (argument := self.inputs.pop((event.index, event.call), None)) is not None:
                return self._input(event.index, event.call, argument.finish())
            case SequenceEnded():
                choice = ChatChunkChoice(event.index, ChatDelta(), None, event.reason, stop_reason(event))
                return self.finish(event.index, choice)
            case Ended():
                return self.close(event)
        return []

    def empty(self) -> list[Struct]:
        return self._delta(min(self.unfinished), ChatDelta(content="")) if self.unfinished else []

    def _text(self, event: TextDelta) -> list[Struct]:
        tokens = event.tokens if self.options.logprobs else ()
        if not event.text and not tokens:
            return []
        logprobs = ChatLogprobs(list(map(chat_token_logprob, tokens))) if self.options.logprobs else None
        return [self.chunk(ChatChunkChoice(event.index, ChatDelta(content=event.text), logprobs))]

    def _input(self, index: int, call: int, text: str) -> list[Struct]:
        return self._call(index, ChatToolCallDelta(call, custom=ChatCustomDelta(input=text))) if text else []

    def _call(self, index: int, call: ChatToolCallDelta) -> list[Struct]:
        return self._delta(index, ChatDelta(tool_calls=[call]))

    def _delta(self, index: int, delta: ChatDelta) -> list[Struct]:
        return [self.chunk(ChatChunkChoice(index, delta))]


def chat_token_logprob(token: TokenInfo) -> ChatTokenLogprob:
    chosen = token.chosen
    return ChatTokenLogprob(
        chosen.text, finite_logprob(chosen.logprob), list(chosen.raw), [chat_top_logprob(one) for one in token.top]
    )


def chat_top_logprob(token: TokenLogprob) -> ChatTopLogprob:
    return ChatTopLogprob(token.text, finite_logprob(token.logprob), list(token.raw))
