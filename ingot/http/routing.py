"""From operations to an application: their routes, inside the guard, inside the edge; the health probes, and Ollama's
addresses that would change what is served, which are refused. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import anyio.to_thread
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from ingot.config import Settings
from ingot.engine.status import Health
from ingot.errors import MethodNotAllowed, NotFound, Unsupported, nearest_name
from ingot.http.edge import EdgeMiddleware, JsonResponse, reply_of
from ingot.http.endpoints.page import page_routes
from ingot.http.guard import GuardMiddleware
from ingot.http.model_registry import ModelRegistry
from ingot.protocol.ingot_api.health import HealthBody, VersionBody
from ingot.protocol.operations import OPERATIONS
from ingot.protocol.terms import Terms
from ingot.version import __version__


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
