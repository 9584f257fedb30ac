"""The items of a response while they are written, and the events that tell of each."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, cast

from msgspec import UNSET

from ingot.engine.request import TokenInfo
from ingot.protocol.chat.custom_tools import TextArgument
from ingot.protocol.chat.sealing import ThinkingSeal
from ingot.protocol.responses.answers import (
    CustomCallItem,
    EventType,
    FunctionCallItem,
    ItemStatus,
    McpCallItem,
    McpError,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    SummaryText,
    entries,
)
from ingot.protocol.responses.tools import Offer

ITEM_ID: Final = re.compile(r"[a-z]+_([0-9a-f]{24})_(?:in)?\d+")


def item_id(prefix: str, response_id: str, number: int | str) -> str:
    """An id that says which response the item is of."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{number}"


def response_of(item: str) -> str | None:
    """The id of the response that an item was made for, where the id is one of ours."""
    found = ITEM_ID.fullmatch(item)
    return f"resp_{found[1]}" if found else None


class ResponseOutput:
    """What has been written of one response, and the numbers of the events that told of it."""

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.items: list[OutputItem] = []
        self._told = 0

    def event(self, type: EventType, **given: Any) -> ResponseEvent:
        made = ResponseEvent(type=type, sequence_number=self._told, **given)
        self._told += 1
        return made


class Growing(ABC):
    """The item that is being written: `begin`, `add` for each piece, `end`. Its place is taken when it is made."""

    prefix: ClassVar[str]  # of its id
    told: ClassVar[str]  # what the events of its text are called

    def __init__(self, output: ResponseOutput) -> None:
        self._output = output
        self.index = len(output.items)
        self.id = item_id(self.prefix, output.response_id, self.index)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def snapshot(self, status: ItemStatus) -> OutputItem: ...

    def begin(self) -> list[ResponseEvent]:
        item = self.snapshot("in_progress")
        self._output.items.append(item)
        return [self._output.event("response.output_item.added", output_index=self.index, item=item)]

    def add(self, text: str) -> list[ResponseEvent]:
        self._texts.append(text)
        return [self.tell(f"{self.told}.delta", delta=text)]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        item = self._output.items[self.index] = self.snapshot(status)
        return [self._output.event("response.output_item.done", output_index=self.index, item=item)]

    def tell(self, what: str, **given: Any) -> ResponseEvent:
        type = cast(EventType, f"response.{what}")
        return self._output.event(type, item_id=self.id, output_index=self.index, **given)


class GrowingPart(Growing):
    """An item that is one part of text, whose beginning and end are told as well."""

    part_told: ClassVar[str] = "content_part"
    numbered: ClassVar[str] = "content_index"

    @abstractmethod
    def part(self) -> OutputText | ReasoningText | SummaryText: ...

    def begin(self) -> list[ResponseEvent]:
        return [*super().begin(), self.tell(f"{self.part_told}.added", part=self.part())]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        part = self.part()
        scored = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
        return [
            self.tell(f"{self.told}.done", text=part.text, **scored),
            self.tell(f"{self.part_told}.done", part=part),
            *super().end(status),
        ]

    def tell(self, what: str, **given: Any) -> ResponseEvent:
        return super().tell(what, **{self.numbered: 0}, **given)


class GrowingMessage(GrowingPart):
    prefix, told = "msg", "output_text"

    def __init__(self, output: ResponseOutput) -> None:
        super().__init__(output)
        self._tokens: list[TokenInfo] = []
        self.waiting: tuple[TokenInfo, ...] = ()  # tokens that begin in the next piece

    def part(self) -> OutputText:
        return OutputText(self.text, logprobs=entries(tuple(self._tokens)))

    def snapshot(self, status: ItemStatus) -> MessageItem:
        return MessageItem(self.id, status, [self.part()] if self._texts else [])

    def add(self, text: str) -> list[ResponseEvent]:
        tokens, self.waiting = self.waiting, ()
        self._texts.append(text)
        self._tokens += tokens
        return [self.tell("output_text.delta", delta=text, logprobs=entries(tokens))]


