"""The endpoints of stored responses, whoever made them: retrieve, delete, cancel, and list what one answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, cast

from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.errors import BadRequest, NotFound
from ingot.http.edge import Json, answer_of
from ingot.http.response_runs import EVENTS, Run, tell
from ingot.http.responses.under_way import Runs
from ingot.http.shared_state import Hall
from ingot.http.streaming import StreamedResponse
from ingot.http.streaming_feed import FeedReader
from ingot.protocol.responses.answers import DeletedResponse, ResponseEvent
from ingot.protocol.responses.queries import ITEMS_QUERY, RESPONSE_QUERY, ItemsQuery, ResponseQuery, listed, query_of
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.terms import NO_TERMS

UNFINISHED: Final = ("queued", "in_progress")


class Resumed(Response):
    """The events after one of them; who leaves changes nothing for the response."""

    def __init__(self, run: Run | None, reader: FeedReader, after: int, hall: Hall) -> None:
        super().__init__()
        self._run, self._reader, self._after, self._hall = run, reader, after, hall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = StreamedResponse(send, EVENTS, self._hall.settings)

        async def answer() -> None:
            async with aclosing(self._batches()) as batches:
                await tell(batches, lambda: [] if self._run is None else self._run.silence(self._reader), out)

        await self._hall.attended(receive, answer)

    async def _batches(self) -> AsyncGenerator[list[Struct], None]:
        async with aclosing(self._reader.batches()) as batches:
            async for told in batches:
                yield [event for event in told if cast(ResponseEvent, event).sequence_number > self._after]


class StoredResponses:
    """The store, and the responses under way."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self.runs: Runs[Run] = hall.runs
        self.store = hall.response_store

    def endpoints(self) -> dict[str, Any]:
        return {
            "retrieveResponse": self.retrieve,
            "deleteResponse": self.delete,
            "cancelResponse": self.cancel,
            "listInputItems": self.input_items,
        }

    def _reading(self) -> BodyReading:
        return BodyReading(replace(NO_TERMS, strict=self._hall.settings.strict))

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        kept = None
        if self.store is not None:
            kept = await to_thread.run_sync(self.store.find, tenant, response_id)
        if kept is None:
            raise NotFound(f"There is no response '{response_id[:100]}'.")
        if kept.response["status"] in UNFINISHED:
            # Nobody works on it any more: a response under way is not looked for here.
            fault = {"code": "server_error", "message": "The server stopped before the response was complete."}
            return StoredResponse({**kept.response, "status": "failed", "error": fault}, kept.input)
        return kept

    async def retrieve(self, request: Request) -> Response:
        query: ResponseQuery = query_of(request.query_params.multi_items(), RESPONSE_QUERY, self._reading())
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        if query.stream:
            return await self._resumed(tenant, response_id, query.starting_after)
        run = self.runs.find(tenant, response_id)
        if run is not None and run.plan.store:
            return Json(run.body())
        return Json((await self.find(tenant, response_id)).response)

    async def _resumed(self, tenant: str, response_id: str, after: int | None) -> Response:
        """The events of a response in the background, from behind the one of this number."""
        run = self.runs.find(tenant, response_id)
        feed = self.runs.ended_lately(tenant, response_id) if run is None else run.feed
        if feed is not None and feed.whole:
            return Resumed(run, feed.reader(), -1 if after is None else after, self._hall)
        alone = run is not None and run.plan.body.background
        if run is None:
            alone = bool((await self.find(tenant, response_id)).response.get("background"))
        why = "its events are no longer held" if alone else "it was not asked for with background"
        raise BadRequest(f"The response '{response_id}' cannot be streamed: {why}. Retrieve it whole.", param="stream")

    async def delete(self, request: Request) -> Response:
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        if run is not None:
            await run.cancel()
        await self.find(tenant, response_id)
        assert self.store is not None, "something was found in it"
        await to_thread.run_sync(self.store.delete, tenant, response_id)
        self.runs.forget(response_id)
        return Json(DeletedResponse(response_id))

    async def cancel(self, request: Request) -> Response:
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        if run is not None:
            await run.cancel()
            return Json(run.body())
        kept = await self.find(tenant, response_id)
        if kept.response["status"] != "cancelled":
            raise BadRequest(f"The response '{response_id}' has ended already: {kept.response['status']}.")
        return Json(kept.response)

    async def input_items(self, request: Request) -> Response:
        query: ItemsQuery = query_of(request.query_params.multi_items(), ITEMS_QUERY, self._reading())
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        found = run is not None and run.plan.store
        items = run.plan.items if run is not None and found else (await self.find(tenant, response_id)).input
        return Json(listed(items, query))
