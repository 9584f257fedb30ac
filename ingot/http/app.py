"""The application of a server: its routes by operation. Light to import and to make.

What knows the bodies and answers takes a second or more to import, and a lazy server is ready before. So it is imported
in the background, or by whoever needs it first, in a thread: streams go on meanwhile. This is the one place that
imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from ingot.config import ModelEntry, Settings
from ingot.http.body import FORM_TYPE, JSON_TYPE
from ingot.http.dispatch import DispatchByBody, DispatchByQuery
from ingot.http.model_registry import EndpointTable, ExtendLease, ModelRegistry, OpenModel
from ingot.http.routing import health_endpoints, make_application
from ingot.http.shared_state import SharedState
from ingot.protocol.operations import OPERATIONS
from ingot.protocol.terms import DEFAULT_NAME, Terms

if TYPE_CHECKING:
    from ingot.engine.fleet import Fleet
    from ingot.engine.loop import LoopHealth

ANY_VOCAB_SIZE: Final = 1 << 24
"""What the document says of token ids: which there are depends on the model."""


def build_fleet_app(fleet: Fleet, pulse: Callable[[], LoopHealth], settings: Settings) -> Starlette:
    """The whole HTTP side of a fleet. Nothing is started; `app.state.service` is what the endpoints share."""
    models = ModelRegistry(fleet, pulse, settings, open_model_later)
    own = health_endpoints(lambda: models.shared_state.health(models.health())) | late_fleet_endpoints(models)
    dispatched = {
        operation.name: DispatchByBody(models, operation.name, FORM_TYPE if operation.takes == "form" else JSON_TYPE)
        if operation.takes in ("json", "form")
        else DispatchByQuery(models, operation.name, works=operation.runs)
        for operation in OPERATIONS
        if operation.name not in own
    }
    names = tuple(name for entry in fleet.entries for name in entry.names)
    terms = Terms((*names, DEFAULT_NAME), ANY_VOCAB_SIZE, settings.request_timeout_s, settings.strict)
    return make_application(models, own | dispatched, terms)


if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine
    from ingot.http.service import SideService

FLEET_OPERATIONS: Final = frozenset(
    {
        *("listModels", "retrieveModel", "loadModel", "unloadModel", "swapModel"),
        *("ollamaTags", "ollamaRunning", "ollamaVersion"),
        *("listRequests", "retrieveRequest", "cancelRequest"),
        *("retrieveResponse", "deleteResponse", "cancelResponse", "listInputItems"),
        *("showLive", "showCacheTree", "metrics", "loads"),
    }
)
"""Operations that tell of all models, or change which are loaded."""


def import_in_background(then: Callable[[], None]) -> None:
    """In the background, before `then`, which imports what takes longer and is needed later."""

    def run() -> None:
        _import_endpoints()
        then()

    threading.Thread(target=run, name="ingot-imports", daemon=True).start()


def open_model_later(
    engine: ModelEngine, entry: ModelEntry, shared_state: SharedState, extend: ExtendLease
) -> tuple[SideService, EndpointTable]:
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

    return {name: later(name) for name in FLEET_OPERATIONS}


def _import_endpoints() -> tuple[OpenModel, Callable[[ModelRegistry], EndpointTable]]:
    from ingot.http.endpoints.table import fleet_endpoints, open_model

    return open_model, fleet_endpoints
