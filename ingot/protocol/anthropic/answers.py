"""Events as Anthropic's messages: one body, or events of the stream."""

from __future__ import annotations

from dataclasses import dataclass
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
    Usage,
)
from ingot.errors import IngotError
from ingot.protocol.chat.answers import AnswerHead, Receipt, StreamedAnswer, WholeAnswer
from ingot.protocol.errors import AnthropicError
from ingot.protocol.served import ThinkingSeal
from ingot.text.parser.arguments import answer_arguments

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlockBody(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlockBody(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlockBody(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlockBody = TextBlockBody | ThinkingBlockBody | ToolUseBlockBody


class AnthropicOutputTokensDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """`input_tokens` are those of the prompt that were neither read from the cache nor put into it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputTokensDetails
    service_tier: Literal["standard"] = "standard"

    @classmethod
    def of(cls, usage: Usage, *, marked: bool) -> MessageUsage:
        """`marked`: the request asks for caching. All of its prompt is kept then but the last token, which an answer
        always computes anew."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        created = max(0, fresh - 1) if marked else 0
        return cls(
            input_tokens=fresh - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=AnthropicOutputTokensDetails(usage.thinking_tokens),
        )


class AppliedEdit(Struct, tag_field="type", tag="clear_thinking_20251015"):
    cleared_thinking_turns: int
    cleared_input_tokens: int


class AppliedEdits(Struct):
    """What was done to the context; an edit that changed nothing is not listed."""

    applied_edits: list[AppliedEdit]


class MessageBody(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlockBody]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET


class TextDeltaBody(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDeltaBody(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDeltaBody(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDeltaBody(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageBody


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlockBody


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDeltaBody | ThinkingDeltaBody | SignatureDeltaBody | InputJsonDeltaBody


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageStopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta", kw_only=True):
    delta: MessageStopDelta
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET
    ingot: Receipt | UnsetType = UNSET


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class MessagePing(Struct, tag_field="type", tag="ping"):
    pass


MESSAGE_EVENTS = (
    MessageStart,
    MessagePing,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
)


@dataclass(frozen=True, slots=True)
class MessageAnswerOptions:
    """What an answer depends on besides its events."""

    head: AnswerHead
    seal: ThinkingSeal
    prompt_tokens: int
    max_tokens: int
    marked: bool = False  # the request asks for caching
    hides_thinking: bool = False  # only the signature is shown
    may_think: bool = False  # the answer begins with thinking, or may
    edits: AppliedEdits | None = None

    def stopped(self, ended: SequenceEnded) -> MessageStopDelta:
        match ended.reason:
            case "tool_calls":
                return MessageStopDelta("tool_use", None)
            case "length":
                spent = ended.completion_tokens >= self.max_tokens
                return MessageStopDelta("max_tokens" if spent else "model_context_window_exceeded", None)
        if isinstance(ended.stopped_by, str):
            return MessageStopDelta("stop_sequence", ended.stopped_by)
        return MessageStopDelta("end_turn", None)

    def thinking(self, text: str) -> ThinkingBlockBody:
        return ThinkingBlockBody("" if self.hides_thinking else text, self.seal.close(text))

    def message(self, content: list[ContentBlockBody], stop: MessageStopDelta | None, usage: Usage) -> MessageBody:
        return MessageBody(
            id=self.head.id,
            model=self.head.model,
            content=content,
            stop_reason=None if stop is None else stop.stop_reason,
            stop_sequence=None if stop is None else stop.stop_sequence,
            usage=MessageUsage.of(usage, marked=self.marked and stop is not None),
            context_management=UNSET if self.edits is None else self.edits,
        )


class WholeMessage(WholeAnswer):
    """One body, whose blocks are in the order in which they were written."""

    def __init__(self, telling: MessageAnswerOptions) -> None:
        self.telling = telling
        self.content: list[ContentBlockBody] = []
        self.pieces: list[str] = []
        self.kind: type[TextDelta] | type[ThinkingDelta] | None = None
        self.call: CallBegan | None = None
        self.stop: MessageStopDelta | None = None
        self.ended: Ended | None = None

    def take(self, event: Event) -> None:
        match event:
            case TextDelta() | ThinkingDelta():
                if event.text:
                    if self.kind is not type(event):
                        self._close()
                        self.kind = type(event)
                    self.pieces.append(event.text)
            case CallBegan():
                self._close()
                self.call = event
            case CallArguments():
                self.pieces.append(event.fragment)
            case CallEnded():
                self._close_call(event.complete)
            case SequenceEnded():
                self._close()
                self.stop = self.telling.stopped(event)
            case Ended():
                self.ended = event

    def body(self) -> MessageBody:
        assert self.ended is not None and self.stop is not None
        made = self.telling.message(self.content, self.stop, self.ended.usage)
        made.ingot = Receipt.of(self.telling.head, self.ended)
        return made

    def _close(self) -> None:
        text = "".join(self.pieces)
        if self.kind is TextDelta:
            self.content.append(TextBlockBody(text))
        elif self.kind is ThinkingDelta:
            self.content.append(self.telling.thinking(text))
        self.kind, self.pieces = None, []

    def _close_call(self, complete: bool) -> None:
        assert self.call is not None
        arguments = answer_arguments("".join(self.pieces), complete=complete)
        self.content.append(ToolUseBlockBody(self.call.id, self.call.name, arguments))
        self.call, self.pieces = None, []


class StreamedMessage(StreamedAnswer):
    """Events: blocks one after another, each begun, told and ended; then how it ended, with the usage."""

    def __init__(self, telling: MessageAnswerOptions) -> None:
        self.telling = telling
        self.index = 0
        self.open: Literal["text", "thinking", "call"] | None = None
        self.thought: list[str] = []
        self.stop: MessageStopDelta | None = None

    def opening(self) -> list[Struct]:
        usage = Usage(prompt_tokens=self.telling.prompt_tokens)
        return [MessageStart(self.telling.message([], None, usage)), MessagePing()]

    def chunks(self, event: Event) -> list[Struct]:
        match event:
            case TextDelta():
                return self._text(event.text)
            case ThinkingDelta():
                return self._thinking(event.text)
            case CallBegan():
                block = ToolUseBlockBody(event.id, event.name, {})
                return self._begin("call", block)
            case CallArguments():
                return self._piece(InputJsonDeltaBody(event.fragment)) if event.fragment else []
            case CallEnded():
                return self._end()
            case SequenceEnded():
                self.stop = self.telling.stopped(event)
                return self._end()
            case Ended():
                return self._close(event)
        return []

    def empty(self) -> list[Struct]:
        """An empty piece of the block that is being told. Before the first, that one is begun, of the kind that most
        likely comes: where another does, it stays before it, without a word. Later there is none between blocks."""
        match self.open:
            case "thinking":
                return self._piece(ThinkingDeltaBody(""))
            case "call":
                return self._piece(InputJsonDeltaBody(""))
            case "text":
                return self._piece(TextDeltaBody(""))
        if self.index or self.stop is not None:
            return []
        if self.telling.may_think:
            return [*self._begin("thinking", ThinkingBlockBody("", "")), *self._piece(ThinkingDeltaBody(""))]
        return [*self._begin("text", TextBlockBody("")), *self._piece(TextDeltaBody(""))]

    def failed(self, error: IngotError) -> list[Struct]:
        return [AnthropicError.of(error, self.telling.head.id)]

    def _text(self, text: str) -> list[Struct]:
        if not text:
            return []
        begun = [] if self.open == "text" else self._begin("text", TextBlockBody(""))
        return [*begun, *self._piece(TextDeltaBody(text))]

    def _thinking(self, text: str) -> list[Struct]:
        if not text:
            return []
        begun = [] if self.open == "thinking" else self._begin("thinking", ThinkingBlockBody("", ""))
        self.thought.append(text)
        return begun if self.telling.hides_thinking else [*begun, *self._piece(ThinkingDeltaBody(text))]

    def _begin(self, kind: Literal["text", "thinking", "call"], block: ContentBlockBody) -> list[Struct]:
        ended = self._end()
        self.open = kind
        return [*ended, ContentBlockStart(self.index, block)]

    def _piece(
        self, piece: TextDeltaBody | ThinkingDeltaBody | SignatureDeltaBody | InputJsonDeltaBody
    ) -> list[Struct]:
        return [ContentBlockDelta(self.index, piece)]

    def _end(self) -> list[Struct]:
        if self.open is None:
            return []
        signed: list[Struct] = []
        if self.open == "thinking":
            signed = self._piece(SignatureDeltaBody(self.telling.seal.close("".join(self.thought))))
            self.thought = []
        self.open = None
        self.index += 1
        return [*signed, ContentBlockStop(self.index - 1)]

    def _close(self, ended: Ended) -> list[Struct]:
        assert self.stop is not None
        telling = self.telling
        delta = MessageDelta(
            delta=self.stop,
            usage=MessageUsage.of(ended.usage, marked=telling.marked),
            context_management=UNSET if telling.edits is None else telling.edits,
            ingot=Receipt.of(telling.head, ended),
        )
        return [delta, MessageStop()]
