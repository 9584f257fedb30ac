"""What the endpoints of a model share that does not generate: its engine, what it serves, and what all models of the
server have in common."""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
from starlette.types import Receive

from ingot.config import Settings
from ingot.engine.health import Health
from ingot.engine.speech_request import Segment, Transcript, TranscriptionRequest, Untranscribed
from ingot.errors import Forbidden
from ingot.http.allowed import is_allowed
from ingot.http.body import Bodies
from ingot.http.capture import Captures
from ingot.http.lanes import Lane
from ingot.http.rates import Rates
from ingot.http.request_lifetime import Live
from ingot.http.response_store import ResponseStore
from ingot.http.shared_state import Hall
from ingot.http.tenants import Tenants
from ingot.http.traces import traces_to
from ingot.mcp.servers import McpServers
from ingot.observe.recent import Recent
from ingot.observe.recent_requests import Timeline
from ingot.observe.side_figures import SideFigures
from ingot.protocol.ours.requests import RequestBody
from ingot.protocol.side_served import SideServed

if TYPE_CHECKING:
    from ingot.engine.side_engine import SideEngine

T = TypeVar("T")
TRANSCRIPTS = 256


class SideService:
    """`settings` are those of the model."""

    def __init__(self, engine: SideEngine, served: SideServed, settings: Settings, hall: Hall) -> None:
        self.engine, self.served, self.hall = engine, served, hall
        self.captures = None if settings.capture is None else Captures(settings.capture, settings)
        endpoint = settings.otlp_traces_endpoint
        self.traces = None if endpoint is None else traces_to(endpoint)
        self._side_figures: dict[str, SideFigures] = {}
        self._heard: OrderedDict[tuple[str, bytes], Transcript] = OrderedDict()

    def ready(self) -> None:
        """Requests may come. There is nothing to do meanwhile."""

    async def stop(self) -> None:
        if self.captures is not None:
            await anyio.to_thread.run_sync(self.captures.close)
        if self.traces is not None:
            await anyio.to_thread.run_sync(self.traces.close)

    def side_figures(self, model: str) -> SideFigures:
        """Of a model that does not generate, by its name."""
        return self._side_figures.setdefault(model, SideFigures())

    def served_to(self, tenant: str) -> SideServed:
        """What is served, as this tenant meets it."""
        return replace(self.served, tenant=tenant) if tenant else self.served

    def health(self) -> Health:
        """The engine's, and whether the server still lets anybody in."""
        return self.hall.health(self.engine.health())

    # What all models have in common

    @property
    def settings(self) -> Settings:
        return self.hall.settings

    @property
    def tenants(self) -> Tenants:
        return self.hall.tenants

    @property
    def rates(self) -> Rates:
        return self.hall.rates

    @property
    def bodies(self) -> Bodies:
        return self.hall.bodies

    @property
    def live(self) -> Live:
        return self.hall.live

    @property
    def statuses(self) -> Counter[int]:
        return self.hall.statuses

    @property
    def ended(self) -> Recent[RequestBody]:
        return self.hall.ended

    @property
    def past(self) -> Timeline:
        return self.hall.past

    @property
    def response_store(self) -> ResponseStore | None:
        return self.hall.response_store

    @property
    def mcp(self) -> McpServers | None:
        return self.hall.mcp

    async def read(self, raw: bytes, translate: Callable[[Any], T], tenant: str) -> T:
        """See `Hall.read`."""
        return await self.hall.read(raw, translate, tenant, self._hear if self.served.hearing is not None else None)

    async def _hear(self, missing: Untranscribed, tenant: str) -> Transcript:
        """What is spoken in a sound of a message. The newest are kept, as every turn sends them again."""
        hearing = self.served.hearing
        assert hearing is not None
        if not is_allowed(hearing.name, self.tenants.key_of(tenant)):
            raise Forbidden(f"This key is not for {hearing.name}, which would write down the sound.", param="messages")
        key = (tenant, missing.digest)
        if key not in self._heard:
            deadline = time.monotonic() + self.settings.request_timeout_s
            sound = TranscriptionRequest(secrets.token_hex(8), missing.sound, tenant=tenant, deadline=deadline)
            stream = self.engine.transcribe(sound)
            try:
                said = "".join([event.text async for event in stream if isinstance(event, Segment)]).strip()
            finally:
                stream.close()
            self._heard[key] = Transcript(said)
        self._heard.move_to_end(key)
        while len(self._heard) > TRANSCRIPTS:
            self._heard.popitem(last=False)
        return self._heard[key]

    async def prepare_long(self, work: Callable[[], T], tenant: str) -> T:
        """See `Hall.prepare_long`."""
        return await self.hall.prepare_long(work, tenant)

    async def prepare(self, work: Callable[[], T], tenant: str, lane: Lane | None = None) -> T:
        """See `Hall.prepare`."""
        return await self.hall.prepare(work, tenant, lane)

    async def attended(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """See `Hall.attended`."""
        return await self.hall.attended(receive, work)
