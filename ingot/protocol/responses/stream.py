"""From the engine's events to a response: its items as they grow, and the wire events that tell of it.

One machine serves both kinds of answers: a streamed one sends what `chunks` returns, a whole one drops it and asks for
the response at the end. It also carries on over several rounds of the engine, where the server calls tools itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from msgspec import Struct, structs

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
from ingot.engine.sparse.ask import SparseReport
from ingot.errors import Cancelled, IngotError
from ingot.protocol.chat.answers import AnswerHead, Receipt, Streamed
from ingot.protocol.chat.sealing import ThinkingSeal
from ingot.protocol.responses.answers import (
    IncompleteDetails,
    ItemStatus,
    McpListedTool,
    McpListItem,
    ResponseBody,
    ResponseEvent,
    ResponseFault,
    ResponseUsage,
)
from ingot.protocol.responses.output import (
    Growing,
    GrowingCall,
    GrowingCustomCall,
    GrowingMessage,
    GrowingServerCall,
    GrowingSummary,
    GrowingThought,
    ResponseOutput,
    item_id,
)
from ingot.protocol.responses.tools import Toolbox


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How a response is to be told."""

    summary: bool = False  # the thinking is the reasoning's summary, else its content
    seal: ThinkingSeal | None = None  # reasoning items come with encrypted content
    logprobs: bool = False
    kept: bool = True  # what was computed of the prompt is kept


@dataclass(slots=True)
class Spent:
    """What the rounds of one response took together."""

    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    speculation: SpeculationReport = field(default_factory=SpeculationReport)
    sparse: tuple[SparseReport, ...] = ()
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


class ResponseBuilder(Streamed):
    """One response. `opening`, then the events of each round in order, then `close` or `failed`, once."""

    def __init__(self, head: AnswerHead, asked: ResponseBody, toolbox: Toolbox, telling: ResponseOptions) -> None:
        self.head, self.toolbox, self.telling = head, toolbox, telling
        self.calls: list[GrowingServerCall] = []  # written by the model, for the server to make
        self.waits_for_client = False  # the model called a tool of the client's
        self.cut_short = False  # the answer came to its limit
        self.spent = Spent()
        self._body = asked
        self._output = ResponseOutput(head.id)
        self._growing: Growing | None = None
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
            incomplete_details=IncompleteDetails("max_output_tokens") if self.cut_short else None,
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
            error=ResponseFault.of(error),
        )
        return [*ended, self._output.event("response.failed", response=self.snapshot())]

    def snapshot(self) -> ResponseBody:
        """The response as it stands now, with what is still being written."""
        items = list(self._output.items)
        if self._growing is not None:
            items[self._growing.index] = self._growing.snapshot("in_progress")
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
                assert self._growing is not None, "a call began before its arguments came"
                return self._growing.add(event.fragment)
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
        message = self._growing
        begun: list[ResponseEvent] = []
        tokens, self._tokens = self._tokens, ()
        if not isinstance(message, GrowingMessage):
            message = GrowingMessage(self._output)
            begun = self._begin(message)
        message.waiting = tokens
        return [*begun, *message.add(event.text)]

    def _think(self, text: str) -> list[ResponseEvent]:
        thought = self._growing
        begun: list[ResponseEvent] = []
        if not isinstance(thought, GrowingThought):
            kind = GrowingSummary if self.telling.summary else GrowingThought
            thought = kind(self._output, self.telling.seal)
            begun = self._begin(thought)
        self._tokens = ()
        return [*begun, *thought.add(text)]

    def _called(self, event: CallBegan) -> Growing:
        offer = self.toolbox.of(event.name)
        if offer is None:
            return GrowingCall(self._output, event.id, event.name, None)
        if offer.kind == "mcp":
            return GrowingServerCall(self._output, event.id, offer)
        kind = GrowingCustomCall if offer.kind == "custom" else GrowingCall
        return kind(self._output, event.id, offer.name, offer.space)

    def _begin(self, growing: Growing) -> list[ResponseEvent]:
        ended = self._end("completed")
        self._growing, self._tokens = growing, ()
        return [*ended, *growing.begin()]

    def _end(self, status: ItemStatus) -> list[ResponseEvent]:
        growing, self._growing = self._growing, None
        if growing is None:
            return []
        if isinstance(growing, GrowingServerCall) and status == "completed":
            self.calls.append(growing)
        self.waits_for_client = self.waits_for_client or isinstance(growing, GrowingCall)
        return growing.end(status)

    def _listed(self, label: str) -> list[ResponseEvent]:
        """A server's tools, which are shown to the model from the start."""
        output, index = self._output, len(self._output.items)
        tools = [
            McpListedTool(tool.name, tool.description, dict(tool.parameters)) for tool in self.toolbox.servers[label]
        ]
        item = McpListItem(item_id("mcpl", self.head.id, index), label, tools)
        output.items.append(item)
        place = {"item_id": item.id, "output_index": index}
        return [
            output.event("response.output_item.added", output_index=index, item=structs.replace(item, tools=[])),
            output.event("response.mcp_list_tools.in_progress", **place),
            output.event("response.mcp_list_tools.completed", **place),
            output.event("response.output_item.done", output_index=index, item=item),
        ]
