"""The endpoints of the Responses API: create (answered whole, as a stream of events, or at once while the work goes on
without a client), retrieve, delete, cancel, list the input items, count tokens. A response in progress is rounds of
generation and of the server's own tool calls, until the model makes no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, cast

from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ingot.engine.request import Ended, Failed
from ingot.errors import BadRequest, Cancelled, IngotError, NotFound, Stopping, Unavailable
from ingot.http.accounting import AccountedStream, open_stream
from ingot.http.body import RequestBody
from ingot.http.capture import wants_capture
from ingot.http.edge import JsonResponse, Reply, as_ingot_error, reply_of
from ingot.http.endpoints.generation import engine_stopped_error
from ingot.http.request_lifetime import RequestLifetime, background_task
from ingot.http.response_store import ResponseRuns, TenantResponses
from ingot.http.service import GenerationService
from ingot.http.shared_state import SharedState
from ingot.http.streaming import (
    NAMED_EVENTS,
    EventFeed,
    EventFeedReader,
    StreamedResponse,
    WholeResponse,
    reporting_errors,
)
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.responses.answers import (
    DeletedResponse,
    McpServerList,
    McpServerListed,
    ResponseBody,
    ResponseEvent,
    ResponseTokens,
)
from ingot.protocol.responses.output import McpCallBuilder, list_mcp_tools
from ingot.protocol.responses.request import (
    ITEMS_QUERY,
    RESPONSE_QUERY,
    ItemsQuery,
    ResponseContext,
    ResponsePlan,
    ResponseQuery,
    count_response_tokens,
    list_input_items,
    read_query,
    read_response,
)
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.protocol.responses.tools import RemoteMcpTools
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import NO_TERMS

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


UNFINISHED: Final = ("queued", "in_progress")


class ResumedResponse(Response):
    """The events after one of them; who leaves changes nothing for the response."""

    def __init__(self, run: ResponseRun | None, reader: EventFeedReader, after: int, shared_state: SharedState) -> None:
        super().__init__()
        self._run, self._reader, self._after, self._shared_state = run, reader, after, shared_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = StreamedResponse(send, RESPONSE_EVENTS, self._shared_state.settings)

        async def answer() -> None:
            async with aclosing(self._batches()) as batches:
                await stream_response_events(
                    batches, lambda: [] if self._run is None else self._run.silence(self._reader), out
                )

        await self._shared_state.attended(receive, answer)

    async def _batches(self) -> AsyncGenerator[list[Struct], None]:
        async with aclosing(self._reader.batches()) as batches:
            async for events in batches:
                yield [event for event in events if cast(ResponseEvent, event).sequence_number > self._after]


class StoredResponseEndpoints:
    """The store, and the responses under way."""

    def __init__(self, shared_state: SharedState) -> None:
        self._shared_state = shared_state
        self.runs: ResponseRuns[ResponseRun] = shared_state.runs
        self.store = shared_state.response_store

    def endpoints(self) -> dict[str, Any]:
        return {
            "retrieveResponse": self.retrieve,
            "deleteResponse": self.delete,
            "cancelResponse": self.cancel,
            "listInputItems": self.input_items,
            "listMcpServers": self.mcp_servers,
        }

    def _reading(self) -> BodyReading:
        return BodyReading(replace(NO_TERMS, strict=self._shared_state.settings.strict))

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        stored = None
        if self.store is not None:
            stored = await to_thread.run_sync(self.store.find, tenant, response_id)
        if stored is None:
            raise NotFound(f"There is no response '{response_id[:100]}'.")
        if stored.response["status"] in UNFINISHED:
            # Nobody works on it any more: a response under way is not looked for here.
            fault = {"code": "server_error", "message": "The server stopped before the response was complete."}
            return StoredResponse({**stored.response, "status": "failed", "error": fault}, stored.input)
        return stored

    async def retrieve(self, request: Request) -> Response:
        query: ResponseQuery = read_query(request.query_params.multi_items(), RESPONSE_QUERY, self._reading())
        tenant, response_id = reply_of(request.scope).tenant, request.path_params["response_id"]
        if query.stream:
            return await self._resume(tenant, response_id, query.starting_after)
        run = self.runs.find(tenant, response_id)
        if run is not None and run.plan.store:
            return JsonResponse(run.body())
        return JsonResponse((await self.find(tenant, response_id)).response)

    async def _resume(self, tenant: str, response_id: str, after: int | None) -> Response:
        """The events of a response in the background, from behind the one of this number."""
        run = self.runs.find(tenant, response_id)
        feed = self.runs.recently_ended(tenant, response_id) if run is None else run.feed
        if feed is not None and feed.whole:
            return ResumedResponse(run, feed.reader(), -1 if after is None else after, self._shared_state)
        alone = run is not None and run.plan.body.background
        if run is None:
            alone = bool((await self.find(tenant, response_id)).response.get("background"))
        why = "its events are no longer stored" if alone else "it did not run in the background"
        raise BadRequest(f"The response '{response_id}' cannot be streamed: {why}. Retrieve it whole.", param="stream")

    async def delete(self, request: Request) -> Response:
        tenant, response_id = reply_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        if run is not None:
            await run.cancel()
        await self.find(tenant, response_id)
        assert self.store is not None, "something was found in it"
        await to_thread.run_sync(self.store.delete, tenant, response_id)
        self.runs.forget(response_id)
        return JsonResponse(DeletedResponse(response_id))

    async def cancel(self, request: Request) -> Response:
        tenant, response_id = reply_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        if run is not None:
            await run.cancel()
            return JsonResponse(run.body())
        stored = await self.find(tenant, response_id)
        if stored.response["status"] != "cancelled":
            raise BadRequest(f"The response '{response_id}' has ended already: {stored.response['status']}.")
        return JsonResponse(stored.response)

    async def input_items(self, request: Request) -> Response:
        query: ItemsQuery = read_query(request.query_params.multi_items(), ITEMS_QUERY, self._reading())
        tenant, response_id = reply_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        found = run is not None and run.plan.store
        items = run.plan.items if run is not None and found else (await self.find(tenant, response_id)).input
        return JsonResponse(list_input_items(items, query))

    async def mcp_servers(self, request: Request) -> Response:
        tools = {} if self._shared_state.mcp is None else self._shared_state.mcp.tools
        listed = [McpServerListed(label, list_mcp_tools(each)) for label, each in tools.items()]
        return JsonResponse(McpServerList(listed))


class ModelResponses:
    """What the endpoints of a model share: the store, the responses under way, and the tools that the server can
    call."""

    def __init__(self, service: GenerationService) -> None:
        self.service = service
        self.runs: ResponseRuns[ResponseRun] = service.shared_state.runs
        self.store = service.shared_state.response_store
        self._background: set[asyncio.Task[None]] = set()

    def around(self, tenant: str) -> ResponseContext:
        """What the tenant's bodies may refer to: stored responses, and tools of MCP servers."""
        return ResponseContext(None if self.store is None else TenantResponses(self.store, tenant), self.remote)

    @property
    def remote(self) -> RemoteMcpTools:
        return {} if self.service.shared_state.mcp is None else self.service.shared_state.mcp.tools

    async def call(self, label: str, name: str, arguments: str) -> str:
        if self.service.shared_state.mcp is None:
            raise Unavailable(f"The MCP server '{label}' is not connected.")
        return await self.service.shared_state.mcp.call(label, name, arguments)

    async def keep(self, run: ResponseRun) -> None:
        if run.plan.store and self.store is not None:
            await to_thread.run_sync(self.store.keep, run.tenant, run.body(), run.plan.items)

    def store_now(self, run: ResponseRun) -> None:
        """`keep` for a loop that is about to end."""
        if run.plan.store and self.store is not None:
            self.store.keep(run.tenant, run.body(), run.plan.items)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Lets `work` go on without a client."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def count(self, value: Any, served: ServedModel) -> ResponseTokens:
        return count_response_tokens(value, served, self.around(served.tenant))


