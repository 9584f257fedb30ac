"""From operations to an application: their routes, inside the guard, inside the edge."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from ingot.config import Settings
from ingot.errors import MethodNotAllowed, NotFound, nearest
from ingot.http.edge import Edge, Json, answer_of
from ingot.http.endpoints.page import page_routes
from ingot.http.endpoints.refused import refused_routes
from ingot.http.guard import Guard
from ingot.http.shared_state import HasHall
from ingot.protocol.operations import OPERATIONS
from ingot.protocol.terms import Terms


def app_of(service: HasHall, endpoints: Mapping[str, Any], terms: Terms) -> Starlette:
    """An application of endpoints by the names of their operations. `terms` are what the document tells of bodies."""
    hall = service.hall
    app = Starlette(
        routes=routes(endpoints, terms, hall.settings),
        middleware=[
            Middleware(Edge, statuses=hall.statuses),
            Middleware(Guard, hall=hall),
        ],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def routes(endpoints: Mapping[str, Any], terms: Terms, settings: Settings) -> list[Route]:
    @cache
    def described() -> Json:
        from ingot.protocol.openapi import document

        return Json(document(terms, keyed=settings.keyed))

    async def openapi(request: Request) -> Response:
        return await anyio.to_thread.run_sync(described)

    return [
        *(Route(route_path(op.path), endpoints[op.name], methods=[op.method]) for op in OPERATIONS),
        *refused_routes(),
        Route("/openapi.json", openapi),
        *page_routes(),
    ]


class ResponseId(StringConvertor):
    """Only what can be a response's id, so that the addresses beside it are taken for themselves."""

    regex = "resp_[^/]*"


register_url_convertor("response", ResponseId())


def route_path(path: str) -> str:
    """Model names may hold slashes."""
    return path.replace("{model}", "{model:path}").replace("{response_id}", "{response_id:response}")


async def refuse(request: Request, error: Exception) -> Response:
    """The router's own refusals, in our words."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in matching for method in route.methods}))
        answer_of(request.scope).headers.append(("allow", allowed))
        raise MethodNotAllowed(f"{path[:200]} takes {allowed}, not {method}.")
    meant = nearest(path[:200], [operation.path for operation in OPERATIONS])
    hint = f" Did you mean {meant}?" if meant else " See /openapi.json for what there is."
    raise NotFound(f"There is no {path[:200]} here.{hint}")
