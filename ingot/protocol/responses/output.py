"""From the engine's events to a response: its output items while they are written, and the wire events that tell of
each.

One builder serves both kinds of answers: a streamed one sends what `chunks` returns, a whole one drops it and asks for
the response at the end. It also carries on over several rounds of the engine, where the server calls tools itself.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, cast

from msgspec import UNSET, Struct, structs

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    SequenceEnded,
    SpecPrefillReport,
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
from ingot.protocol.responses.tools import OfferedTool, Toolbox
from ingot.protocol.served import ThinkingSeal

ITEM_ID_FORMAT: Final = re.compile(r"[a-z]+_([0-9a-f]{24})_(?:in)?\d+")


def make_item_id(prefix: str, response_id: str, number: int | str) -> str:
    """An id that says which response the item is of."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{number}"


def response_id_of_item(item: str) -> str | None:
    """The id of the response that an item was made for, where the id is one of ours."""
    found = ITEM_ID_FORMAT.fullmatch(item)
    return f"resp_{found[1]}" if found else None


class ResponseEventWriter:
    """What has been written of one response, and the numbers of the events that told of it."""

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.items: list[ResponseOutputItem] = []
        self._told = 0

    def event(self, type: ResponseEventType, **given: Any) -> ResponseEvent:
        made = ResponseEvent(type=type, sequence_number=self._told, **given)
        self._told += 1
        return made


class OutputItemBuilder(ABC):
    """The item that is being written: `begin`, `add` for each piece, `end`. Its place is taken when it is made."""

    prefix: ClassVar[str]  # of its id
    told: ClassVar[str]  # what the events of its text are called

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
        return [self.tell(f"{self.told}.delta", delta=text)]

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        item = self._output.items[self.index] = self.snapshot(status)
        return [self._output.event("response.output_item.done", output_index=self.index, item=item)]

    def tell(self, what: str, **given: Any) -> ResponseEvent:
        type = cast(ResponseEventType, f"response.{what}")
        return self._output.event(type, item_id=self.id, output_index=self.index, **given)


class PartItemBuilder(OutputItemBuilder):
    """An item that is one part of text, whose beginning and end are told as well."""

    part_events: ClassVar[str] = "content_part"
    numbered: ClassVar[str] = "content_index"

    @abstractmethod
    def part(self) -> OutputTextPart | ReasoningTextPart | SummaryTextPart: ...

    def begin(self) -> list[ResponseEvent]:
        return [*super().begin(), self.tell(f"{self.part_events}.added", part=self.part())]

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        part = self.part()
        scored = {"logprobs": part.logprobs} if isinstance(part, OutputTextPart) else {}
        return [
            self.tell(f"{self.told}.done", text=part.text, **scored),
            self.tell(f"{self.part_events}.done", part=part),
            *super().end(status),
        ]

    def tell(self, what: str, **given: Any) -> ResponseEvent:
        return super().tell(what, **{self.numbered: 0}, **given)


class MessageItemBuilder(PartItemBuilder):
    prefix, told = "msg", "output_text"

    def __init__(self, output: ResponseEventWriter) -> None:
        super().__init__(output)
        self._tokens: list[TokenInfo] = []
        self.waiting: tuple[TokenInfo, ...] = ()  # tokens that begin in the next piece

    def part(self) -> OutputTextPart:
        return OutputTextPart(self.text, logprobs=token_logprobs(tuple(self._tokens)))

    def snapshot(self, status: ResponseItemStatus) -> MessageOutputItem:
        return MessageOutputItem(self.id, status, [self.part()] if self._texts else [])

    def add(self, text: str) -> list[ResponseEvent]:
        tokens, self.waiting = self.waiting, ()
        self._texts.append(text)
        self._tokens += tokens
        return [self.tell("output_text.delta", delta=text, logprobs=token_logprobs(tokens))]


class ReasoningItemBuilder(PartItemBuilder):
    """Thinking, told as the item's content."""

    prefix, told = "rs", "reasoning_text"

    def __init__(self, output: ResponseEventWriter, seal: ThinkingSeal | None) -> None:
        super().__init__(output)
        self._seal = seal

    def part(self) -> ReasoningTextPart | SummaryTextPart:
        return ReasoningTextPart(self.text)

    def snapshot(self, status: ResponseItemStatus) -> ReasoningOutputItem:
        content = [ReasoningTextPart(self.text)] if self.text else []
        return ReasoningOutputItem(self.id, status, [], content, self.sealed(status))

    def sealed(self, status: ResponseItemStatus) -> Any:
        return UNSET if self._seal is None or status == "in_progress" else self._seal.close(self.text)


class SummaryItemBuilder(ReasoningItemBuilder):
    """Thinking, told as the item's summary, which holds all of it."""

    told, part_events, numbered = "reasoning_summary_text", "reasoning_summary_part", "summary_index"

    def part(self) -> SummaryTextPart:
        return SummaryTextPart(self.text)

    def snapshot(self, status: ResponseItemStatus) -> ReasoningOutputItem:
        summary = [self.part()] if self.text else []
        return ReasoningOutputItem(self.id, status, summary, encrypted_content=self.sealed(status))


