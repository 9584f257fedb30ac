"""What the endpoints of responses share, and those that need a model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from anyio import to_thread

from ingot.errors import Unavailable
from ingot.http.endpoints.reading import reader
from ingot.http.response_runs import Run
from ingot.http.response_store import TenantsResponses
from ingot.http.responses.stored import StoredResponses
from ingot.http.service import Service
from ingot.protocol.responses.answers import ResponseTokens
from ingot.protocol.responses.request import Surroundings, count_tokens
from ingot.protocol.responses.tools import RemoteTools
from ingot.protocol.served import Served

UNFINISHED: Final = ("queued", "in_progress")


class Responses:
    """What the endpoints of a model share: the store, the responses under way, and the tools that the server can
    call."""

    def __init__(self, service: Service) -> None:
        self.service, self._stored = service, StoredResponses(service.hall)
        self.runs, self.store = self._stored.runs, self._stored.store
        self._background: set[asyncio.Task[None]] = set()

    def endpoints(self) -> dict[str, Any]:
        return {"countResponseTokens": reader(self.service, self.count), **self._stored.endpoints()}

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

    def count(self, value: Any, served: Served) -> ResponseTokens:
        return count_tokens(value, served, self.around(served.tenant))
