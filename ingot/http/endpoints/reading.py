"""Endpoints that only read a body and answer, without the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.http.edge import Json, answer_of
from ingot.http.side_service import SideService


def reader(service: SideService, translate: Callable[[Any, Any], Any]) -> Callable[[Request], Any]:
    """An endpoint whose answer is `translate` of the body and of what the service serves."""

    async def endpoint(request: Request) -> Response:
        tenant = answer_of(request.scope).tenant
        served = service.served_to(tenant)

        async def work() -> Any:
            return await service.read(body.raw, lambda value: translate(value, served), tenant)

        async with service.bodies.reading(request.scope, request.receive) as body:
            return Json(await service.attended(request.receive, work))

    return endpoint