EventBatches = AsyncGenerator[list[Struct], None]


class CreateResponseEndpoint:
    """One ASGI endpoint."""

    def __init__(self, responses: ModelResponses) -> None:
        self._responses, self._service = responses, responses.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._service.shared_state.bodies.reading(scope, receive) as body:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        noted = reply_of(scope)
        out = StreamedResponse(send, RESPONSE_EVENTS, self._service.shared_state.settings)
        whole = WholeResponse(noted, send, self._service.shared_state.settings)
        run: ResponseRun | None = None

        async def answer() -> None:
            nonlocal run
            run = await self._start_run(body, noted)
            alone = run.plan.body.background
            reader = await self._start_in_background(run, noted) if alone else None
            async with aclosing(self._with_client(run) if reader is None else reader.batches()) as batches:
                if run.plan.body.stream:
                    await stream_response_events(batches, lambda: run.silence(reader), out)
                    return
                if not alone:
                    async with whole.waiting():
                        await drain_batches(batches)
                if run.error is not None and not whole.begun:  # else the body says that it failed
                    raise run.error
                await JsonResponse(run.body())(scope, receive, whole.send)

        exchange = RequestLifetime(receive, self._service.shared_state.settings.request_timeout_s, noted)
        async with reporting_errors(noted, whole, out, lambda error: run.plan.builder.failed(error) if run else ()):
            await self._service.shared_state.live.run(exchange, answer)

    async def _start_run(self, body: RequestBody, noted: Reply) -> ResponseRun:
        responses, service = self._responses, self._service
        if wants_capture(service.captures, noted.scope):
            noted.body = body.raw
        served = service.served_for(noted.tenant)
        plan = await service.read(
            body.raw,
            lambda value: read_response(value, served, noted.id, responses.around(noted.tenant)),
            noted.tenant,
        )
        body.release(kept=bool(plan.first.request.media))
        run = ResponseRun(service, plan, noted, responses.call, responses.keep)
        await run.start()
        return run

    async def _with_client(self, run: ResponseRun) -> EventBatches:
        """The events of a response that ends with its client."""
        self._responses.runs.add(run)
        try:
            async with aclosing(run.batches()) as batches:
                async for events in batches:
                    yield events
        finally:
            run.close()
            run.ended.set()
            self._responses.runs.remove(run)

    async def _start_in_background(self, run: ResponseRun, noted: Reply) -> EventFeedReader:
        """The events of a response that goes on whether or not anybody reads them."""
        run.feed = feed = EventFeed()
        self._responses.runs.add(run)
        await self._responses.keep(run)
        self._responses.run_in_background(self._run_to_end(run, feed, noted, self._service.extend()))
        return feed.reader()

    async def _run_to_end(self, run: ResponseRun, feed: EventFeed, noted: Reply, end_lease: Callable[[], None]) -> None:
        async def work() -> None:
            async with aclosing(run.batches()) as batches:
                async for events in batches:
                    feed.put(events)

        try:
            await self._service.shared_state.live.run(
                RequestLifetime(receive_never, self._service.shared_state.settings.request_timeout_s, noted), work
            )
        except asyncio.CancelledError:
            self._fail(run, Stopping("The server is shutting down."))
            raise
        except Exception as error:  # nobody else would learn of it
            self._fail(run, as_ingot_error(error, run.id))
        finally:
            run.close()
            run.ended.set()
            self._responses.runs.end(run, feed)
            feed.end()
            end_lease()

    def _fail(self, run: ResponseRun, error: IngotError) -> None:
        run.plan.builder.failed(error)
        self._responses.store_now(run)


async def drain_batches(batches: AsyncIterable[list[Struct]]) -> None:
    async for _ in batches:
        pass


async def receive_never() -> Message:
    """A client that neither sends anything nor leaves."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}
