"""Answers as Anthropic's messages: one body, or a stream of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

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
from ingot.protocol.chat.answers import AnswerHead, AnswerPart, Receipt, StreamedAnswer, WholeAnswer
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
    """`input_tokens` are those of the prompt that were neither read from the cache nor written to it."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputTokensDetails
    service_tier: Literal["standard"] = "standard"

    @classmethod
    def of(cls, usage: Usage, *, marked: bool) -> MessageUsage:
        """`marked`: the request asks for caching. All of its prompt is cached then but the last token, which is always
        computed again."""
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
    """The edits of the context; one that changed nothing is not listed."""

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


EMPTY_BLOCKS: Final[dict[str, tuple[ContentBlockBody, type[TextDeltaBody] | type[ThinkingDeltaBody]]]] = {
    "text": (TextBlockBody(""), TextDeltaBody),
    "thinking": (ThinkingBlockBody("", ""), ThinkingDeltaBody),
}
"""The start of a block, and the class of its deltas."""


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

    def stop_delta(self, end: SequenceEnded) -> MessageStopDelta:
        match end.reason:
            case "tool_calls":
                return MessageStopDelta("tool_use", None)
            case "length":
                # For a loop, too: agents shorten the conversation where the context is said to be full.
                is_limit = end.loop is not None or end.completion_tokens >= self.max_tokens
                return MessageStopDelta("max_tokens" if is_limit else "model_context_window_exceeded", None)
        if isinstance(end.stopped_by, str):
            return MessageStopDelta("stop_sequence", end.stopped_by)
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
    """One body, whose blocks are in the order in which they were generated."""

    def __init__(self, options: MessageAnswerOptions) -> None:
        super().__init__(options.head)
        self.options = options

    def body(self) -> MessageBody:
        answer = self.answers[0]
        assert answer.end is not None
        content = [self._block(part) for part in answer.parts]
        body = self.options.message(content, self.options.stop_delta(answer.end), self.ended.usage)
        body.ingot = Receipt.of(self.head, self.ended)
        return body

    def _block(self, part: AnswerPart) -> ContentBlockBody:
        if part.kind == "call":
            return ToolUseBlockBody(part.id, part.name, answer_arguments(part.content, complete=part.complete))
        return TextBlockBody(part.content) if part.kind == "text" else self.options.thinking(part.content)


BlockKind = Literal["text", "thinking", "call"]
MessageDeltaBody = TextDeltaBody | ThinkingDeltaBody | SignatureDeltaBody | InputJsonDeltaBody


class StreamedMessage(StreamedAnswer):
    """Events: one block after another, each with a start, deltas and a stop; then the stop reason and the usage."""

    def __init__(self, options: MessageAnswerOptions) -> None:
        self.options = options
        self.index = 0
        self.open: BlockKind | None = None
        self.thinking: list[str] = []
        self.stop: MessageStopDelta | None = None

    def opening(self) -> list[Struct]:
        usage = Usage(prompt_tokens=self.options.prompt_tokens)
        return [MessageStart(self.options.message([], None, usage)), MessagePing()]

    def chunks(self, event: Event) -> list[Struct]:
        match event:
            case TextDelta():
                return self._text("text", event.text)
            case ThinkingDelta():
                return self._text("thinking", event.text)
            case CallBegan():
                return self._begin("call", ToolUseBlockBody(event.id, event.name, {}))
            case CallArguments():
                return self._delta(InputJsonDeltaBody(event.fragment)) if event.fragment else []
            case CallEnded():
                return self._end()
            case SequenceEnded():
                self.stop = self.options.stop_delta(event)
                return self._end()
            case Ended():
                return self._close(event)
        return []

    def empty(self) -> list[Struct]:
        """An empty delta of the open block. Before the first one, a block of the likeliest kind is opened, which stays
        empty if another kind comes. Between later blocks there is none."""
        if self.open == "call":
            return self._delta(InputJsonDeltaBody(""))
        if self.open is not None:
            return self._delta(EMPTY_BLOCKS[self.open][1](""))
        if self.index or self.stop is not None:
            return []
        kind: BlockKind = "thinking" if self.options.may_think else "text"
        block, delta = EMPTY_BLOCKS[kind]
        return [*self._begin(kind, block), *self._delta(delta(""))]

    def failed(self, error: IngotError) -> list[Struct]:
        return [AnthropicError.of(error, self.options.head.id)]

    def _text(self, kind: Literal["text", "thinking"], text: str) -> list[Struct]:
        if not text:
            return []
        block, delta = EMPTY_BLOCKS[kind]
        start = [] if self.open == kind else self._begin(kind, block)
        if kind == "thinking":
            self.thinking.append(text)
            if self.options.hides_thinking:
                return start
        return [*start, *self._delta(delta(text))]

    def _begin(self, kind: BlockKind, block: ContentBlockBody) -> list[Struct]:
        end = self._end()
        self.open = kind
        return [*end, ContentBlockStart(self.index, block)]

    def _delta(self, delta: MessageDeltaBody) -> list[Struct]:
        return [ContentBlockDelta(self.index, delta)]

    def _end(self) -> list[Struct]:
        if self.open is None:
            return []
        signature: list[Struct] = []
        if self.open == "thinking":
            signature = self._delta(SignatureDeltaBody(self.options.seal.close("".join(self.thinking))))
            self.thinking = []
        self.open = None
        self.index += 1
        return [*signature, ContentBlockStop(self.index - 1)]

    def _close(self, ended: Ended) -> list[Struct]:
        assert self.stop is not None
        delta = MessageDelta(
            delta=self.stop,
            usage=MessageUsage.of(ended.usage, marked=self.options.marked),
            context_management=UNSET if self.options.edits is None else self.options.edits,
            ingot=Receipt.of(self.options.head, ended),
        )
        return [delta, MessageStop()]
