"""The models of a server, as its endpoints ask for them: by name, with a lease for as long as a request lasts. Light to
import; for the event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import anyio.to_thread

from ingot.config import KINDS, ApiKey, ModelEntry, Settings
from ingot.engine.status import Health, ModelStatus
from ingot.errors import BadRequest, ModelNotFound, Unavailable
from ingot.http.edge import Reply
from ingot.http.shared_state import LeasedModel, SharedState
from ingot.http.tenants import check_model_allowed, is_model_allowed
from ingot.protocol.operations import OPERATIONS
from ingot.protocol.terms import DEFAULT_NAME, check_aliases, matches_model_name, unknown_model_error

if TYPE_CHECKING:
    from ingot.engine.engine import Engine, ModelEngine
    from ingot.engine.fleet import Fleet
    from ingot.engine.request import RequestStatus
    from ingot.http.service import ModelService

CHAT_KIND: Final = "chat"
ADAPTER_MARK: Final = ":"
"""Stands between the name of a model and that of its adapter."""
EndpointTable = dict[str, Any]
ExtendLease = Callable[[], Callable[[], None]]
OpenModel = Callable[["ModelEngine", ModelEntry, SharedState, ExtendLease], "tuple[ModelService, ModelEndpoints]"]
"""Makes what a loaded model's requests go to. That may take long: not for an event loop."""
QUIET_S: Final = 0.05
"""Between two looks whether requests run."""


class ModelEndpoints:
    """The endpoints of a loaded model, by the names of their operations. Each is made when it is first asked for,
    because its imports take a while."""

    def __init__(self, make: Callable[[str], EndpointTable]) -> None:
        """`make` returns an endpoint, with those that are made with it. It is called in a thread."""
        self._make, self._lock = make, threading.Lock()
        self._made: EndpointTable = {}

    async def find(self, name: str) -> Any:
        if name not in self._made:
            await anyio.to_thread.run_sync(self.make, name)
        return self._made[name]

    def make(self, name: str) -> None:
        """Not for an event loop."""
        with self._lock:
            if name not in self._made:
                self._made |= self._make(name)


