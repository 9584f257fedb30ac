"""The application of a server: its routes by operation. Light to import and to make.

What knows the bodies and answers takes a second or more to import, and a lazy server is ready before. So it is imported
in the background, or by whoever needs it first, in a thread: streams go on meanwhile. This is the one place that
imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ingot.config import ModelEntry, Settings, with_name
from ingot.engine.status import Health
from ingot.http.dispatch import DispatchByBody, DispatchByQuery
from ingot.http.model_registry import EndpointTable, ExtendLease, ModelRegistry, OpenModel
from ingot.http.routing import health_endpoints, make_application
from ingot.http.shared_state import SharedState
from ingot.protocol.operations import OPERATIONS
from ingot.protocol.terms import DEFAULT_NAME, Terms

if TYPE_CHECKING:
    from ingot.engine.engine import Engine, ModelEngine
    from ingot.engine.fleet import Fleet
    from ingot.http.service import ModelService


ANY_VOCAB: Final = 1 << 24
"""What the document says of token ids: which there are depends on the model."""


def build_app(engine: Engine, settings: Settings, alongside: Sequence[ModelEngine] = ()) -> Starlette:
    """The HTTP application of one engine, and of those alongside, whose models stay. Raises ConfigError."""
    from ingot.engine.fleet import Fleet

    models: list[tuple[ModelEntry, ModelEngine]] = [(with_name(ModelEntry("", settings), engine.card.name), engine)]
    for other in alongside:
        entry = ModelEntry("", replace(settings, served_model_name=()), other.card.kind, alongside=True)
        models.append((with_name(entry, other.card.name, [each for each, _ in models]), other))
    return build_fleet_app(Fleet.of_resident(models), engine.health, settings)


def build_fleet_app(fleet: Fleet, health: Callable[[], Health], settings: Settings) -> Starlette:
    """The whole HTTP side of a fleet, whose thread is as `health` says. Nothing is started; `app.state.service` is what
    the endpoints share. Raises ConfigError."""
    models = ModelRegistry(fleet, health, settings, open_model_later)
    own = late_fleet_endpoints(models) | health_endpoints(lambda: models.shared_state.health(models.health()))
    dispatched = {
        operation.name: (DispatchByBody if operation.takes in ("json", "form") else DispatchByQuery)(models, operation)
        for operation in OPERATIONS
        if operation.kind != "server"
    }
    return make_application(models, own | dispatched, terms_of(models))


def terms_of(models: ModelRegistry) -> Terms:
    """What the OpenAPI document says of bodies: what resident models say, or else what holds for all."""
    if models.is_resident:
        first, *others = [service.served.terms for service in models.services()]
        tasks = {kind: task for terms in (first, *others) for kind, task in terms.tasks.items()}
        return replace(first, tasks=tasks)
    names = tuple(name for entry in models.fleet.entries for name in entry.names)
    settings = models.settings
    return Terms((*names, DEFAULT_NAME), ANY_VOCAB, settings.request_timeout_s, settings.strict)


def import_in_background(then: Callable[[], None]) -> None:
    """In the background, before `then`, which imports what takes longer and is needed later."""

    def run() -> None:
        _import_endpoints()
        then()

    threading.Thread(target=run, name="ingot-imports", daemon=True).start()


def open_model_later(
    engine: ModelEngine, entry: ModelEntry, shared_state: SharedState, extend: ExtendLease
) -> tuple[ModelService, EndpointTable]:
    """The service of a loaded model and its endpoints. Takes long at first: not for an event loop."""
    open_model, _ = _import_endpoints()
    return open_model(engine, entry, shared_state, extend)


def late_fleet_endpoints(models: ModelRegistry) -> EndpointTable:
    """By the names of their operations."""
    made: EndpointTable = {}

    def later(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not made:
                _, make = await anyio.to_thread.run_sync(_import_endpoints)
                made.update(make(models))
            answer: Response = await made[name](request)
            return answer

        return endpoint

    return {operation.name: later(operation.name) for operation in OPERATIONS if operation.kind == "server"}


def _import_endpoints() -> tuple[OpenModel, Callable[[ModelRegistry], EndpointTable]]:
    from ingot.http.endpoints.table import fleet_endpoints, open_model

    return open_model, fleet_endpoints