class GrowingThought(GrowingPart):
    """Thinking, told as the item's content."""

    prefix, told = "rs", "reasoning_text"

    def __init__(self, output: ResponseOutput, seal: ThinkingSeal | None) -> None:
        super().__init__(output)
        self._seal = seal

    def part(self) -> ReasoningText | SummaryText:
        return ReasoningText(self.text)

    def snapshot(self, status: ItemStatus) -> ReasoningItem:
        content = [ReasoningText(self.text)] if self.text else []
        return ReasoningItem(self.id, status, [], content, self.sealed(status))

    def sealed(self, status: ItemStatus) -> Any:
        return UNSET if self._seal is None or status == "in_progress" else self._seal.close(self.text)


class GrowingSummary(GrowingThought):
    """Thinking, told as the item's summary, which holds all of it."""

    told, part_told, numbered = "reasoning_summary_text", "reasoning_summary_part", "summary_index"

    def part(self) -> SummaryText:
        return SummaryText(self.text)

    def snapshot(self, status: ItemStatus) -> ReasoningItem:
        summary = [self.part()] if self.text else []
        return ReasoningItem(self.id, status, summary, encrypted_content=self.sealed(status))


class GrowingCall(Growing):
    """A call of a function of the client's."""

    prefix, told = "fc", "function_call_arguments"

    def __init__(self, output: ResponseOutput, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(output)
        self._call_id, self._name, self._namespace = call_id, name, namespace or UNSET

    def snapshot(self, status: ItemStatus) -> FunctionCallItem | CustomCallItem:
        return FunctionCallItem(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        return [self.tell("function_call_arguments.done", arguments=self.text), *super().end(status)]


class GrowingCustomCall(GrowingCall):
    """A call of a custom tool of the client's, whose text is read out of the arguments as they come."""

    prefix, told = "ctc", "custom_tool_call_input"

    def __init__(self, output: ResponseOutput, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(output, call_id, name, namespace)
        self._argument = TextArgument()

    def snapshot(self, status: ItemStatus) -> CustomCallItem:
        return CustomCallItem(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def add(self, text: str) -> list[ResponseEvent]:
        return self._add(self._argument.push(text))

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        told = self._add(self._argument.rest())
        return [*told, self.tell("custom_tool_call_input.done", input=self.text), *Growing.end(self, status)]

    def _add(self, piece: str) -> list[ResponseEvent]:
        return super().add(piece) if piece else []


class GrowingServerCall(Growing):
    """A call that the server makes itself. A complete one ends when it was made, not when it was written."""

    prefix, told = "mcp", "mcp_call_arguments"

    def __init__(self, output: ResponseOutput, call_id: str, offer: Offer) -> None:
        super().__init__(output)
        self.call_id, self.offer = call_id, offer
        self._result: str | None = None
        self._error: str | None = None

    def snapshot(self, status: ItemStatus) -> McpCallItem:
        error = McpError(self._error) if self._error is not None else None
        return McpCallItem(
            self.id,
            status if error is None else "failed",
            self.call_id,
            self.offer.space or "",
            self.offer.name,
            self.text,
            self._result,
            error,
        )

    def begin(self) -> list[ResponseEvent]:
        return [*super().begin(), self.tell("mcp_call.in_progress")]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        told = [self.tell("mcp_call_arguments.done", arguments=self.text)]
        if status == "completed":
            self._output.items[self.index] = self.snapshot("in_progress")
            return told
        return [*told, self.tell("mcp_call.failed"), *super().end(status)]

    def succeeded(self, result: str) -> list[ResponseEvent]:
        self._result = result
        return [self.tell("mcp_call.completed"), *super().end("completed")]

    def failed(self, reason: str) -> list[ResponseEvent]:
        self._error = reason
        return [self.tell("mcp_call.failed"), *super().end("completed")]
