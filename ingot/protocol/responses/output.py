"""Builds a response from the engine's events: its output items, and the events of its stream.

One builder serves both kinds of answers: a streamed one sends what `chunks` returns, a whole one drops it and takes the
response at the end. It spans several rounds of the engine where the server calls tools itself.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, TypeVar, cast

from msgspec import UNSET, Struct, structs

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    SequenceEnded,
    SpeculationReport,
    TextDelta,
    ThinkingDelta,
    Timing,
    TokenInfo,
    Usage,
)
from ingot.errors import Cancelled, IngotError
from ingot.protocol.chat.answers import AnswerHead, Receipt, StreamedAnswer
from ingot.protocol.chat.ask import CustomInputDecoder
from ingot.protocol.responses.answers import (
    CustomCallOutputItem,
    FunctionCallOutputItem,
    McpApprovalRequestItem,
    McpCallOutputItem,
    McpError,
    McpListedTool,
    McpListOutputItem,
    MessageOutputItem,
    OutputTextPart,
    ReasoningOutputItem,
    ReasoningTextPart,
    ResponseBody,
    ResponseErrorBody,
    ResponseEvent,
    ResponseEventType,
    ResponseIncompleteDetails,
    ResponseItemStatus,
    ResponseOutputItem,
    ResponseUsage,
    SummaryTextPart,
    token_logprobs,
)
from ingot.protocol.responses.tools import OfferedTool, RemoteMcpTool, Toolbox
from ingot.protocol.served import ThinkingSeal

ITEM_ID_FORMAT: Final = re.compile(r"[a-z]+_([0-9a-f]{24})_(?:in)?\d+")


T = TypeVar("T", Usage, Timing, SpeculationReport)


def make_item_id(prefix: str, response_id: str, number: int | str) -> str:
    """An id that contains the id of the item's response."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{number}"


def response_id_of_item(item: str) -> str | None:
    """The id of the item's response, where the item's id is one of ours."""
    match = ITEM_ID_FORMAT.fullmatch(item)
    return f"resp_{match[1]}" if match else None


class ResponseEventWriter:
    """The items of one response, and the numbering of its events."""

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.items: list[ResponseOutputItem] = []
        self._count = 0

    def event(self, type: ResponseEventType, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=type, sequence_number=self._count, **fields)
        self._count += 1
        return event


class OutputItemBuilder(ABC):
    """The item that is being generated: `begin`, `add` for each piece, `end`. It has its index from the beginning."""

    prefix: ClassVar[str]  # of its id
    text_event: ClassVar[str]  # the name of the events of its text

    def __init__(self, output: ResponseEventWriter) -> None:
        self._output = output
        self.index = len(output.items)
        self.id = make_item_id(self.prefix, output.response_id, self.index)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def snapshot(self, status: ResponseItemStatus) -> ResponseOutputItem: ...

    def begin(self) -> list[ResponseEvent]:
        item = self.snapshot("in_progress")
        self._output.items.append(item)
        return [self._output.event("response.output_item.added", output_index=self.index, item=item)]

    def add(self, text: str) -> list[ResponseEvent]:
        self._texts.append(text)
        return [self.event(f"{self.text_event}.delta", delta=text)]

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        item = self._output.items[self.index] = self.snapshot(status)
        return [self._output.event("response.output_item.done", output_index=self.index, item=item)]

    def event(self, name: str, **fields: Any) -> ResponseEvent:
        type = cast(ResponseEventType, f"response.{name}")
        return self._output.event(type, item_id=self.id, output_index=self.index, **fields)


class PartItemBuilder(OutputItemBuilder):
    """An item with one part of text, which has events of its own."""

    part_event: ClassVar[str] = "content_part"
    index_field: ClassVar[str] = "content_index"

    @abstractmethod
    def part(self) -> OutputTextPart | ReasoningTextPart | SummaryTextPart: ...

    def begin(self) -> list[ResponseEvent]:
        return [*super().begin(), self.event(f"{self.part_event}.added", part=self.part())]

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        part = self.part()
        logprobs = {"logprobs": part.logprobs} if isinstance(part, OutputTextPart) else {}
        return [
            self.event(f"{self.text_event}.done", text=part.text, **logprobs),
            self.event(f"{self.part_event}.done", part=part),
            *super().end(status),
        ]

    def event(self, name: str, **fields: Any) -> ResponseEvent:
        return super().event(name, **{self.index_field: 0}, **fields)


