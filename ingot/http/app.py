"""The application of a server: its routes by operation, inside the guard, inside the edge; the health probes, and
Ollama's addresses that would change what is served, which are refused. Light to import and to make.

What knows the bodies and answers takes a second or more to import, and a lazy server is ready before. So it is imported
in the background, or by whoever needs it first, in a thread: streams go on meanwhile. This is the one place that
imports it.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import anyio.to_thread
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from ingot.config import ModelEntry, Settings
from ingot.engine.status import Health
from ingot.errors import MethodNotAllowed, NotFound, Unsupported, nearest_name
from ingot.http.dispatch import DispatchByBody, DispatchByQuery
from ingot.http.edge import EdgeMiddleware, JsonResponse, reply_of
from ingot.http.endpoints.page import page_routes
from ingot.http.guard import GuardMiddleware
from ingot.http.model_registry import EndpointTable, ExtendLease, ModelEndpoints, ModelRegistry
from ingot.http.shared_state import SharedState
from ingot.protocol.ingot_api.health import HealthBody, VersionBody
from ingot.protocol.operations import OPERATIONS, Work, load
from ingot.protocol.terms import DEFAULT_NAME, Terms
from ingot.version import __version__

if TYPE_CHECKING:
    from ingot.engine.engine import ModelEngine
    from ingot.engine.fleet import Fleet
    from ingot.http.service import ModelService


ANY_VOCAB: Final = 1 << 24
"""What the document says of token ids: which there are depends on the model."""


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


ENDPOINTS: Final = "ingot.http.endpoints.table"
SERVICE: Final = "ingot.http.service"


def import_in_background(module: str, then: Callable[[], None] = lambda: None) -> None:
    """Import the module in a thread, before `then`, which imports what takes longer and is needed later."""

    def run() -> None:
        import_module(module)
        then()

    threading.Thread(target=run, name="ingot-imports", daemon=True).start()


def open_model_later(
    engine: ModelEngine, entry: ModelEntry, shared_state: SharedState, extend: ExtendLease
) -> tuple[ModelService, ModelEndpoints]:
    """The service of a loaded model, and its endpoints. Takes long at first: not for an event loop. Raises
    ConfigError."""
    from ingot.http.service import open_service

    service = open_service(engine, entry, shared_state, extend)
    return service, ModelEndpoints(partial(_make_endpoint, service))


SHARED_WORKS: Final[dict[Work, tuple[str, str]]] = {
    "generate": ("generation", "GenerationEndpoint"),
    "encode": ("generation", "EncodingEndpoint"),
    "transcribe": ("audio", "TranscriptionEndpoint"),
    "speak": ("audio", "SpeechEndpoint"),
    "read": ("generation", "reading_endpoint"),
}
"""Where the endpoints are that several operations share: the module and the name."""


def _make_endpoint(service: ModelService, name: str) -> EndpointTable:
    operation = next(each for each in OPERATIONS if each.name == name)
    if operation.work not in SHARED_WORKS:
        own: EndpointTable = import_module(ENDPOINTS).own_endpoints(service)
        return own
    module, made_by = SHARED_WORKS[operation.work]
    make = getattr(import_module(f"ingot.http.endpoints.{module}"), made_by)
    return {name: make(service, load(operation.reader or "") if operation.work == "read" else operation)}


def late_fleet_endpoints(models: ModelRegistry) -> EndpointTable:
    """By the names of their operations."""
    made: EndpointTable = {}

    def later(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not made:
                table = await anyio.to_thread.run_sync(import_module, ENDPOINTS)
                made.update(table.fleet_endpoints(models))
            answer: Response = await made[name](request)
            return answer

        return endpoint

    return {operation.name: later(operation.name) for operation in OPERATIONS if operation.kind == "server"}


def make_application(models: ModelRegistry, endpoints: Mapping[str, Any], terms: Terms) -> Starlette:
    """An application of endpoints by the names of their operations. `terms` are what OpenAPI says of bodies."""
    shared_state = models.shared_state
    app = Starlette(
        routes=make_routes(endpoints, terms, shared_state.settings),
        middleware=[
            Middleware(EdgeMiddleware, statuses=shared_state.statuses),
            Middleware(GuardMiddleware, shared_state=shared_state),
        ],
        exception_handlers={HTTPException: refuse_route},
    )
    app.router.redirect_slashes = False
    app.state.service = models
    return app


def make_routes(endpoints: Mapping[str, Any], terms: Terms, settings: Settings) -> list[Route]:
    @cache
    def described() -> JsonResponse:
        from ingot.protocol.openapi import openapi_document

        return JsonResponse(openapi_document(terms, keyed=settings.keyed))

    async def openapi(request: Request) -> Response:
        return await anyio.to_thread.run_sync(described)

    return [
        *(Route(route_path(op.path), endpoints[op.name], methods=[op.method]) for op in OPERATIONS),
        *refused_routes(),
        Route("/openapi.json", openapi),
        *page_routes(),
    ]


class ResponseIdConvertor(StringConvertor):
    """Only what can be a response's id, so that other addresses of that folder are not taken for one."""

    regex = "resp_[^/]*"


register_url_convertor("response", ResponseIdConvertor())


def route_path(path: str) -> str:
    """Model names may hold slashes."""
    return path.replace("{model}", "{model:path}").replace("{response_id}", "{response_id:response}")


async def refuse_route(request: Request, error: Exception) -> Response:
    """The router's own refusals, in our words."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        longest = max((route.path for route in matching), key=len)  # a model's name may match more than its own path
        allowed = ", ".join(sorted({name for route in matching if route.path == longest for name in route.methods}))
        reply_of(request.scope).headers.append(("allow", allowed))
        raise MethodNotAllowed(f"{path[:200]} takes {allowed}, not {method}.")
    meant = nearest_name(path[:200], [operation.path for operation in OPERATIONS])
    hint = f" Did you mean {meant}?" if meant else " See /openapi.json for what there is."
    raise NotFound(f"There is no {path[:200]} here.{hint}")


MODELS_ARE_FIXED: Final = "the models are those that the server was started with. Use `ingot pull` and `ingot serve`."
REFUSED_PATHS: Final = {
    "/api/pull": ("POST",),
    "/api/push": ("POST",),
    "/api/create": ("POST",),
    "/api/copy": ("POST",),
    "/api/delete": ("DELETE",),
    "/api/blobs/{digest}": ("HEAD", "POST"),
}


def refused_routes() -> list[Route]:
    """Paths that are known and not honoured, so that a client learns why rather than that there is nothing."""

    async def refuse(request: Request) -> Response:
        raise Unsupported(f"{request.url.path[:200]} is not supported: {MODELS_ARE_FIXED}")

    return [Route(path, refuse, methods=list(methods)) for path, methods in REFUSED_PATHS.items()]


def health_endpoints(health_now: Callable[[], Health]) -> dict[str, Any]:
    async def version(request: Request) -> Response:
        return JsonResponse(VersionBody(__version__))

    def probe(is_ok: Callable[[Health], bool]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            health = health_now()
            ok = is_ok(health)
            return JsonResponse(HealthBody.of(health, ok=ok, known=reply_of(request.scope).known), 200 if ok else 503)

        return endpoint

    return {
        "live": probe(lambda health: health.alive),
        "ready": probe(lambda health: health.ready),
        "health": probe(lambda health: health.ready),
        "version": version,
    }
