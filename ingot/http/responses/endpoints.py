"""The endpoints of stored responses: retrieve, delete, cancel, and list what a response answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import BadRequest, NotFound, Unavailable
from ingot.http.edge import Json, answer_of
from ingot.http.endpoints.reading import reader
from ingot.http.responses.runs import Run, Runs
from ingot.http.responses.store import TenantsResponses
from ingot.http.service import Service
from ingot.protocol.responses.answers import DeletedResponse, ResponseTokens
from ingot.protocol.responses.queries import ITEMS_QUERY, RESPONSE_QUERY, ItemsQuery, listed, query_of
from ingot.protocol.responses.request import StoredResponse, Surroundings, count_tokens
from ingot.protocol.responses.tools import RemoteTools
from ingot.protocol.served import Served

UNFINISHED: Final = ("queued", "in_progress")


class Responses:
    """What the endpoints share: the store, the responses under way, and the tools that the server can call."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.runs = Runs()
        self.store = service.response_store
        self._background: set[asyncio.Task[None]] = set()

    def endpoints(self) -> dict[str, Any]:
        return {
            "countResponseTokens": reader(self.service, self.count),
            "retrieveResponse": self.retrieve,
            "deleteResponse": self.delete,
            "cancelResponse": self.cancel,
            "listInputItems": self.input_items,
        }

    def around(self, tenant: str) -> Surroundings:
        """What the tenant's bodies are read in the light of."""
        return Surroundings(None if self.store is None else TenantsResponses(self.store, tenant), self.remote)

    @property
    def remote(self) -> RemoteTools:
        return {} if self.service.mcp is None else self.service.mcp.tools

    async def call(self, label: str, name: str, arguments: str) -> str:
        if self.service.mcp is None:
            raise Unavailable(f"The MCP server '{label}' is not connected.")
        return await self.service.mcp.call(label, name, arguments)

    async def keep(self, run: Run) -> None:
        if run.plan.store and self.store is not None:
            await to_thread.run_sync(self.store.keep, run.tenant, run.body(), run.plan.items)

    def keep_now(self, run: Run) -> None:
        """`keep` for a loop that is about to end."""
        if run.plan.store and self.store is not None:
            self.store.keep(run.tenant, run.body(), run.plan.items)

    def go_alone(self, work: Coroutine[Any, Any, None]) -> None:
        """Lets `work` go on without a client."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

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

    def count(self, value: Any, served: Served) -> ResponseTokens:
        return count_tokens(value, served, self.around(served.tenant))

    async def retrieve(self, request: Request) -> Response:
        query_of(request.query_params.multi_items(), RESPONSE_QUERY, self.service.served.reading())
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
        query: ItemsQuery = query_of(request.query_params.multi_items(), ITEMS_QUERY, self.service.served.reading())
        tenant, response_id = answer_of(request.scope).tenant, request.path_params["response_id"]
        run = self.runs.find(tenant, response_id)
        found = run is not None and run.plan.store
        items = run.plan.items if run is not None and found else (await self.find(tenant, response_id)).input
        return Json(listed(items, query))