class MessageItemBuilder(PartItemBuilder):
    prefix, text_event = "msg", "output_text"

    def __init__(self, output: ResponseEventWriter) -> None:
        super().__init__(output)
        self._tokens: list[TokenInfo] = []
        self.pending: tuple[TokenInfo, ...] = ()  # tokens that begin in the next piece

    def part(self) -> OutputTextPart:
        return OutputTextPart(self.text, logprobs=token_logprobs(tuple(self._tokens)))

    def snapshot(self, status: ResponseItemStatus) -> MessageOutputItem:
        return MessageOutputItem(self.id, status, [self.part()] if self._texts else [])

    def add(self, text: str) -> list[ResponseEvent]:
        tokens, self.pending = self.pending, ()
        self._texts.append(text)
        self._tokens += tokens
        return [self.event("output_text.delta", delta=text, logprobs=token_logprobs(tokens))]


class ReasoningItemBuilder(PartItemBuilder):
    """Thinking, as the item's content."""

    prefix, text_event = "rs", "reasoning_text"

    def __init__(self, output: ResponseEventWriter, seal: ThinkingSeal | None) -> None:
        super().__init__(output)
        self._seal = seal

    def part(self) -> ReasoningTextPart | SummaryTextPart:
        return ReasoningTextPart(self.text)

    def snapshot(self, status: ResponseItemStatus) -> ReasoningOutputItem:
        content = [ReasoningTextPart(self.text)] if self.text else []
        return ReasoningOutputItem(self.id, status, [], content, self.encrypted(status))

    def encrypted(self, status: ResponseItemStatus) -> Any:
        return UNSET if self._seal is None or status == "in_progress" else self._seal.close(self.text)


class SummaryItemBuilder(ReasoningItemBuilder):
    """Thinking, as the item's summary, which has all of it."""

    text_event, part_event, index_field = "reasoning_summary_text", "reasoning_summary_part", "summary_index"

    def part(self) -> SummaryTextPart:
        return SummaryTextPart(self.text)

    def snapshot(self, status: ResponseItemStatus) -> ReasoningOutputItem:
        summary = [self.part()] if self.text else []
        return ReasoningOutputItem(self.id, status, summary, encrypted_content=self.encrypted(status))


