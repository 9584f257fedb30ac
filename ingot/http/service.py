"""What the endpoints share: the engine, what it serves, the requests under way, and the threads that read bodies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread

from ingot.config import Settings
from ingot.http.body import decode
from ingot.http.exchange import Live
from ingot.http.response_store import store_of
from ingot.mcp.config import read_servers
from ingot.mcp.servers import McpServers
from ingot.observe.recent import Recent
from ingot.protocol.requests import RequestBody
from ingot.protocol.served import Served

if TYPE_CHECKING:
    from ingot.engine.engine import Engine

T = TypeVar("T")
READERS: Final = 8


class Service:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.served = Served.of(engine.card, engine.tokenizer, settings, engine.encoders)
        self.response_store = store_of(settings)
        if self.response_store is not None:
            self.served = replace(self.served, secret=self.response_store.secret)
        self.mcp = None if settings.mcp_config is None else McpServers(read_servers(settings.mcp_config))
        self.live = Live()
        self.ended: Recent[RequestBody] = Recent()
        self._readers = anyio.CapacityLimiter(READERS)

    async def start(self) -> None:
        """What needs the event loop or takes a while, before requests come. Raises ConfigError."""
        await anyio.to_thread.run_sync(self.served.grammars.prepare)
        if self.mcp is not None:
            await self.mcp.start()

    async def stop(self) -> None:
        self.served.grammars.close()
        if self.mcp is not None:
            await self.mcp.stop()

    def served_to(self, tenant: str) -> Served:
        """What is served, as this tenant meets it."""
        return replace(self.served, tenant=tenant) if tenant else self.served

    async def read(self, raw: bytes, translate: Callable[[Any], T]) -> T:
        """`translate` of the decoded body, in a thread: rendering and tokenizing would hold up every stream."""

        def read() -> T:
            return translate(decode(raw, self.settings.max_json_depth))

        return await anyio.to_thread.run_sync(read, limiter=self._readers)
