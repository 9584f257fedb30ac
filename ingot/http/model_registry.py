"""The models of a server, as its endpoints ask for them: by name, for as long as a request lasts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import anyio.to_thread

from ingot.config import ApiKey, ModelEntry, Settings
from ingot.engine.fleet_standing import Standing
from ingot.engine.health import Health
from ingot.errors import BadRequest, ModelNotFound, Unavailable
from ingot.http.allowed import is_allowed, refuse_unless_allowed
from ingot.http.edge import Reply
from ingot.http.shared_state import Hall
from ingot.protocol.model_names import DEFAULT_NAME, is_name, unknown_name

if TYPE_CHECKING:
    from ingot.engine.engine import Engine
    from ingot.engine.fleet import Fleet
    from ingot.engine.loop import Pulse
    from ingot.engine.request import RequestStatus
    from ingot.engine.side_engine import SideEngine
    from ingot.http.side_service import SideService

CHAT: Final = "chat"
WORDS: Final = {
    CHAT: "answers conversations",
    "embedding": "makes vectors of texts (/v1/embeddings)",
    "rerank": "ranks documents (/v1/rerank)",
    "audio": "writes down what is spoken (/v1/audio/transcriptions)",
    "speech": "speaks what is written (/v1/audio/speech)",
}
"""What models of a kind do."""
ADAPTER: Final = ":"
"""Stands between a model and an adapter of it, which that model's own names tell of."""
Endpoints = dict[str, Any]
Extend = Callable[[], Callable[[], None]]
Opening = Callable[["SideEngine", ModelEntry, Hall, Extend], "tuple[SideService, Endpoints]"]
"""Makes what a loaded model's requests go to. That may take long: not for an event loop."""


class Models:
    """For the event loop. A model's service and its endpoints are made when it is loaded."""

    def __init__(self, fleet: Fleet, pulse: Callable[[], Pulse], settings: Settings, opening: Opening) -> None:
        self.fleet, self.hall = fleet, Hall(settings)
        self._pulse, self._opening = pulse, opening
        self._services: dict[SideEngine, tuple[SideService, Endpoints]] = {}
        fleet.arriving, fleet.leaving = self._take_on, self._let_go

    @property
    def settings(self) -> Settings:
        return self.hall.settings

    async def start(self) -> None:
        """Load what is to be there from the start. Raises ConfigError."""
        await self.hall.start()
        await self.fleet.preload()

    def ready(self) -> None:
        """Requests may come. Each model does what it has to do meanwhile once it is loaded."""

    async def stop(self) -> None:
        self.fleet.close()
        await self.hall.stop()
        for engine in [*self._services]:
            await self._let_go(engine)

    def find(self, name: str | None, kind: str) -> ModelEntry:
        """The model that a name means, its own or that of an adapter which its settings name, for what it is to be used
        for; without a name, the first. Raises ModelNotFound that lists what there is, or BadRequest where a name means
        a model for something else."""
        entries = [entry for entry in self.fleet.entries if entry.kind == kind]
        for entry in self.fleet.entries:
            if kind in entry.further_kinds:  # whose names it knows once it is loaded
                return entry
        if name is None or name == DEFAULT_NAME:
            if not entries:
                served = ", ".join(f"'{entry.name}' ({entry.kind})" for entry in self.fleet.entries)
                raise ModelNotFound(f"No model is served here that {WORDS[kind]}. Served: {served}.", param="model")
            return entries[0]
        for entry in entries:
            if is_name(name, entry.names):
                return entry
        base = name.partition(ADAPTER)[0]
        for entry in entries:
            if base != name and is_name(base, entry.names):
                return entry
        for entry in entries:
            if any(name == lora.name for lora in entry.settings.loras):
                return entry
        for entry in self.fleet.entries:
            if is_name(name, entry.names):
                able = [f"'{each.name}'" for each in entries]
                others = f" {'One that does' if len(able) == 1 else 'Those that do'}: {', '.join(able)}."
                raise BadRequest(
                    f"The model '{name[:200]}' {WORDS[entry.kind]}, and not what was asked for, which needs one that "
                    f"{WORDS[kind]}.{others if able else ''}",
                    param="model",
                )
        raise unknown_name(name, [name for entry in entries for name in entry.names])

    def named(self, name: str) -> ModelEntry:
        """The model of that name, whatever it is for. Raises ModelNotFound."""
        for entry in self.fleet.entries:
            if is_name(name, entry.names):
                return entry
        raise unknown_name(name, [name for entry in self.fleet.entries for name in entry.names])

    def loaded(self, name: str | None) -> ModelEntry:
        """The model of that name, or the first; one that is loaded: to look at a model is no reason to load it. Raises
        ModelNotFound or Unavailable."""
        there = {stands.name for stands in self.fleet.standings() if stands.state == "loaded"}
        candidates = self.fleet.entries if name is None else [self.find(name, CHAT)]
        for entry in candidates:
            if entry.kind == CHAT and entry.name in there:
                return entry
        raise Unavailable("No model is loaded." if name is None else f"{candidates[0].name} is not loaded.")

    def allow(self, entry: ModelEntry, answer: Reply) -> None:
        """Raises Forbidden where the key is for other models."""
        refuse_unless_allowed(entry.name, self.hall.tenants.key_of(answer.tenant), answer)

    @asynccontextmanager
    async def lease(
        self, entry: ModelEntry, kept_s: float | None = None, within_s: float | None = None
    ) -> AsyncIterator[tuple[SideService, Endpoints]]:
        """A model's service and endpoints, which stay for as long as the block lasts; waits until it is loaded.
        `within_s` is what the request says that it may take; no more than the settings say."""
        most_s = self.settings.request_timeout_s
        within_s = most_s if within_s is None else min(within_s, most_s)
        async with self.fleet.lease(entry.name, kept_s, within_s) as engine:
            yield self._services[engine]

    def generating(self) -> list[Engine]:
        """Of the models that are loaded, those that answer."""
        return [cast("Engine", engine) for entry, engine in self.fleet.loaded if entry.kind == CHAT]

    def services(self) -> Iterator[SideService]:
        """Of the models that are loaded."""
        for engine in self.fleet.engines:
            yield self._services[engine][0]

    def standings(self, key: ApiKey) -> list[Standing]:
        """Of the models that a key is for."""
        return [stands for stands in self.fleet.standings() if is_allowed(stands.name, key)]

    def status(self) -> list[RequestStatus]:
        return [status for engine in self.fleet.engines for status in engine.status()]

    def cancel(self, request_id: str) -> bool:
        return any(engine.cancel(request_id) for engine in self.fleet.engines)

    def health(self) -> Health:
        """Ready means that requests are taken, which may then wait for their model."""
        pulse = self._pulse()
        each = [engine.health() for engine in self.fleet.engines]
        running, queued = sum(one.running for one in each), sum(one.queued for one in each)
        waiting = sum(stands.waiting for stands in self.fleet.standings())
        refused = sum(one.refused for one in each)
        return Health(pulse.alive, pulse.ready, pulse.detail, pulse.beat_ago_s, running, queued + waiting, refused)

    async def _take_on(self, entry: ModelEntry, engine: SideEngine) -> None:
        """An engine was loaded: what its requests go to is made for it."""
        extend = partial(self.fleet.extend, entry.name)
        service, endpoints = await anyio.to_thread.run_sync(self._opening, engine, entry, self.hall, extend)
        self._services[engine] = service, endpoints
        service.ready()

    async def _let_go(self, engine: SideEngine) -> None:
        """An engine is about to go, and with it whatever holds its arrays."""
        held = self._services.pop(engine, None)
        if held is not None:
            await held[0].stop()