class FunctionCallBuilder(OutputItemBuilder):
    """A call of a function of the client's."""

    prefix, told = "fc", "function_call_arguments"

    def __init__(self, output: ResponseEventWriter, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(output)
        self._call_id, self._name, self._namespace = call_id, name, namespace or UNSET

    def snapshot(self, status: ResponseItemStatus) -> FunctionCallOutputItem | CustomCallOutputItem:
        return FunctionCallOutputItem(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        return [self.tell("function_call_arguments.done", arguments=self.text), *super().end(status)]


class CustomCallBuilder(FunctionCallBuilder):
    """A call of a custom tool of the client's, whose text is read out of the arguments as they come."""

    prefix, told = "ctc", "custom_tool_call_input"

    def __init__(self, output: ResponseEventWriter, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__(output, call_id, name, namespace)
        self._argument = CustomInputDecoder()

    def snapshot(self, status: ResponseItemStatus) -> CustomCallOutputItem:
        return CustomCallOutputItem(self.id, status, self._call_id, self._name, self.text, self._namespace)

    def add(self, text: str) -> list[ResponseEvent]:
        return self._add(self._argument.push(text))

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        told = self._add(self._argument.rest())
        return [*told, self.tell("custom_tool_call_input.done", input=self.text), *OutputItemBuilder.end(self, status)]

    def _add(self, piece: str) -> list[ResponseEvent]:
        return super().add(piece) if piece else []


class McpCallBuilder(OutputItemBuilder):
    """A call that the server makes itself. A complete one ends when it was made, not when it was written."""

    prefix, told = "mcp", "mcp_call_arguments"

    def __init__(self, output: ResponseEventWriter, call_id: str, offer: OfferedTool) -> None:
        super().__init__(output)
        self.call_id, self.offer = call_id, offer
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
        )

    def begin(self) -> list[ResponseEvent]:
        return [*super().begin(), self.tell("mcp_call.in_progress")]

    def end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
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


@dataclass(frozen=True, slots=True)
class ResponseBuildOptions:
    """How a response is to be told."""

    summary: bool = False  # the thinking is the reasoning's summary, else its content
    seal: ThinkingSeal | None = None  # reasoning items come with encrypted content
    logprobs: bool = False
    kept: bool = True  # what was computed of the prompt is kept


@dataclass(slots=True)
class RoundTotals:
    """What the rounds of one response took together."""

    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    speculation: SpeculationReport = field(default_factory=SpeculationReport)
    sparse: tuple[SpecPrefillReport, ...] = ()
    last: Ended | None = None

    def add(self, ended: Ended) -> None:
        so_far, more = self.usage, ended.usage
        self.usage = Usage(
            so_far.prompt_tokens + more.prompt_tokens,
            so_far.completion_tokens + more.completion_tokens,
            so_far.cached_tokens + more.cached_tokens,
            so_far.thinking_tokens + more.thinking_tokens,
        )
        took, longer = self.timing, ended.timing
        self.timing = Timing(took.queue + longer.queue, took.prefill + longer.prefill, took.decode + longer.decode)
        guessed, anew = self.speculation, ended.speculation
        self.speculation = SpeculationReport(
            guessed.proposed + anew.proposed, guessed.accepted + anew.accepted, guessed.passes + anew.passes
        )
        self.sparse += ended.sparse
        self.last = ended

    def receipt(self, head: AnswerHead) -> Receipt:
        assert self.last is not None, "asked for after the last round"
        return Receipt.of(
            head,
            replace(self.last, usage=self.usage, timing=self.timing, speculation=self.speculation, sparse=self.sparse),
        )


class ResponseBuilder(StreamedAnswer):
    """One response. `opening`, then the events of each round in order, then `close` or `failed`, once."""

    def __init__(self, head: AnswerHead, asked: ResponseBody, toolbox: Toolbox, telling: ResponseBuildOptions) -> None:
        self.head, self.toolbox, self.telling = head, toolbox, telling
        self.calls: list[McpCallBuilder] = []  # written by the model, for the server to make
        self.waits_for_client = False  # the model called a tool of the client's
        self.cut_short = False  # the answer came to its limit
        self.spent = RoundTotals()
        self._body = asked
        self._output = ResponseEventWriter(head.id)
        self._current_item: OutputItemBuilder | None = None
        self._tokens: tuple[TokenInfo, ...] = ()

    def opening(self) -> list[Struct]:
        told: list[Struct] = [self._output.event("response.created", response=self._body)]
        if self._body.status == "queued":
            told.append(self._output.event("response.queued", response=self._body))
        self._body = structs.replace(self._body, status="in_progress")
        told.append(self._output.event("response.in_progress", response=self._body))
        for label in self.toolbox.servers:
            told += self._listed(label)
        return told

    def chunks(self, event: Event) -> list[Struct]:
        return [*self._told(event)]

    def empty(self) -> list[Struct]:
        """That it is in progress, once more; none before it is, and none after its end."""
        if self._body.status != "in_progress":
            return []
        return [self._output.event("response.in_progress", response=self.snapshot())]

    def close(self) -> list[Struct]:
        self._body = structs.replace(
            self._body,
            status="incomplete" if self.cut_short else "completed",
            completed_at=int(time.time()),
            incomplete_details=ResponseIncompleteDetails("max_output_tokens") if self.cut_short else None,
            usage=ResponseUsage.of(self.spent.usage, kept=self.telling.kept),
            ingot=self.spent.receipt(self.head),
        )
        type = "response.incomplete" if self.cut_short else "response.completed"
        return [self._output.event(type, response=self.snapshot())]  # type: ignore[arg-type]

    def failed(self, error: IngotError) -> list[Struct]:
        """The last words of a response that broke. What was written so far stays in it."""
        ended = self._end("incomplete")
        self._body = structs.replace(
            self._body,
            status="cancelled" if isinstance(error, Cancelled) else "failed",
            error=ResponseErrorBody.of(error),
        )
        return [*ended, self._output.event("response.failed", response=self.snapshot())]

    def snapshot(self) -> ResponseBody:
        """The response as it stands now, with what is still being written."""
        items = list(self._output.items)
        if self._current_item is not None:
            items[self._current_item.index] = self._current_item.snapshot("in_progress")
        return structs.replace(self._body, output=items)

    def _told(self, event: Event) -> list[ResponseEvent]:
        match event:
            case TextDelta():
                return self._say(event)
            case ThinkingDelta():
                return self._think(event.text)
            case CallBegan():
                return self._begin(self._called(event))
            case CallArguments():
                assert self._current_item is not None, "a call began before its arguments came"
                return self._current_item.add(event.fragment)
            case CallEnded():
                return self._end("completed" if event.complete else "incomplete")
            case SequenceEnded():
                self.cut_short = event.reason == "length"
                return self._end("incomplete" if self.cut_short else "completed")
            case Ended():
                self.spent.add(event)
        return []

    def _say(self, event: TextDelta) -> list[ResponseEvent]:
        # Tokens come before the text that they begin; those of thinking and of calls are nobody's here.
        self._tokens += event.tokens if self.telling.logprobs else ()
        if not event.text:
            return []
        message = self._current_item
        begun: list[ResponseEvent] = []
        tokens, self._tokens = self._tokens, ()
        if not isinstance(message, MessageItemBuilder):
            message = MessageItemBuilder(self._output)
            begun = self._begin(message)
        message.waiting = tokens
        return [*begun, *message.add(event.text)]

    def _think(self, text: str) -> list[ResponseEvent]:
        thought = self._current_item
        begun: list[ResponseEvent] = []
        if not isinstance(thought, ReasoningItemBuilder):
            kind = SummaryItemBuilder if self.telling.summary else ReasoningItemBuilder
            thought = kind(self._output, self.telling.seal)
            begun = self._begin(thought)
        self._tokens = ()
        return [*begun, *thought.add(text)]

    def _called(self, event: CallBegan) -> OutputItemBuilder:
        offer = self.toolbox.of(event.name)
        if offer is None:
            return FunctionCallBuilder(self._output, event.id, event.name, None)
        if offer.kind == "mcp":
            return McpCallBuilder(self._output, event.id, offer)
        kind = CustomCallBuilder if offer.kind == "custom" else FunctionCallBuilder
        return kind(self._output, event.id, offer.name, offer.space)

    def _begin(self, growing: OutputItemBuilder) -> list[ResponseEvent]:
        ended = self._end("completed")
        self._current_item, self._tokens = growing, ()
        return [*ended, *growing.begin()]

    def _end(self, status: ResponseItemStatus) -> list[ResponseEvent]:
        growing, self._current_item = self._current_item, None
        if growing is None:
            return []
        if isinstance(growing, McpCallBuilder) and status == "completed":
            self.calls.append(growing)
        self.waits_for_client = self.waits_for_client or isinstance(growing, FunctionCallBuilder)
        return growing.end(status)

    def _listed(self, label: str) -> list[ResponseEvent]:
        """A server's tools, which are shown to the model from the start."""
        output, index = self._output, len(self._output.items)
        tools = [
            McpListedTool(tool.name, tool.description, dict(tool.parameters)) for tool in self.toolbox.servers[label]
        ]
        item = McpListOutputItem(make_item_id("mcpl", self.head.id, index), label, tools)
        output.items.append(item)
        place = {"item_id": item.id, "output_index": index}
        return [
            output.event("response.output_item.added", output_index=index, item=structs.replace(item, tools=[])),
            output.event("response.mcp_list_tools.in_progress", **place),
            output.event("response.mcp_list_tools.completed", **place),
            output.event("response.output_item.done", output_index=index, item=item),
        ]
