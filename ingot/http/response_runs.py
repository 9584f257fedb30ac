"""Responses in progress: rounds of generation and of the server's own tool calls, until the model makes no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Final

from anyio import to_thread
from msgspec import Struct

from ingot.engine.request import Ended, Failed
from ingot.errors import Cancelled, IngotError
from ingot.http.accounting import AccountedStream, open_stream
from ingot.http.edge import Reply
from ingot.http.endpoints.generation import engine_stopped_error
from ingot.http.request_lifetime import background_task
from ingot.http.service import GenerationService
from ingot.http.streaming import NAMED_EVENTS, EventFeed, EventFeedReader, StreamedResponse
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.responses.answers import ResponseBody
from ingot.protocol.responses.output import McpCallBuilder
from ingot.protocol.responses.request import ResponsePlan

MOST_SERVER_CALLS: Final = 32  # for one response, where the request sets no limit
CANCEL_S: Final = 10.0  # until a cancelled response has ended
RESPONSE_EVENTS: Final = NAMED_EVENTS
CallTool = Callable[[str, str, str], Awaitable[str]]
"""Calls a tool of an MCP server, by its label, with JSON arguments. Raises IngotError, whose message the model
reads."""
StoreRun = Callable[["ResponseRun"], Awaitable[None]]


async def stream_response_events(
    batches: AsyncIterable[list[Struct]], empty: Callable[[], list[Struct]], out: StreamedResponse
) -> None:
    remaining = aiter(batches)
    await out.start()
    await out.write(RESPONSE_EVENTS.framed(await anext(remaining, [])))
    async with background_task(out.keep_alive(empty)):
        async for events in remaining:
            await out.write(RESPONSE_EVENTS.framed(events))
    await out.end(b"")


class ResponseRun:
    """One response. `start` opens the engine's stream, unless approved calls come first, and may raise; `batches` then
    yields its events, to the end.

    `keep` is called once, when the response has ended and before its last event.
    """

    def __init__(
        self, service: GenerationService, plan: ResponsePlan, answer: Reply, call: CallTool, keep: StoreRun
    ) -> None:
        self.plan, self.tenant = plan, answer.tenant
        self._service, self._answer, self._call, self._keep = service, answer, call, keep
        self._stream: AccountedStream | None = None
        self._calls_left = plan.body.max_tool_calls or MOST_SERVER_CALLS
        self._cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: IngotError | None = None
        self.feed: EventFeed | None = None  # its events, where it continues without its client

    @property
    def id(self) -> str:
        return self.plan.builder.head.id

    async def start(self) -> None:
        if not self.plan.approved:  # else the model goes on after those calls
            self._stream = await self._open(self.plan.first)

    async def batches(self) -> AsyncGenerator[list[Struct], None]:
        """Events for the wire, a batch at a time. The last one reports an error after `start`."""
        builder = self.plan.builder
        yield builder.opening()
        try:
            for approved in self.plan.approved:
                yield builder.begin_approved(approved)
            while self._stream is not None or builder.calls:
                if self._stream is not None:
                    async for events in self._round(self._stream):
                        yield events
                for call in builder.calls:
                    yield await self._make(call)
                self._stream = await self._next()
            last = builder.close()
        except IngotError as error:
            self.error = error
            last = builder.failed(error)
        finally:
            # Here and not in the rounds: closing a generator does not close those within it.
            self.close()
        await self._keep(self)
        self.ended.set()
        yield last

    async def cancel(self) -> None:
        """Returns when the response has ended and is stored as such."""
        self._cancelled.set()
        await to_thread.run_sync(self._service.engine.cancel, self.id)
        async with asyncio.timeout(CANCEL_S):
            await self.ended.wait()

    def silence(self, reader: EventFeedReader | None) -> list[Struct]:
        """An empty event, unless numbered events still wait to be read."""
        return [] if reader is not None and len(reader) else self.plan.builder.empty()

    def body(self) -> ResponseBody:
        return self.plan.builder.snapshot()

    def close(self) -> None:
        """Closes the engine's stream."""
        if self._stream is not None:
            self._stream.close()

    async def _round(self, stream: AccountedStream) -> AsyncGenerator[list[Struct], None]:
        builder = self.plan.builder
        async for events in stream:
            last = events[-1]
            complete = events[:-1] if isinstance(last, Failed) else events
            yield [chunk for event in complete for chunk in builder.chunks(event)]
            if isinstance(last, Failed):
                raise last.error
            if isinstance(last, Ended):
                return
        raise engine_stopped_error()

    async def _make(self, call: McpCallBuilder) -> list[Struct]:
        """Makes one call; an error of it is for the model to read."""
        if self._calls_left <= 0:
            return [*call.failed("No more calls are allowed in this response.")]
        self._calls_left -= 1
        making = asyncio.ensure_future(self._call(call.offer.space or "", call.offer.name, call.text))
        stopping = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({making, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._cancelled.is_set():
                raise Cancelled("The response was cancelled.")
            return [*call.succeeded(making.result())]
        except Cancelled:
            raise
        except IngotError as error:
            return [*call.failed(error.message)]
        finally:
            making.cancel()
            stopping.cancel()

    async def _next(self) -> AccountedStream | None:
        """The next round, where the server made calls and the client has none to make."""
        builder = self.plan.builder
        self.close()
        made, builder.calls = builder.calls, []
        if not made or builder.cut_short or builder.waits_for_client:
            return None
        job = await self._service.shared_state.prepare(self.plan.next_task, self.tenant)
        if job is None:
            builder.cut_short = True
            return None
        return await self._open(job)

    async def _open(self, job: GenerationTask) -> AccountedStream:
        if self._cancelled.is_set():
            raise Cancelled("The response was cancelled.")
        return await open_stream(job, self._answer, self._service)