class ModelRegistry:
    """For the event loop. A model's service and its endpoints are made when it is loaded."""

    def __init__(self, fleet: Fleet, health: Callable[[], Health], settings: Settings, opening: OpenModel) -> None:
        self.fleet, self.shared_state = fleet, SharedState(settings)
        self.is_resident = fleet.is_resident
        self._health, self._opening = health, opening
        self._services: dict[ModelEngine, tuple[ModelService, ModelEndpoints]] = {}
        fleet.arriving, fleet.leaving = self._open_model, self._close_model
        self.shared_state.served_names = self.names
        transcriber = next((entry for entry in fleet.entries if entry.kind == "audio" and entry.alongside), None)
        if transcriber is not None:
            lease = partial(self.lease, transcriber)
            self.shared_state.speech_to_text = LeasedModel(transcriber.name, transcriber.names, lease)
        for entry, engine in fleet.loaded:
            self._services[engine] = self._opened(entry, engine)
        if not settings.models and settings.models_config is None:
            names = [name for entry in fleet.entries for name in (entry.name, *entry.settings.served_model_name)]
            check_aliases(settings.alias, (*names, DEFAULT_NAME))

    @property
    def settings(self) -> Settings:
        return self.shared_state.settings

    async def start(self) -> None:
        """Load what is to be there from the start. Raises ConfigError."""
        await self.shared_state.start()
        await self.fleet.preload()

    def ready(self) -> None:
        """Requests may come. A model that comes later does what it has to do meanwhile once it is loaded."""
        if self.is_resident:
            for service in self.services():
                service.ready()

    def prepare(self) -> None:
        """Do what the first requests would wait for, while there are none. Takes seconds: for a thread of its own."""
        for entry, engine in self.fleet.loaded:
            service, endpoints = self._services[engine]
            for operation in OPERATIONS:
                if operation.kind in (entry.kind, "any"):
                    self._wait_until_quiet()
                    endpoints.make(operation.name)
            self._wait_until_quiet()
            service.prepare()

    def _wait_until_quiet(self) -> None:
        """Imports would take turns with the requests that run."""
        while len(self.shared_state.live):
            time.sleep(QUIET_S)

    async def stop(self) -> None:
        self.fleet.close()
        await self.shared_state.stop()
        for engine in [*self._services]:
            await self._close_model(engine)

    def find(self, name: str | None, kind: str) -> ModelEntry:
        """The model that a name means, its own or that of an adapter which its settings name, for what it is to be used
        for; without a name, the first. Raises ModelNotFound that lists what there is, or BadRequest where a name means
        a model for something else. Of resident models there is one of a kind, which refuses other names itself."""
        entries = [entry for entry in self.fleet.entries if entry.kind == kind]
        if self.is_resident:
            if not entries:
                raise ModelNotFound(KINDS[kind].missing, param="model")
            return entries[0]
        if name is None or name == DEFAULT_NAME:
            if not entries:
                served = ", ".join(f"'{entry.name}' ({entry.kind})" for entry in self.fleet.entries)
                raise ModelNotFound(
                    f"No model is served here that {KINDS[kind].does}. Served: {served}.", param="model"
                )
            return entries[0]
        for entry in entries:
            if matches_model_name(name, entry.names):
                return entry
        base = name.partition(ADAPTER_MARK)[0]
        for entry in entries:
            if base != name and matches_model_name(base, entry.names):
                return entry
        for entry in entries:
            if any(name == lora.name for lora in entry.settings.loras):
                return entry
        for entry in self.fleet.entries:
            if matches_model_name(name, entry.names):
                able = [f"'{each.name}'" for each in entries]
                others = f" {'One that does' if len(able) == 1 else 'Those that do'}: {', '.join(able)}."
                raise BadRequest(
                    f"The model '{name[:200]}' {KINDS[entry.kind].does}, and this request needs one "
                    f"that {KINDS[kind].does}.{others if able else ''}",
                    param="model",
                )
        raise unknown_model_error(name, [name for entry in entries for name in entry.names])

    def named(self, name: str) -> ModelEntry:
        """The model of that name, whatever it is for. Raises ModelNotFound, unless the models are resident: the first
        of those knows the names of its adapters, and refuses others itself."""
        for entry in self.fleet.entries:
            if matches_model_name(name, entry.names):
                return entry
        if self.is_resident:
            return self.fleet.entries[0]
        raise unknown_model_error(name, [name for entry in self.fleet.entries for name in entry.names])

    def names(self) -> list[str]:
        """All names of the models and adapters that are loaded."""
        terms = [service.served.terms for service in self.services()]
        return list(dict.fromkeys(name for each in terms for name in (*each.models, *each.loras)))

    def loaded(self, name: str | None, kind: str) -> ModelEntry:
        """The model of that name, or the first of the kind, or else a chat model; one that is loaded: to look at a
        model is no reason to load it. Raises ModelNotFound or Unavailable."""
        kind = kind if any(entry.kind == kind for entry in self.fleet.entries) else CHAT_KIND
        if self.is_resident:
            return self.find(name, kind)
        loaded = {status.name for status in self.fleet.statuses() if status.state == "loaded"}
        candidates = self.fleet.entries if name is None else [self.find(name, kind)]
        for entry in candidates:
            if entry.kind == kind and entry.name in loaded:
                return entry
        raise Unavailable("No model is loaded." if name is None else f"{candidates[0].name} is not loaded.")

    def allow(self, entry: ModelEntry, answer: Reply) -> None:
        """Raises Forbidden where the key is for other models. Endpoints of a resident model check that themselves."""
        if not entry.resident:
            check_model_allowed(entry.name, self.shared_state.tenants.key_of(answer.tenant), answer)

    @asynccontextmanager
    async def lease(
        self, entry: ModelEntry, unload_after_s: float | None = None, within_s: float | None = None
    ) -> AsyncIterator[tuple[ModelService, ModelEndpoints]]:
        """A model's service and endpoints, which stay for as long as the block lasts; waits until it is loaded.
        `within_s` is what the request says that it may take; no more than the settings say."""
        most_s = self.settings.request_timeout_s
        within_s = most_s if within_s is None else min(within_s, most_s)
        async with self.fleet.lease(entry.name, unload_after_s, within_s) as engine:
            yield self._services[engine]

    def generating(self) -> list[Engine]:
        """The engines of the loaded models that generate."""
        return [cast("Engine", engine) for entry, engine in self.fleet.loaded if entry.kind == CHAT_KIND]

    def services(self) -> Iterator[ModelService]:
        """Of the models that are loaded."""
        for engine in self.fleet.engines:
            yield self._services[engine][0]

    def model_statuses(self, key: ApiKey) -> list[ModelStatus]:
        """Of the models that a key is for; resident ones are shown to everybody."""
        return [each for each in self.fleet.statuses() if each.resident or is_model_allowed(each.name, key)]

    def status(self) -> list[RequestStatus]:
        return [status for engine in self.fleet.engines for status in engine.status()]

    def cancel(self, request_id: str) -> bool:
        return any(engine.cancel(request_id) for engine in self.fleet.engines)

    def health(self) -> Health:
        """Ready means that requests are accepted, which may then wait for their model."""
        each = [engine.health() for engine in self.fleet.engines]
        running, queued = sum(one.running for one in each), sum(one.queued for one in each)
        waiting = sum(status.waiting for status in self.fleet.statuses())
        refused = sum(one.refused for one in each)
        return replace(self._health(), running=running, queued=queued + waiting, refused=refused)

    async def _open_model(self, entry: ModelEntry, engine: ModelEngine) -> None:
        """An engine was loaded: what its requests go to is made for it."""
        self._services[engine] = await anyio.to_thread.run_sync(self._opened, entry, engine)
        self._services[engine][0].ready()

    def _opened(self, entry: ModelEntry, engine: ModelEngine) -> tuple[ModelService, ModelEndpoints]:
        return self._opening(engine, entry, self.shared_state, partial(self.fleet.extend, entry.name))

    async def _close_model(self, engine: ModelEngine) -> None:
        """An engine is about to go, and with it whatever holds its arrays."""
        service = self._services.pop(engine, None)
        if service is not None:
            await service[0].stop()
