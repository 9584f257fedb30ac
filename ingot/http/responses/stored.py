"""The endpoints of stored responses, whoever made them: retrieve, delete, cancel, and list what one answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import BadRequest, NotFound
from ingot.http.edge import Json, answer_of
from ingot.http.hall import Hall
from ingot.http.responses.runs import Run
from ingot.http.responses.under_way import Runs
from ingot.protocol.responses.answers import DeletedResponse
from ingot.protocol.responses.queries import ITEMS_QUERY, RESPONSE_QUERY, ItemsQuery, listed, query_of
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.schema.terms import NO_TERMS

UNFINISHED: Final = ("queued", "in_progress")


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
        query_of(request.query_params.multi_items(), RESPONSE_QUERY, self._reading())
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        if run is not None and run.plan.store:
            return Json(run.body())
        return Json((await self.find(tenant, response_id)).response)

    async def delete(self, request: Request) -> Response:
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        if run is not None:
            await run.cancel()
        await self.find(tenant, response_id)
        assert self.store is not None, "something was found in it"
        await to_thread.run_sync(self.store.delete, tenant, response_id)
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