class FunctionCallBuilder(OutputItemBuilder):
    """A call of the client's function."""

    prefix, text_event = "fc", "function_call_arguments"

    def __init__(self, output: ResponseEventWriter, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(output)
        self._call_id, self._name, self._namespace = call_id, name, namespace or UNSET

    def snapshot(self, status: ResponseItemStatus) -> FunctionCallOutputItem | CustomCallOutputItem:
        return FunctionCallOutputItem(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        return [self.event("function_call_arguments.done", arguments=self.text), *super().end(status)]


class CustomCallBuilder(FunctionCallBuilder):
    """A call of the client's custom tool, whose input is decoded from the arguments."""

    prefix, text_event = "ctc", "custom_tool_call_input"

    def __init__(self, output: ResponseEventWriter, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(output, call_id, name, namespace)
        self._decoder = CustomInputDecoder()

    def snapshot(self, status: ResponseItemStatus) -> CustomCallOutputItem:
        return CustomCallOutputItem(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def add(self, text: str) -> list[ResponseEvent]:
        return self._add(self._decoder.push(text))

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        rest = self._add(self._decoder.finish())
        return [*rest, self.event("custom_tool_call_input.done", input=self.text), *OutputItemBuilder.end(self, status)]

    def _add(self, piece: str) -> list[ResponseEvent]:
        return super().add(piece) if piece else []


class McpCallBuilder(OutputItemBuilder):
    """A call that the server makes itself. A complete one ends when it was made, not when it was generated."""

    prefix, text_event = "mcp", "mcp_call_arguments"

    def __init__(
        self, output: ResponseEventWriter, call_id: str, offer: OfferedTool, approval_request_id: str | None = None
    ) -> None:
        super().__init__(output)
        self.call_id, self.offer = call_id, offer
        self._approval_request_id = approval_request_id
        self._result: str | None = None
        self._error: str | None = None

    def snapshot(self, status: ResponseItemStatus) -> McpCallOutputItem:
        error = McpError(self._error) if self._error is not None else None
        return McpCallOutputItem(
            self.id,
            status if error is None else "failed",
            self.call_id,
            self.offer.space or "",
            self.offer.name,
            self.text,
            self._result,
            error,
            self._approval_request_id,
        )

    def begin(self) -> list[ResponseEvent]:
        return [*super().begin(), self.event("mcp_call.in_progress")]

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        events = [self.event("mcp_call_arguments.done", arguments=self.text)]
        if status == "completed":
            self._output.items[self.index] = self.snapshot("in_progress")
            return events
        return [*events, self.event("mcp_call.failed"), *super().end(status)]

    def succeeded(self, result: str) -> list[ResponseEvent]:
        self._result = result
        return [self.event("mcp_call.completed"), *super().end("completed")]

    def failed(self, reason: str) -> list[ResponseEvent]:
        self._error = reason
        return [self.event("mcp_call.failed"), *super().end("completed")]


class McpApprovalBuilder(OutputItemBuilder):
    """A call that the client is asked about. Its arguments come with the whole item: nothing is done before."""

    prefix, text_event = "mcpr", ""

    def __init__(self, output: ResponseEventWriter, offer: OfferedTool) -> None:
        super().__init__(output)
        self._offer = offer

    def snapshot(self, status: ResponseItemStatus) -> McpApprovalRequestItem:
        return McpApprovalRequestItem(self.id, self._offer.space or "", self._offer.name, self.text)

    def add(self, text: str) -> list[ResponseEvent]:
        self._texts.append(text)
        return []


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that the client approved and that is still to be made."""

    request_id: str
    offer: OfferedTool
    arguments: str


@dataclass(frozen=True, slots=True)
class ResponseBuildOptions:
    """The optional parts of a response."""

    summary: bool = False  # the thinking is the reasoning's summary, else its content
    seal: ThinkingSeal | None = None  # reasoning items have encrypted content
    logprobs: bool = False
    cached: bool = True  # the prompt is cached


def list_mcp_tools(tools: Iterable[RemoteMcpTool]) -> list[McpListedTool]:
    return [McpListedTool(tool.name, tool.description, dict(tool.parameters)) for tool in tools]


def add_rounds(total: Ended | None, ended: Ended) -> Ended:
    """What the rounds of one response took together."""
    if total is None:
        return ended

    def add(one: T, other: T) -> T:
        return type(one)(*(getattr(one, f.name) + getattr(other, f.name) for f in fields(one)))

    return replace(
        ended,
        usage=add(total.usage, ended.usage),
        timing=add(total.timing, ended.timing),
        speculation=add(total.speculation, ended.speculation),
        specprefill=total.specprefill + ended.specprefill,
        loops=total.loops + ended.loops,
    )


class ResponseBuilder(StreamedAnswer):
    """One response. `opening`, then the events of each round in order, then `close` or `failed`, once."""

    def __init__(self, head: AnswerHead, body: ResponseBody, toolbox: Toolbox, options: ResponseBuildOptions) -> None:
        self.head, self.toolbox, self.options = head, toolbox, options
        self.calls: list[McpCallBuilder] = []  # of the model, for the server to make
        self.waits_for_client = False  # the model called a tool of the client's, or one that needs approval
        self.cut_short = False  # the answer reached its limit
        self.total: Ended | None = None  # of all rounds
        self._body = body
        self._output = ResponseEventWriter(head.id)
        self._current_item: OutputItemBuilder | None = None
        self._tokens: tuple[TokenInfo, ...] = ()

    def opening(self) -> list[Struct]:
        events: list[Struct] = [self._output.event("response.created", response=self._body)]
        if self._body.status == "queued":
            events.append(self._output.event("response.queued", response=self._body))
        self._body = structs.replace(self._body, status="in_progress")
        events.append(self._output.event("response.in_progress", response=self._body))
        for label in self.toolbox.servers:
            events += self._list_tools(label)
        return events

    def chunks(self, event: Event) -> list[Struct]:
        return [*self._events(event)]

    def begin_approved(self, call: ApprovedCall) -> list[Struct]:
        """A call for the server to make before the model goes on."""
        events = self._begin(McpCallBuilder(self._output, call.request_id, call.offer, call.request_id))
        assert self._current_item is not None, "it has just begun"
        return [*events, *self._current_item.add(call.arguments), *self._end("completed")]

    def empty(self) -> list[Struct]:
        """Another `response.in_progress`; none before the first, and none after the end."""
        if self._body.status != "in_progress":
            return []
        return [self._output.event("response.in_progress", response=self.snapshot())]

    def close(self) -> list[Struct]:
        assert self.total is not None, "a response closes after its last round"
        self._body = structs.replace(
            self._body,
            status="incomplete" if self.cut_short else "completed",
            completed_at=int(time.time()),
            incomplete_details=ResponseIncompleteDetails("max_output_tokens") if self.cut_short else None,
            usage=ResponseUsage.of(self.total.usage, cached=self.options.cached),
            ingot=Receipt.of(self.head, self.total),
        )
        type = "response.incomplete" if self.cut_short else "response.completed"
        return [self._output.event(type, response=self.snapshot())]  # type: ignore[arg-type]

    def failed(self, error: IngotError) -> list[Struct]:
        """The last events of a response that broke. Its output so far stays in it."""
        events = self._end("incomplete")
        self._body = structs.replace(
            self._body,
            status="cancelled" if isinstance(error, Cancelled) else "failed",
            error=ResponseErrorBody.of(error),
        )
        return [*events, self._output.event("response.failed", response=self.snapshot())]

    def snapshot(self) -> ResponseBody:
        """The response so far, with the item that is being generated."""
        items = list(self._output.items)
        if self._current_item is not None:
            items[self._current_item.index] = self._current_item.snapshot("in_progress")
        return structs.replace(self._body, output=items)

    def _events(self, event: Event) -> list[ResponseEvent]:
        match event:
            case TextDelta():
                return self._add_text(event)
            case ThinkingDelta():
                return self._add_thinking(event.text)
            case CallBegan():
                return self._begin(self._call_builder(event))
            case CallArguments():
                assert self._current_item is not None, "a call began before its arguments came"
                return self._current_item.add(event.fragment)
            case CallEnded():
                return self._end("completed" if event.complete else "incomplete")
            case SequenceEnded():
                self.cut_short = event.reason == "length"
                return self._end("incomplete" if self.cut_short else "completed")
            case Ended():
                self.total = add_rounds(self.total, event)
        return []

    def _add_text(self, event: TextDelta) -> list[ResponseEvent]:
        # Tokens come before the text that they begin; those of thinking and calls are left out.
        self._tokens += event.tokens if self.options.logprobs else ()
        if not event.text:
            return []
        message, events = self._current_item, []
        tokens, self._tokens = self._tokens, ()
        if not isinstance(message, MessageItemBuilder):
            message = MessageItemBuilder(self._output)
            events = self._begin(message)
        message.pending = tokens
        return [*events, *message.add(event.text)]

    def _add_thinking(self, text: str) -> list[ResponseEvent]:
        item, events = self._current_item, []
        if not isinstance(item, ReasoningItemBuilder):
            kind = SummaryItemBuilder if self.options.summary else ReasoningItemBuilder
            item = kind(self._output, self.options.seal)
            events = self._begin(item)
        self._tokens = ()
        return [*events, *item.add(text)]

    def _call_builder(self, event: CallBegan) -> OutputItemBuilder:
        offer = self.toolbox.of(event.name)
        if offer is None:
            return FunctionCallBuilder(self._output, event.id, event.name, None)
        if offer.needs_approval:
            return McpApprovalBuilder(self._output, offer)
        if offer.kind == "mcp":
            return McpCallBuilder(self._output, event.id, offer)
        kind = CustomCallBuilder if offer.kind == "custom" else FunctionCallBuilder
        return kind(self._output, event.id, offer.name, offer.space)

    def _begin(self, item: OutputItemBuilder) -> list[ResponseEvent]:
        events = self._end("completed")
        self._current_item, self._tokens = item, ()
        return [*events, *item.begin()]

    def _end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        item, self._current_item = self._current_item, None
        if item is None:
            return []
        if isinstance(item, McpCallBuilder) and status == "completed":
            self.calls.append(item)
        self.waits_for_client = self.waits_for_client or isinstance(item, FunctionCallBuilder | McpApprovalBuilder)
        return item.end(status)

    def _list_tools(self, label: str) -> list[ResponseEvent]:
        """A server's tools, which the model is shown from the start."""
        output, index = self._output, len(self._output.items)
        tools = list_mcp_tools(self.toolbox.servers[label])
        item = McpListOutputItem(make_item_id("mcpl", self.head.id, index), label, tools)
        output.items.append(item)
        return [
            output.event("response.output_item.added", output_index=index, item=structs.replace(item, tools=[])),
            output.event("response.mcp_list_tools.in_progress", item_id=item.id, output_index=index),
            output.event("response.mcp_list_tools.completed", item_id=item.id, output_index=index),
            output.event("response.output_item.done", output_index=index, item=item),
        ]
